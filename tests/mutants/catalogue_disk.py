"""Mistakes in the disk tier's records and files: each takes one of its guards away."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FORMAT, SLOTS, STORE = "pagedkv/tiers/disk/format.py", "pagedkv/tiers/disk/slots.py", "pagedkv/tiers/disk/store.py"
SEGMENTS, DIRECTORY = "pagedkv/tiers/disk/segments.py", "pagedkv/tiers/disk/directory.py"
FILES = "pagedkv/tiers/disk/segment_files.py"
SUPER = "pagedkv/tiers/disk/superblock.py"
IO = "pagedkv/tiers/disk/_io.pyx"

COMPARE = "if header[: g.tokens_end] != expected:"
SEALED = 'if not sealed(header, slot):\n            return "header"\n        if'


def _unread(first: int, last: int) -> tuple[str, str]:
    """Bytes [first, last) of a header are not compared with what is expected there."""
    return COMPARE, f"if header[:{first}] != expected[:{first}] or header[{last} : g.tokens_end] != expected[{last}:]:"


RECORDS = (
    Mutant(
        "a payload's sums are not compared", FORMAT,
        (('!= sums.astype("<u8", copy=False).tobytes():', '== b"":'),),
        ("test_a_flip_anywhere_in_the_payload_is_a_miss",),
        quick=True,
    ),
    Mutant(
        "a foreign folder is marked before it is refused", "pagedkv/tiers/disk/directory.py",
        (("            self._check_ours()  # before anything is made in it\n"
          "            self.lock_fd = self._open_lock()\n",
          "            self.lock_fd = self._open_lock()\n            self._check_ours()\n"),),
        ("test_a_directory_with_something_else_in_it_is_not_taken_over",),
    ),
    Mutant(
        "the home of no user is a folder here", "pagedkv/spec/paths.py",
        (('    if full.startswith("~"):\n', "    if False:\n"),),
        ("test_the_home_of_no_user_is_refused_and_no_folder_is_named_after_it",),
    ),
    Mutant(
        "a header's own sum is not compared", FORMAT,
        ((SEALED, SEALED.replace("not sealed(header, slot)", "False")),),
        ("test_a_flip_in_any_header_field_is_a_miss_before_and_after_reopening",),
    ),
    Mutant(
        "a slot is served whatever its header names", FORMAT,
        ((COMPARE, "if header[:80] != expected[:80]:"),),
        ("test_a_record_that_differs_in_one_part_is_a_miss[tokens]",),
    ),
    Mutant(
        "an older write of a slot passes for the latest", FORMAT,
        (('"little") ^ generation', '"little")'), _unread(16, 24)),
        ("test_a_slot_from_before_it_was_overwritten_is_a_miss",),
    ),
    Mutant(
        "a record of another store is served", FORMAT,
        (_unread(32, 48), ('"little") ^ generation', '"little") & 0')),
        ("test_a_slot_of_another_store_is_a_miss",),
    ),
    Mutant(
        "a record of another chain key is served", FORMAT,
        (_unread(80, 112), ('int.from_bytes(record.key[:8], "little") ^ generation', "generation")),
        ("test_a_record_that_differs_in_one_part_is_a_miss[key]",),
    ),
    Mutant(
        "a record of another parent is served", FORMAT, (_unread(112, 144),),
        ("test_a_record_that_differs_in_one_part_is_a_miss[parent]",),
    ),
    Mutant(
        "a record of another namespace is served", FORMAT, (_unread(144, 176),),
        ("test_a_record_that_differs_in_one_part_is_a_miss[namespace]",),
    ),
    Mutant(
        "a record with another extra digest is served", FORMAT, (_unread(176, 208),),
        ("test_a_record_that_differs_in_one_part_is_a_miss[extra]",),
    ),
    Mutant(
        "shards may change places inside a payload", IO,
        (("shards.width, seed ^ i, SUM_LEVEL_C)", "shards.width, seed, SUM_LEVEL_C)"),),
        ("test_swapped_shards_inside_one_payload_are_a_miss",),
    ),
    Mutant(
        "records of an epoch that is over are found again", FORMAT,
        (('            "epoch": self.epoch, ', "            "),),
        ("test_clear_forgets_everything_for_good",),
    ),
    Mutant(
        "a slot that holds nothing is read all the same", SLOTS,
        (('            if not generation:\n                reason = "empty"\n            elif', "            if"),),
        ("test_an_empty_slot_is_a_miss",),
    ),
    Mutant(
        "a read that the kernel refused passes for a read", SLOTS,
        (('elif outcomes[i] < 0:\n                reason = "io_error"\n            elif outcomes[i] !=',
          "elif 0 <= outcomes[i] !="),),
        ("test_a_failing_read_is_a_counted_miss",),
    ),
    Mutant(
        "a write that was cut short passes for a whole one", IO,
        (("            done += put\n", "            done = until\n"),),
        ("test_a_write_that_is_cut_short_is_gone_on_with_until_it_fails",),
    ),
    Mutant(
        "a payload that a power failure tore is served", FORMAT,
        (('!= sums.astype("<u8", copy=False).tobytes():', '== b"":'),),
        ("test_the_proof_holds[power_loss]",), 400,
    ),
    Mutant(
        "a write that failed is told to be stored", SLOTS,
        (("        ok[chosen[outcomes < 0]] = False\n", ""),),
        ("test_a_failing_write_loses_the_block_and_is_counted_by_errno",),
    ),
    Mutant(
        "an emptied slot keeps its header on the disk", SLOTS,
        (("outcomes = self._segments.write_headers(buried, headers)", "outcomes = np.zeros(buried.size, np.int64)"),),
        ("test_a_reopened_store_lists_its_records_and_serves_the_same_bytes",),
    ),
    Mutant(
        "of two records with one key the older comes back", SLOTS,
        (("surplus[order[:-1][(keys[1:] == keys[:-1]).all(axis=1)]] = True", "pass"),),
        ("test_of_slots_with_one_key_the_latest_write_counts_after_reopening_and_no_other_ever_comes_back",),
    ),
    Mutant(
        "a read past the page cache that fails is not tried again through the file", SEGMENTS,
        (('if direct is not None or self.files.read_path', 'if self.files.read_path'),),
        ("test_a_read_that_cannot_go_past_the_page_cache_takes_the_other_way",),
    ),
    Mutant(
        "a disk tier takes a model without a name", "pagedkv/cache/parts.py",
        (("if disk is not None and not spec.model and not disk.unnamed_model:", "if False and disk is not None:"),),
        ("test_a_disk_for_a_model_without_a_name_is_refused_unless_that_is_said_aloud",),
    ),
)  # fmt: skip

PURGES = (
    Mutant(
        "what was purged is served until its slot is used again", SLOTS,
        (("return generation < self._ages.barriers.get(record.namespace, 0)", "return False"),),
        ("test_a_purged_namespace_is_gone_at_once_and_others_stay",),
    ),
    Mutant(
        "a crash takes a purge back", "pagedkv/tiers/disk/tier.py",
        (("                if not self._saved():\n", "                if False:\n"),),
        ("test_a_purged_namespace_is_gone_after_reopening",),
    ),
    Mutant(
        "a write that was on its way when its namespace was purged is stored", SLOTS,
        (("ok[chosen[i]] = not self._is_void(record, generation)", "ok[chosen[i]] = True"),),
        ("test_a_write_that_was_on_its_way_when_its_namespace_was_purged_stores_nothing",),
    ),
    Mutant(
        "a store that was purged is reopened without its barriers", "pagedkv/tiers/disk/ages.py",
        (("self.barriers = next_generation, dict(barriers)", "self.barriers = next_generation, {}"),),
        ("test_a_purged_namespace_is_gone_after_reopening",),
    ),
    Mutant(
        "one damaged page of the superblock takes a purge back", STORE,
        (("for _ in range(2):", "for _ in range(1):"),),
        ("test_one_damaged_copy_of_the_superblock_takes_no_purge_back",),
    ),
    Mutant(
        "generations are used again after a crash", STORE,
        (("next_generation=self.first_generation + RESERVED_GENERATIONS", "next_generation=self.first_generation"),),
        ("test_generations_do_not_repeat_after_a_crash",),
    ),
    Mutant(
        "a damaged header is forgotten, and a purge of what it named too", "pagedkv/tiers/disk/scan.py",
        (("        doubtful[damaged[headers[damaged].any(axis=1)]] = True  # all zeros: never written\n", ""),),
        ("test_a_damaged_header_that_heals_brings_nothing_back_that_was_purged",),
    ),
)  # fmt: skip

FILES = (
    Mutant(
        "two processes have one directory open", DIRECTORY,
        (("file_system.lock(self.lock_fd)", "None"), ("file_system.lock(self.fd)", "None")),
        ("test_a_second_opener_is_refused_here_and_in_another_process",),
    ),
    Mutant(
        "a forked child uses its parent's store", "pagedkv/tiers/disk/_rw_gate.pyx",
        (("        if not self.is_ours:            # before any lock", "        if False:"),),
        ("test_a_forked_child_is_refused_and_does_not_keep_the_lock",),
    ),
    Mutant(
        "files of another user are taken over", DIRECTORY,
        (("if info.st_uid != os.geteuid():", "if False:"),),
        ("test_a_directory_or_file_of_another_user_is_refused",),
    ),
    Mutant(
        "files that others can read are taken", DIRECTORY,
        (("if info.st_mode & 0o077:", "if False:"),),
        ("test_a_directory_or_file_open_to_others_is_refused",),
    ),
    Mutant(
        "links are followed", DIRECTORY,
        (('_FLAGS = file_system.flags("O_NOFOLLOW", "O_CLOEXEC")', "_FLAGS = os.O_CLOEXEC"),
         ("if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):", "if False:")),
        ("test_a_link_to_a_directory_is_refused", "test_a_file_that_is_a_link_a_pipe_or_a_directory_is_refused"),
    ),
    Mutant(
        "a directory with foreign files is taken over", "pagedkv/tiers/disk/directory.py",
        (("        if foreign:\n", "        if False:\n"),),
        ("test_a_directory_with_something_else_in_it_is_not_taken_over",),
    ),
    Mutant(
        "a store is opened with another store's key", STORE,
        (("if key_check(self.superblock.uuid, self.secret) != self.superblock.key_check:", "if False:"),),
        ("test_another_key_is_refused",),
    ),
    Mutant(
        "a store of another model is opened", STORE,
        (("if found.fingerprint != ours:", "if False:"),),
        ("test_a_store_of_another_layout_is_refused_and_left_as_it_is",),
    ),
    Mutant(
        "a store of an unknown version is opened", STORE,
        (("        if not found.is_known:", "        if False:"),),
        ("test_an_unknown_version_or_feature_is_refused",),
    ),
    Mutant(
        "a file that was cut is opened", FILES,
        (("                if found != size:", "                if False:"),),
        ("test_a_segment_of_the_wrong_size_is_refused",),
    ),
    Mutant(
        "a damaged superblock is believed", SUPER,
        (("if len(page) != PAGE or not sealed(page, 0):", "if len(page) != PAGE:"),),
        ("test_one_damaged_superblock_is_survived_and_two_are_refused",),
    ),
    Mutant(
        "a network file system is taken for a disk", DIRECTORY,
        (("if is_network(kind) and not self._network_fs:", "if False:"),),
        ("test_a_network_file_system_is_refused_unless_it_is_asked_for",),
    ),
    Mutant(
        "a full disk is tried again by every write", "pagedkv/tiers/circuit.py",
        (("self.shut = self.shut or self._failed >= self._patience or hopeless", "pass"),),
        ("test_a_full_disk_makes_the_tier_read_only_until_it_works_again",),
    ),
    Mutant(
        "a dead disk is asked by every read", SLOTS,
        (("if not self._breaker.may_read():", "if False:"),),
        ("test_a_dead_disk_is_off_and_costs_no_more_calls",),
    ),
    Mutant(
        "a write beyond the limit of file sizes is tried", FILES,
        (("return self.geometry.segment_bytes(0) > file_size_limit()", "return False"),),
        ("test_a_limit_of_file_sizes_is_no_signal",),
    ),
    Mutant(
        "two blocks of one write go into one slot", "pagedkv/tiers/disk/tier.py",
        (("if np.unique(slots).size != slots.size:", "if False:"),),
        ("test_every_way_to_misuse_a_call_is_refused_before_anything_is_written",),
    ),
)  # fmt: skip

HANGS = (
    Mutant(
        "what a write that hung took from memory that has another owner by now gets a name", SLOTS,
        (("        if self._breaker.hangs:  # perhaps this call", "        if False:  # perhaps this call"),),
        ("test_what_a_write_that_hung_has_written_gets_no_name",
         "test_a_step_goes_on_when_its_demotion_hangs_and_nothing_wrong_is_found_after_a_restart"),
    ),
    Mutant(
        "a tier with a call inside that hangs closes its files under it", "pagedkv/tiers/disk/tier.py",
        (("if not is_empty or not self._ending.", "if not self._ending."),),
        ("test_a_tier_closed_with_a_call_inside_keeps_its_files_until_that_is_back",),
    ),
    Mutant(
        "a caller stays inside who leaves where there is no memory", "pagedkv/tiers/disk/_rw_gate.pyx",
        (("        cdef object last_out = None\n",
          "        cdef object last_out = None\n        with self.changed:\n            last_out = None\n"),),
        ("test_a_caller_leaves_also_where_there_is_no_memory",),
    ),
    Mutant(
        "an end that failed is not tried again", "pagedkv/tiers/disk/tier.py",
        (("if self._ending is None or self._ending.has_failed:", "if self._ending is None:"),),
        ("test_a_tier_whose_end_failed_is_closed_by_the_next_close",),
    ),
    Mutant(
        "the files that a closer left to a hanging call are never closed", "pagedkv/tiers/disk/_rw_gate.pyx",
        (("                self.last_out = last_out\n", ""),),
        ("test_a_tier_closes_while_another_thread_hangs_in_flush_and_that_one_closes_the_files",),
    ),
    Mutant(
        "a purge during which a call hangs forgets what others have stored", "pagedkv/tiers/disk/tier.py",
        (("            if self._breaker.hangs:  # no reason", "            if False:  # no reason"),),
        ("test_a_purge_during_which_a_call_hangs_forgets_nothing_of_others",),
    ),
)  # fmt: skip

OWNERS = (
    Mutant(
        "a directory without its LOCK has two owners", "pagedkv/tiers/disk/directory.py",
        (("            self._lock_directory()\n", ""),),
        ("test_without_its_lock_a_directory_still_has_one_owner",),
    ),
    Mutant(
        "an owner without its LOCK goes on writing", "pagedkv/tiers/disk/tier.py",
        (("            self._check_owner()\n            return", "            return"),),
        ("test_an_owner_without_its_lock_writes_no_more_and_says_so_once",),
    ),
    Mutant(
        "a store that is open is taken for closed once its LOCK is gone", "pagedkv/tools/store/reader.py",
        (("        locked = [os.fstat(self.fd)]\n", "        locked = []\n"),),
        ("test_a_store_that_is_open_is_known_as_open_also_without_its_lock",),
    ),
    Mutant(
        "a LOCK that cannot be looked at stops the tier",
        "pagedkv/tiers/disk/directory.py",
        (("            return True\n        except OSError:\n            return False\n",
          "            return True\n"),),
        ("test_a_lock_that_cannot_be_looked_at_is_no_lost_lock",),
    ),
    Mutant(
        "a directory that no caller was given stays locked",
        "pagedkv/tiers/disk/directory.py",
        (("        if not is_finalizing():  # a mover's thread", "        if False:  # a mover"),),
        ("test_a_directory_that_nobody_was_given_is_free_again",),
    ),
)  # fmt: skip

KILLED = ("test_a_store_that_is_killed_while_it_grows_has_either_size_and_every_block",)
GROWTH = (
    Mutant(
        "an interrupted growth is not undone", STORE,
        (("if GROWING not in self.directory.names():", "if True:"),), KILLED,
    ),
    Mutant(
        "a store says its new size before it has it", "pagedkv/tiers/disk/growth.py",
        (("    close_quietly(directory.make_file(GROWING, 0))\n",
          "    save()\n    close_quietly(directory.make_file(GROWING, 0))\n"),),
        KILLED,
    ),
    Mutant(
        "a store goes on to say that it grows", "pagedkv/tiers/disk/growth.py",
        (("    os.unlink(GROWING, dir_fd=directory.fd)\n", ""),), KILLED,
    ),
    Mutant(
        "a growth that is refused keeps what it has allocated", "pagedkv/tiers/disk/growth.py",
        (("            cut(directory, old)\n", "            pass\n"),),
        ("test_a_disk_that_refuses_leaves_the_old_size",),
    ),
)  # fmt: skip

MUTANTS = RECORDS + PURGES + FILES + HANGS + OWNERS + GROWTH
