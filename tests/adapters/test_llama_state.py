"""The bytes of llama.cpp states, written out by hand: read, written, cut, damaged."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters.llama_numbers import numbers_of
from pagedkv.adapters.llama_state import Layout

CELLS, LAYERS = 3, 2
F32, F16, Q8_0 = 0, 1, 8

# Of a token in one layer: kind -> (K type, K bytes, V type, V bytes, bytes of V's items where it is transposed)
KINDS = {
    "f16, V transposed": (F16, 8, F16, 12, 2),
    "f32, V transposed": (F32, 16, F32, 8, 4),
    "f16, flash attention": (F16, 8, F16, 8, 0),
    "q8_0, flash attention": (Q8_0, 34, Q8_0, 68, 0),
    "K q8_0, V f16 transposed": (Q8_0, 34, F16, 8, 2),
}


def row(side: str, layer: int, token: int, width: int) -> bytes:
    """A token's row: bytes that no other row has."""
    start = 1 + 100 * (side == "v") + 40 * layer + 7 * token
    return bytes((start + 3 * i) % 251 for i in range(width))


def golden(kind: str, cells: int = CELLS, *, magic: bool = True) -> np.ndarray:
    """A state, put together field by field."""
    k_type, k_bytes, v_type, v_bytes, item = KINDS[kind]
    state = b""
    if magic:
        state += b"\xd8\x3c\x14\xaf" + b"\x00\x00\x00\x00"
    state += b"\x01\x00\x00\x00" + struct.pack("<I", cells)
    for token in range(cells):
        state += struct.pack("<i", token) + b"\x01\x00\x00\x00" + b"\x00\x00\x00\x00"
    state += (b"\x01" if item else b"\x00") + b"\x00\x00\x00" + b"\x02\x00\x00\x00"
    for layer in range(LAYERS):
        state += struct.pack("<i", k_type) + struct.pack("<Q", k_bytes)
        for token in range(cells):
            state += row("k", layer, token, k_bytes)
    for layer in range(LAYERS):
        rows = [row("v", layer, token, v_bytes) for token in range(cells)]
        if item:
            state += struct.pack("<i", v_type) + struct.pack("<I", item) + struct.pack("<I", v_bytes // item)
            for at in range(0, v_bytes, item):
                state += b"".join(one[at : at + item] for one in rows)
        else:
            state += struct.pack("<i", v_type) + struct.pack("<Q", v_bytes) + b"".join(rows)
    return np.frombuffer(state, np.uint8).copy()


@pytest.mark.parametrize("magic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_read_and_its_rows_are_those_of_the_tokens(kind: str, magic: bool) -> None:
    state = golden(kind, magic=magic)
    layout = Layout.of(state)
    k_type, k_bytes, v_type, v_bytes, item = KINDS[kind]
    assert layout == Layout(magic, bool(item), k_type, v_type, LAYERS, k_bytes, v_bytes, item or 2)
    for side, view, width in zip("kv", layout.views(state, CELLS), (k_bytes, v_bytes), strict=True):
        assert np.shares_memory(view, state)
        for layer in range(LAYERS):
            for token in range(CELLS):
                assert view[layer, token, 0].tobytes() == row(side, layer, token, width)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_any_length_is_written(kind: str) -> None:
    whole = golden(kind, 5)
    layout = Layout.of(whole)
    for cells in range(1, 6):
        short = np.full(layout.size(cells), 255, np.uint8)
        layout.frame(short, cells)
        for part, side in zip(layout.views(short, cells), layout.views(whole, 5), strict=True):
            part[:] = side[:, :cells]
        assert short.tobytes() == golden(kind, cells).tobytes()
        assert Layout.of(short) == layout
        assert layout.frames(short, cells)
        assert not layout.frames(short, cells + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_cut_is_refused_at_every_length(kind: str) -> None:
    state = golden(kind)
    for length in range(len(state)):
        with pytest.raises(pk.NotSupported):
            Layout.of(state[:length])
    with pytest.raises(pk.NotSupported):
        Layout.of(np.append(state, np.uint8(0)))


def framing(kind: str, magic: bool = True) -> np.ndarray:
    """Where a state holds neither K nor V: a byte that no row's number can change."""
    state, layout = golden(kind, magic=magic), Layout.of(golden(kind, magic=magic))
    touched = state.copy()
    for side in layout.views(touched, CELLS):
        side[:] = ~side
    return np.flatnonzero(touched == state)


def test_ten_thousand_damaged_states_are_refused_or_only_their_rows_differ() -> None:
    """A cut, or a flip outside of K and V, never passes; one inside changes that row alone."""
    rng = np.random.default_rng(17)
    wrong = accepted = refused = 0
    for kind in KINDS:
        state, frame = golden(kind), set(framing(kind).tolist())
        layout = Layout.of(state)
        for _ in range(10_000 // len(KINDS)):
            damaged = state.copy()
            at = int(rng.integers(len(state)))
            if rng.random() < 0.3:
                damaged = damaged[:at]
            else:
                damaged[at] ^= 1 << int(rng.integers(8))
            try:
                found = Layout.of(damaged)
            except pk.NotSupported:
                refused += 1
                wrong += len(damaged) == len(state) and at not in frame
                continue
            accepted += 1
            changed = sum(int((a != b).sum()) for a, b in zip(
                layout.views(damaged, CELLS), layout.views(state, CELLS), strict=True))  # fmt: skip
            wrong += found != layout or at in frame or len(damaged) != len(state) or changed != 1
    assert wrong == 0
    assert accepted > 2_000
    assert refused > 2_000


@pytest.mark.parametrize(
    ("at", "number", "reason"),
    [
        (8, 2, "2 streams"),
        (12, 0, "0 cells"),
        (12, 2**32 - 1, "too short"),
        (52, 7, "streams"),  # v_trans
        (56, 3, "bytes"),
        (56, 2**32 - 1, "layers"),
        (64, 2**31, "bytes in a row"),
    ],
)
def test_a_number_that_no_state_has_is_named(at: int, number: int, reason: str) -> None:
    state = golden("f16, V transposed")
    state[at : at + 4] = np.frombuffer(struct.pack("<I", number), np.uint8)
    with pytest.raises(pk.NotSupported, match=reason):
        Layout.of(state)


def test_positions_that_are_not_in_a_row_are_refused() -> None:
    state = golden("f16, flash attention")
    state[16:20] = np.frombuffer(struct.pack("<i", 5), np.uint8)
    with pytest.raises(pk.NotSupported, match="more than K and V"):
        Layout.of(state)


def test_the_spec_does_not_depend_on_how_v_lies() -> None:
    transposed, rows = (Layout(True, trans, F16, F16, 2, 8, 8) for trans in (True, False))
    assert transposed.spec(16, "m").fingerprint() == rows.spec(16, "m").fingerprint()
    assert rows.spec(16, "m").bytes_per_token == 32


# ---- numbers


def test_rows_are_numbers_by_their_type() -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(np.float32)
    assert np.array_equal(numbers_of(values.view(np.uint32), F32), values)
    half = values.astype(np.float16)
    assert np.array_equal(numbers_of(half.view(np.uint16), F16), half.astype(np.float32))
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert np.allclose(numbers_of(bits, 30), values, rtol=2**-7)
    assert numbers_of(half.view(np.uint16), 99).dtype == np.uint8


def test_quantised_rows_are_numbers_times_their_scale() -> None:
    block = struct.pack("<e32b", 0.5, *range(-16, 16))
    rows = np.frombuffer(block * 2, np.uint16).reshape(1, -1)
    assert np.array_equal(numbers_of(rows, Q8_0)[0, :32], 0.5 * np.arange(-16, 16))
    packed = struct.pack("<e16B", 2.0, *(low | 15 - low << 4 for low in range(16)))
    numbers = numbers_of(np.frombuffer(packed, np.uint16).reshape(1, -1), 2)
    assert np.array_equal(numbers[0], 2.0 * np.concatenate([np.arange(-8, 8), np.arange(7, -9, -1)]))
