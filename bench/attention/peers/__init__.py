"""Other libraries' attention, one module each.

A module imports its library when it is asked to compute.
"""

from __future__ import annotations

from bench.attention.sections import Peers


def all_peers() -> Peers:
    """Every peer this bench knows, installed or not."""
    from bench.attention.peers.fa3 import FlashAttention3
    from bench.attention.peers.flashinfer_cascade import FlashInferCascade
    from bench.attention.peers.flashinfer_decode import FlashInferDecode
    from bench.attention.peers.flashinfer_prefill import FlashInferPrefill
    from bench.attention.peers.sdpa import Sdpa
    from bench.attention.peers.xqa import Xqa

    return Peers(
        decode=(FlashInferDecode(tensor_cores=False), FlashInferDecode(tensor_cores=True), FlashAttention3(), Xqa()),
        prefill=(FlashInferPrefill("fa2"), FlashInferPrefill("fa3"), FlashAttention3(), Sdpa()),
        cascade=(FlashInferCascade(),),
        contiguous=(Sdpa(),),
    )
