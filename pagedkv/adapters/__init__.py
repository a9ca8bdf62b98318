"""Adapters: pagedkv as the prefix cache of runtimes that other people wrote.

Nothing is imported here. Each module needs its own runtime, and no adapter installs one:

    pagedkv.adapters.llama_cpp   attach(llm, memory=, disk=): for a llama_cpp.Llama
    pagedkv.adapters.onnx        CachedDecoder(session, memory=, disk=, revision=): for sessions with past KV
    pagedkv.adapters.store       PrefixStore: for adapters of your own; NumPy alone
"""
