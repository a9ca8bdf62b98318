"""The KV of a model whose layers keep different blocks, over one arena in extents.

Each group of layers has its own pages, page ids and tables (:mod:`pagedkv.spec.groups`). A :class:`GroupKV` routes a
layer's writes, attention and gathers to a :class:`DeviceKV` over its group's pages, which are rows of the same arena;
gpu_group_kv.py routes them to the kernels of a GPU. The groups' pages overlap: the core, which gives out page ids, lets
an extent belong to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.cache.device_kv import DeviceKV, log_overflow
from pagedkv.cache.storage import BoundStep, StepTables
from pagedkv.errors import InvalidArgument, LayoutMismatch, UnsupportedVariant
from pagedkv.spec.block_layout import check_outputs, gathered_shapes
from pagedkv.spec.groups import Group, GroupLayout
from pagedkv.spec.kv_spec import KVSpec
from pagedkv.spec.sizes import whole_number


class GroupKV:
    """Reads and writes the KV of several groups of layers.

    Layers are the spec's own, those with KV, counted over the whole model.

    Parameters
    ----------
    spec : of the whole model.
    layout : of this spec, as :func:`pagedkv.spec.groups.layout_of` chooses it.
    arena : uint8 [num_extents, extent_bytes], C-contiguous; views share it.

    Raises
    ------
    LayoutMismatch
        The arena is not such an array.
    """

    is_synchronous = True

    def __init__(self, spec: KVSpec, layout: GroupLayout, arena: Any) -> None:
        fits = arena.ndim == 2 and arena.dtype == np.uint8 and arena.shape[1] == layout.extent_bytes
        if not fits or not arena.flags.c_contiguous:
            raise LayoutMismatch(
                f"the arena must be uint8 [num_extents, {layout.extent_bytes}] and C-contiguous, got {arena.dtype} "
                f"{list(arena.shape)}"
            )
        self.spec, self.layout, self._arena = spec, layout, arena
        self._told: list[int] = []
        self._kvs: tuple[Any, ...] = tuple(
            self._opened(group, arena.reshape(len(arena) * count, stride))
            for group, count, stride in zip(layout.groups, layout.per_extent, layout.strides, strict=True)
        )
        where = {layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)}
        self._where = [where[layer] for layer in range(spec.num_layers)]
        self.decode = self._kvs[0].decode

    def _opened(self, group: Group, rows: Any) -> Any:
        """Open the KV of one group over its pages, which begin the rows, uint8 [num_pages, stride]."""
        return _Pages(self.spec, group, rows[:, : group.page_bytes], self._told)

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return len(self._kvs)

    @property
    def overflowing_writes(self) -> int:
        """Calls of `write` that stored a finite number as infinity."""
        return sum(kv.overflowing_writes for kv in self._kvs)

    def group_of(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and the layer's number within it.

        Raises
        ------
        WrongType, InvalidArgument
            There is no such layer.
        """
        if type(layer) is not int or not 0 <= layer < len(self._where):  # raises
            layer = whole_number(layer, "layer", 0, self.spec.num_layers - 1)
        return self._where[layer]

    def group_layers(self, group: int) -> tuple[int, ...]:
        """The layers of a group, ascending."""
        return self.layout.groups[self._checked(group)].layers

    def layer(self, layer: int) -> tuple[Any, Any]:
        """K and V of a layer, [num_pages of its group, block_size, num_kv_heads, head_dim] views."""
        group, within = self.group_of(layer)
        views: tuple[Any, Any] = self._kvs[group].layer(within)
        return views

    def layer_scales(self, layer: int) -> tuple[Any, Any] | None:
        """Scales of K and V of a layer by its group's pages, as :meth:`DeviceKV.layer_scales`."""
        group, within = self.group_of(layer)
        scales: tuple[Any, Any] | None = self._kvs[group].layer_scales(within)
        return scales

    def bind(self, arrays: StepTables, part: int = 0) -> GroupStep:
        """Bind one step: its writes and its attention, in the pages of each group.

        Parameters
        ----------
        arrays : the tables of group 0
            Their attribute ``groups`` holds the StepTables of each short group. There, ``block_tables`` holds the pages
            of a sequence's last blocks, and ``seq_lens`` counts from the first of them.
        part : as :meth:`pagedkv.cache.storage.KV.bind`.

        Raises
        ------
        LayoutMismatch
            The step has tables of another number of groups.
        """
        tables = (arrays, *getattr(arrays, "groups", ()))
        if len(tables) != self.num_groups:
            raise LayoutMismatch(f"the step has tables for {len(tables)} groups of layers, and {self.num_groups} exist")
        bound = tuple(kv.bind(of_group, part) for kv, of_group in zip(self._kvs, tables, strict=True))
        return GroupStep(self, tables, bound)

    def bind_group(self, group: int, tables: StepTables, part: int = 0) -> BoundStep:
        """Bind a step of one group, whose layers count from 0 within the group."""
        bound: BoundStep = self._kvs[self._checked(group)].bind(tables, part)
        return bound

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copy whole pages of group 0, (source, destination) int32 [n, 2], one after the other."""
        self.copy_pages(0, pairs)

    def copy_pages(self, group: int, pairs: NDArray[np.int32]) -> None:
        """Copy whole pages of a group, (source, destination) int32 [n, 2], one after the other."""
        self._kvs[self._checked(group)].copy_blocks(pairs)

    def zero_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Fill whole pages of group 0 with zeros, int32 [n]."""
        self.zero_pages(0, blocks)

    def zero_pages(self, group: int, pages: NDArray[np.int32]) -> None:
        """Fill whole pages of a group with zeros, int32 [n]."""
        self._kvs[self._checked(group)].zero_blocks(pages)

    def gather(
        self, blocks: NDArray[np.int32], start: int, stop: int, out: tuple[Any, Any] | None, layout: str = "NHD"
    ) -> tuple[Any, Any]:
        """Refuse: the blocks of group 0 do not name the pages of the others.

        Raises
        ------
        UnsupportedVariant
        """
        raise UnsupportedVariant(
            "this cache keeps other blocks of some layers, which these blocks do not name: use Sequence.gather"
        )

    def gather_pages(
        self,
        tables: Sequence[tuple[int, NDArray[np.int32]]],
        start: int,
        stop: int,
        out: tuple[Any, Any] | None,
        layout: str = "NHD",
    ) -> tuple[Any, Any]:
        """K and V of tokens `start` to `stop` - 1 of a sequence, of all layers.

        Parameters
        ----------
        tables : (first, pages) of each group; ``pages[c]`` int32 is the page of block ``first + c``.
        out, layout : and the result, as :meth:`DeviceKV.gather`.

        Raises
        ------
        InvalidArgument
            A group no longer has the pages of `start`. Nothing was written.
        LayoutMismatch
            There are tables of another number of groups, or `out` does not fit. Nothing was written.
        """
        if len(tables) != self.num_groups:
            raise LayoutMismatch(f"there are tables for {len(tables)} groups of layers, and {self.num_groups} exist")
        self._check_reaches(tables, start, stop)
        out = self._outputs(out, gathered_shapes(self.spec, start, stop, layout))
        if start == stop:
            return out
        for number, (first, pages) in enumerate(tables):
            skipped = first * self.spec.block_size
            self._gather_group(number, pages, start - skipped, stop - skipped, out, layout)
        return out

    def _outputs(self, out: tuple[Any, Any] | None, shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, Any]:
        """The arrays to gather into: the caller's, checked, or new ones."""
        dtype = self.spec.value_dtype
        if out is None:
            out = (np.empty(shapes[0], dtype), np.empty(shapes[1], dtype))
        check_outputs(out, shapes, dtype, np.ndarray)
        for array in out:
            if not array.flags.writeable:
                raise LayoutMismatch("out is read-only")
            if np.may_share_memory(array, self._arena):
                raise LayoutMismatch("out shares memory with the arena; give arrays of your own")
        return out

    def _gather_group(
        self, number: int, pages: NDArray[np.int32], start: int, stop: int, out: tuple[Any, Any], layout: str
    ) -> None:
        """Gather the layers of one group, whose tokens count from its first page."""
        kv, index = self._kvs[number], _index(self.layout.groups[number].layers)
        if isinstance(index, slice):
            kv.gather(pages, start, stop, (out[0][index], out[1][index]), layout)
            return
        for array, values in zip(out, kv.gather(pages, start, stop, None, layout), strict=True):
            array[index] = values

    def _check_reaches(self, tables: Sequence[tuple[int, NDArray[np.int32]]], start: int, stop: int) -> None:
        """Raise InvalidArgument unless every group has pages from `start` on."""
        shortest = max(range(len(tables)), key=lambda group: tables[group][0])
        begin = tables[shortest][0] * self.spec.block_size
        if start < begin and start < stop:
            layer = self.spec.model_layer(self.layout.groups[shortest].layers[0])
            raise InvalidArgument(
                f"layer {layer} keeps only its last tokens, from {begin} on, and start is {start}: gather from there, "
                "or open the cache with by_group=False"
            )

    def _checked(self, group: int) -> int:
        return whole_number(group, "group", 0, self.num_groups - 1)


class GroupStep:
    """The KV of one step: each layer's, in the pages of its group.

    Parameters
    ----------
    kv : GroupKV
    tables : of each group.
    bound : the step of each group over these tables.
    """

    def __init__(self, kv: GroupKV, tables: tuple[StepTables, ...], bound: tuple[BoundStep, ...]) -> None:
        self._kv, self._tables, self._bound = kv, tables, bound

    def write(self, layer: int, k: Any, v: Any, stream: Any = None) -> None:
        """Put the new tokens' K and V into the slots of the layer's group, as :meth:`StepKV.write`."""
        group, within = self._kv.group_of(layer)
        self._bound[group].write(within, k, v, stream)

    def attend(self, layer: int, q: Any, **options: Any) -> Any:
        """Attention of the new tokens over the group's pages, as :meth:`StepKV.attend`.

        The caller gives the layer's window, and cuts the tables of layers with chunks (:meth:`bound_over`). A mask is
        refused in short groups: it has a bit for every key, and their tables begin later.

        Raises
        ------
        UnsupportedVariant
            The layer is of a short group, and the queries have a mask.
        """
        group, within = self._kv.group_of(layer)
        if group and options.get("mask") is not None:
            raise UnsupportedVariant(
                f"layer {self._kv.spec.model_layer(layer)} keeps only its last tokens, and a mask is over all of them: "
                "open the cache with by_group=False"
            )
        return self._bound[group].attend(within, q, **options)

    def tables_of(self, layer: int) -> StepTables:
        """The tables of the layer's group."""
        return self._tables[self._kv.group_of(layer)[0]]

    def bound_over(self, layer: int, tables: StepTables, part: int = 0) -> GroupStep:
        """The step with other tables for the layer's group, with buffers of their own (`part`)."""
        group, _ = self._kv.group_of(layer)
        changed, bound = list(self._tables), list(self._bound)
        changed[group], bound[group] = tables, self._kv.bind_group(group, tables, part)
        return GroupStep(self._kv, tuple(changed), tuple(bound))


class _Pages(DeviceKV):
    """The pages of one group.

    The groups of a KV share `told`, so that the first write of any of them that overflows is logged, and no other.
    """

    def __init__(self, whole: KVSpec, group: Group, arena: NDArray[np.uint8], told: list[int]) -> None:
        super().__init__(group.spec, arena)
        self._whole, self._own, self._told = whole, group.layers, told

    def _overflowed(self, layer: int) -> None:
        self.overflowing_writes += 1
        if not self._told:
            self._told.append(self._own[layer])
            log_overflow(self._whole, self._own[layer])


def _index(layers: tuple[int, ...]) -> slice | list[int]:
    """An index of these layers: a slice, which makes views, where they lie at equal distances."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    regular = range(layers[0], layers[-1] + 1, step)
    return slice(regular.start, regular.stop, step) if tuple(regular) == layers else list(layers)
