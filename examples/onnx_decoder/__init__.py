"""SmolLM2 as an ONNX graph with past and present KV, behind pagedkv's cache."""
