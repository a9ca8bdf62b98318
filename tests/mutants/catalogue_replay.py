"""Mistakes in the replay: who holds what until when, and the bounds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BOUNDS = "pagedkv/lab/replay/bounds.pyx"
ENGINE = "pagedkv/lab/replay/engine_sim.py"
SCHEDULE = "pagedkv/lab/replay/schedule.py"
RECORDER = "pagedkv/lab/traces/recorder.py"
LINES = "pagedkv/lab/traces/whole_lines.py"
LOG = "pagedkv/lab/traces/token_log.py"

MUTANTS = (
    Mutant(
        "a small file may name any number of blocks",
        "pagedkv/lab/replay/trace_npz.py",
        (("    if num_accesses > max(FEW_ACCESSES, MAX_ACCESSES_PER_BYTE * stored_bytes):\n", "    if False:\n"),),
        ("test_a_small_file_that_names_very_many_blocks_is_refused_before_they_take_memory",),
    ),
    Mutant(
        "a file of empty lines is read to its end",
        "pagedkv/lab/replay/trace_jsonl.py",
        (("        if spare < 0:\n", "        if False:\n"),),
        ("test_empty_lines_without_end_are_refused_after_a_mebibyte",),
    ),
    Mutant(
        "a request that generates lets go of its blocks at once",
        ENGINE,
        (("        if generating is None:\n            cache.close(visit)\n", "        cache.close(visit)\n"),),
        ("test_what_a_running_request_holds_is_not_evicted_and_the_next_keeps_what_fits",),
    ),
    Mutant(
        "a bound evicts what a running request holds",
        BOUNDS,
        ((" or keys[block] != victim.key or holders[block]:", " or keys[block] != victim.key:"),),
        ("test_min_equals_the_best_of_all_eviction_choices_while_requests_run",),
    ),
    Mutant(
        "a bound never evicts again what was held at its turn",
        BOUNDS,
        (
            (
                "                    if children[block] == 0:\n                        heap_push",
                "                    if children[block] == 0 and hits[i] == 0:\n"
                "                        heap_push",
            ),
        ),
        ("test_min_equals_the_best_of_all_eviction_choices_while_requests_run",),
    ),
    Mutant(
        "a request holds a block more than fits beside the others",
        BOUNDS,
        (("(holders[paths[a]] or used < capacity)", "(holders[paths[a]] or used <= capacity)"),),
        ("test_what_is_held_follows_from_the_trace_and_the_device_alone",),
    ),
    Mutant(
        "who is over at an arrival goes after it",
        SCHEDULE,
        (("np.lexsort((ends, request, time))", "np.lexsort((request, ends, time))"),),
        ("test_who_is_over_goes_before_who_arrives_in_order_of_the_ends_and_then_of_arrival",),
    ),
    Mutant(
        "cold blocks that find no room on the device count as hits",
        ENGINE,
        (("            hit = placement.settle(owner)\n", "            placement.settle(owner)\n"),),
        ("test_a_request_whose_cold_blocks_find_no_room_on_the_device_hits_those_that_do",),
    ),
    Mutant(
        "a line with another block size is taken for one of the trace's",
        "pagedkv/lab/replay/trace_jsonl.py",
        (("        if block_size != self.block_size and len(self.t_ms):\n", "        if False:\n"),),
        ("test_lines_may_say_the_size_of_their_blocks_which_must_be_one",),
    ),
    Mutant(
        "time stamps that go back are not counted",
        "pagedkv/lab/replay/trace.py",
        (("self.t_ms < np.maximum.accumulate(self.t_ms)", "self.t_ms < 0"),),
        ("test_time_stamps_that_go_back_are_counted_and_said",),
    ),
    Mutant(
        "a few points between LRU and MIN are shown as a share of themselves",
        "pagedkv/lab/replay/table.py",
        (("    if points < FEW_POINTS:\n", "    if False:\n"),),
        ("test_where_lru_is_close_to_min_the_column_between_them_has_points",),
    ),
    Mutant(
        "what is enough is half of what is",
        "pagedkv/lab/replay/advice.py",
        (("    return low\n", "    return low // 2\n"), ("if points(n) >= most - NOTHING)", "if n)")),
        ("test_more_than_what_is_enough_is_worth_nothing_and_less_is_not_enough",),
    ),
    Mutant(
        "a dollar sign in a trace's name is a formula",
        "pagedkv/lab/replay/plot.py",
        (("    return printable(text).replace", "    return text or printable(text).replace"),),
        ("test_an_odd_name_is_printed_and_drawn_as_it_is",),
    ),
    Mutant(
        "a name may control the terminal",
        "pagedkv/lab/replay/about.py",
        (('    return "".join(c if c.isprintable() else "?" for c in text)\n', "    return text\n"),),
        ("test_an_odd_name_is_printed_and_drawn_as_it_is",),
    ),
    Mutant(
        "a log may lie about its lengths",
        LOG,
        (("is not None and said != len(tokens):", "is None:"),),
        ("test_a_bad_line_of_a_log_is_named_with_its_field_and_leaves_no_trace",),
    ),
    Mutant(
        "a line of a log may be of any length",
        LOG,
        (("        if len(rest) > MAX_LINE_BYTES:\n", "        if False:\n"),),
        ("test_a_line_without_end_is_refused_before_it_takes_memory",),
    ),
    Mutant(
        "a conversion that fails leaves its half behind",
        "pagedkv/lab/traces/from_tokens.py",
        (("            beside.unlink(missing_ok=True)\n", "            pass\n"),),
        ("test_a_bad_line_of_a_log_is_named_with_its_field_and_leaves_no_trace",),
    ),
    Mutant(
        "namespaces of a recording share numbers",
        "pagedkv/lab/traces/block_ids.py",
        (('        link = self._hash(b"namespace", namespace)\n', '        link = self._hash(b"namespace", b"")\n'),),
        ("test_namespaces_share_no_number_and_neither_do_their_sessions",),
    ),
    Mutant(
        "numbers of a recording have no secret in them",
        "pagedkv/lab/traces/block_ids.py",
        (("digest_size=CHAIN_BYTES, key=self._key, person=use", "digest_size=CHAIN_BYTES, person=use"),),
        ("test_numbers_say_nothing_of_tokens_and_differ_from_recording_to_recording",),
    ),
    Mutant(
        "no memory in the recorder fails the request",
        RECORDER,
        (
            (
                "        except Exception as problem:  # MemoryError too: the request needs none of this\n",
                "        except RuntimeError as problem:\n",
            ),
        ),
        ("test_an_error_in_the_recorder_is_counted_and_the_request_goes_on",),
    ),
    Mutant(
        "a trace waits for its writer however much is queued",
        RECORDER,
        (("            if waiting + len(tokens) > MAX_QUEUED_TOKENS or", "            if"),),
        ("test_requests_that_come_too_fast_are_dropped_and_counted",),
    ),
    Mutant(
        "a part of a line stays in a trace on a full disk",
        LINES,
        (("                os.ftruncate(self._file, self.size)\n", "                self.size = at\n"),),
        ("test_a_full_disk_costs_lines_and_no_request_and_leaves_the_file_readable",),
    ),
    Mutant(
        "a sequence on trial is a request before it is kept",
        "pagedkv/cache/cache.py",
        (("        if not on_trial:\n            self.count(seq)\n", "        self.count(seq)\n"),),
        ("test_a_sequence_that_was_only_tried_is_no_request_and_forks_are_none",),
    ),
)
