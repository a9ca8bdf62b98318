"""Bookkeeping benchmarks: pagedkv, vLLM and SGLang in one run (``python -m bench.core``)."""
