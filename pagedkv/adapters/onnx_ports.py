"""Inputs and outputs of an exported decoder: tokens, masks, positions, past and present.

Only ``get_inputs``, ``get_outputs`` and their ``name``, ``shape`` and ``type`` are asked, so it needs no onnxruntime.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidArgument, NotSupported
from pagedkv.spec.kv_spec import KVSpec

PAST, PRESENT = "past_key_values.{layer}.{side}", "present.{layer}.{side}"
LOGITS = "logits"
_SIDES = ("key", "value")
_TYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}  # of KV
_INTEGERS: dict[str, np.dtype[Any]] = {"tensor(int64)": np.dtype(np.int64), "tensor(int32)": np.dtype(np.int32)}
_WHAT = "this session"


@dataclass(frozen=True, slots=True)
class Ports:
    """What goes into one run of a decoder and comes out of it.

    Attributes
    ----------
    past, present : for each layer the names of K and of V.
    heads, dim, dtype : of every layer.
    length : tokens of a fixed past; None if it grows with the sequence.
    chunk : tokens of every run, where ``input_ids`` has a fixed length; else None.
    integers : dtypes of the inputs beside the KV, by name.
    mask_length : of ``attention_mask``, where it is fixed; else None.
    has_branch : whether ``use_cache_branch`` is an input, as of Optimum's merged decoders.
    """

    past: tuple[tuple[str, str], ...]
    present: tuple[tuple[str, str], ...]
    heads: int
    dim: int
    dtype: np.dtype[Any]
    length: int | None
    chunk: int | None
    integers: dict[str, np.dtype[Any]]
    mask_length: int | None
    has_branch: bool

    @classmethod
    def of(cls, session: Any, past: str = PAST, present: str = PRESENT) -> Ports:
        """Read them from a session.

        Parameters
        ----------
        session : onnxruntime.InferenceSession
        past, present : names of the KV, with ``{layer}`` and ``{side}``, which is ``key`` or ``value``.

        Raises
        ------
        InvalidArgument
            A name lacks one of the two.
        NotSupported
            It has no past, or inputs whose meaning is not known, and which.
        """
        inputs = {one.name: one for one in session.get_inputs()}
        outputs = {one.name: one for one in session.get_outputs()}
        into, out = _layers(inputs, past, "past"), _layers(outputs, present, "present")
        if not into:
            raise NotSupported(
                _WHAT,
                f"no input is named like {past!r}, so it takes no past KV: export it with its cache, or name its "
                f"inputs with past= (it has {_listed(inputs)})",
            )
        if len(into) != len(out):
            raise NotSupported(
                _WHAT,
                f"it has past KV of {len(into)} layers, and {len(out)} with outputs like {present!r}: "
                f"{_listed(outputs)}",
            )
        names = {name for pair in into for name in pair}
        heads, dim, dtype, length = _shape_of_all([inputs[name] for name in names])
        rest = {name: one for name, one in inputs.items() if name not in names}
        if "input_ids" not in rest:
            raise NotSupported(_WHAT, f"it has no input 'input_ids': {_listed(rest)}")
        if LOGITS not in outputs:
            raise NotSupported(_WHAT, f"it has no output {LOGITS!r}: {_listed(outputs)}")
        if unknown := sorted(set(rest) - _KNOWN):
            raise NotSupported(
                _WHAT, f"the meaning of its input {unknown[0]!r} is not known; known are {', '.join(sorted(_KNOWN))}"
            )
        branch = rest.pop("use_cache_branch", None)
        integers: dict[str, np.dtype[Any]] = {}
        for name, one in rest.items():
            if one.type not in _INTEGERS:
                raise NotSupported(_WHAT, f"its input {name!r} is {one.type}, not int64 or int32")
            integers[name] = _INTEGERS[one.type]
        ids, mask = rest["input_ids"], rest.get("attention_mask")
        if len(ids.shape) != 2 or _fixed(ids.shape[0]) not in (None, 1):
            raise NotSupported(_WHAT, f"its input_ids are {ids.shape}, not [1 or any batch, tokens]")
        chunk = _fixed(ids.shape[1])
        if chunk is not None and length is None:
            raise NotSupported(_WHAT, f"its past grows, and every run takes {chunk} tokens: padding would be cached")
        if mask is not None and len(mask.shape) != 2:
            raise NotSupported(_WHAT, f"its attention_mask is {mask.shape}, not [batch, tokens]")
        mask_length = None if mask is None else _fixed(mask.shape[1])
        return cls(into, out, heads, dim, dtype, length, chunk, integers, mask_length, branch is not None)

    @property
    def num_layers(self) -> int:
        """Layers with KV of their own."""
        return len(self.past)

    def spec(self, block_size: int, model: str) -> KVSpec:
        """The spec of a cache of this KV.

        Raises
        ------
        WrongType, InvalidArgument
        """
        return KVSpec(self.num_layers, self.heads, self.dim, self.dtype.name, block_size, layout="HND", model=model)

    def empty(self, tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V of all layers, zeros [num_layers, heads, tokens, dim]."""
        k, v = (np.zeros((self.num_layers, self.heads, tokens, self.dim), self.dtype) for _ in _SIDES)
        return k, v

    def feeds(self, ids: NDArray[Any], start: int, total: int) -> dict[str, NDArray[Any]]:
        """All inputs but the KV of a run.

        Parameters
        ----------
        ids : int [n], padding included.
        start : position of the first one.
        total : tokens of the sequence after the run, padding not included.
        """
        positions = np.arange(start, start + len(ids))
        values = {
            "input_ids": ids[None],
            "attention_mask": (np.arange(self.mask_length or start + len(ids)) < total)[None],
            "position_ids": positions[None],
            "cache_position": positions,
            "num_logits_to_keep": np.array(len(ids) if self.chunk else 1),
        }
        feeds = {name: np.array(values[name], dtype, order="C") for name, dtype in self.integers.items()}
        if self.has_branch:
            feeds["use_cache_branch"] = np.array([True])
        return feeds


_KNOWN = {
    "input_ids", "attention_mask", "position_ids", "cache_position", "num_logits_to_keep", "use_cache_branch",
}  # fmt: skip


def _fixed(axis: Any) -> int | None:
    """The length of an axis; None for one that is named or unknown."""
    return axis if isinstance(axis, int) else None


def _listed(ports: dict[str, Any]) -> str:
    names = list(ports)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _layers(ports: dict[str, Any], form: str, what: str) -> tuple[tuple[str, str], ...]:
    """The names of K and V by layer."""
    if not isinstance(form, str) or form.count("{layer}") != 1 or form.count("{side}") != 1:
        raise InvalidArgument(f"{what}={form!r}: '{{layer}}' and '{{side}}' are needed once each, as in {PAST!r}")
    pattern = re.escape(form).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{side\}", r"(?P<side>key|value)")
    found = {}
    for name in ports:
        if match := re.fullmatch(pattern, name):
            found[int(match["layer"]), match["side"]] = name
    numbers = sorted({layer for layer, _ in found})
    if missing := [(layer, side) for layer in numbers for side in _SIDES if (layer, side) not in found]:
        raise NotSupported(_WHAT, f"its {what} of layer {missing[0][0]} has no {missing[0][1]}")
    return tuple((found[layer, "key"], found[layer, "value"]) for layer in numbers)


def _shape_of_all(ports: list[Any]) -> tuple[int, int, np.dtype[Any], int | None]:
    """Heads, dim, dtype and length that all past KV has.

    Raises
    ------
    NotSupported
    """
    seen = {(tuple(map(_fixed, one.shape)), one.type) for one in ports}
    if len(seen) > 1:
        shown = sorted({f"{one.type} {one.shape}" for one in ports})
        raise NotSupported(_WHAT, f"its layers differ: {' and '.join(shown[:2])}")
    (shape, kind), first = seen.pop(), ports[0]
    if len(shape) != 4 or shape[0] not in (None, 1) or shape[1] is None or shape[3] is None:
        raise NotSupported(_WHAT, f"its {first.name} is {first.shape}, not [1 or any batch, heads, tokens, head_dim]")
    if kind not in _TYPES:
        raise NotSupported(_WHAT, f"its {first.name} is {kind}; KV of {' and '.join(_TYPES)} can be cached")
    return shape[1], shape[3], np.dtype(_TYPES[kind]), shape[2]
