"""Mistakes between a cache and its ranks: answers, losses, the handshake, names of parts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GROUP, MOVER = "pagedkv/tiers/ranks/group.py", "pagedkv/tiers/ranks/mover.py"
SHAKE, WIRE = "pagedkv/tiers/ranks/handshake.py", "pagedkv/tiers/ranks/wire.py"
STORE, HANDS, FRAMES = (f"pagedkv/tiers/ranks/{name}.py" for name in ("store", "hands", "frames"))
SPEC, STORAGE = "pagedkv/spec/ranks.py", "pagedkv/cache/ranks/storage.py"

MUTANTS = (
    Mutant(
        "a transfer arrives if it has at one rank", MOVER,
        (("                ok &= answer.ok\n", "                ok = ok & answer.ok if rank == 0 else ok\n"),),
        ("test_a_transfer_arrives_if_it_has_at_all_ranks",),
    ),
    Mutant(
        "a rank that was lost has moved its part", MOVER,
        (("                    ok[:] = False\n", ""),),
        ("test_a_rank_that_could_not_even_try_fails_everything_without_a_word_against_it",
         "test_a_rank_that_owes_an_answer_and_is_silent_is_lost_and_named"),
    ),
    Mutant(
        "a rank's word against a source is not passed on", MOVER,
        (("                refuted |= ~answer.ok & answer.tried\n", ""),),
        ("test_a_failure_speaks_against_the_source_where_a_rank_says_so",),
    ),
    Mutant(
        "blocks that a rank has left are free at once", MOVER,
        (("                self._keep_left(sent, rank, answer)\n", ""),),
        ("test_blocks_that_one_rank_left_are_kept_until_it_is_back",),
    ),
    Mutant(
        "blocks that two ranks left are free when one is back", MOVER,
        (("back & (sent.left == 0)", "back"),),
        ("test_blocks_that_two_ranks_left_are_kept_for_both",),
    ),
    Mutant(
        "a deadline is kept by the ranks alone", MOVER,
        (("        if left > 0:\n            return min(", "        if left > -1e9:\n            return max("),),
        ("test_a_read_is_given_up_at_its_deadline_and_its_blocks_kept_until_all_answered",),
    ),
    Mutant(
        "blocks of a read that was given up are free before the ranks have answered", MOVER,
        (("            ticket.leave(np.arange(len(sent.moves)), reading=True)\n", ""),),
        ("test_a_read_is_given_up_at_its_deadline_and_its_blocks_kept_until_all_answered",),
    ),
    Mutant(
        "a rank that comes back early is forgotten", GROUP,
        (("            call.early.append((rank, answer))\n            return\n", "            return\n"),),
        ("test_blocks_that_one_rank_left_are_kept_until_it_is_back",),
    ),
    Mutant(
        "a rank that is gone keeps the blocks that it left", GROUP,
        (("                self._came_back(number, call, None)\n", "                pass\n"),),
        ("test_blocks_that_two_ranks_left_are_kept_for_both",),
    ),
    Mutant(
        "a silent rank is waited for", GROUP,
        (("            elif now - link.pinged < patience:\n", "            elif now - link.pinged < 1e9:\n"),),
        ("test_a_rank_that_owes_an_answer_and_is_silent_is_lost_and_named",),
    ),
    Mutant(
        "a rank that answers pings is lost all the same", GROUP,
        (("link.heard, link.pinged, link.is_overdue = self._clock(), None, False", "link.heard = self._clock()"),),
        ("test_a_slow_rank_that_answers_pings_is_waited_for",),
    ),
    Mutant(
        "an answer that has come and was not read is silence", GROUP,
        (("link.is_overdue = True\n", "self._loop.drop(rank, \"has not answered\")\n"),),
        ("test_an_answer_that_waits_to_be_read_is_no_silence",),
    ),
    Mutant(
        "calls are sent to the ranks that are left", GROUP,
        (("is_sent = self.lost is None and not self._is_stopped\n", "is_sent = not self._is_stopped\n"),),
        ("test_after_a_loss_every_call_is_over_at_once",),
    ),
    Mutant(
        "a step begins after a loss", STORAGE,
        (("        self._finish()\n        self._group.check()\n        return FarStep()\n",
          "        self._finish()\n        return FarStep()\n"),),
        ("test_ranks_that_close_first_are_lost", "test_a_rank_that_is_killed_in_the_middle_of_moves_is_named"),
    ),
    Mutant(
        "a rank copies blocks of its own order alone", HANDS,
        (("self._blocks.copy_blocks(unpack_ids(payload).reshape(-1, 2))", "unpack_ids(payload)"),),
        ("test_forks_copy_their_shared_block_at_every_rank",),
    ),
    Mutant(
        "a rank clears no blocks", HANDS,
        (("self._blocks.zero_blocks(unpack_ids(payload))", "unpack_ids(payload)"),),
        ("test_blocks_of_another_tenant_are_zeroed_at_every_rank",),
    ),
    Mutant(
        "a restart finds blocks that only the first rank has", STORE,
        (("            if all(other is not None and other.record == first.record for other in others):\n",
          "            if others is not None:\n"),),
        ("test_a_restart_finds_no_block_that_a_rank_lacks",),
    ),
    Mutant(
        "a proof of the secret is not compared", SHAKE,
        (("    if not hmac.compare_digest(proof, _proof(secret, b\"pagedkv-rank\", challenge, nonce, body)):\n",
          "    if not proof:\n"),),
        ("test_a_rank_with_another_secret_is_refused_and_the_right_one_is_let_in",),
    ),
    Mutant(
        "a rank obeys a process that has proved nothing", SHAKE,
        (("        if not hmac.compare_digest(proof, _proof(secret, b\"pagedkv-core\", challenge, nonce, body)):\n",
          "        if not proof:\n"),),
        ("test_a_process_that_cannot_prove_that_it_knows_the_secret_commands_no_rank",),
    ),
    Mutant(
        "two processes may be one rank", SHAKE,
        (("    if not problem and other.rank in there:\n", "    if False:\n"),),
        ("test_the_second_process_of_one_rank_is_refused",),
    ),
    Mutant(
        "blocks are not compared at opening", SHAKE,
        (("        if other.blocks != self.blocks:\n", "        if False:\n"),),
        ("test_a_rank_that_was_given_something_else_is_refused_on_both_sides",
         "test_a_greeting_says_in_what_it_differs"),
    ),
    Mutant(
        "a part of the KV does not say which part it is", SPEC,
        (("model = f\"{spec.model} rank {rank} of {self.size}\"", "model = spec.model"),),
        ("test_a_rank_that_cannot_open_its_tiers_is_named_and_all_are_let_go",),
    ),
    Mutant(
        "heads that are left over belong to no rank", SPEC,
        (("        if rest:\n", "        if rest and not heads:\n"),),
        ("test_numbers_of_ranks_that_do_not_divide_the_kv_heads_are_refused",),
    ),
    Mutant(
        "the socket is open to others", WIRE,
        (("            os.chmod(path, 0o600)\n", "            os.chmod(path, 0o666)\n"),),
        ("test_the_socket_is_closed_to_other_users",),
    ),
    Mutant(
        "a frame may have any length", WIRE,
        ((" or size > self.most_bytes", ""),),
        ("test_a_stranger_s_bytes_end_its_connection_and_no_more", "test_a_rank_that_sends_nonsense_is_lost"),
    ),
    Mutant(
        "what follows a form is not read", FRAMES,
        (("        if self._at != len(self._payload):\n", "        if False:\n"),),
        ("test_a_form_that_is_cut_or_longer_is_refused",),
    ),
)  # fmt: skip
