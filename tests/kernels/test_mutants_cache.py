"""Mutants of the cache kernels: would the tests notice?

Each mistake names the test that must fail on it.
"""

from __future__ import annotations

from functools import partial

import pytest

from pagedkv.kernels.backend import Backend
from tests.kernels import test_block_ops as blocks
from tests.kernels import test_gather_kv as gathers
from tests.kernels import test_merge as merges
from tests.kernels import test_rope as ropes
from tests.kernels import test_write_kv as writes
from tests.kernels.pools import Shape
from tests.mutants.kernels import KernelMutant, assert_killed, mutated
from tests.slices import one_in

TABLE = {"dim": 64, "rotary_dim": 16, "offset": 0, "src": "bfloat16", "dtype": "bfloat16", "scale_mode": "none"}
SCALED = Shape(dtype="float8_e4m3", scale_mode="token_head", heads=3)

MUTANTS = (
    KernelMutant(
        "tokens that are to be skipped are written to the first slot",
        "write_kv",
        (
            ("inside = inside && slot >= 0;", ""),
            ("place_of_slot(p.kv, inside ? slot : 0)", "place_of_slot(p.kv, max(slot, 0ll))"),
        ),
        partial(writes.check, shape=Shape()),
    ),
    KernelMutant(
        "the place of K is computed in 32 bits",
        "write_kv",
        (("const_cast<void*>(p.k)) + element", "const_cast<void*>(p.k)) + static_cast<int>(element)"),),
        writes.test_slots_past_2_to_the_31_elements_are_reached,
    ),
    KernelMutant(
        "V takes the scales of K",
        "write_kv",
        (("scale_of(p.kv, p.kv.v_scale, at, head)", "scale_of(p.kv, p.kv.k_scale, at, head)"),),
        partial(writes.check, shape=Shape(dtype="int8", scale_mode="head")),
    ),
    KernelMutant(
        "every lane has the largest number of its own elements",
        "write_kv",
        (
            (
                "for (int step = LANES / 2; step > 0; step /= 2) largest",
                "for (int step = LANES / 2; step > 1; step /= 2) largest",
            ),
        ),
        partial(writes.check, shape=SCALED),
    ),
    KernelMutant(
        "bfloat16 is cut off instead of rounded",
        "write_kv",
        (("return __float2bfloat16_rn(x);", "return __float2bfloat16_rz(x);"),),
        partial(writes.check, shape=Shape(dtype="bfloat16"), src="float32"),
    ),
    KernelMutant(
        "int8 is rounded towards zero",
        "write_kv",
        (("__float2int_rn(x)", "__float2int_rz(x)"),),
        partial(writes.check, shape=Shape(dtype="int8", scale_mode="tensor")),
    ),
    KernelMutant(
        "block and offset of a slot are exchanged",
        "write_kv",
        (
            (
                "return {static_cast<i64>(block), slot - static_cast<i64>(block) * p.block_size};",
                "return {slot % p.num_blocks, slot / p.num_blocks};",
            ),
        ),
        partial(writes.check, shape=Shape()),
    ),
    KernelMutant(
        "cosine and sine are exchanged",
        "write_kv",
        (
            (
                "cos[i + e] = some_cos.at[e], sin[i + e] = some_sin.at[e]",
                "cos[i + e] = some_sin.at[e], sin[i + e] = some_cos.at[e]",
            ),
        ),
        partial(ropes.test_k_and_q_turn_as_the_table_says_and_the_rest_stays, pairing="split", **TABLE),
    ),
    KernelMutant(
        "pairs turn the other way",
        "write_kv",
        (("is_second ? cross : -cross", "is_second ? -cross : cross"),),
        partial(ropes.test_k_and_q_turn_as_the_table_says_and_the_rest_stays, pairing="interleaved", **TABLE),
    ),
    KernelMutant(
        "the angle is a float32 product",
        "write_kv",
        (
            (
                "static_cast<float>(turned) * 0x1p-63f",
                "static_cast<float>(position) * (static_cast<float>(p.frequencies[pair + i]) * 0x1p-63f)",
            ),
        ),
        partial(ropes.test_computed_angles_are_exact_at_any_position, pairing="split"),
    ),
    KernelMutant(
        "Q is written while other lanes still read it",
        "write_kv",
        (("  __syncwarp();  // q_out may be q", "  // q_out may be q"),),
        partial(ropes.test_q_turns_in_place_also_where_its_token_is_skipped, pairing="split"),
    ),
    KernelMutant(
        "the last chunk of a block runs past its end",
        "copy_blocks",
        (("if (at < block_vecs) to[at] = vecs[j];", "to[at] = vecs[j];"),),
        partial(blocks.test_blocks_are_copied_and_nothing_else_changes, block_bytes=4096),
    ),
    KernelMutant(
        "the place of a block is computed in 32 bits",
        "copy_blocks",
        (("source * p.source_stride", "static_cast<u32>(source * p.source_stride)"),),
        blocks.test_blocks_past_4_gib_are_reached,
    ),
    KernelMutant(
        "a pair with a negative destination is copied",
        "copy_blocks",
        (("if (source < 0 || target < 0) return;", "if (source < 0) return;"),),
        partial(blocks.test_blocks_are_copied_and_nothing_else_changes, block_bytes=64),
    ),
    KernelMutant(
        "a CTA takes only its first chunk",
        "fill_blocks",
        (
            (
                "chunk < num_blocks * per_block; chunk += gridDim.x",
                "chunk < min_of<i64>(num_blocks * per_block, gridDim.x); chunk += gridDim.x",
            ),
        ),
        partial(blocks.test_listed_blocks_are_filled_and_nothing_else, block_bytes=20_002, max_ctas=2),
    ),
    KernelMutant(
        "a sequence's first token belongs to the one before",
        "gather_kv",
        (("indptr[middle] <= token", "indptr[middle] < token"),),
        partial(gathers.test_sequences_come_out_of_their_blocks_and_go_back_bit_by_bit, shape=Shape(20), starts=None),
    ),
    KernelMutant(
        "a sequence is scattered from its beginning whatever its first position is",
        "scatter_kv",
        (("p.first_positions ? p.first_positions[seq] : 0", "0"),),
        partial(
            gathers.test_sequences_come_out_of_their_blocks_and_go_back_bit_by_bit,
            shape=Shape(20),
            starts=gathers.STARTS,
        ),
    ),
    KernelMutant(
        "keys and values are decoded with the same scale",
        "gather_kv",
        (("from.kv.v_scale(from.at, head)", "from.kv.k_scale(from.at, head)"),),
        partial(
            gathers.test_quantised_kv_comes_out_decoded, dtype="int8", out_dtype="float16", scale_mode="token_head"
        ),
    ),
    KernelMutant(
        "the second state counts as the first",
        "merge_state",
        (("[&](int s) { return s ? lse_b : lse_a; }", "[&](int s) { return s ? lse_a : lse_b; }"),),
        partial(merges.test_two_states_are_merged_as_float64_does, dtype="float32", out_dtype="float32", dim=32),
    ),
    KernelMutant(
        "a state that saw nothing is read",
        "merge_state",
        (("if (lse == neg_inf()) continue;", ""),),
        merges.test_a_state_that_saw_nothing_leaves_the_other_bit_for_bit,
    ),
    KernelMutant(
        "weights are not measured from the largest",
        "merge_state",
        (("float largest = neg_inf();", "float largest = 0.f;"),),
        merges.test_lse_far_apart_or_large_do_not_overflow,
    ),
    KernelMutant(
        "natural logarithms are taken for those of base 2",
        "merge_states",
        (("exp2_approx((lse - largest) * kLog2e)", "exp2_approx(lse - largest)"),),
        partial(merges.test_many_states_are_merged, num_states=9),
    ),
    KernelMutant(
        "a ragged token has one state more",
        "merge_states",
        (("p.indptr[token + 1] - static_cast<int>(first)", "p.indptr[token + 1] - static_cast<int>(first) + 1"),),
        merges.test_each_token_may_have_another_number_of_states,
    ),
)


def fresh() -> Backend:
    """The interpreter: a mutant may read and write where it must not."""
    from tests.ptxsim.backend import PtxsimBackend

    return PtxsimBackend()


@pytest.fixture(autouse=True)
def _on_the_interpreter(backend: Backend) -> None:
    """Skips where nothing can be compiled, and on a GPU, where a mutant could do harm."""
    if backend.name != "ptxsim":
        pytest.skip("mutants run on the interpreter only")


@pytest.mark.parametrize("mutant", one_in(8, MUTANTS), ids=str)
def test_the_same_test_passes_without_the_mistake(mutant: KernelMutant, backend: Backend) -> None:
    mutant.check(backend)


@pytest.mark.parametrize("mutant", one_in(8, MUTANTS), ids=str)
def test_the_tests_notice_that(mutant: KernelMutant) -> None:
    assert_killed(mutant, fresh)


def test_a_text_that_is_not_there_once_is_a_stale_mutant() -> None:
    for text in ("no such text", "inside"):
        with pytest.raises(AssertionError, match="instead of once"), mutated("write_kv", ((text, ""),)):
            pass


def test_a_mutant_that_changes_nothing_survives_and_says_so() -> None:
    same = KernelMutant(
        "nothing is wrong", "merge_state", (("float total = 0.f;", "float total = 0.0f;"),), merges.test_nan_stays_nan
    )
    with pytest.raises(AssertionError, match="nothing noticed that nothing is wrong"):
        assert_killed(same, fresh)


def test_a_mutant_that_does_not_compile_is_no_kill() -> None:
    broken = KernelMutant(
        "it is no C++", "merge_state", (("float total = 0.f;", "float total = ;"),), merges.test_nan_stays_nan
    )
    with pytest.raises(AssertionError, match="does not compile"):
        assert_killed(broken, fresh)
