"""Mistakes in the use of a remote store: claims, sends, values, connections."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VALUE, TIER = "pagedkv/tiers/remote/value.py", "pagedkv/tiers/remote/tier.py"
VALKEY, WIRE = "pagedkv/tiers/remote/valkey.py", "pagedkv/tiers/remote/connection.py"
SENDER = "pagedkv/cache/remote/sender.py"
SENDS = "pagedkv/_core/sends.pyx"

MUTANTS = (
    Mutant(
        "a connection is used again after an error", VALKEY,
        (("            yield wire\n        except BaseException:\n            wire.close()\n",
          "            yield wire\n        except BaseException:\n            self._give_back(wire)\n"),),
        ("test_an_answer_that_comes_with_the_next_question_is_not_taken_for_its_own",
         "test_a_call_that_ends_in_time_is_answered_after_one_that_did_not",
         "test_an_exception_in_the_callback_closes_the_connection"),
    ),
    Mutant(
        "a value of another key is served", VALUE,
        (('        if key != chain_key:\n            return "key"\n', ""),
         ("int.from_bytes(chain_key[:8], \"little\")", "0")),
        ("test_exchanged_replayed_and_cut_values_are_misses_by_name",),
    ),
    Mutant(
        "a sum is not compared", VALUE,
        (('return "" if total == self._sum(row, chain_key) else "sum"', 'return ""'),),
        ("test_flipped_payloads_are_misses_by_the_right_name",),
    ),
    Mutant(
        "a reader takes the weaker mode", VALUE,
        (('        if mode != self._mode:\n            return "integrity"\n', ""),),
        ("test_a_value_of_another_version_or_mode_is_a_miss",),
    ),
    Mutant(
        "the rest of a head may hold anything", VALUE,
        (("        if rest != REST or (nonce != NO_NONCE if self._cipher is None else total):\n",
          "        if nonce != NO_NONCE and self._cipher is None:\n"),),
        ("test_every_changed_byte_of_a_head_is_refused",),
    ),
    Mutant(
        "shards share their blocks", VALUE,
        (("namespace, self._shard):", "namespace):"),),
        ("test_another_secret_model_or_shard_finds_nothing",),
    ),
    Mutant(
        "a wrong value stays in the store", TIER,
        (("        if wrong and not self._call(", "        if False and not self._call("),),
        ("test_every_changed_byte_of_a_head_is_refused", "test_values_overwritten_without_the_secret_are_misses"),
    ),
    Mutant(
        "a lookup goes on behind a hole", TIER,
        (("run = there.index(False) if False in there else len(part)", "run = sum(there)"),),
        ("test_a_lookup_ends_at_the_first_hole",),
    ),
    Mutant(
        "a request awaits all but the last blocks", "pagedkv/cache/remote/lookups.py",
        (("(1 if anew else self._min_blocks)", "self._min_blocks"),),
        ("test_a_decoder_waits_for_the_last_blocks_as_for_the_first",),
    ),
    Mutant(
        "a missing key is asked for again at once", TIER,
        (("            if known == 0:\n", "            if known < 0:\n"), ("            keys = keys[:known]\n", "")),
        ("test_a_missing_key_is_not_asked_for_again_at_once",),
    ),
    Mutant(
        "one's own write leaves a key missing", TIER,
        (("                    self._absent.discard(keys[i])\n", ""),),
        ("test_a_missing_key_is_not_asked_for_again_at_once",),
    ),
    Mutant(
        "a refused write counts as a failure of the store", TIER,
        (('                    self._counts.add_by("refused", why)\n',
          '                    raise Unreachable("protocol", why)\n'),),
        ("test_a_full_server_refuses_and_is_not_taken_for_dead",),
    ),
    Mutant(
        "a value longer than a block ends up in the next one", WIRE,
        (("            self._skip(size, until)\n", "            self._skip(expected, until)\n"),),
        ("test_a_value_of_another_size_is_unusable_and_costs_no_other",),
    ),
    Mutant(
        "a connection on which the server said more is used again", VALKEY,
        (("            if wire.is_quiet:\n", "            if True:\n"),),
        ("test_an_answer_that_no_call_has_asked_for_costs_its_connection",
         "test_connections_that_the_server_has_closed_are_replaced_unnoticed"),
    ),
    Mutant(
        "a late connection is thrown away", VALKEY,
        (("                self._leave(attempt)\n", "                attempt.abandon()\n"),),
        ("test_a_connection_that_is_late_for_its_call_serves_the_next_one",),
    ),
    Mutant(
        "a value need not end where it says", WIRE,
        (('        if end != b"\\r\\n":\n', "        if False:\n"),),
        ("test_no_other_reply_is_a_value_or_makes_room_for_itself",),
    ),
    Mutant(
        "a value of any length is read to its end", WIRE,
        (("        elif size <= SKIPPED * expected:\n", "        elif True:\n"),),
        ("test_no_other_reply_is_a_value_or_makes_room_for_itself",
         "test_a_value_far_too_long_is_not_read_to_its_end"),
    ),
    Mutant(
        "the limit of a call is not looked at", WIRE,
        (("        if left <= 0:\n", "        left = max(left, 1.0)\n        if left <= 0:\n"),),
        ("test_nothing_is_read_or_sent_after_the_limit",),
    ),
    Mutant(
        "a password with an unquoted mark names another host", "pagedkv/spec/server_url.py",
        (('        if not host or not re.fullmatch(r"/?|/\\d{1,9}", path) or port > 65535:\n',
          "        if not host or port > 65535:\n"),),
        ("test_a_url_that_cannot_be_read_is_refused_and_no_part_of_it_repeated",),
    ),
    Mutant(
        "a group's prefix is a pattern", VALKEY,
        (('        pattern = escaped(prefix) + b"*"\n', '        pattern = prefix.encode() + b"*"\n'),
         ("            yield [key for key in keys if key.startswith(prefix.encode())]\n", "            yield keys\n")),
        ("test_a_group_is_removed_and_no_other",),
    ),
    Mutant(
        "a path is let go of while the store reads its blocks", SENDER,
        (("        if left.any():\n", "        if False:\n"),),
        ("test_a_path_whose_call_was_left_is_held_until_it_is_back",),
    ),
    Mutant(
        "callers without room do not wait for sends", SENDER,
        (("        hold, first, node = own_unsent(", "        holder.end()\n        hold, first, node = own_unsent("),),
        ("test_a_path_is_held_until_its_call_is_over",),
    ),
    Mutant(
        "a path is owned before callers without room can know of it", SENDER,
        (("        holder = Holder(self._dispatch)  # before the path is owned, as above\n", ""),
         ("            holder.end()\n            return False\n", "            return False\n"),
         ("                sending = self._begin(hold, holder, node, first)\n",
          "                holder = Holder(self._dispatch)\n"
          "                sending = self._begin(hold, holder, node, first)\n")),
        ("test_a_request_waits_for_blocks_that_are_about_to_be_sent[True]",),
    ),
    Mutant(
        "blocks that were not stored count as sent", SENDER,
        (("        if sending.asked is None and stored < sending.num_blocks:\n", "        if False:\n"),),
        ("test_what_was_not_stored_is_sent_with_its_next_use",),
    ),
    Mutant(
        "claims that were not needed are kept", "pagedkv/_core/placement.pyx",
        (("                pool_free(pool, given + found, first, &bad)\n", ""),),
        ("test_claims_that_another_thread_made_needless_are_given_back",
         "test_a_block_that_another_thread_has_cached_meanwhile_is_not_claimed"),
    ),
    Mutant(
        "a claim has the key of its neighbour", "pagedkv/_core/placement.pyx",
        (("&names[i, 0], rows.shape[1]", "&names[count - 1 - i, 0], rows.shape[1]"),),
        ("test_a_claim_is_matched_promoted_and_given_back",),
    ),
    Mutant(
        "a publish takes blocks that are not on the device", SENDER,
        (("if hold.num_blocks > asked.first and on_device:", "if hold.num_blocks > asked.first:"),),
        ("test_blocks_that_left_the_device_before_their_publish_are_not_sent",),
    ),
    Mutant(
        "the caller of a publish owns blocks being sent", SENDER,
        (("                    sending.asked = asked\n",
          "                    sending.asked = asked\n                    hold.release()\n"),),
        ("test_a_publish_whose_caller_has_gone_holds_its_path",),
    ),
    Mutant(
        "a cache that closes leaves publishers waiting", SENDER,
        (("                holder.end()\n                self._end(asked, 0, 0)\n", "                holder.end()\n"),),
        ("test_blocks_that_left_the_device_before_their_publish_are_not_sent",
         "test_a_publish_ends_when_the_cache_closes"),
    ),
    Mutant(
        "a holder that dies counts on", "pagedkv/_core/held.pyx",
        (("        if self.counts and self.dispatch.lock.may_be_taken():\n            self.end()\n",
          "        pass\n"),),
        ("test_a_holder_counts_until_its_end_or_its_own",),
    ),
    Mutant(
        "blocks are demoted to claims", "pagedkv/_core/transfers.pyx",
        (("p.pools[tier].max_capacity > 0 and not p.beside[tier]", "p.pools[tier].max_capacity > 0"),),
        ("test_nothing_is_demoted_to_claims",),
    ),
    Mutant(
        "a failed claim stays in the way", "pagedkv/_core/insertion.pyx",
        (("            if not drop_subtree(p, child):\n                return done\n            break\n",
          "            return done\n"),),
        ("test_what_could_not_be_read_makes_way_for_another_graft",),
    ),
    Mutant(
        "blocks that came from the store are sent back", "pagedkv/_core/transfers.pyx",
        (("        if p.beside[src]:\n            f.sent = num_blocks\n", ""),),
        ("test_blocks_that_came_from_the_store_are_not_sent_back",),
    ),
    Mutant(
        "a cut run forgets which part was sent", "pagedkv/_core/recency.pyx",
        (("    p.fates[n].sent -= p.fates[upper].sent\n", ""),),
        ("test_a_cut_run_knows_which_part_was_sent",),
    ),
    Mutant(
        "a block is sent from where it can be freed meanwhile", SENDS,
        (("        if p.fates[at].failed or node_top(p.tree, at) != DEVICE:\n", "        if p.fates[at].failed:\n"),),
        ("test_a_run_that_left_the_device_is_not_handed_out",),
    ),
    Mutant(
        "a dropped namespace is sent", SENDS,
        ((" and not p.fates[p.tree.nodes[entry.node].root].failed:", ":"),),
        ("test_a_dropped_namespace_is_not_sent",),
    ),
    Mutant(
        "a question to the store is waited for as if it left room", "pagedkv/scheduler/room.py",
        (("            if (room := self._pool.num_obtainable) > self._known:\n",
          "            if (room := self._known) or True:\n"),),
        ("test_a_request_without_room_does_not_ask_the_store_for_ever",),
    ),
)
