"""``python -m tests.realmodel.make_gemma_goldens FILE``: Gemma 3 270M in llama.cpp.

The GGUF's weights are expanded to float32 and written as another GGUF, which llama.cpp computes with K and V in
float32. For each prompt: its tokens, the greedy tokens behind it, and the 20 largest logits of each.

llama-cpp-python is not among the test extras: it compiles for minutes. The goldens were made with version 0.3.36:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" pip install llama-cpp-python==0.3.36
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from examples.gemma_numpy import source

SYSTEM = "You are a careful teacher. You answer in short sentences. You give one example. You never guess. " * 32
PROMPTS = {  # the last three reach far beyond the window of 512 tokens
    "france": "The capital of France is",
    "code": "import numpy as np\n\ndef softmax(x):\n",
    "mixed": "In 2024, München had 1.5 million people; 北京 had 21 million. "
    "Prices: $3.50, €4.10. Emoji: 🙂👍🏽\n\tTabs too.",
    "single": "The",
    "table": " ".join(f"Row {n}: value {n * n}." for n in range(170)),
    "shared_a": SYSTEM + "Name a prime number.",
    "shared_b": SYSTEM + "Why is the sky blue?",
}
COUNT, TOP = 24, 20


def expanded(path: Path, target: Path) -> None:
    """Write the GGUF at `path` with all its weights in float32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, "gemma3")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(tensor.shape[::-1].tolist()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Compute all prompts and write them."""
    import llama_cpp

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "gemma-f32.gguf")
        expanded(source.find_checked(), whole)
        model = llama_cpp.Llama(
            str(whole), n_ctx=4096, n_batch=256, n_threads=2, type_k=0, type_v=0, logits_all=False, verbose=False
        )
        for name, prompt in PROMPTS.items():
            ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
            greedy, tops, logits = list[int](), list[list[int]](), list[list[float]]()
            model.reset()
            model.eval(ids)
            for _ in range(COUNT):
                row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),))
                order = np.argsort(-row, kind="stable")[:TOP]
                greedy.append(int(order[0]))
                tops.append(order.tolist())
                logits.append([round(float(one), 4) for one in row[order]])
                model.eval([greedy[-1]])
            found[name] = {"prompt": prompt, "ids": ids, "greedy": greedy, "top_ids": tops, "top_logits": logits}
            print(name, len(ids), repr(model.detokenize(greedy).decode(errors="replace")), file=sys.stderr)
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in found.items())
    Path(sys.argv[1]).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
