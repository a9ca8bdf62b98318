"""A process that computes a prompt, writes its KV to a disk tier, and dies.

test_tiers.py runs it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pagedkv as pk
from examples.gemma_numpy.model import Gemma
from examples.gemma_numpy.weights import load_model as load_gemma
from examples.llama_numpy.model import Llama
from examples.llama_numpy.weight_cache import load_model
from tests.realmodel.bed import kv_of


def main(order: dict[str, Any]) -> None:
    """Compute, note the KV of the whole blocks beside the disk tier, flush, and be killed."""
    folder = Path(order["folder"])
    path = Path(order["gguf"])
    model = Gemma(load_gemma(path).weights) if order["is_gemma"] else Llama(load_model(path).weights)
    spec = model.config.kv_spec(order["model"], block_size=order["block_size"])
    by_group = order.get("by_group", False)
    disk = pk.Disk(str(folder / "kv"), pk.Blocks(order["disk"]), admission="all")
    cache = pk.KVCache(spec, pk.Blocks(order["device"]), disk=disk, by_group=by_group)
    with cache.sequence(order["prompt"]) as seq:
        for token in order["follow"]:
            while (left := seq.num_tokens - seq.num_computed) > 0:
                with cache.step([seq], q_lens=[min(left, order.get("chunk", left))]) as step:
                    model.forward(step)
            seq.append(token)
        whole = seq.num_computed // spec.block_size * spec.block_size
        (folder / "kv.bin").write_bytes(kv_of(seq, whole, 512 if by_group else None))
    assert cache.flush() >= whole // spec.block_size
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
