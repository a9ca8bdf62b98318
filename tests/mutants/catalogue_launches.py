"""Mistakes in launches: repeated ones, the choice of a kernel, streams, small blocks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RECIPE, ATTENTION = "pagedkv/kernels/recipe.py", "pagedkv/attention/paged_attention.py"
AUTOTUNE, TRIAL = "pagedkv/kernels/autotune.py", "pagedkv/kernels/trial.py"
CHECKS = "pagedkv/attention/layer_checks.py"
AUTOTUNE = "pagedkv/kernels/autotune.py"
IN_TURN = "pagedkv/kernels/in_turn.py"
COPY = "pagedkv/tiers/cuda_copy.py"
ON_A_GPU = "return array.shape, array.strides, array.dtype, data.ptr & 15, data.device_id"

MUTANTS = (
    Mutant(
        "arrays with other strides have the same signature",
        RECIPE,
        (("return array.shape, array.strides, array.dtype, address(array) & 15, array.flags.writeable",
          "return array.shape, array.dtype, address(array) & 15, array.flags.writeable"),),
        ("test_another_form_that_fits_is_worked_out_anew", "test_another_array_on_the_host_has_another_signature"),
    ),
    Mutant(
        "an array on another GPU has the same signature",
        RECIPE,
        ((ON_A_GPU, "return array.shape, array.strides, array.dtype, data.ptr & 15"),),
        ("test_another_array_on_a_gpu_has_another_signature",),
    ),
    Mutant(
        "an array that is less aligned has the same signature",
        RECIPE,
        ((ON_A_GPU, "return array.shape, array.strides, array.dtype, data.device_id"),),
        ("test_another_array_on_a_gpu_has_another_signature",),
    ),
    Mutant(
        "an array of another dtype has the same signature",
        RECIPE,
        ((ON_A_GPU, "return array.shape, array.strides, data.ptr & 15, data.device_id"),),
        ("test_another_array_on_a_gpu_has_another_signature",),
    ),
    Mutant(
        "two launches at once share a struct",
        RECIPE,
        (("filled = self._spare.pop()", "filled = self._spare[-1]"),),
        ("test_a_launch_within_a_launch_has_a_struct_of_its_own",),
    ),
    Mutant(
        "a spare struct holds the arrays of its last launch",
        RECIPE,
        (("        filled.params.arrays = ()\n", ""),),
        ("test_a_launch_holds_no_array_of_a_layer_that_is_gone",),
    ),
    Mutant(
        "a second scale beside that of latents is ignored",
        CHECKS,
        (("    if v_scale is not None:\n", "    if False:\n"),),
        ("test_latents_that_do_not_fit_are_refused_and_nothing_is_launched",),
    ),
    Mutant(
        "V of latents is not scaled",
        CHECKS,
        ((": config.head_dim_v], k_scale\n", ": config.head_dim_v], k_scale and k_scale / k_scale\n"),),
        ("test_latents_are_given_once",),
    ),
    Mutant(
        "latents of a trial do not hold V",
        "pagedkv/kernels/trial.py",
        (("k[..., : config.head_dim_v] if config.v_in_k else made", "made"),),
        ("test_kernels_for_latents_are_right_in_their_trial",),
    ),
    Mutant(
        "launches outlive the arrays of their batch",
        ATTENTION,
        (("self._places, self._launches = places, {}", "self._places = places"),),
        ("test_a_plan_over_the_same_arrays_keeps_the_launches_and_other_arrays_get_their_own",),
    ),
    Mutant(
        "the output is no part of the form",
        ATTENTION,
        (("form = (kv_form, signature(q), signature(out), signature(lse))", "form = (kv_form, signature(q))"),),
        ("test_another_form_that_fits_is_worked_out_anew",
         "test_another_form_that_does_not_fit_is_refused_as_the_first_time"),
    ),
    Mutant(
        "all layers have the tensor maps of the first",
        "pagedkv/kernels/layer_launch.py",
        (("self._maps.get((k_address, v_address))", "next(iter(self._maps.values()), None)"),),
        ("test_layers_of_one_form_are_worked_out_once_and_get_their_own_addresses",),
    ),
    Mutant(
        "an array on another GPU is taken",
        "pagedkv/kernels/arrays.py",
        (("if None not in (own, found) and own != found:", "if False:"),),
        ("test_arrays_in_host_memory_or_on_another_gpu_are_refused",),
    ),
    Mutant(
        "bfloat16 is read as float16",
        "pagedkv/kernels/dtypes.py",
        ((" or own != found:", ":"),),
        ("test_another_form_that_does_not_fit_is_refused_as_the_first_time",),
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
        (("        except MemoryError:  # of the device", "        except ZeroDivisionError:  # of the device"),),
        ("test_without_memory_for_a_trial_decode_simt_is_taken_until_there_is",),
    ),
    Mutant(
        "noise decides between kernels",
        AUTOTUNE,
        (("CLEARLY = 0.97", "CLEARLY = 1.0"),),
        ("test_the_kernel_that_is_clearly_faster_is_taken_and_tried_once",),
    ),
    Mutant(
        "a wide window wraps around",
        ATTENTION,
        (("min(int(window or 0), MAX_WINDOW)", "int(window or 0)"),),
        ("test_a_window_as_wide_as_there_can_be_hides_nothing",),
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
        (("make((num_blocks, heads, size, dim)).swapaxes(1, 2)", "make((num_blocks, size, heads, dim))"),),
        ("test_a_trials_blocks_lie_as_a_cache_on_a_gpu_lays_them",),
    ),
    Mutant(
        "an attention is made within a capture",
        "pagedkv/attention/paged_attention.py",
        (("            check_may_wait(self.backend)\n", ""),),
        ("test_no_attention_is_made_within_a_capture",),
    ),
    Mutant(
        "a step's first attention is made within its stream's capture",
        "pagedkv/cache/gpu_kv.py",
        (("spec = self.spec\n            check_may_wait(self.backend, stream)\n", "spec = self.spec\n"),),
        ("test_a_steps_first_attention_within_a_capture_is_refused_and_works_later",),
    ),
    Mutant(
        "a step's buffers grow within a capture",
        "pagedkv/cache/gpu_kv.py",
        (("< flat.size:\n            check_may_wait(self.backend, stream)\n", "< flat.size:\n"),),
        ("test_a_steps_first_attention_within_a_capture_is_refused_and_works_later",),
    ),
    Mutant(
        "a NaN passes the check",
        "pagedkv/kernels/trial.py",
        (("(np.abs(ours - theirs) <= limit)", "~(np.abs(ours - theirs) > limit)"),),
        ("test_a_difference_is_told_by_its_place_and_no_nan_passes",),
    ),
    Mutant(
        "verdicts of another driver are believed",
        "pagedkv/kernels/tuning.py",
        (("        if other:\n", "        if False:\n"),),
        ("test_a_file_of_another_driver_or_source_is_made_again",),
    ),
    Mutant(
        "a process forgets the verdicts of others",
        "pagedkv/kernels/tuning.py",
        (("{**self._read(), **self._known, config: verdict}", "{**self._known, config: verdict}"),),
        ("test_verdicts_of_two_processes_are_both_kept",),
    ),
    Mutant(
        "a kernel that needs tensor maps is tried without them",
        "pagedkv/kernels/select.py",
        (("        and (maps or not kernel.tiling(config, max_q_len).box_tokens)\n", ""),),
        ("test_a_device_without_tensor_maps_tries_no_kernel_that_needs_them",),
    ),
    Mutant(
        "a run on another stream does not wait for the runs before it",
        IN_TURN,
        (("        if self._pointer is not None:\n", "        if False:\n"),),
        ("test_a_run_on_another_stream_waits_for_the_runs_before_it",),
    ),
    Mutant(
        "a run beside a capture of its workspace is launched",
        IN_TURN,
        (("if was_captured and not is_captured:", "if False:"),),
        ("test_a_run_beside_a_capture_of_the_same_workspace_is_refused_before_it_is_launched",),
    ),
    Mutant(
        "two threads launch over one workspace at once",
        IN_TURN,
        (("        with self._launching:\n", "        if True:\n"),),
        ("test_a_thread_that_runs_during_anothers_launch_waits_for_that_launch",),
    ),
    Mutant(
        "a capture waits for work outside",
        IN_TURN,
        (("if is_captured and not was_captured:", "if False:"),),
        ("test_a_capture_does_not_wait_for_work_outside",),
    ),
    Mutant(
        "a cascade's launches on another stream do not wait",
        "pagedkv/attention/cascade.py",
        (("if self._in_turn is None else self._in_turn.take(stream, launch, *arguments)", "if True else None"),),
        ("test_a_cascade_serves_one_stream_at_a_time",),
    ),
    Mutant(
        "levels do not know what lies below them",
        "pagedkv/attention/positions.py",
        (("            below = positions\n", ""),),
        ("test_windows_and_alibi_reach_through_all_levels",),
    ),
    Mutant(
        "on the CPU a level's keys count once for all levels above",
        "pagedkv/attention/positions.py",
        (("below = below + np.repeat(seq_lens, counts)", "below = np.repeat(seq_lens, counts)"),),
        ("test_windows_and_alibi_reach_through_all_levels",),
    ),
    Mutant(
        "levels of different queries are placed",
        "pagedkv/attention/positions.py",
        (("        if len(set(ends)) > 1:\n", "        if False:\n"),),
        ("test_positions_of_a_batch_that_does_not_fit_are_refused",),
    ),
    Mutant(
        "more queries are placed than there is room for",
        "pagedkv/attention/positions.py",
        (("            if q_indptr[-1] > self._max_tokens:\n", "            if False:\n"),),
        ("test_positions_of_a_batch_that_does_not_fit_are_refused",),
    ),
    Mutant(
        "blocks that a level's windows have left must be there",
        "pagedkv/attention/checks.py",
        (("first_positions = batch.position_spans[:, 0]", "first_positions = batch.seq_lens - q_lens"),),
        ("test_windows_and_alibi_reach_through_all_levels",),
    ),
    Mutant(
        "more queries run than have a position",
        "pagedkv/attention/batch_checks.py",
        (("len(batch.q_positions) < len(q)", "len(batch.q_positions) < 0"),),
        ("test_positions_are_given_where_they_were_asked_for",),
    ),
    Mutant(
        "reset leaves the counters",
        "pagedkv/kernels/attention.py",
        (("        if arrivals is not None:\n", "        if False:\n"),),
        ("test_reset_zeroes_the_counters_and_asks_for_a_plan",),
    ),
    Mutant(
        "a fork copies page-locked memory",
        "pagedkv/tiers/host.py",
        (("mapping.madvise(mmap.MADV_DONTFORK)", "pass"),),
        ("test_page_locked_memory_is_not_copied_by_a_fork",),
    ),
    Mutant(
        "a step's own work counts as the report of a graph's launch",
        "pagedkv/tiers/device.py",
        (("            event.record(stream)\n        return True\n",
          "            event.record(stream)\n            self._untold_graph = False\n        return True\n"),),
        ("test_a_move_complains_of_a_captured_graph_whose_launches_were_not_reported",),
    ),
    Mutant(
        "a kernel copies large runs too",
        COPY,
        (("small = counts * block_bytes < SMALL_RUN", "small = counts > 0"),),
        (
            "test_few_runs_or_large_ones_stay_with_the_copy_engine",
            "test_a_large_run_among_small_ones_is_not_the_kernels",
        ),
    ),
    Mutant(
        "a launch for a few runs",
        COPY,
        (("np.count_nonzero(small) <= FEW_RUNS", "not small.any()"),),
        ("test_few_runs_or_large_ones_stay_with_the_copy_engine",),
    ),
    Mutant(
        "a kernel copies the blocks of large runs again",
        COPY,
        (("listed = np.repeat(small, counts)", "listed = np.ones(src_blocks.size, np.bool_)"),),
        ("test_a_large_run_among_small_ones_is_not_the_kernels",),
    ),
    Mutant(
        "the copy engine copies the blocks of small runs again",
        COPY,
        (("starts[~small].tolist(), counts[~small].tolist()", "starts.tolist(), counts.tolist()"),),
        ("test_a_large_run_among_small_ones_is_not_the_kernels",),
    ),
    Mutant(
        "a failed copy is not waited for",
        COPY,
        (("        finally:  # after an error too: its blocks are used again\n            stream",
          "        finally:\n            pass\n        stream"),),
        ("test_a_copy_that_fails_is_waited_for_before_its_blocks_are_used_again",),
    ),
    Mutant(
        "a kernel copies from memory that is not page-locked",
        "pagedkv/tiers/mover/transfer.py",
        (("reached = all(tier.gpu is not None for tier in tiers)", "reached = True"),),
        ("test_host_memory_out_of_the_kernels_reach_stays_with_the_copy_engine",),
    ),
    Mutant(
        "a kernel copies by host addresses on a device that has others",
        "pagedkv/tiers/device.py",
        (("if self.gpu is not None and self._cupy.cuda.runtime.deviceGetAttribute(HOST_POINTERS, self.gpu):",
          "if self.gpu is not None:"),),
        ("test_host_memory_out_of_the_kernels_reach_stays_with_the_copy_engine",),
    ),
    Mutant(
        "page-locked memory is out of reach of kernels",
        "pagedkv/tiers/host.py",
        (("PORTABLE_AND_MAPPED = 1 | 2", "PORTABLE_AND_MAPPED = 1"),),
        ("test_page_locked_memory_is_locked_in_chunks_and_unlocked_with_its_last_view",),
    ),
    Mutant(
        "the kernel for small blocks is unknown to lanes of pages",
        "pagedkv/tiers/device.py",
        (("tier.wait_for_users, tier.kernel\n", "tier.wait_for_users, None\n"),),
        ("test_pages_of_groups_that_lie_apart_are_one_launch_and_the_bytes_between_stay",),
    ),
    Mutant(
        "every move of small blocks takes device memory",
        "pagedkv/kernels/block_moves.py",
        (("if found is None or len(found) < count:", "if True:"),),
        ("test_many_small_runs_are_one_launch_in_either_direction",),
    ),
    Mutant(
        "a list of blocks is longer than its memory",
        "pagedkv/kernels/block_moves.py",
        (("if found is None or len(found) < count:", "if found is None:"),),
        ("test_a_longer_list_takes_more_memory_once",),
    ),
    Mutant(
        "small blocks are copied on another stream than the copies'",
        "pagedkv/kernels/block_moves.py",
        (("max_ctas=MOST_CTAS, stream=stream)", "max_ctas=MOST_CTAS)"),),
        ("test_many_small_runs_are_one_launch_in_either_direction",),
    ),
    Mutant(
        "moves of small blocks take the whole GPU",
        "pagedkv/kernels/block_moves.py",
        (("max_ctas=MOST_CTAS, stream", "stream"),),
        ("test_the_kernel_leaves_multiprocessors_to_attention",),
    ),
    Mutant(
        "a cache gives its tier no kernel for small blocks",
        "pagedkv/cache/tiered.py",
        (("        tier.copy_small_by(BlockMoves(backend))\n", ""),),
        ("test_a_caches_small_blocks_go_to_the_host_and_come_back_with_their_scales",),
    ),
    Mutant(
        "small blocks go through a bounce buffer a few at a time",
        "pagedkv/tiers/mover/transfer.py",
        (("max(BOUNCE_BLOCKS, BOUNCE_BYTES // tier.block_bytes)", "BOUNCE_BLOCKS"),),
        ("test_small_blocks_fill_a_bounce_buffer_and_are_one_launch_of_it",),
    ),
    Mutant(
        "a trial has no end",
        AUTOTUNE,
        (("if budget.left <= 0:", "if False:"),),
        ("test_a_kernel_that_there_is_no_time_for_is_tried_by_the_next_process",),
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
        (("    with budget.paused():\n        backend.prepare(plan.variants())\n    problem = ", "    problem = "),),
        ("test_a_trial_takes_its_seconds_and_compiling_does_not_count",),
    ),
    Mutant(
        "the first kernel is timed for as long as all have",
        AUTOTUNE,
        (("budget, 1 / (len(new) - number))", "budget, 1.0)"),),
        ("test_a_trial_takes_its_seconds_and_compiling_does_not_count",),
    ),
    Mutant(
        "a kernel is timed however long it takes",
        "pagedkv/kernels/cupy_backend.py",
        (("fits = int(1e6 * most_s / max(once, 1.0))", "fits = _SERIES * runs"),),
        ("test_a_kernel_is_timed_within_the_seconds_given_but_for_two_runs",),
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
)
