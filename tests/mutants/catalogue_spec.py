"""Mistakes with the shape of KV: reach, scales, the planes of a block, rows of bytes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYOUT, SPEC = "pagedkv/spec/block_layout.py", "pagedkv/spec/kv_spec.py"
DEVICE, SCALES = "pagedkv/cache/device_kv.py", "pagedkv/cache/layer_scales.py"
GPU = "pagedkv/cache/gpu_kv.py"
LAYERS = "pagedkv/spec/layers.py"
CHOICE = "pagedkv/cache/layout.py"
REACH = "pagedkv/cache/reach.py"
RANDOM_STEPS = ("test_attend_keeps_to_the_reach_of_each_layer_in_random_steps",)
RULE = ("test_the_last_needed_blocks_are_all_that_later_tokens_read",
        "test_one_walk_finds_the_longest_prefix_that_all_layers_can_go_on_from")  # fmt: skip

MUTANTS = (
    Mutant(
        "a window that begins inside a block does not need it", LAYERS,
        (("-(-(self.window - 1) // block_size)", "(self.window - 1) // block_size"),),
        RULE,
    ),
    Mutant(
        "a query is not among the tokens of its window", LAYERS,
        (("-(-(self.window - 1) // block_size)", "-(-self.window // block_size)"),),
        RULE,
    ),
    Mutant(
        "a chunk begins at the last multiple behind the boundary", LAYERS,
        (("num_blocks * block_size // self.chunk * self.chunk // block_size",
          "-(-num_blocks * block_size // self.chunk) * self.chunk // block_size"),),
        RULE,
    ),
    Mutant(
        "a recurrent layer needs no state", LAYERS,
        (("        return min(num_blocks, 1)\n", "        return 0\n"),),
        RULE,
    ),
    Mutant(
        "a full layer needs its last block alone", LAYERS,
        (("            return num_blocks - num_blocks * block_size // self.chunk * self.chunk // block_size\n"
          "        return num_blocks\n",
          "            return num_blocks - num_blocks * block_size // self.chunk * self.chunk // block_size\n"
          "        return min(num_blocks, 1)\n"),),
        RULE,
    ),
    Mutant(
        "attend forgets the window of the layer", REACH,
        (("(seen := own if has_limits else window)", "(seen := window)"),),
        (*RANDOM_STEPS, "test_a_hit_goes_on_in_the_middle_of_windows_and_chunks"),
    ),
    Mutant(
        "a window that is not the layer's own is taken", REACH,
        (("        if has_limits and window is not None and window != own:\n", "        if False:\n"),),
        ("test_a_window_that_is_not_the_layers_own_is_refused_and_the_step_goes_on",),
    ),
    Mutant(
        "layers with a chunk attend as the first of them", REACH,
        (("bound = self._in_chunks.get(chunk)", "bound = next(iter(self._in_chunks.values()), None)"),),
        RANDOM_STEPS,
    ),
    Mutant(
        "the keys of a chunk begin a block late", REACH,
        (("columns = start[:, None] // block_size +", "columns = start[:, None] // block_size + 1 +"),),
        RANDOM_STEPS,
    ),
    Mutant(
        "no sequence is cut where one is shorter than a chunk", REACH,
        (("ends.max() <= chunk", "ends.min() <= chunk"),),
        RANDOM_STEPS,
    ),
    Mutant(
        "the parts of a step share their tables on the device", "pagedkv/cache/gpu_kv.py",
        (('self._kv.device_copy(f"{name} {part}"', "self._kv.device_copy(name"),),
        ("test_the_cuda_wrappers_keep_to_the_reach_of_each_layer",),
    ),
    Mutant(
        "windows are not part of the fingerprint", SPEC,
        (("listed = (self.windows, self.chunks, self.reads)", "listed = ((), self.chunks, self.reads)"),),
        ("test_a_spec_knows_its_layers_and_one_without_limits_is_the_old_one",
         "test_a_directory_of_other_windows_is_refused"),
    ),
    Mutant(
        "all attentions of a step have the first one's mask", "pagedkv/cache/gpu_kv.py",
        (("        if masks is None or masks[0] is not mask or masks[1] is not mask_indptr:\n",
          "        if masks is None:\n"),),
        ("test_each_attention_of_a_step_has_its_own_mask",),
    ),
    Mutant(
        "a null in a config is taken for a missing field", "pagedkv/spec/config.py",
        (('fields.get("attention_chunk_size")  # null', 'fields.get("attention_chunk_size", 8192)  # null'),),
        ("test_a_field_that_is_null_is_no_field_that_is_missing",),
    ),
    Mutant(
        "a rank has the scales of another layer", "pagedkv/cache/ranks/rank.py",
        (("kv.layer_scales(self.spec.own_layer(layer))", "kv.layer_scales(min(layer, 2))"),),
        ("test_a_rank_has_the_scales_of_the_layer_that_is_read",),
    ),
    Mutant(
        "ranks attend to everything", "pagedkv/cache/ranks/rank.py",
        (("bind_step(self._storage.kv, _StepArrays(slots, tables, lens, indptr), self.spec)",
          "self._storage.kv.bind(_StepArrays(slots, tables, lens, indptr))"),),
        ("test_each_rank_keeps_to_windows_and_chunks",),
    ),
    Mutant(
        "a layer that shares KV overwrites it", REACH,
        (("    if spec.model_layer(own) != layer:\n", "    if False:\n"),),
        ("test_layers_that_share_kv_read_the_layer_that_has_it",),
    ),
    Mutant(
        "a layer that shares KV reads the one after", SPEC,
        (("                reads.append(reads[layer.layer])\n", "                reads.append(len(own) - 1)\n"),),
        ("test_layers_that_share_kv_read_the_layer_that_has_it", "test_a_spec_is_made_of_a_file"),
    ),
    Mutant(
        "a chunk may end inside a block", SPEC,
        (("            if chunk is not None and chunk % self.block_size:\n", "            if False:\n"),),
        ("test_windows_and_chunks_that_contradict_the_spec_are_refused",),
    ),
    Mutant(
        "scales are not part of the fingerprint", SPEC,
        (("values = (*values, self.width_of_v, scales)", "values = (*values, self.width_of_v)"),),
        ("test_what_changes_the_bytes_changes_the_fingerprint_and_nothing_else_does",
         "test_a_directory_of_other_scales_is_refused"),
    ),
    Mutant(
        "the width of V is not part of the fingerprint", SPEC,
        (("values = (*values, self.width_of_v, scales)", "values = (*values, scales)"),),
        ("test_what_changes_the_bytes_changes_the_fingerprint_and_nothing_else_does",),
    ),
    Mutant(
        "the scales of V lie where those of K do", LAYOUT,
        (('        add("v_scale", (), np.dtype(np.float32))\n',
          '        add("v_scale", (), np.dtype(np.float32))\n        found["v_scale"] = found["k_scale"]\n'),),
        ("test_planes_cover_each_byte_at_most_once_and_leave_only_their_filling",),
    ),
    Mutant(
        "planes with scales are not filled up", LAYOUT,
        (("ALIGNMENT if spec.has_scale_planes else 1", "4 if spec.has_scale_planes else 1"),),
        ("test_planes_with_scales_begin_where_kernels_load_16_bytes_at_once",),
    ),
    Mutant(
        "scales are in the order of tokens in every layout", LAYOUT,
        (('return view.swapaxes(2, 3) if spec.layout == "HND" else view',
          'return view.swapaxes(2, 3) if spec.layout == "HND" and plane.shape[2:] else view.reshape(view.shape[:2] '
          "+ (spec.block_size, spec.num_kv_heads) + view.shape[4:])"),),
        ("test_the_bytes_of_a_block_with_scales_are_as_documented",),
    ),
    Mutant(
        "K is gathered with the scales of V", SCALES,
        (("        k_scales, v_scales = (plane[..., None] for plane in self._planes)\n",
          "        v_scales, k_scales = (plane[..., None] for plane in self._planes)\n"),),
        ("test_attention_reads_exactly_what_numpy_would_have_stored",),
    ),
    Mutant(
        "every layer is gathered with the first one's fixed scales", SCALES,
        (("for side in zip(*self._layers, strict=True))", "for side in zip(*self._layers[:1], strict=True))"),),
        ("test_attention_reads_exactly_what_numpy_would_have_stored",),
    ),
    Mutant(
        "scores over latents are scaled by their width", "pagedkv/spec/layers.py",
        (("    if softmax_scale is None:\n", "    if False:\n"),),
        ("test_latents_have_no_scale_of_their_width",),
    ),
    Mutant(
        "a step scales scores over latents by their width", "pagedkv/cache/step.py",
        (("            check_scale_of_latents(softmax_scale, spec.head_dim)\n", "            pass\n"),),
        ("test_arrays_that_do_not_fit_latents_are_refused_and_nothing_changes",),
    ),
    Mutant(
        "latents are measured by the V that they lack", "pagedkv/spec/scales.py",
        (("latents = v is None or getattr(", "latents = v is None and getattr("),),
        ("test_latents_have_scales_of_k_alone",),
    ),
    Mutant(
        "V is quantised by K's scales where it was forgotten", SPEC,
        (("if self.scales.are_of_latents and not self.v_in_k:", "if False:"),),
        ("test_latents_have_scales_of_k_alone",),
    ),
    Mutant(
        "the scales of a model go before those of a layer", SPEC,
        (("    scales = scales if layer.scales is None else layer.scales\n",
          "    scales = layer.scales if scales is None else scales\n"),),
        ("test_scales_of_layers_that_name_none_are_checked",),
    ),
    Mutant(
        "scales of no known kind reach the layers", SPEC,
        (("        dtype = dtype_name(dtype)\n        check_kind(scales)\n", "        dtype = dtype_name(dtype)\n"),),
        ("test_scales_of_layers_that_name_none_are_checked",),
    ),
    Mutant(
        "fixed scales of all layers are those of the first", "pagedkv/spec/scales.py",
        (("row = layer if self.shape[0] > 1 else 0", "row = 0"),),
        ("test_a_layer_has_its_own_scales_or_those_of_all",),
    ),
    Mutant(
        "the kernels attend without the scales", DEVICE,
        (("                **self._kv.scales(layer), **(_as_arrays", "                **(_as_arrays"),),
        ("test_attention_reads_exactly_what_numpy_would_have_stored",),
    ),
    Mutant(
        "the reference attends without the scales", DEVICE,
        (("            factors = scale[used] if scale.ndim == 3 else scale\n",
          "            factors = np.ones_like(scale[used] if scale.ndim == 3 else scale)\n"),),
        ("test_attention_reads_exactly_what_numpy_would_have_stored",),
    ),
    Mutant(
        "whole numbers are taken for values that are quantised", DEVICE,
        (("if (values.dtype != self._dtype or self._scales is not None) and", "if values.dtype != self._dtype and"),),
        ("test_numbers_that_are_no_floats_are_refused_before_anything_is_written",),
    ),
    Mutant(
        "gathered values may be put into the arena", DEVICE,
        (("            if np.may_share_memory(array, self._arena):\n", "            if False:\n"),),
        ("test_outputs_that_do_not_fit_are_refused",),
    ),
    Mutant(
        "rows of bytes are computed with", SPEC,
        (("if self.dtype == BYTES:\n            raise Unsupported", "if False:\n            raise Unsupported"),),
        ("test_nobody_computes_with_rows_of_bytes",),
    ),
    Mutant(
        "every rank has the scales of the first heads", "pagedkv/spec/ranks.py",
        (("scales.of_heads(rank * heads, (rank + 1) * heads)", "scales.of_heads(0, heads)"),),
        ("test_ranks_share_out_the_scales_of_their_heads",),
    ),
    Mutant(
        "fp8 is handed out by our name", SPEC,
        (('return "float8_e4m3fn" if self.dtype == "float8_e4m3" else self.dtype', "return self.dtype"),),
        ("test_exported_fp8_is_the_fp8_that_was_stored",),
    ),
    Mutant(
        "the caller may write to fixed scales", "pagedkv/spec/scales.py",
        (("k.flags.writeable = v.flags.writeable = False", "pass"),),
        ("test_the_fixed_scales_of_a_cache_cannot_be_changed",),
    ),
    Mutant(
        "layers of different shapes make one spec", SPEC,
        (("            if layer.stored != own[0].stored:\n", "            if False:\n"),),
        ("test_layers_that_do_not_fit_together_are_refused_by_number",),
    ),
    Mutant(
        "a block with scales has the shape of one without", SPEC,
        (("if self.has_scale_planes or self.width_of_v != self.head_dim:\n            kind",
          "if self.width_of_v != self.head_dim:\n            kind"),),
        ("test_a_block_that_is_not_one_array_has_no_shape",
         "test_a_block_with_scales_is_not_handed_out_as_one_array"),
    ),
    Mutant(
        "samples measure the largest number of all heads", "pagedkv/spec/scales.py",
        (('axis=(1, 3) if per == "head" else (1, 2, 3))', 'axis=(1, 3) if per == "head" else (1, 3))'),),
        ("test_the_largest_sample_becomes_the_largest_number",),
    ),
    Mutant(
        "a cache leaves the layout of its directory aside", CHOICE,
        (("None if disk is None else stored_fingerprint(disk.path)", "None"),),
        ("test_a_directory_of_nhd_is_found_again_on_a_gpu", "test_a_directory_of_a_gpu_is_found_again_without_one"),
    ),
    Mutant(
        "a failing close of the superblock refuses the cache", "pagedkv/tiers/disk/peek.py",
        (("        close_quietly(fd)\n", "        os.close(fd)\n"),),
        ("test_a_failing_close_after_the_look_keeps_no_cache_from_opening",),
    ),
    Mutant(
        "a GPU gets the layout of a CPU", CHOICE,
        (('("HND", "NHD") if on_gpu else ("NHD", "HND")', '("NHD", "HND")'),),
        ("test_a_new_cache_takes_hnd_on_a_gpu_and_nhd_elsewhere",),
    ),
    Mutant(
        "processes that share KV choose by themselves", CHOICE,
        (("    if shared:\n", "    if False:\n"),),
        ("test_with_a_remote_store_the_default_stays_nhd", "test_a_remote_store_and_ranks_want_the_layout_named"),
    ),
    Mutant(
        "a storage of its own hides its remote store", "pagedkv/cache/tiered.py",
        (("        return self._shared is not None\n", "        return False\n"),),
        ("test_with_a_remote_store_the_default_stays_nhd", "test_a_remote_store_and_ranks_want_the_layout_named"),
    ),
    Mutant(
        "a storage of its own hides its GPU", "pagedkv/cache/cache.py",
        ((' or getattr(storage, "on_gpu", False)', ""),),
        ("test_a_new_cache_takes_hnd_on_a_gpu_and_nhd_elsewhere",),
    ),
    Mutant(
        "a rank chooses its layout alone", "pagedkv/cache/ranks/rank.py",
        (("on_gpu=False, shared=True", "on_gpu=False, shared=False"),),
        ("test_a_remote_store_and_ranks_want_the_layout_named",),
    ),
    Mutant(
        "a named layout gives way to the directory's", CHOICE,
        (("    if spec.layout in LAYOUTS:\n        return spec\n", ""),),
        ("test_a_layout_that_is_named_stays", "test_a_named_layout_other_than_the_directorys_is_refused_as_ever"),
    ),
    Mutant(
        "the older copy of a superblock counts", "pagedkv/tiers/disk/superblock.py",
        (("max(intact, key", "min(intact, key"),),
        ("test_an_unknown_version_or_feature_is_refused",),
    ),
    Mutant(
        "a spec without a layout has a fingerprint of its own", SPEC,
        (('self.layout if self.layout in LAYOUTS else "NHD"', "str(self.layout)"),),
        ("test_until_a_cache_chooses_a_spec_counts_as_nhd", "test_the_fingerprint_is_what_it_was_in_the_first_release"),
    ),
    Mutant(
        "a V within K is no part of the fingerprint", SPEC,
        (("        if self.v_in_k:\n            values = (*values, \"v_in_k\", self.output_dim)\n", ""),),
        ("test_what_changes_the_bytes_changes_the_fingerprint_and_nothing_else_does",),
    ),
    Mutant(
        "a V within K has bytes of its own", SPEC,
        (("return 0 if self.v_in_k else self.output_dim", "return self.output_dim"),),
        ("test_a_spec_layer_by_layer_is_the_same_spec",),
    ),
    Mutant(
        "a V within K has scales of its own", LAYOUT,
        (("if spec.v_in_k:\n            found", "if False:\n            found"),),
        ("test_a_spec_layer_by_layer_is_the_same_spec",),
    ),
    Mutant(
        "another scale for the V within K is taken", SPEC,
        (("isinstance(self.scales, Scales) and self.scales.k != self.scales.v", "False"),),
        ("test_specs_that_contradict_themselves_are_refused",),
    ),
    Mutant(
        "attention reads all of K as V", DEVICE,
        (("(k, k[..., : self.spec.output_dim]) if self.spec.v_in_k", "(k, k) if self.spec.v_in_k"),),
        ("test_attention_over_latents_is_that_of_float64",),
    ),
    Mutant(
        "the kernels get no V within K", GPU,
        (("        found = self._attended\n", "        found = self._layers\n"),),
        ("test_attention_over_latents_is_that_of_float64",),
    ),
)  # fmt: skip
