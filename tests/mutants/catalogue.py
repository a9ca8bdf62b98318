"""The mutants: small mistakes put into a copy of the source, each with the tests that must notice it.

A mutant that no test notices is a guard that nothing holds up: write the test, keep the mutant. A mutant whose text is
no longer found once in its file is stale: fit it to the new source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes
    ----------
    name : str
        A sentence that says what goes wrong.
    file : str
        The source file, from the root of the repository; of a ``.pyx``, only that module is built again, so a mutant
        changes what functions do and never the layout of a struct.
    edits : tuple of (str, str)
        Texts that occur exactly once in the file, and what stands there instead.
    killers : tuple of str
        Tests of which one at least must fail, by the names of their functions, in whatever file of ``tests/`` they are;
        ``name[case]`` is one case alone.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    killers: tuple[str, ...]

    @property
    def module(self) -> str | None:
        """Name of the extension module to build, or None for Python files."""
        return self.file.removesuffix(".pyx").replace("/", ".") if self.file.endswith(".pyx") else None


COMPILED = (
    Mutant(
        "a reference that nobody holds can be given back",
        "pagedkv/_core/block_pool.pyx",
        (("if refs == 0 or refs & TREE:", "if refs & TREE:"),),
        ("test_double_release_raises_and_changes_nothing",),
    ),
    Mutant(
        "ids of one call are checked before any is counted so the same id twice passes",
        "pagedkv/_core/block_pool.pyx",
        (
            ("        p.refs[block] = refs - 1\n", ""),
            (
                "    if code == OK:\n        for j in range(p.num_stack, top):",
                "    if code == OK:\n        for j in range(n):\n            p.refs[ids[j]] -= 1\n"
                "        for j in range(p.num_stack, top):",
            ),
            ("        p.refs[ids[j]] += 1\n    return code", "        pass\n    return code"),
        ),
        ("test_the_same_id_twice_in_one_free_counts_twice",),
    ),
    Mutant(
        "blocks under the watermark are handed out",
        "pagedkv/_core/block_pool.pyx",
        (("if n > pool_available(p):", "if n > pool_available(p) + p.watermark:"),),
        ("test_the_last_blocks_under_the_watermark_are_never_handed_out",),
    ),
    Mutant(
        "the tree takes the same block twice in one insertion",
        "pagedkv/_core/placement.pyx",
        (("pool.refs[given[i]] |= TREE", "pass"),),
        ("test_blocks_that_cannot_be_inserted_change_nothing",),
    ),
    Mutant(
        "an owner of a run forgets to count its last block",
        "pagedkv/_core/transfers.pyx",
        (
            (
                "    for i in range(length):\n        pool.refs[ids[i]] += 1",
                "    for i in range(length - 1):\n        pool.refs[ids[i]] += 1",
            ),
        ),
        ("test_an_owner_holds_its_path_and_shares_it_with_other_owners",),
    ),
    Mutant(
        "a demotion takes the blocks away although somebody came back for them",
        "pagedkv/_core/transfers.pyx",
        (("    if owners > 0:", "    if False:"),),
        ("test_a_block_wanted_again_while_it_is_demoted_stays_where_it_was",),
    ),
    Mutant(
        "a promotion is visible as soon as it starts",
        "pagedkv/_core/transfers.pyx",
        (
            (
                "    p.fates[n].transfer = t.id\n",
                "    p.fates[n].transfer = t.id\n    if promotes:\n"
                "        memcpy(node_ids(p.tree, n, dst), t.dst_ids, node.length * sizeof(int32_t))\n"
                "        node.tiers |= <uint32_t>1 << dst\n",
            ),
        ),
        ("test_a_promotion_is_visible_only_when_it_is_complete",),
    ),
    Mutant(
        "a promotion that failed counts as a success",
        "pagedkv/_core/transfers.pyx",
        (("    if not succeeded:", "    if not succeeded and not promotes:"),),
        ("test_a_promotion_that_fails_is_a_miss_for_everybody",),
    ),
    Mutant(
        "an exclusive tier keeps what was promoted out of it",
        "pagedkv/_core/transfers.pyx",
        (("        if not p.inclusive[src]:", "        if False:"),),
        ("test_an_inclusive_tier_keeps_its_copy_and_an_exclusive_one_does_not",),
    ),
    Mutant(
        "what was released last goes first",
        "pagedkv/_core/recency.pyx",
        (
            (
                "    link_hottest(&p.links[tier], list_no, n)",
                "    link_between(&p.links[tier], n, ~list_no, coldest(&p.links[tier], list_no))",
            ),
        ),
        ("test_the_coldest_leaf_goes_first_and_deepest_blocks_before_their_parents",),
    ),
    Mutant(
        "an evicted block is remembered for one eviction too many",
        "pagedkv/_core/recency.pyx",
        (
            (
                "g.count[e.queue] - e.stamp < p.pools[tier].max_capacity",
                "g.count[e.queue] - e.stamp <= p.pools[tier].max_capacity",
            ),
        ),
        ("test_a_policy_over_runs_is_the_policy_over_single_blocks",),
    ),
    Mutant(
        "a block with the same hash passes for the same block",
        "pagedkv/_core/radix_tree.pyx",
        (
            (
                "parent\n                and memcmp(node.tokens, block, t.block_size * sizeof(int32_t)) == 0):",
                "parent):",
            ),
            (
                "    if memcmp(run, tokens, length * width) == 0:\n        return length\n    for k in range(length):",
                "    for k in range(1, length):",
            ),
        ),
        ("test_blocks_whose_hashes_collide_are_told_apart_by_their_tokens",),
    ),
    Mutant(
        "a split loses the last block",
        "pagedkv/_core/radix_tree.pyx",
        (("    rest = low.length - k\n", "    rest = low.length - k - (1 if low.length - k > 1 else 0)\n"),),
        ("test_a_branch_in_the_middle_of_a_run_splits_it_and_both_are_found",),
    ),
    Mutant(
        "a block that gives way to the tree's is never given back",
        "pagedkv/_core/insertion.pyx",
        (("            pool_drop_one(p.pools[0], blocks[i])", "            pass"),),
        ("test_two_who_compute_the_same_prefix_end_with_one_copy",),
    ),
    Mutant(
        "a namespace takes more than its quota",
        "pagedkv/_core/insertion.pyx",
        (("    if quota < 0:", "    if True:"),),
        ("test_what_the_quota_does_not_admit_stays_the_callers",),
    ),
    Mutant(
        "a released owner's handle still works once its slot is used again",
        "pagedkv/_core/owners.pyx",
        (("(p.owners[slot].generation + 1) & 0x7FFFFFFF", "p.owners[slot].generation"),),
        ("test_a_released_owner_is_stale_even_when_its_slot_is_used_again",),
    ),
    Mutant(
        "a fork writes into the block it shares",
        "pagedkv/_core/block_table.pyx",
        (
            ("        if row.forked and q > 0:", "        if False:"),
            ("            if row.forked and row.scheduled > 0:", "            if False:"),
        ),
        ("test_siblings_never_see_each_others_writes",),
    ),
    Mutant(
        "a cut sequence counts tokens of a block it gave back as computed",
        "pagedkv/_core/block_table.pyx",
        (("keep_computed = whole * self.block_size", "keep_computed = keep"),),
        ("test_truncated_and_grown_differently_it_holds_the_new_content",),
    ),
)

INTERPRETED = (
    Mutant(
        "room for a promotion is made before its prefix is owned",
        "pagedkv/cache.py",
        (("        owner, hits = self._acquire(prompt, root)\n",
          "        cold = int(np.count_nonzero(self.placement.match(prompt, root)[0]))\n"
          "        self._conductor.make_room(cold)\n"
          "        owner, hits = self._acquire(prompt, root)\n"),),
        ("test_making_room_for_a_promotion_never_drops_what_is_promoted",),
    ),
    Mutant(
        "all namespaces share one root",
        "pagedkv/cache.py",
        (("root = self.placement.tree.namespace(digest)", 'root = self.placement.tree.namespace(b"")'),),
        ("test_no_block_crosses_namespaces_on_any_tier",),
    ),
    Mutant(
        "the same value in another field makes the same namespace",
        "pagedkv/namespace.py",
        (("_HEADER.pack(tag, kind, len(data))", "_HEADER.pack(0, kind, len(data))"),),
        ("test_the_same_value_in_another_field_is_another_namespace",),
    ),
    Mutant(
        "a chain key does not say where its tokens end",
        "pagedkv/_core/chain_key.py",
        (
            ("_FIELD.pack(_TOKENS, len(token_bytes)) + token_bytes", "token_bytes"),
            ("_FIELD.pack(_EXTRA, len(extra)) + extra", "extra"),
        ),
        ("test_no_field_can_lend_bytes_to_its_neighbour",),
    ),
    Mutant(
        "a payload's sums are not compared",
        "pagedkv/tiers/disk_format.py",
        (('!= sums.astype("<u8", copy=False).tobytes():', '== b"":'),),
        ("test_a_flip_anywhere_in_the_payload_is_a_miss",),
    ),
    Mutant(
        "a slot is served whatever its header names",
        "pagedkv/tiers/disk_format.py",
        (("if header[: g.tokens_end] != expected:", "if header[:80] != expected[:80]:"),),
        ("test_a_record_that_differs_in_one_part_is_a_miss[tokens]",),
    ),
    Mutant(
        "an older write of a slot passes for the latest",
        "pagedkv/tiers/disk_format.py",
        (
            ('"little") ^ generation', '"little")'),
            ("if header[: g.tokens_end] != expected:",
             "if header[:16] != expected[:16] or header[24 : g.tokens_end] != expected[24:]:"),
        ),
        ("test_a_slot_from_before_it_was_overwritten_is_a_miss",),
    ),
    Mutant(
        "an emptied slot keeps its header on the disk",
        "pagedkv/tiers/slots.py",
        (("outcomes = self._segments.write_headers(buried, headers)", "outcomes = np.zeros(buried.size, np.int64)"),),
        ("test_a_reopened_store_lists_its_records_and_serves_the_same_bytes",),
    ),
    Mutant(
        "moves that came too late count as done",
        "pagedkv/tiers/mover.py",
        (("                counts.late += part.moves.size\n        return None",
          "                counts.late += part.moves.size\n        return np.ones(part.moves.shape, np.bool_)"),),
        ("test_what_has_not_started_by_its_deadline_is_late",),
    ),
    Mutant(
        "a transfer of which one block arrived counts as done",
        "pagedkv/tiers/ticket.py",
        (("return ids, failed == 0", "return ids, failed < np.bincount(index.reshape(-1))"),),
        ("test_one_bad_block_fails_its_transfer_and_no_other",),
    ),
    Mutant(
        "two moves may have the same destination",
        "pagedkv/tiers/parts.py",
        (("if np.unique(targets).size != targets.size:", "if False:"),),
        ("test_moves_that_cannot_be_carried_out_are_refused_as_a_whole",),
    ),
    Mutant(
        "the core is told that every move arrived",
        "pagedkv/moving.py",
        (("self._complete(*ticket.results())",
          "self._complete(ticket.results()[0], np.ones_like(ticket.results()[1]))"),),
        ("test_a_disk_that_lost_its_content_is_a_miss_and_never_wrong",),
    ),
    Mutant(
        "a stored block is believed although its key is not that of its content",
        "pagedkv/durable.py",
        ((" or record.key != chain_key(secret, record.namespace, record.parent, record.tokens)", ""),),
        ("test_a_stored_block_whose_key_is_not_that_of_its_content_is_never_used",),
    ),
    Mutant(
        "blocks whose beginning is gone stay on the disk",
        "pagedkv/durable.py",
        (("    orphans += [found.block for key, found in records.items() if key not in reached]\n", ""),),
        ("test_a_stored_block_whose_key_is_not_that_of_its_content_is_never_used",),
    ),
    Mutant(
        "a token without a slot is written into the last block",
        "pagedkv/device_kv.py",
        (("if len(slots) and slots.min() < 0:", "if False:"),),
        ("test_a_token_with_slot_minus_one_is_written_nowhere",),
    ),
    Mutant(
        "the source of a copy is let go of before it is copied",
        "pagedkv/engine.py",
        (("            kv.copy_blocks(arrays.copies)\n",
          "            self.table.copies_done()\n            kv.copy_blocks(arrays.copies)\n"),),
        ("test_the_source_of_a_copy_is_nobody_elses_until_it_is_copied",),
    ),
    Mutant(
        "a step commits although its body raised",
        "pagedkv/step.py",
        (("if kind is not None or (missing and len(arrays.tokens)):", "if missing and len(arrays.tokens):"),),
        ("test_an_exception_inside_commits_nothing",),
    ),
)  # fmt: skip

MUTANTS = COMPILED + INTERPRETED
