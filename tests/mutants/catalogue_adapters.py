"""Mutants of the adapters: failures, folders, probes, states, attach, decoders, mlx-lm."""

from tests.mutants.mutant import Mutant

ADAPTERS = "pagedkv/adapters/"

MUTANTS = (
    Mutant(
        "a state's framing is not compared with that of its numbers",
        ADAPTERS + "llama_state.py",
        (("        if not layout.frames(state, cells):\n", "        if False:\n"),),
        ("test_ten_thousand_damaged_states_are_refused_or_only_their_rows_differ",),
    ),
    Mutant(
        "a short prompt is looked for",
        ADAPTERS + "store.py",
        (("        if len(prompt) < self._min_tokens:\n", "        if False:\n"),),
        ("test_short_prompts_are_left_alone",),
    ),
    Mutant(
        "an exception of the program's own signal handler counts as a miss",
        ADAPTERS + "failures.py",
        (("            if came_from_signal(problem):\n", "            if False:\n"),),
        ("test_an_interrupt_comes_out",),
    ),
    Mutant(
        "each failure is logged",
        ADAPTERS + "failures.py",
        (("is_first = self._counts[kind] == 1", "is_first = True"),),
        ("test_a_caller_that_fails_costs_a_hit_and_nothing_else",),
    ),
    Mutant(
        "a folder that a process has open is removed",
        ADAPTERS + "folders.py",
        (("lock = _try_lock(folder)", "lock = _open_lock(folder / 'IN_USE')"),),
        ("test_a_folder_that_is_open_does_not_go",),
    ),
    Mutant(
        "a store that could not be opened is taken for as large as it was to become",
        ADAPTERS + "folders.py",
        (("            self.keep_size()\n        else:", "            pass\n        else:"),),
        ("test_a_store_that_cannot_be_opened_for_a_while_is_there_afterwards",),
    ),
    Mutant(
        "a damaged size counts",
        ADAPTERS + "folders.py",
        (("min(noted, most) if noted is not None and noted >= least else most", "most if noted is None else noted"),),
        ("test_a_damaged_note_of_the_size_costs_nothing",),
    ),
    Mutant(
        "a cache leaves out a disk that cannot grow",
        ADAPTERS + "model_cache.py",
        (("size=Bytes(folder.num_bytes), required=True)", "size=Bytes(folder.num_bytes))"),),
        ("test_a_full_store_without_room_to_grow_is_opened_as_it_is",),
    ),
    Mutant(
        "a folder without a probe is emptied",
        ADAPTERS + "folders.py",
        (("(_kept_in(path) or (path", "(probe is None or (path"),),
        ("test_a_folder_made_without_a_probe_is_not_emptied_by_one",),
    ),
    Mutant(
        "a folder whose store could not be opened keeps its size",
        ADAPTERS + "folders.py",
        (("                (self.path / \"ABOUT\").unlink(missing_ok=True)\n", "                pass\n"),),
        ("test_a_disk_whose_share_holds_no_block_is_refused_by_the_size_that_was_given",),
    ),
    Mutant(
        "a store that could not be opened is forgotten with its folder",
        ADAPTERS + "folders.py",
        (("        if self.kept_bytes:\n            self.keep_size()\n", "        if False:\n            pass\n"),),
        ("test_a_store_that_cannot_be_opened_for_a_while_is_there_afterwards",),
    ),
    Mutant(
        "a lock that has failed to close is closed again",
        ADAPTERS + "folders.py",
        (("        lock, self._lock = self._lock, -1\n        if lock >= 0:\n            close_quietly(lock)\n",
          "        if self._lock >= 0:\n            os.close(self._lock)\n            self._lock = -1\n"),),
        ("test_a_lock_whose_close_fails_is_not_closed_again",),
    ),
    Mutant(
        "the folder that was opened last goes first",
        ADAPTERS + "folders.py",
        (("sorted(others, key=_last_opened)", "sorted(others, key=_last_opened, reverse=True)"),),
        ("test_the_least_recently_opened_goes_first_and_as_a_whole",),
    ),
    Mutant(
        "a folder without its probe is used",
        ADAPTERS + "folders.py",
        (("            _empty(path)  # made halfway", "            pass  # made halfway"),),
        ("test_a_folder_that_was_made_halfway_is_made_anew",),
    ),
    Mutant(
        "a new model takes all the space",
        ADAPTERS + "folders.py",
        (("    return max(free // 2, least)", "    return max(free, least)"),),
        ("test_a_new_model_gets_half_of_what_is_free",),
    ),
    Mutant(
        "an infinite number agrees with all others",
        ADAPTERS + "probe.py",
        (("np.isfinite(norm) and ", ""),),
        ("test_a_number_that_is_none_is_a_difference",),
    ),
    Mutant(
        "a context keeps its tokens though llama.cpp has dropped them",
        ADAPTERS + "llama_cpp.py",
        (("            llm.n_tokens = 0\n            self._context", "            self._context"),),
        (
            "test_after_a_state_that_was_not_taken_the_context_is_empty",
            "test_a_restore_that_is_cut_short_leaves_an_empty_context",
        ),
    ),
    Mutant(
        "cells that are not the tokens are stored",
        ADAPTERS + "llama_context.py",
        (("return state if self.layout.frames(state, num_tokens) else None", "return state"),),
        ("test_cells_that_are_not_the_tokens_are_not_stored",),
    ),
    Mutant(
        "attaching empties a context that held tokens",
        ADAPTERS + "llama_context.py",
        (("            if state is not None:\n", "            if False:\n"),),
        ("test_a_context_with_tokens_goes_on_from_them",),
    ),
    Mutant(
        "generated tokens that the context goes on from are stored as a prompt's",
        ADAPTERS + "llama_cpp.py",
        (("            if self._as_prompt >= min(reused, held):\n", "            if True:\n"),),
        ("test_prompts_alone_have_the_bits_of_a_cold_run",),
    ),
    Mutant(
        "a stream belongs to the namespace in which it ends",
        ADAPTERS + "llama_cpp.py",
        (("            self.store.save(ids, read, namespace=space)\n", "            self.store.save(ids, read)\n"),),
        ("test_tenants_share_nothing_also_in_a_stream_that_goes_on_outside",),
    ),
    Mutant(
        "images in a context are stored",
        ADAPTERS + "llama_cpp.py",
        (("            if len(ids) and ids.min() < 0:\n", "            if False:\n"),),
        ("test_images_in_the_context_are_not_stored",),
    ),
    Mutant(
        "a model with a sliding window is accepted",
        ADAPTERS + "llama_model.py",
        (("runtime.llama_model_n_swa(model) > 0", "False"),),
        ("test_a_model_that_cannot_be_cached_is_refused_and_works_as_before",),
    ),
    Mutant(
        "a decoder that ignores its past is accepted",
        ADAPTERS + "onnx_probe.py",
        (("    if differs:\n", "    if False:\n"),),
        ("test_a_session_that_does_not_use_its_past_is_refused",),
    ),
    Mutant(
        "a decoder whose tokens see later ones is accepted",
        ADAPTERS + "onnx_probe.py",
        (
            ("np.concatenate((ids[:KEPT], others[: PROBED - KEPT]))", "ids"),
            (
                "    context.run(ids[KEPT:-1])\n    behind = context.run(ids[-1:])\n",
                "    behind = context.run(ids[KEPT:])\n",
            ),
        ),
        ("test_a_session_whose_tokens_see_later_ones_is_refused",),
    ),
    Mutant(
        "a decoder is tried with clean arrays",
        ADAPTERS + "onnx_probe.py",
        (("    context.run(others[: context.limit])", "    (others[: context.limit])"),),
        ("test_a_session_that_sees_what_lies_behind_the_tokens_is_refused[9]",),
    ),
    Mutant(
        "a prompt that was interrupted belongs to the namespace before it",
        ADAPTERS + "onnx.py",
        (("self._has_prompt, self._space = False, None  #", "self._has_prompt = False  #"),),
        ("test_an_interrupted_prompt_moves_no_kv_into_another_namespace",),
    ),
    Mutant(
        "a decoder's context serves another namespace",
        ADAPTERS + "onnx.py",
        (("if space is not None and space == self._space else 0", "if space is not None else 0"),),
        ("test_namespaces_share_neither_cache_nor_context",),
    ),
    Mutant(
        "a run that was interrupted leaves its tokens in the past",
        ADAPTERS + "onnx.py",
        (("        self._context.cut(len(self.tokens))  # an", "        pass  # an"),),
        ("test_a_step_that_is_interrupted_behind_its_run_is_not_there",),
    ),
    Mutant(
        "an answer goes on behind another prompt",
        ADAPTERS + "onnx.py",
        (("                if self._turn is not turn:\n", "                if False:\n"),),
        ("test_one_decoder_answers_one_prompt_at_a_time",),
    ),
    Mutant(
        "a mask counts padding as tokens",
        ADAPTERS + "onnx_context.py",
        (("feeds(padded, start, start + len(ids))", "feeds(padded, start, start + size)"),),
        ("test_a_mask_leaves_out_the_padding",),
    ),
    Mutant(
        "the logits of padding are taken",
        ADAPTERS + "onnx_context.py",
        (("return np.array(rows[tokens - 1])", "return np.array(rows[-1])"),),
        ("test_every_kind_of_past_hits_with_two_conversations_in_turn",),
    ),
    Mutant(
        "a run has no room for its padding",
        ADAPTERS + "onnx_context.py",
        (("self.limit = limit - (ports.chunk or 1) + 1", "self.limit = limit"),),
        ("test_an_answer_ends_at_a_stop_token_and_where_the_past_is_full",),
    ),
    Mutant(
        "a KVCache that was quantised on the way is stored",
        ADAPTERS + "mlx_layers.py",
        (("            if type(layer) is not self._kind:\n", "            if False:\n"),),
        ("test_caches_of_something_else_are_not_kept_and_that_is_said_once",),
    ),
    Mutant(
        "caches come back without room to grow",
        ADAPTERS + "mlx_lm.py",
        (("self._layers.room(self._layers.capacity(len(ids)))", "self._layers.room(found)"),),
        ("test_what_comes_back_has_the_type_the_bytes_and_the_room_of_a_cache_that_computed_it",),
    ),
    Mutant(
        "tokens that the caches do not hold yet are stored",
        ADAPTERS + "mlx_lm.py",
        (("held = min(len(ids), prompt_cache[0].offset)", "held = len(ids)"),),
        ("test_caches_that_hold_fewer_or_more_tokens_than_the_text_are_kept_as_far_as_both_go",),
    ),
    Mutant(
        "one cache serves every model's name",
        ADAPTERS + "mlx_lm.py",
        (("if not (model is self._key or ", "if False and not (model is self._key or "),),
        ("test_another_models_name_is_a_miss",),
    ),
    Mutant(
        "the server's next model finds the KV of the one before",
        ADAPTERS + "mlx_server.py",
        (("if key != self._key or model is not self._model():", "if self._key is None:"),),
        ("test_models_in_turn_never_find_each_others_kv",),
    ),
    Mutant(
        "a draft model's requests get caches without its layers",
        ADAPTERS + "mlx_server.py",
        (("        if key[2] is not None:\n", "        if False:\n"),),
        ("test_what_is_refused_goes_on_with_the_servers_own_cache",),
    ),
)
