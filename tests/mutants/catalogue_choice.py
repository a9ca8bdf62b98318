"""Mistakes in choosing a kernel: trials on the device, and the file of their verdicts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AUTOTUNE, TRIAL = "pagedkv/kernels/autotune.py", "pagedkv/kernels/trial.py"
TUNING, DOCTOR = "pagedkv/kernels/tuning.py", "pagedkv/tools/doctor.py"
PRECOMPILE, CHOICE = "pagedkv/kernels/precompile.py", "pagedkv/tools/choice.py"

MUTANTS = (
    Mutant(
        "no run of a check reads blocks that lie token by token",
        TRIAL,
        (('    (ALL_CTAS, True, "NHD"),', "    #"),),
        ("test_a_kernel_that_is_wrong_in_places_is_caught",),
    ),
    Mutant(
        "times of another process's trial are kept, and its choice is not",
        TUNING,
        (("return Verdict(fastest(us, candidates), us, wrong, late)", "return Verdict(own.kernel, us, wrong, late)"),),
        ("test_a_kernel_that_another_process_had_time_for_is_taken_by_its_time",),
    ),
    Mutant(
        "a verdict that was not put counts as this process's own",
        TUNING,
        (("            kept = self._read()\n", "            self._own.add(config); kept = self._read()\n"),),
        ("test_a_verdict_that_was_not_put_is_not_taken_for_this_process_own",),
    ),
    Mutant(
        "latents of a trial do not hold V",
        "pagedkv/kernels/trial.py",
        (("k[..., : config.head_dim_v] if config.v_in_k else made", "made"),),
        ("test_kernels_for_latents_are_right_in_their_trial",),
    ),
    Mutant(
        "a process takes back what another found wrong",
        TUNING,
        (("verdict = _joined(verdict, found, _candidates(config))", "pass"),),
        ("test_no_process_takes_back_what_another_found_wrong",),
    ),
    Mutant(
        "a few queries behind a prefill go on with its kernel",
        "pagedkv/cache/gpu_kv.py",
        (("few = _room(max_q_len) * num_qo_heads <= FEW_ROWS * self.spec.num_kv_heads", "few = False"),),
        ("test_few_queries_after_a_prefill_are_decoded",),
    ),
    Mutant(
        "an error of a signal's handler is put down to the file of verdicts",
        TUNING,
        (("            if came_from_signal(error):\n                raise\n", ""),),
        ("test_an_error_of_a_signals_handler_is_no_damage_of_the_file",),
    ),
    Mutant(
        "the process of a trial takes a kernel that another has found wrong",
        AUTOTUNE,
        (("            final = verdicts.put(name, final)\n", "            verdicts.put(name, final)\n"),),
        ("test_the_trial_itself_takes_no_kernel_that_another_process_found_wrong_meanwhile",),
    ),
    Mutant(
        "a capture that breaks a trial demotes the kernel",
        AUTOTUNE,
        (("MemoryError | OSError | CaptureBroken)", "MemoryError | OSError)"),),
        ("test_a_capture_that_breaks_a_trial_demotes_no_kernel",),
    ),
    Mutant(
        "a kernel found wrong is taken where trials are off",
        "pagedkv/kernels/select.py",
        (("return chosen if chosen.name not in wrong else", "return chosen if True else"),),
        ("test_a_kernel_found_wrong_is_not_taken_where_none_is_tried",),
    ),
    Mutant(
        "any word but 0 turns trials of kernels on",
        AUTOTUNE,
        (("if asked.lower() not in (*ON, *OFF):", "if False:"), ("and asked.lower() in ON", "and asked != '0'")),
        ("test_autotune_is_on_or_off_by_words_and_nothing_else",),
    ),
    Mutant(
        "a kernel whose results differ is taken",
        AUTOTUNE,
        (("        if why:\n", "        if False:\n"), ("            if not why:\n", "            if True:\n")),
        ("test_a_kernel_that_is_wrong_here_is_demoted_with_a_warning",),
    ),
    Mutant(
        "a kernel without memory for its trial counts as wrong",
        AUTOTUNE,
        (
            (
                "if came_from_signal(error) or _passes(error):\n                raise\n            why",
                "if came_from_signal(error):\n                raise\n            why",
            ),
        ),
        ("test_a_trial_that_fails_for_want_of_something_is_put_off",),
    ),
    Mutant(
        "memory that CUDA does not give is a fault of the kernel",
        AUTOTUNE,
        (("return passes or isinstance(", "return isinstance("),),
        ("test_a_trial_that_fails_for_want_of_something_is_put_off",),
    ),
    Mutant(
        "a kernel that CUDA cannot run is tried for ever",
        AUTOTUNE,
        (('is_cuda and getattr(error, "status", 0) in PASSING', "is_cuda"),),
        ("test_a_kernel_that_cannot_run_is_demoted_for_good",),
    ),
    Mutant(
        "a trial that was put off is made at once",
        AUTOTUNE,
        (("again_at is not None and time.monotonic() < again_at", "False"),),
        ("test_a_trial_that_fails_for_want_of_something_is_put_off",),
    ),
    Mutant(
        "a trial is due that another process has made",
        AUTOTUNE,
        (("        _settle(verdicts, name)\n        return", "        return"),),
        ("test_a_trial_that_another_process_made_is_not_due",),
    ),
    Mutant(
        "a trial put off that no call asks for is due for ever",
        AUTOTUNE,
        (("any(asked_at < at <= time.monotonic()", "any(at <= time.monotonic()"),),
        ("test_a_trial_put_off_that_no_call_asks_for_is_looked_at_once",),
    ),
    Mutant(
        "a step forgets that it looked for a better kernel",
        "pagedkv/cache/gpu_kv.py",
        (("        self._asked_at[key] = time.monotonic()\n", ""),),
        ("test_a_trial_put_off_that_no_call_asks_for_is_looked_at_once",),
    ),
    Mutant(
        "precompiling takes the newest NVRTC whatever the driver",
        PRECOMPILE,
        (('nvrtc_for(checked_pair(driver, "driver", "(12, 8)"))', "nvrtc_for()"),),
        ("test_precompiling_takes_the_nvrtc_for_the_named_driver",),
    ),
    Mutant(
        "an old GPU is told to take a newer NVRTC",
        PRECOMPILE,
        (("if number > min(nvrtc.architectures()):", "if True:"),),
        ("test_a_device_too_old_for_an_nvrtc_is_not_told_to_take_a_newer_one",),
    ),
    Mutant(
        "a compute capability of one number or three is unpacked",
        PRECOMPILE,
        (("    except (TypeError, ValueError):\n        raise Wrong", "    except TypeError:\n        raise Wrong"),),
        ("test_a_capability_that_is_no_pair_of_numbers_is_named",),
    ),
    Mutant(
        "shipped variants are asked for a text",
        "pagedkv/kernels/shipped.py",
        (('_shipped(checked_pair(capability, "capability", "(9, 0)"))', "_shipped(capability)"),),
        ("test_a_capability_that_is_no_pair_of_numbers_is_named",),
    ),
    Mutant(
        "the kernels of an H100 are shown for every GPU",
        CHOICE,
        (("device, found = Recorder(capability), []", "device, found = Recorder((9, 0)), []"),),
        ("test_the_kernels_and_reasons_are_those_of_the_named_gpu",),
    ),
    Mutant(
        "a call without kernels to try shows none",
        CHOICE,
        ((" or (REFERENCE,)", ""),),
        ("test_every_kernel_is_tried_for_a_call_or_it_is_said_why_not",),
    ),
    Mutant(
        "a kernel that cannot compute a call is said to have too few rows",
        CHOICE,
        (("        return reason\n", "        pass\n"),),
        ("test_the_kernels_and_reasons_are_those_of_the_named_gpu",),
    ),
    Mutant(
        "--gpu goes unheard beside another examination",
        CHOICE,
        (("    if any(getattr(arguments, name)", "    if False and any(getattr(arguments, name)"),),
        ("test_another_gpu_is_asked_about_alone",),
    ),
    Mutant(
        "a kernel is blamed for a device that another broke",
        AUTOTUNE,
        (("            is_lost = _is_lost(backend)\n", ""),),
        ("test_a_kernel_that_breaks_the_device_is_not_the_fault_of_the_next",),
    ),
    Mutant(
        "an error of the driver ends the constructor",
        AUTOTUNE,
        (("if came_from_signal(error) or _passes(error) or isinstance(error, PagedKVError):", "if True:"),),
        ("test_a_device_on_which_decode_simt_fails_is_named",),
    ),
    Mutant(
        "noise decides between kernels",
        TUNING,
        (("CLEARLY = 0.97", "CLEARLY = 1.0"),),
        ("test_the_kernel_that_is_clearly_faster_is_taken_and_tried_once",),
    ),
    Mutant(
        "a trial of prefill divides no row tile",
        "pagedkv/kernels/trial.py",
        (("DIVIDED_LEN = 2200", "DIVIDED_LEN = 1000"),),
        ("test_a_trial_of_prefill_has_row_tiles_in_parts",),
    ),
    Mutant(
        "a trial's blocks are NHD",
        "pagedkv/kernels/trial.py",
        (('if layout == "NHD":', "if True:"),),
        ("test_a_trials_blocks_lie_as_a_cache_on_a_gpu_lays_them",),
    ),
    Mutant(
        "a NaN passes the check",
        "pagedkv/kernels/trial.py",
        (("(np.abs(ours - theirs) <= limit)", "~(np.abs(ours - theirs) > limit)"),),
        ("test_a_difference_is_told_by_its_place_and_no_nan_passes",),
    ),
    Mutant(
        "verdicts of another driver are believed",
        TUNING,
        (("            if not other:\n", "            if True:\n"),),
        ("test_a_file_of_another_driver_or_source_is_made_again",),
    ),
    Mutant(
        "that a file of verdicts is of another driver is told twice",
        TUNING,
        (("        self._warned = True\n", ""),),
        ("test_a_file_of_another_driver_or_source_is_made_again",),
    ),
    Mutant(
        "a damaged file of verdicts ends the constructor",
        TUNING,
        ((", OverflowError, RecursionError) as error", ", OverflowError) as error"),),
        ("test_a_damaged_file_is_made_again",),
    ),
    Mutant(
        "a kernel of the file is taken, whatever it is",
        TUNING,
        (("if verdict.kernel != REFERENCE and verdict.kernel not in us:", "if False:"),),
        ("test_a_damaged_file_is_made_again",),
    ),
    Mutant(
        "a kernel of the file is taken that is wrong",
        TUNING,
        (("len(set(known)) < len(known) or ", ""),),
        ("test_a_damaged_file_is_made_again",),
    ),
    Mutant(
        "a kernel of the file is taken that was no candidate",
        TUNING,
        ((" or not candidates.issuperset(known):", ":"),),
        ("test_a_damaged_file_is_made_again",),
    ),
    Mutant(
        "a NaN of the file is a time",
        TUNING,
        (("if not all(0 <= value < math.inf for", "if any(value < 0 or value == math.inf for"),),
        ("test_a_damaged_file_is_made_again",),
    ),
    Mutant(
        "a process forgets the verdicts of others",
        TUNING,
        (("kept = self._read()\n", "kept = {}\n"),),
        ("test_verdicts_of_two_processes_are_both_kept_and_the_newer_one_of_a_config",),
    ),
    Mutant(
        "a process puts its old verdicts over those of others",
        TUNING,
        (("kept = self._read()\n", "kept = {**self._read(), **self._known}\n"),),
        (
            "test_verdicts_of_two_processes_are_both_kept_and_the_newer_one_of_a_config",
            "test_a_verdict_that_was_forgotten_does_not_come_back",
        ),
    ),
    Mutant(
        "a file of verdicts is written in place",
        TUNING,
        (("write_whole(self.path, body.encode())", "self.path.write_bytes(body.encode())"),),
        ("test_a_file_of_verdicts_is_whole_at_any_moment",),
    ),
    Mutant(
        "forgotten verdicts stay in the file",
        TUNING,
        (("                self.path.unlink(missing_ok=True)\n", "                pass\n"),),
        ("test_a_verdict_that_was_forgotten_does_not_come_back",),
    ),
    Mutant(
        "a kernel that needs tensor maps is tried without them",
        "pagedkv/kernels/select.py",
        (("        and (maps or not kernel.tiling(config, max_q_len, backend.capability).box_tokens)\n", ""),),
        ("test_a_device_without_tensor_maps_tries_no_kernel_that_needs_them",),
    ),
    Mutant(
        "a trial has no end",
        AUTOTUNE,
        (("is_lost or budget.left <= 0:", "is_lost:"),),
        ("test_a_kernel_that_there_is_no_time_for_is_tried_by_the_next_process",),
    ),
    Mutant(
        "a mistake in a long row is held to the output of a short one",
        TRIAL,
        (("bound * np.maximum(rows, LEAST_OUTPUT)", "bound * max(rows.max(), 1.0)"),),
        ("test_a_mistake_in_a_long_row_is_no_rounding",),
    ),
    Mutant(
        "a log-sum-exp is held to the largest",
        TRIAL,
        (
            (
                "expected[..., -1], bound),",
                "expected[..., -1], bound * max(float(np.abs(expected[..., -1]).max()), 1.0)),",
            ),
        ),
        ("test_a_mistake_in_a_long_row_is_no_rounding",),
    ),
    Mutant(
        "a verdict outlives the compiler",
        AUTOTUNE,
        (("backend.driver, backend.compiler)", 'backend.driver, "")'),),
        ("test_a_verdict_is_of_one_compiler_and_of_what_chooses_tilings",),
    ),
    Mutant(
        "a verdict outlives the tilings that were tried",
        TUNING,
        (('.glob("*.py")', '.glob("*.none")'),),
        ("test_a_verdict_is_of_one_compiler_and_of_what_chooses_tilings",),
    ),
    Mutant(
        "verdicts of two compilers take turns in one file",
        TUNING,
        (('"\\n".join((device, driver, compiler)).encode()', "device.encode()"),),
        ("test_a_verdict_is_of_one_compiler_and_of_what_chooses_tilings",),
    ),
    Mutant(
        "a source that cannot be read ends a trial",
        TUNING,
        (("contextlib.suppress(OSError):  # an editor", "contextlib.suppress(KeyError):  # an editor"),),
        ("test_a_verdict_is_of_one_compiler_and_of_what_chooses_tilings",),
    ),
    Mutant(
        "a thread that cannot be had demotes a kernel",
        AUTOTUNE,
        (("contextlib.suppress(RuntimeError):", "contextlib.suppress(KeyError):"),),
        ("test_without_a_thread_to_watch_it_a_kernel_is_tried_all_the_same",),
    ),
    Mutant(
        "an error of a signal's handler demotes a kernel",
        AUTOTUNE,
        (("            if came_from_signal(error) or _passes(error):\n", "            if _passes(error):\n"),),
        ("test_an_error_of_a_signals_handler_comes_out_of_a_trial",),
    ),
    Mutant(
        "a deadline of a signal's handler puts a trial off",
        AUTOTUNE,
        (("if came_from_signal(error) or not _passes(error):", "if not _passes(error):"),),
        ("test_an_error_of_a_signals_handler_comes_out_of_a_trial",),
    ),
    Mutant(
        "an error of a signal's handler is one of decode_simt",
        AUTOTUNE,
        (("if came_from_signal(error) or _passes(error) or isinstance", "if _passes(error) or isinstance"),),
        ("test_an_error_of_a_signals_handler_comes_out_of_a_trial",),
    ),
    Mutant(
        "one attention alone takes the verdict of a trial that was put off",
        AUTOTUNE,
        (("    if asked_at < _settled_at:\n", "    if False:\n"),),
        ("test_a_trial_that_fails_for_want_of_something_is_put_off",),
    ),
    Mutant(
        "fp8 numbers of a check are too small for their keys to count",
        TRIAL,
        (('if config.kv_dtype == "int8" else (0.5, 1.0)', "if True else (0.5, 1.0)"),),
        ("test_a_kernel_that_misses_its_keys_or_sinks_is_seen",),
    ),
    Mutant(
        "sinks of a check are too small to count",
        TRIAL,
        (("for most in (1, most_sink))", "for most in (1, 1))"),),
        ("test_a_kernel_that_misses_its_keys_or_sinks_is_seen",),
    ),
    Mutant(
        "nothing is said of a kernel that hangs",
        AUTOTUNE,
        (("        timer.start()\n", "        pass\n"),),
        ("test_the_log_says_what_to_do_where_a_kernel_hangs",),
    ),
    Mutant(
        "a kernel that came back is said to hang",
        AUTOTUNE,
        (("        timer.cancel()\n", "        pass\n"),),
        ("test_the_log_says_what_to_do_where_a_kernel_hangs",),
    ),
    Mutant(
        "the doctor shows no verdict on a GPU",
        DOCTOR,
        (("    yield from verdict_checks(backend, retune)\n", ""),),
        ("test_on_a_gpu_the_device_is_described_and_the_self_test_runs",),
    ),
    Mutant(
        "the doctor hides kernels found wrong where none is tried",
        DOCTOR,
        (
            (
                '"PAGEDKV_AUTOTUNE=0: no kernel is tried")\n',
                '"PAGEDKV_AUTOTUNE=0: no kernel is tried")\n        return\n',
            ),
        ),
        ("test_the_doctor_shows_verdicts_and_tries_again_when_asked",),
    ),
    Mutant(
        "compiling takes the time of a trial",
        TRIAL,
        (("            self._end += self._clock() - begin\n", "            pass\n"),),
        ("test_a_trial_takes_its_seconds_and_compiling_does_not_count",),
    ),
    Mutant(
        "a kernel compiles while its launches are counted",
        TRIAL,
        (("    with budget.paused():\n        backend.prepare(plan.variants())\n    problems = ", "    problems = "),),
        ("test_a_trial_takes_its_seconds_and_compiling_does_not_count",),
    ),
    Mutant(
        "the first kernel is timed for as long as all have",
        AUTOTUNE,
        (("budget, 1 / (len(new) - number))", "budget, 1.0)"),),
        ("test_a_trial_takes_its_seconds_and_compiling_does_not_count",),
    ),
    Mutant(
        "a kernel that was late is never tried",
        "pagedkv/kernels/tuning.py",
        (("found.late and config not in self._own", "False"),),
        ("test_a_kernel_that_there_is_no_time_for_is_tried_by_the_next_process",),
    ),
    Mutant(
        "a kernel that was late is tried whenever a plan is made",
        "pagedkv/kernels/tuning.py",
        (("            self._own.add(config)\n", ""),),
        ("test_a_kernel_that_there_is_no_time_for_is_tried_by_the_next_process",),
    ),
    Mutant(
        "kernels that were tried are tried again with the late ones",
        AUTOTUNE,
        (("us, wrong, late = dict(before.us), dict(before.wrong), []", "us, wrong, late = {}, {}, []"),),
        ("test_a_kernel_that_there_is_no_time_for_is_tried_by_the_next_process",),
    ),
    Mutant(
        "a trial times what Python does for a launch",
        TRIAL,
        (
            (
                "        return lambda stream: made(arrays, stream)\n",
                "        return lambda stream: plan.layer_launch(\n"
                "            self.q, self.k, self.v, self.out, self.batch, self.options, lse=self.lse, **self.scales\n"
                "        )(arrays, stream)\n",
            ),
        ),
        ("test_a_timed_run_works_nothing_out_in_python",),
    ),
    Mutant(
        "the KV that a trial times may lie in the L2",
        TRIAL,
        (("min(max(TIMED_BYTES, TIMED_L2S * backend.l2_bytes), MOST_TIMED_BYTES)", "TIMED_BYTES"),),
        ("test_what_is_timed_does_not_fit_into_the_l2_unless_memory_is_short",),
    ),
    Mutant(
        "a trial takes memory that there is not",
        TRIAL,
        (("min(wanted, max(backend.free_bytes() // FREE_SHARE, LEAST_TIMED_BYTES))", "wanted"),),
        ("test_what_is_timed_does_not_fit_into_the_l2_unless_memory_is_short",),
    ),
    Mutant(
        "many CTAs share the small batch of a check",
        TRIAL,
        (("        plan.division.narrow(num_ctas)\n", ""),),
        ("test_a_kernel_that_is_wrong_in_places_is_caught",),
    ),
    Mutant(
        "queries of a trial take more memory than its keys",
        TRIAL,
        (("max(min(tokens, TIMED_TOKENS), 1)", "TIMED_TOKENS"),),
        ("test_queries_that_are_timed_take_no_more_memory_than_keys",),
    ),
    Mutant(
        "a check with many heads has as many queries as one with few",
        TRIAL,
        (("-(-CHECKED_ROWS // config.group_size)", "CHECKED_ROWS"),),
        ("test_a_check_has_more_rows_than_a_row_tile_and_not_many_more",),
    ),
    Mutant(
        "behind the keys of a check lie random numbers",
        TRIAL,
        (("values[unused] = NAN[config.kv_dtype]", "pass"),),
        ("test_a_kernel_that_is_wrong_in_places_is_caught",),
    ),
    Mutant(
        "each sequence of a check has keys",
        TRIAL,
        (("SEQ_LENS = (0, 1, 37, 300)", "SEQ_LENS = (1, 1, 37, 300)"),),
        ("test_a_kernel_that_is_wrong_in_places_is_caught",),
    ),
    Mutant(
        "no mask of a check hides a tile",
        TRIAL,
        (("bits[begin : begin + length // 8 + (length < 64)] = 0", "pass"),),
        ("test_a_kernel_that_is_wrong_in_places_is_caught",),
    ),
    Mutant(
        "each run of a check asks for log-sum-exps",
        TRIAL,
        (('    (ALL_CTAS, False, "HND"),\n', ""),),
        ("test_a_kernel_that_is_wrong_in_places_is_caught",),
    ),
    Mutant(
        "few CTAs alone take the small batch of a check",
        TRIAL,
        (('ALL_CTAS, True, "HND"', 'FEW_CTAS, True, "HND"'), ('ALL_CTAS, False, "HND"', 'FEW_CTAS, False, "HND"')),
        ("test_a_kernel_that_is_wrong_in_places_is_caught",),
    ),
    Mutant(
        "a run of a check that writes nothing has the output of the run before",
        TRIAL,
        (("out=backend.zeros(problem.out.shape, problem.out.dtype), ", ""),),
        ("test_a_kernel_that_computes_nothing_in_one_of_the_runs_is_wrong",),
    ),
    Mutant(
        "--retune is ignored beside --disk and --remote",
        DOCTOR,
        (("arguments.retune and (arguments.remote", "False and (arguments.remote"),),
        ("test_kernels_are_not_tried_again_beside_another_examination",),
    ),
    Mutant(
        "--retune forgets nothing",
        DOCTOR,
        (("            verdicts.forget()\n", "            pass\n"),),
        ("test_the_doctor_shows_verdicts_and_tries_again_when_asked",),
    ),
    Mutant(
        "a file of verdicts that cannot be removed ends the doctor",
        DOCTOR,
        (("OSError as error:\n            why", "ZeroDivisionError as error:\n            why"),),
        ("test_the_doctor_names_a_file_that_cannot_be_forgotten",),
    ),
    Mutant(
        "verdicts are dropped though their file stays",
        TUNING,
        (
            (
                "        with self._lock:\n            if self.path is not None:",
                "        with self._lock:\n            self._known = {}\n            if self.path is not None:",
            ),
        ),
        ("test_the_doctor_names_a_file_that_cannot_be_forgotten",),
    ),
    Mutant(
        "PAGEDKV_AUTOTUNE=0 turns nothing off",
        AUTOTUNE,
        ((" and asked.lower() in ON", ""),),
        ("test_nothing_is_tried_for_a_named_kernel_or_schedule_or_when_it_is_off",),
    ),
)
