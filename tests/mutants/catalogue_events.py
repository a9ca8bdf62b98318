"""Mutants of the events' core and of their publisher."""

from tests.mutants.mutant import Mutant

CORE, EVENTS = "pagedkv/_core/", "pagedkv/events/"
HISTORIES = ("test_a_reader_of_events_knows_all_that_a_match_finds",)

MUTANTS = (
    Mutant(
        "partly filled blocks are told",
        CORE + "telling.pyx",
        ((" and not is_remainder(p.tree, n)", ""),),
        ("test_partly_filled_blocks_are_not_told",),
    ),
    Mutant(
        "a run that could not be read is told once more when it goes",
        CORE + "telling.pyx",
        (("not p.fates[n].failed and not p.fates[p.tree", "not p.fates[p.tree"),),
        HISTORIES,
    ),
    Mutant(
        "blocks that outlive their namespace are told once more when they go",
        CORE + "telling.pyx",
        ((" and not p.fates[p.tree.nodes[n].root].failed", ""),),
        ("test_what_a_dropped_namespace_still_holds_is_told_as_removed_once",),
    ),
    Mutant(
        "a snapshot leaves out the disk",
        CORE + "telling.pyx",
        (("            for tier in range(p.num_tiers):\n                if (p.tree.nodes[n].tiers >> tier) & 1 and not",
          "            for tier in range(2):\n                if (p.tree.nodes[n].tiers >> tier) & 1 and not"),),
        HISTORIES,
    ),
    Mutant(
        "the hash of the namespace stands for that of the parent",
        CORE + "telling.pyx",
        (("name_before(p.tree, n, first) if named", "p.tree.nodes[node.root].names[0] if named"),),
        HISTORIES,
    ),
    Mutant(
        "a failed read is not told",
        CORE + "transfers.pyx",
        (("            event_hidden(p, n)\n            f.failed = 1", "            f.failed = 1"),),
        HISTORIES,
    ),
    Mutant(
        "blocks that outlive their namespace are not told as removed",
        CORE + "placement.pyx",
        (("                events_hidden_below(p, root)\n", ""),),
        HISTORIES,
    ),
    Mutant(
        "clearing is told although blocks stay",
        CORE + "placement.pyx",
        (("        if p.tree.num_blocks == 0:\n            ring_put(", "        if True:\n            ring_put("),),
        ("test_clearing_is_told_only_where_nothing_stays",),
    ),
    Mutant(
        "a snapshot leaves events waiting that it has told",
        CORE + "placement.pyx",
        (("                if missing == 0:\n                    r.head = r.tail\n", ""),),
        ("test_a_snapshot_tells_all_and_drops_what_waits",),
    ),
    Mutant(
        "the first block has a parent",
        CORE + "events.pyx",
        (("if num_hashes and depth else None", "if num_hashes else None"),),
        ("test_hashes_are_of_the_namespaces_name_and_all_tokens",),
    ),
    Mutant(
        "a loss in the ring is overlooked",
        EVENTS + "publisher.py",
        (("            if lost == self._lost:\n", "            if True:\n"),),
        ("test_an_overflow_of_the_ring_clears_and_tells_all",),
    ),
    Mutant(
        "an exception loses the events that were taken",
        EVENTS + "publisher.py",
        (("self._is_new = True  # until all are sent", "self._is_new = False  # until all are sent"),),
        ("test_an_exception_among_changes_loses_none_of_them",),
    ),
    Mutant(
        "a subscriber that lost too much gets the rest",
        EVENTS + "publisher.py",
        (("first < self._kept[0][0] and not self._kept_all:", "False:"),),
        ("test_a_subscriber_that_lost_more_than_is_kept_is_told_all",),
    ),
    Mutant(
        "a snapshot begins without clearing",
        EVENTS + "publisher.py",
        (('told = [{"type": "AllBlocksCleared"}, *self', "told = [*self"),),
        ("test_an_overflow_of_the_ring_clears_and_tells_all",),
    ),
    Mutant(
        "events of a namespace that the host keeps back are published",
        EVENTS + "wire.py",
        (("            labels = self._label(event.namespace)\n",
          "            labels = self._label(event.namespace) or Labels()\n"),),
        ("test_a_namespace_is_told_by_the_labels_that_the_host_gives_it",),
    ),
    Mutant(
        "tokens below 0 stay so",
        EVENTS + "wire.py",
        (("token & 0xFFFFFFFF for token", "token for token"),),
        ("test_a_thousand_answers_are_the_caches_own",),
    ),
    Mutant(
        "a port beyond the last one is another port",
        EVENTS + "sockets.py",
        (("int(port) > LAST_PORT:", "False:"),),
        ("test_wrong_options_are_refused_by_name",),
    ),
)  # fmt: skip
