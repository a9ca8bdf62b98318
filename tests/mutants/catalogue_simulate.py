"""Mistakes in the simulator: reach and experts of a step, pages, memory held."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYERS, VIRTUAL = "pagedkv/lab/simulate/layers.py", "pagedkv/lab/simulate/virtual.py"
CACHE = "pagedkv/cache/cache.py"

MUTANTS = (
    Mutant(
        "a step reads a token more than a window has", LAYERS,
        (("np.minimum(context, q + (self.window - 1))", "np.minimum(context, q + self.window)"),),
        ("test_keys_and_tokens_read_are_those_that_each_new_token_sees[window 7]",),
    ),
    Mutant(
        "a token attends to the chunk before its own", LAYERS,
        (("        return chunks * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2\n",
          "        return chunks * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + self.chunk) // 2\n"),),
        ("test_keys_and_tokens_read_are_those_that_each_new_token_sees[chunk 8]",),
    ),
    Mutant(
        "a step reads all experts", "pagedkv/lab/simulate/hardware.py",
        (("        return self.weight_bytes - self.expert_bytes * self.missed**num_tokens\n",
          "        return float(self.weight_bytes)\n"),),
        ("test_a_step_reads_the_experts_that_its_tokens_meet",),
    ),
    Mutant(
        "steps that are reckoned together read whole contexts in short layers", "pagedkv/lab/simulate/contiguous.py",
        ((" if self.roofline.short else ()", " if not self.roofline.short else ()"),),
        ("test_one_request_costs_the_same_in_blocks_and_in_a_region[window]",),
    ),
    Mutant(
        "attention of short layers grows without end", "pagedkv/lab/simulate/served.py",
        (("        grows = of_key * sum(group.num_layers for group in self.far_groups)\n",
          "        grows = of_key * sum(group.num_layers for group in self.sizes.groups)\n"),),
        ("test_context_at_which_attention_costs_as_much_as_all_else",),
    ),
    Mutant(
        "a page of a tail is as long as one of the layers that see everything", VIRTUAL,
        (("int(pages[link] @ self._real_bytes)", "int(pages[link].sum() * self._real_bytes[0])"),),
        ("test_bytes_moved_are_the_pages_of_their_groups[window]",),
    ),
    Mutant(
        "tails are not held", VIRTUAL,
        (('int(self.lane_bytes @ [each.counts()["live"] for each in pool.extents.pools])',
          'int(self.lane_bytes[0]) * pool.counts()["live"]'),),
        ("test_a_sequence_holds_its_full_layers_and_the_reach_of_the_others[chunk]",),
    ),
    Mutant(
        "the disk writes tails for nothing", VIRTUAL,
        (("        self.lane_bytes = self.write_bytes = np.array", "        self.lane_bytes = np.array"),),
        ("test_a_write_budget_is_of_the_bytes_of_pages",),
    ),
    Mutant(
        "groups of layers are served as one", "pagedkv/lab/simulate/paged.py",
        (("by_group=system.by_group", "by_group=False"),),
        ("test_more_requests_run_at_once_in_the_same_memory[window]",),
    ),
    Mutant(
        "a tail counts to the first tier of its prompt", "pagedkv/lab/simulate/found.py",
        (("    coldest = np.where(found > 0, np.arange(len(PLACES)), 0).max(axis=1)\n    for i,",
          "    coldest = (found > 0).argmax(axis=1)\n    for i,"),),
        ("test_a_tail_counts_where_the_last_block_of_the_prompt_was_found",),
    ),
    Mutant(
        "a storage learns no layout", CACHE,
        (("                storage.lay_out(layout)\n", "                pass\n"),),
        ("test_a_storage_of_the_caller_s_is_told_the_layout_before_it_opens",),
    ),
    Mutant(
        "a storage without a layout gets groups of layers", "pagedkv/cache/storage.py",
        (('    return callable(getattr(storage, "lay_out", None))\n', "    return True\n"),),
        ("test_a_cache_by_groups_says_what_it_cannot_be",),
    ),
    Mutant(
        "a panel of zeros is drawn", "pagedkv/lab/simulate/plot.py",
        (("for panel in others if any(panel.values))]", "for panel in others)]"),),
        ("test_a_panel_of_zeros_is_left_out_and_named",),
    ),
    Mutant(
        "an even number of panels has the first system at the bottom", "pagedkv/lab/replay/drawing.py",
        (("axes.yaxis.set_inverted(True)", "axes.invert_yaxis()"),),
        ("test_a_panel_of_zeros_is_left_out_and_named",),
    ),
)  # fmt: skip
