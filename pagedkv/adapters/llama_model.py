"""Which llama.cpp models can be cached, and a name for everything that their KV depends on.

Only functions of the module ``llama_cpp`` and attributes of ``llama_cpp.Llama`` are asked. The probe (probe.py) stands
behind the name: it notices settings that are not asked for here.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import struct
from typing import Any

from pagedkv.errors import NotSupported

TESTED = ("0.3.36", "0.3.36")  # versions of llama-cpp-python, the first and the last one
_SAMPLES, _SAMPLE_BYTES, _HEAD_BYTES = 256, 1 << 16, 16 << 20  # of a weights file
_SPLIT = re.compile(r"(.*-)00001-of-(\d{5})\.gguf")
_WHAT = "this llama_cpp.Llama"


def check_supported(llm: Any, runtime: Any) -> None:
    """Raise NotSupported where K and V of tokens are not all of the state; nothing is computed.

    Parameters
    ----------
    llm : llama_cpp.Llama
    runtime : the module ``llama_cpp``.
    """
    model, params = llm._model.model, llm.context_params
    plain_ropes = {runtime.LLAMA_ROPE_TYPE_NONE, runtime.LLAMA_ROPE_TYPE_NORM, runtime.LLAMA_ROPE_TYPE_NEOX}
    reasons = {
        "embeddings are not generated from a prefix": bool(params.embeddings),
        f"its context has {params.n_seq_max} sequences": params.n_seq_max != 1,
        "logits_all=True and draft models need the logits of every token of the prompt": bool(llm._logits_all),
        "its chat handler puts images in front of tokens": llm.chat_handler is not None,
        "its layers are recurrent, so a token has no state of its own": runtime.llama_model_is_recurrent(model),
        "some of its layers are recurrent, so a token has no state of its own": runtime.llama_model_is_hybrid(model),
        "it has an encoder": runtime.llama_model_has_encoder(model),
        "it generates by diffusion": runtime.llama_model_is_diffusion(model),
        "its sliding window drops tokens that a shorter prompt needs": runtime.llama_model_n_swa(model) > 0,
        "its positions have several dimensions (M-RoPE)": runtime.llama_model_rope_type(model) not in plain_ropes,
    }
    for reason, applies in reasons.items():
        if applies:
            raise NotSupported(_WHAT, reason)


def model_name(llm: Any, runtime: Any, layout: Any) -> str:
    """A text that differs between any two settings whose KV is known to differ.

    With the runtime's version: llama.cpp may change the stored numbers without saying so in a state, as in April 2026,
    when it began to rotate K and V before it quantises them.

    Raises
    ------
    OSError
        A weights file cannot be read.
    """
    p = llm.context_params
    positions = (
        p.rope_scaling_type, p.rope_freq_base, p.rope_freq_scale, p.yarn_ext_factor, p.yarn_attn_factor,
        p.yarn_beta_fast, p.yarn_beta_slow, p.yarn_orig_ctx,
    )  # fmt: skip
    original = [int(v) for key, v in llm.metadata.items() if key.endswith(".rope.scaling.original_context_length")]
    parts = {
        "weights": weights_digest(llm.model_path),
        "lora": f"{weights_digest(llm.lora_path)} x {llm.lora_scale}" if llm.lora_path else "",
        "overrides": repr(llm.kv_overrides) if llm.kv_overrides else "",
        "positions": positions,
        "long": any(llm.n_ctx() > length for length in original),  # some models then take other factors
        "types": (layout.k_type, layout.v_type),
        "rotation": os.environ.get("LLAMA_ATTN_ROT_DISABLE", ""),
        "llama-cpp-python": runtime.__version__,
    }
    return " ".join(f"{name}={value}" for name, value in parts.items())


def weights_digest(path: str) -> str:
    """A digest of a GGUF: its size, its first 16 MiB and 256 samples of 64 KiB.

    Of a split one, of all parts.

    Raises
    ------
    OSError
    """
    digest = hashlib.blake2b(digest_size=16)
    split = _SPLIT.fullmatch(os.path.basename(path))
    files = [path]
    if split is not None:
        pattern = glob.escape(os.path.join(os.path.dirname(path), split[1])) + f"?????-of-{split[2]}.gguf"
        files = sorted(glob.glob(pattern))
    for name in files:
        size = os.path.getsize(name)
        digest.update(struct.pack("<Q", size))
        with open(name, "rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            if size > _HEAD_BYTES:
                for sample in range(_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
