"""PyTorch as a guest: its tensors are written and attended to where they lie.

Needs PyTorch, which no extra names.
"""

import numpy as np
import torch

import pagedkv as pk
from pagedkv.interop import as_array

LAYERS, HEADS, DIM, VOCAB = 2, 2, 64, 500
spec = pk.KVSpec(LAYERS, HEADS, DIM, "bfloat16", block_size=16)
torch.manual_seed(0)
embedding = torch.randn(VOCAB, HEADS * DIM, dtype=torch.bfloat16)
weights = torch.randn(LAYERS, 4, HEADS * DIM, HEADS * DIM, dtype=torch.bfloat16) / (HEADS * DIM) ** 0.5
head = torch.randn(HEADS * DIM, VOCAB, dtype=torch.bfloat16)


@torch.no_grad()
def forward(step: pk.Step) -> torch.Tensor:
    """Logits of every sequence in the step."""
    x = embedding[torch.from_dlpack(step.tokens)]  # a view of the step's tokens
    for layer in range(LAYERS):
        q, k, v = ((x @ weights[layer, i]).view(-1, HEADS, DIM) for i in range(3))
        assert as_array(k).ctypes.data == k.data_ptr()  # what the cache reads is the tensor's own memory
        step.write(layer, k, v)
        o = torch.empty(q.shape)
        assert step.attend(layer, q.float(), out=o) is o  # and what it writes: float32, as q is
        x = torch.tanh(x + o.flatten(1).bfloat16() @ weights[layer, 3])
    return x[torch.from_dlpack(step.q_indptr[1:] - 1).long()] @ head


prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
answers = []
with pk.KVCache(spec, device_memory="4MiB") as cache:
    for _ in range(2):
        with cache.sequence(prompt) as seq:
            print(f"{seq.num_computed} of {len(prompt)} prompt tokens cached")
            for _ in range(8):
                with cache.step([seq]) as step:
                    logits = forward(step)
                seq.append(int(logits[0].argmax()))
            answers.append(seq.tokens[len(prompt) :].tolist())
    with cache.sequence(prompt) as seq:  # KV for code that knows no pages: gathered into tensors
        k, v = torch.empty(2, LAYERS, seq.num_computed, HEADS, DIM, dtype=torch.bfloat16)
        assert seq.gather(out=(k, v))[0] is k
        assert torch.isfinite(k).all()
assert answers[0] == answers[1]
print(answers[0])
