"""The wire format of KV events: vLLM's tagged maps, in a batch array, as MessagePack.

A batch is ``[ts, events, data_parallel_rank]``. Source of the fields: ``vllm/distributed/kv_events.py``. All required
fields are there also where they are nil; hashes and tokens are unsigned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagedkv._core.events import KVEvent
from pagedkv._core.tier import Tier
from pagedkv.errors import WrongType

MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
BLOCKS = 2048  # of a message, at most, unless a single event has more

Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels of a namespace in its events, by which a router tells its blocks from others.

    Parameters
    ----------
    lora_id, lora_name : of the adapter.
    cache_salt : field of the same name, which Dynamo and SGLang read.
    extra_keys : keys of the first block of a prefix, vLLM's form of a salt.
    """

    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: tuple[str | int, ...] | None = None


Label: TypeAlias = Callable[[bytes], Labels | None]


class Translator:
    """KVEvents to maps. One thread at a time.

    Parameters
    ----------
    block_size : tokens of a block.
    label : called with the ``Namespace.digest()`` of an event; None keeps the namespace's events here. Without `label`
        all namespaces are published, and only their hashes tell them apart.
    by_group : whether the blocks are those of the group of layers that sees everything: their maps say so.
    """

    def __init__(self, block_size: int, label: Label | None = None, *, by_group: bool = False) -> None:
        self._size, self._label = block_size, label
        self._group: Event = {"group_idx": 0} if by_group else {}
        self._kind: Event = {"kv_cache_spec_kind": "full_attention"} if by_group else {}

    def __call__(self, events: Iterable[KVEvent]) -> list[Event]:
        """The maps of these events.

        Raises
        ------
        WrongType
            `label` returned something else than Labels or None.
        """
        return [told for event in events if (told := self._one(event)) is not None]

    def _one(self, event: KVEvent) -> Event | None:
        if event.tier is None:
            return {"type": "AllBlocksCleared"}
        if event.kind not in ("stored", "removed"):  # the format has no event for boundaries
            return None
        labels: Labels | None = Labels()
        if event.namespace is None:  # it was dropped since: later events remove its blocks
            labels = None if event.kind == "stored" else labels
        elif self._label is not None:
            labels = self._label(event.namespace)
            if labels is not None and not isinstance(labels, Labels):
                raise WrongType(f"label must return Labels or None, not {type(labels).__name__}")
        if labels is None:
            return None
        where = {"medium": MEDIA[event.tier], "locality": "LOCAL", **self._group}
        if event.kind == "removed":
            return {"type": "BlockRemoved", "block_hashes": event.hashes, **where}
        tokens = event.token_ids
        if min(tokens) < 0:  # engines' own tokens, of images and the like
            tokens = tuple(token & 0xFFFFFFFF for token in tokens)
        told: Event = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent_hash,
            "token_ids": tokens,
            "block_size": self._size,
            "lora_id": labels.lora_id,
            "lora_name": labels.lora_name,
            **where,
            **self._kind,
        }
        if labels.cache_salt is not None:
            told["cache_salt"] = labels.cache_salt
        if labels.extra_keys is not None and event.depth == 0:
            told["extra_keys"] = [labels.extra_keys, *[None] * (len(event.hashes) - 1)]
        return told


def messages(events: list[Event], blocks: int = BLOCKS) -> Iterator[list[Event]]:
    """The events in order, parted where a message would have more than so many blocks."""
    part: list[Event] = []
    held = 0
    for event in events:
        size = num_blocks(event)
        if part and held + size > blocks:
            yield part
            part, held = [], 0
        part.append(event)
        held += size
    if part:
        yield part


def num_blocks(event: Mapping[str, Any]) -> int:
    """Blocks that an event is about."""
    return len(event.get("block_hashes", ()))
