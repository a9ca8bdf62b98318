"""KVSpec: the shape of one block of KV, and what follows from it.

One block holds ``block_size`` tokens of K and V for all layers, contiguously, in C order and native byte
order: ``[num_layers, 2, block_size, num_kv_heads, head_dim]`` (layout NHD) or
``[num_layers, 2, num_kv_heads, block_size, head_dim]`` (HND). block_layout.py has the other kinds of blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from pagedkv.errors import InvalidArgument, UnsupportedVariant, WrongType
from pagedkv.spec.block_layout import planes
from pagedkv.spec.config import read_config
from pagedkv.spec.dtypes import BYTES, ITEMSIZES, LARGEST, dtype_name, numpy_dtype
from pagedkv.spec.layers import Attention, Latent, Layer, Rows, SameAs, check_layers
from pagedkv.spec.namespace import DIGEST_BYTES, MAX_FIELD_BYTES, encode_fields
from pagedkv.spec.per_layer import checked_reads, reach_of_layers
from pagedkv.spec.scales import TOKEN_HEAD, Scales, check_kind
from pagedkv.spec.sizes import format_size, whole_number

MAX_BLOCK_SIZE = 256  # tokens
MAX_BLOCK_BYTES = 2**31 - 1  # offsets within one block fit in int32; offsets between blocks are 64-bit
MAX_DIMENSION = 2**16
LAYOUTS = ("NHD", "HND")
AUTO = "auto"  # the layout that a cache chooses
LAYOUT_VERSION = 1  # part of the fingerprint: raise it when the meaning of a block's bytes changes


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape, dtype and layout of the KV of one model.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : the model's numbers; KV heads are those of this process.
    dtype : ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"``, ``"float8_e4m3"`` or ``"float8_e5m2"``, or the
        NumPy dtype of one of them. ``"uint8"``: rows of bytes that only the caller understands; see :class:`Rows`.
    block_size : tokens in a block, 1..256.
    layout : order within a block: ``"NHD"`` (token, head, dim) or ``"HND"`` (head, token, dim).
        ``"auto"``: the cache takes that of the directory it reopens, else HND on a GPU and NHD elsewhere; its ``spec``
        names it. None: likewise, and NHD where the cache shares its KV with others, in a remote store or with ranks,
        which refuse ``"auto"``. Until a cache has chosen, such a spec counts as NHD.
    model : name and revision of the weights. Part of the fingerprint: files written for others are refused.
    head_dim_v : of V; None: that of K.
    v_in_k : V is the first ``head_dim_v`` numbers of K, as in latents (MLA): a block holds K alone, and V and its
        scales have no bytes.
    scales : of int8 and fp8, value = stored * scale
        ``"token_head"``: one for each token and head, computed when KV is written; they lie in the block. That is the
        default. A :class:`Scales`: fixed ones, part of the fingerprint.
    windows : tokens that a query of each layer sees, its own included, or None where it sees all before it: a number or
        None for each layer; None: no layer has a window. :meth:`pagedkv.Step.attend` keeps to it.
    chunks : likewise: a query sees the tokens since the last multiple of this, which is a multiple of `block_size`.
    reads : for each layer of the model, the layer whose KV it reads, counted among those with KV of their own
        `num_layers` is then the number of these, of which windows, chunks, scales and gathered arrays have one entry
        each; each comes before those that share its KV. None: no layer shares.

    Raises
    ------
    WrongType, InvalidArgument
        A number is not whole or out of range, the dtype or layout is not known, the scales, windows, chunks or shared
        layers do not fit, or a block would pass 2 GiB.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    block_size: int = 16
    _: KW_ONLY
    layout: str | None = None
    model: str = ""
    head_dim_v: int | None = None
    v_in_k: bool = False
    scales: str | Scales | None = None
    windows: tuple[int | None, ...] | None = None
    chunks: tuple[int | None, ...] | None = None
    reads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            self._store(name, whole_number(getattr(self, name), name, 1, MAX_DIMENSION))
        self._store("dtype", dtype_name(self.dtype))
        self._store("block_size", whole_number(self.block_size, "block_size", 1, MAX_BLOCK_SIZE))
        if self.layout is not None and type(self.layout) is not str:
            raise WrongType(f"layout must be a string or None, not {type(self.layout).__name__}")
        if self.layout not in (None, AUTO, *LAYOUTS):
            raise InvalidArgument(f"layout must be 'NHD', 'HND' or 'auto', got {str(self.layout)[:40]!r}")
        if type(self.model) is not str:
            raise WrongType(f"model must be a string, not {type(self.model).__name__}")
        if len(encode_fields([(0, self.model)])) > MAX_FIELD_BYTES:
            raise InvalidArgument(f"model is too long: at most about {MAX_FIELD_BYTES} bytes")
        if self.head_dim_v is not None:
            width = whole_number(self.head_dim_v, "head_dim_v", 0 if self.dtype == BYTES else 1, MAX_DIMENSION)
            self._store("head_dim_v", None if width == self.head_dim else width)
        self._check_v_in_k()
        self._check_scales()
        self._check_reach()
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise InvalidArgument(
                f"a block of {self.block_size} tokens would be {format_size(self.block_bytes)}, of layer "
                f"{self.model_layer(0)} alone {format_size(self.block_bytes // self.num_layers)}; at most 2 GiB: "
                "take a smaller block_size"
            )

    def _check_v_in_k(self) -> None:
        if self.v_in_k is not True and self.v_in_k is not False:
            raise WrongType(f"v_in_k must be a bool, not {type(self.v_in_k).__name__}")
        if not self.v_in_k:
            return
        if self.dtype == BYTES:
            raise InvalidArgument("v_in_k is for numbers, not for rows of bytes: give them head_dim_v = 0")
        if self.output_dim > self.head_dim:
            raise InvalidArgument(f"v_in_k: head_dim_v = {self.output_dim} is more than head_dim = {self.head_dim}")
        if isinstance(self.scales, Scales) and self.scales.k != self.scales.v:
            raise InvalidArgument("v_in_k: V is a part of K, so its scales must be those of K: give pagedkv.Scales(k)")

    def _check_scales(self) -> None:
        if self.dtype not in LARGEST:
            if self.scales is not None:
                raise InvalidArgument(f"scales are for {', '.join(LARGEST)}, not for {self.dtype}")
        elif isinstance(self.scales, Scales):
            self.scales.check_fits(self.num_layers, self.num_kv_heads)
            if self.scales.are_of_latents and not self.v_in_k:
                raise InvalidArgument("these scales are of K alone, as for latents: give pagedkv.Scales(k, v)")
        else:
            check_kind(self.scales)
            self._store("scales", TOKEN_HEAD)

    def _check_reach(self) -> None:
        self._store("reads", checked_reads(self.reads, self.num_layers))
        for name in ("windows", "chunks"):
            self._store(name, reach_of_layers(getattr(self, name), name, self.num_layers))
        for own, chunk in enumerate(self.chunks or ()):
            layer = self.model_layer(own)
            if chunk is not None and chunk % self.block_size:
                raise InvalidArgument(
                    f"layer {layer} has a chunk of {chunk} tokens: that must be a multiple of block_size, "
                    f"{self.block_size}"
                )
            if chunk is not None and self.windows is not None and self.windows[own] is not None:
                raise InvalidArgument(f"layer {layer} has a window and a chunk: a layer has one of them")

    @classmethod
    def of(
        cls, layers: Sequence[Layer], *, dtype: str = "float16", block_size: int = 16, layout: str | None = None,
        model: str = "", scales: str | Scales | None = None,
    ) -> KVSpec:  # fmt: skip
        """The spec of a model, layer by layer.

        Parameters
        ----------
        layers : all of one shape: :class:`Attention`, :class:`Latent` or :class:`Rows`, and :class:`SameAs`
            :meth:`pagedkv.Step.attend` keeps to their windows and chunks. A cache keeps all tokens of every layer, or
            with ``by_group=True`` those that each can still read.
        dtype, scales : of layers that name none.
        block_size, layout, model : see :class:`KVSpec`.

        Raises
        ------
        UnsupportedVariant
            The layers keep different things: a cache does not hold such models yet. The message names the layer.
        WrongType, InvalidArgument
        """
        if not isinstance(layers, list | tuple) or not layers:
            raise WrongType("layers must be a list of layers, at least one")
        dtype = dtype_name(dtype)
        check_kind(scales)
        own: list[Attention | Latent | Rows] = []
        reads: list[int] = []
        for number, layer in enumerate(check_layers(tuple(layers))):
            if isinstance(layer, SameAs):
                reads.append(reads[layer.layer])
                continue
            if not isinstance(layer, Attention | Latent | Rows):
                raise UnsupportedVariant(
                    f"layer {number} is {str(layer)[:120]}: a cache holds K and V of every layer in one shape"
                )
            reads.append(len(own))
            own.append(_resolved(layer, dtype, scales))
            layer = own[-1]
            if layer.stored != own[0].stored:
                raise UnsupportedVariant(
                    f"layer {number} keeps {layer.stored} and layer 0 {own[0].stored}: a cache holds layers of a shape"
                )
        one = own[0]
        if isinstance(one, Latent):
            return cls(
                len(own), 1, one.rank + one.rope_dim, one.dtype, block_size, layout=layout, model=model,
                head_dim_v=one.rank, v_in_k=True, scales=one.scales, reads=tuple(reads),
            )  # fmt: skip
        if isinstance(one, Rows):
            return cls(
                len(own), 1, one.k_bytes, BYTES, block_size, layout=layout, model=model, head_dim_v=one.v_bytes,
                scales=scales, reads=tuple(reads),
            )  # fmt: skip
        windows, chunks = (tuple(getattr(layer, name) for layer in own) for name in ("window", "chunk"))
        return cls(
            len(own), one.num_kv_heads, one.head_dim, one.dtype, block_size, layout=layout, model=model,
            scales=one.scales, windows=windows, chunks=chunks, reads=tuple(reads),
        )  # fmt: skip

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | str | os.PathLike[str], *, dtype: str | None = None, block_size: int = 16,
        layout: str | None = None, model: str = "", scales: str | Scales | None = None,
    ) -> KVSpec:  # fmt: skip
        """The spec of a model, from the path of its ``config.json`` or a mapping with the content.

        Names and defaults are those of transformers.

        Parameters
        ----------
        dtype : of the KV; None: that of the weights.
        block_size, layout, model, scales : see :class:`KVSpec`.

        Raises
        ------
        UnsupportedVariant
            Its layers keep different things, or no K and V of each token: a cache does not hold such models yet.
        WrongType, InvalidArgument
            No such file, a family that is not known, or a field that may change the KV and is not known.
        """
        found, layers = read_config(config), []
        for number, layer in enumerate(found.layers):
            if not isinstance(layer, Attention | Latent | SameAs):
                raise UnsupportedVariant(
                    f"layer {number} of this {found.model_type} model is {layer!r}: a cache holds K and V of every "
                    "layer in one shape; pagedkv plan --config shows the model's needs"
                )
            layers.append(layer)
        dtype = dtype or found.dtype or "float16"
        return cls.of(layers, dtype=dtype, block_size=block_size, layout=layout, model=model, scales=scales)

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the normalised form, once, before anybody sees the object

    def own_layer(self, layer: int) -> int:
        """Of the layers with KV of their own, the one that a layer of the model reads.

        Raises
        ------
        WrongType, InvalidArgument
            The model has no such layer.
        """
        if self.reads is None:
            return whole_number(layer, "layer", 0, self.num_layers - 1)
        return self.reads[whole_number(layer, "layer", 0, len(self.reads) - 1)]

    def model_layer(self, own: int) -> int:
        """The model's number of a layer with KV of its own.

        Raises
        ------
        WrongType, InvalidArgument
        """
        own = whole_number(own, "own", 0, self.num_layers - 1)
        return own if self.reads is None else self.reads.index(own)

    @property
    def num_model_layers(self) -> int:
        """Layers of the model, those that share KV included."""
        return self.num_layers if self.reads is None else len(self.reads)

    @property
    def itemsize(self) -> int:
        """Bytes of one number of K or V."""
        return ITEMSIZES[self.dtype]

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the stored numbers.

        Without ``ml_dtypes`` bfloat16 is its bits, uint16, and fp8 uint8.
        """
        return numpy_dtype(self.dtype)

    @property
    def exchange_dtype(self) -> str:
        """Name of the dtype as DLPack and ml_dtypes have it.

        Their ``float8_e4m3`` is another format than ours.
        """
        return "float8_e4m3fn" if self.dtype == "float8_e4m3" else self.dtype

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """NumPy dtype of gathered K and V: :attr:`np_dtype`, or float32 where numbers have scales."""
        return np.dtype(np.float32) if self.scales is not None else self.np_dtype

    @property
    def output_dim(self) -> int:
        """Numbers of V, and so of attention's output, for each token and head."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def width_of_v(self) -> int:
        """Numbers of V that a block holds for each token and head; 0 where V is a part of K."""
        return 0 if self.v_in_k else self.output_dim

    @property
    def has_scale_planes(self) -> bool:
        """Whether a block holds scales."""
        return self.scales == TOKEN_HEAD

    @property
    def scale_mode(self) -> str:
        """``"none"``, ``"tensor"``, ``"head"`` or ``"token_head"``."""
        return self.scales.per if isinstance(self.scales, Scales) else self.scales or "none"

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block; axis 1 is K, then V.

        Raises
        ------
        UnsupportedVariant
            A block is not one array: it holds scales, or V is not as wide as K.
        """
        if self.has_scale_planes or self.width_of_v != self.head_dim:
            kind = "with scales inside" if self.has_scale_planes else "whose V is not as wide as K"
            raise UnsupportedVariant(f"a block {kind} is not one array: take the views of KVCache.layer()")
        if self.layout == "HND":
            return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    def check_can_attend(self) -> None:
        """Raise UnsupportedVariant where only the caller knows the meaning of a block's bytes."""
        if self.dtype == BYTES:
            raise UnsupportedVariant("attend cannot compute with rows of bytes: only the caller knows their meaning")

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers, with its scales; a block may need some bytes more."""
        scales = 4 * (1 if self.v_in_k else 2) if self.has_scale_planes else 0
        one = (self.head_dim + self.width_of_v) * self.itemsize + scales
        return self.num_layers * self.num_kv_heads * one

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_layers * planes(self)[1]

    def fingerprint(self) -> bytes:
        """32 bytes that differ between any two specs whose blocks cannot stand for each other.

        Over every field, the layout's version and the machine's byte order; the same in every process. A model with
        other windows computes other KV, so they count too. A spec without scales and windows has the fingerprint of
        older files.
        """
        values: tuple[int | str, ...] = (
            LAYOUT_VERSION,
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            self.dtype,
            self.block_size,
            self.layout if self.layout in LAYOUTS else "NHD",
            self.model,
            sys.byteorder,
        )
        has_reach = not (self.windows is self.chunks is self.reads is None)
        if self.width_of_v != self.head_dim or self.scales is not None or has_reach:
            scales = self.scales.digest() if isinstance(self.scales, Scales) else self.scales or ""
            values = (*values, self.width_of_v, scales)
        if has_reach:
            listed = (self.windows, self.chunks, self.reads)
            values = (*values, *(" ".join(map(str, numbers or ())) for numbers in listed))
        if self.v_in_k:
            values = (*values, "v_in_k", self.output_dim)
        encoded = encode_fields(enumerate(values, start=1))
        return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES, person=b"pagedkv:spec:1").digest()


def _resolved(
    layer: Attention | Latent | Rows, dtype: str, scales: str | Scales | None
) -> Attention | Latent | Rows:
    """The layer with its dtype and scales as a cache takes them."""
    if isinstance(layer, Rows):
        return layer
    dtype = layer.dtype or dtype
    scales = scales if layer.scales is None else layer.scales
    if scales is None and dtype in LARGEST:
        scales = TOKEN_HEAD
    return dataclasses.replace(layer, dtype=dtype, scales=scales)
