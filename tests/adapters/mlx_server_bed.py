"""A folder of a random model for mlx_lm.server, and its process.

python -m tests.adapters.mlx_server_bed MODEL CACHE PORT      runs the server with our cache in CACHE; "-": its own
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCAB = 512
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
    "tie_word_embeddings": False, "eos_token_id": VOCAB - 1,
}  # fmt: skip


def make(folder: Path, seed: int = 0, **changes: Any) -> None:
    """Write the folder of a model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = {**CONFIG, **changes}
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{VOCAB - 1}", "unk_token": "w0"})
    )


def main() -> None:
    """Run the server as its command does."""
    import mlx_lm.server

    import pagedkv as pk
    from pagedkv.adapters.mlx_server import in_server

    model, cache, port = sys.argv[1:4]
    sys.argv[1:] = ["--model", model, "--port", port, "--temp", "0", *sys.argv[4:]]
    if cache == "-":
        mlx_lm.server.main()
        return
    with in_server("16MiB", pk.Disk(cache, "64MiB")):
        mlx_lm.server.main()


if __name__ == "__main__":
    main()
