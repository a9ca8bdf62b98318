"""Mistakes in the reuse of names and slots behind handles.

Also in quotas beside moves, and where memory is short.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLACEMENT, TRANSFERS, TREE = (f"pagedkv/_core/{name}.pyx" for name in ("placement", "transfers", "radix_tree"))
OWNERS, TABLE, ROOTS = "pagedkv/_core/owners.pyx", "pagedkv/_core/block_table.pyx", "pagedkv/cache/roots.py"

NAMES = (
    Mutant(
        "a namespace is forgotten although an owner is in it", PLACEMENT,
        ((" or p.fates[root].born != 0:", ":"),),
        ("test_what_needs_a_namespace_keeps_it",),
    ),
    Mutant(
        "a namespace is forgotten although events of it were not drained", PLACEMENT,
        (("    if p.events.words != NULL and p.fates[root].last_use > p.events.head:\n        return False ",
          "    if False:\n        return False "),),
        ("test_what_needs_a_namespace_keeps_it",
         "test_events_name_the_namespace_that_they_were_of_and_never_the_one_after_it"),
    ),
    Mutant(
        "a namespace is forgotten although it has a quota", PLACEMENT,
        (("            if d > 0 and p.domains[d].quota[tier] >= 0:\n                return False\n",
          "            pass\n"),),
        ("test_what_needs_a_namespace_keeps_it",),
    ),
    Mutant(
        "a namespace is forgotten although the policy remembers prefixes of it", PLACEMENT,
        (("    if p.policy.remembers != NULL and p.policy.remembers(p, root):\n        return False\n", ""),),
        ("test_what_the_policy_remembers_keeps_a_namespace_until_it_is_forgotten",),
    ),
    Mutant(
        "a forgotten namespace keeps its lists", PLACEMENT,
        (("    if d > 0:\n        domain_free(p, d)\n    p.domain_of[root] = 0\n", ""),),
        ("test_quotas_of_namespaces_that_come_and_go_use_the_same_lists_again",
         "test_purges_leave_nothing_of_what_they_purged_and_of_themselves"),
    ),
    Mutant(
        "a name that a thread is about to use is forgotten", ROOTS,
        (("            if _references(root) == _ALONE + 1:\n", "            if True:\n"),),
        ("test_a_name_that_a_thread_is_about_to_use_is_not_forgotten",),
    ),
    Mutant(
        "no name is ever forgotten", ROOTS,
        (("        for digest in list(itertools.islice(self._known, LOOKED_AT)):\n", "        for digest in ():\n"),),
        ("test_a_hundred_thousand_names_used_once_and_evicted_leave_as_many_as_are_cached",),
    ),
    Mutant(
        "a name is lost where an interrupt comes while it is looked at", ROOTS,
        (("            root = self._unsettled[digest] = self._known[digest]\n",
          "            root = self._known[digest]\n            self._unsettled.clear()\n"),
         ("            if _references(root) == _ALONE + 1:\n", "            if _references(root) == _ALONE:\n"),
         ("                self._placement.forget(root)\n            self._settle()\n",
          "                self._placement.forget(root)\n"
          "            self._unsettled[digest] = root\n            self._settle()\n")),
        ("test_an_interrupt_at_any_line_loses_no_namespace",),
    ),
    Mutant(
        "a name is lost where an interrupt comes while it is made", ROOTS,
        (("                self._unsettled[digest] = None\n", ""),
         ("                self._unsettled.pop(digest, None)  # a signal handler may have settled it\n",
          "")),
        ("test_an_interrupt_at_any_line_loses_no_namespace",),
    ),
    Mutant(
        "what was purged is never forgotten", ROOTS,
        (("        for _ in range(min(LOOKED_AT, len(self._dropped))):\n", "        for _ in range(0):\n"),),
        ("test_purges_leave_nothing_of_what_they_purged_and_of_themselves",),
    ),
    Mutant(
        "a purged namespace begins anew without its quota", ROOTS,
        (("        for tier, blocks in self.quotas.get(digest, {}).items():\n",
          "        for tier, blocks in {}.items():\n"),),
        ("test_quotas_and_kinds_outlive_purges_and_names_that_come_and_go",),
    ),
    Mutant(
        "a name whose making was interrupted goes without its quota", ROOTS,
        (("        root = Root(self._placement.tree.namespace(digest))\n",
          "        root = self._known[digest] = Root(self._placement.tree.namespace(digest))\n"),
         ("        for tier, blocks in self.quotas.get(digest, {}).items():\n"
          "            self._placement.set_quota(root, blocks, tier)\n", ""),
         ("        self._scrub.saw(int(root))\n",
          "        self._scrub.saw(int(root))\n"
          "        for tier, blocks in self.quotas.get(digest, {}).items():\n"
          "            self._placement.set_quota(root, blocks, tier)\n")),
        ("test_the_makings_of_a_name_that_were_interrupted_are_done_again",),
    ),
    Mutant(
        "explain makes a name", "pagedkv/cache/cache.py",
        (("return self._tokens(tokens), self._roots.find(self._digest(namespace))",
          "return self._tokens(tokens), self._root(namespace)"),),
        ("test_explain_of_a_namespace_that_was_never_used_makes_nothing",),
    ),
    Mutant(
        "a row says the slot of its namespace and not its number", TABLE,
        (("make_handle(root, self.placement.place.tree.nodes[root].generation)", "root"),),
        ("test_a_block_shows_nothing_of_the_namespace_that_had_its_number_before",),
    ),
    Mutant(
        "evicted blocks are known again after a purge", TREE,
        (("self.tree.seed ^ self.purges * 0xA0761D6478BD642FU", "self.tree.seed"),),
        ("test_a_forgotten_namespace_that_comes_back_knows_what_was_evicted_and_no_other_does",),
    ),
)

HANDLES = (
    Mutant(
        "an owner's slot is used again when its generations are used up", OWNERS,
        (("    if next_generation(&p.owners[slot].generation):\n",
          "    if next_generation(&p.owners[slot].generation) or True:\n"),),
        ("test_an_owner_whose_generations_are_used_up_is_never_handed_out_again",),
    ),
    Mutant(
        "an owner that a row took over still has its handle", TABLE,
        (("            self.placement.place.owners[slot].live = TAKEN_OVER\n", "            pass\n"),),
        ("test_an_owner_that_a_row_took_over_has_no_handle_until_it_is_used_again",),
    ),
    Mutant(
        "a row's slot is used again when its generations are used up", TABLE,
        (("        if next_generation(&row.generation):\n", "        if next_generation(&row.generation) or True:\n"),),
        ("test_a_row_whose_generations_are_used_up_is_never_handed_out_again",),
    ),
    Mutant(
        "a transfer's slot is used again when its generations are used up", TRANSFERS,
        (("    if next_generation(&t.generation):\n", "    if next_generation(&t.generation) or True:\n"),),
        ("test_a_transfer_whose_generations_are_used_up_is_never_handed_out_again",),
    ),
    Mutant(
        "a node is used again when its generations are used up", TREE,
        (("    cdef bint again = next_generation(&generation)\n",
          "    cdef bint again = next_generation(&generation) or True\n"),),
        ("test_a_node_whose_generations_are_used_up_is_never_a_namespace_again",),
    ),
    Mutant(
        "a block whose generations are used up has a handle that is never stale", "pagedkv/_core/block_pool.pyx",
        (("            if self.pool.generations[block] == UNNAMEABLE:\n", "            if False:\n"),
         ("\n                    or self.pool.generations[block] == UNNAMEABLE):", "):")),
        ("test_a_block_whose_generations_are_used_up_stays_in_use_but_has_no_handle",),
    ),
    Mutant(
        "a block's generation goes on after it is used up", "pagedkv/_core/block_pool.pyx",
        (("        if highest > UNNAMEABLE: ", "        if False: "),),
        ("test_a_block_whose_generations_are_used_up_stays_in_use_but_has_no_handle",),
    ),
)

QUOTAS = (
    Mutant(
        "what is being demoted counts towards the quota of the tier that it leaves", TRANSFERS,
        (("usage_of(p, n, src)[0] -= node.length   # no more there, unless it stays\n", "pass\n"),
         ("        usage_of(p, n, src)[0] += num_blocks        # it stays, or is taken away below\n", "")),
        ("test_what_is_leaving_for_a_colder_tier_no_longer_counts_so_the_newest_blocks_stay",),
    ),
    Mutant(
        "a demotion that is over never counts again", TRANSFERS,
        (("        usage_of(p, n, src)[0] += num_blocks        # it stays, or is taken away below\n", ""),),
        ("test_a_demotion_that_fails_or_is_cancelled_leaves_no_more_than_the_quota",),
    ),
    Mutant(
        "a run that making room sends on its way is adopted", "pagedkv/_core/insertion.pyx",
        (("t.nodes[child].length != k\n                        or p.fates[child].transfer >= 0):",
          "t.nodes[child].length != k):"),),
        ("test_a_run_that_making_room_within_the_quota_sends_on_its_way_is_not_adopted",),
    ),
    Mutant(
        "new blocks are refused where the colder tier is busy", "pagedkv/_core/insertion.pyx",
        (("        drop_for(p, 0, over, p.domain_of[p.tree.nodes[n].root])\n", ""),),
        ("test_where_the_colder_tier_is_busy_old_blocks_are_dropped_rather_than_new_ones_refused",),
    ),
    Mutant(
        "a quota set while blocks move counts them where they were", "pagedkv/_core/retention.pyx",
        (("            if not p.transfers[handle_slot(p.fates[n].transfer)].promotes:\n", "            if False:\n"),),
        ("test_a_namespace_that_gets_a_quota_while_its_blocks_move_is_counted_as_if_it_had_had_it",),
    ),
)

SHORT = "test_whichever_allocation_fails_the_books_agree_and_the_call_succeeds_later"
MEMORY = (
    Mutant(
        "buffers that could not all be made are freed twice", TREE,
        (("    node.tokens = node.ids = node.pages = NULL\n    node.chain = node.names = NULL\n", ""),),
        (f"{SHORT}[lru]",),
    ),
    Mutant(
        "a truncation lets go before it knows that it can be carried out", TABLE,
        (("            code = place_shorten(&self.placement.place, entry.owner, whole)\n",
          "            code = place_shorten(&self.placement.place, entry.owner, whole)\n"
          "            if code == E_MEMORY:\n"
          "                place_shorten(&self.placement.place, entry.owner, 0)\n"),),
        (f"{SHORT}[lru]",),
    ),
    Mutant(
        "an audit that runs out of memory keeps the mutex", "pagedkv/_core/audit.pyx",
        (("    finally:\n        self.lock.end_audit(collecting)\n    return problems\n",
          "    except ZeroDivisionError:\n        raise\n    self.lock.end_audit(collecting)\n    return problems\n"),),
        (f"{SHORT}[lru]",),
    ),
)

UNITS = (
    Mutant(
        "a number of bytes passes as a number of blocks in the core", "pagedkv/_core/arrays.pyx",
        (("    if isinstance(own, str) and own != unit:\n", "    if False:\n"),),
        ("test_a_number_of_bytes_is_no_number_of_blocks_tokens_or_rows",),
    ),
    Mutant(
        "a number of blocks passes as a number of tokens", "pagedkv/spec/sizes.py",
        (('raise WrongType(f"{name} is not in {value.unit}: write {write}, not {value!r}")\n', "return\n"),),
        ("test_a_whole_number_of_another_unit_is_a_wrong_type",),
    ),
    Mutant(
        "a tier passes as a number", "pagedkv/spec/sizes.py",
        (("    if isinstance(value, Tier):\n", "    if False:\n"),),
        ("test_a_tier_is_no_number",),
    ),
    Mutant(
        "a number of blocks passes as seconds", "pagedkv/spec/sizes.py",
        (('    check_plain(value, what, "a number of seconds")\n', ""),),
        ("test_seconds_have_no_unit",),
    ),
    Mutant(
        "a tier that stands for a size is advised as a number of blocks", "pagedkv/spec/sizes.py",
        (("not isinstance(value, bool | Tier):\n", "not isinstance(value, bool):\n"),),
        ("test_a_tier_is_no_size",),
    ),
    Mutant(
        "a number of blocks passes as a share", "pagedkv/scheduler/options.py",
        (("    check_plain(value, name)\n", ""),),
        ("test_public_numbers_refuse_a_unit_and_a_tier",),
    ),
    Mutant(
        "a replay takes a bare number for blocks", "pagedkv/lab/replay/capacity.py",
        (("    elif unit in (\"block\", \"blocks\"):\n", "    elif unit in (\"\", \"block\", \"blocks\"):\n"),
         ("    elif unit == \"\":\n", "    elif unit == \"?\":\n")),
        ("test_what_is_no_size_is_an_error_that_names_the_argument",),
    ),
)

MUTANTS = NAMES + HANDLES + QUOTAS + MEMORY + UNITS
