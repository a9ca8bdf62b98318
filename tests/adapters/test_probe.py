"""The numeric fingerprint: small differences pass, other models do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
from pagedkv.adapters.probe import Probe

K = np.random.default_rng(0).standard_normal((3, 8, 16))
V = np.random.default_rng(1).standard_normal((3, 8, 16))


def test_rounding_is_no_difference_and_other_weights_are() -> None:
    ours = Probe(K, V)
    noise = np.random.default_rng(2).standard_normal(K.shape)
    assert ours.difference(Probe(K + 0.005 * noise, V)) == ""
    assert "K of layer 0" in ours.difference(Probe(K + 0.05 * noise, V))
    other = V.copy()
    other[2] *= 1.02
    assert "V of layer 2" in ours.difference(Probe(K, other))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_none_is_a_difference(bad: float) -> None:
    k = K.copy()
    k[1, 2, 3] = bad
    assert "K of layer 1" in Probe(K, V).difference(Probe(k, V))
    assert "K of layer 1" in Probe(k, V).difference(Probe(K, V))


def test_bytes_must_be_equal() -> None:
    k = np.arange(24, dtype=np.uint8).reshape(2, 12)
    other = k.copy()
    other[1, 5] ^= 1
    assert Probe(k, k).difference(Probe(k.copy(), k)) == ""
    assert "layer 1" in Probe(k, k).difference(Probe(other, k))
    assert "was float32" in Probe(k, k).difference(Probe(k.astype(np.float32), k))


def test_other_shapes_are_a_difference() -> None:
    assert "K is float32 (3, 8, 16), and was float32 (2, 8, 16)" in Probe(K, V).difference(Probe(K[:2], V[:2]))


@pytest.mark.parametrize(("k", "v"), [(K, V[:2]), (K[0, 0], V[0, 0]), (K[:0], V[:0])])
def test_a_probe_has_layers(k: np.ndarray, v: np.ndarray) -> None:
    with pytest.raises(pk.LayoutMismatch):
        Probe(k, v)


def test_it_is_written_and_read(tmp_path: Path) -> None:
    Probe(K, V).write(tmp_path / "PROBE")
    assert Probe(K, V).difference(Probe.read(tmp_path / "PROBE"), 1e-7) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["PROBE"]


def test_a_damaged_file_is_a_named_error(tmp_path: Path) -> None:
    path = tmp_path / "PROBE"
    Probe(K, V).write(path)
    whole = path.read_bytes()
    for text in (b"", b"PK", whole[:100], whole[: len(whole) // 2], b"x" * 1000):
        path.write_bytes(text)
        with pytest.raises(pk.FileFormatError):
            Probe.read(path)
