"""Adapters: pagedkv as the prefix cache of runtimes that other people wrote.

Nothing is imported here. Each module needs its own runtime, and no adapter installs one:

    pagedkv.adapters.llama_cpp   attach(llm, memory=, disk=): for a llama_cpp.Llama
    pagedkv.adapters.mlx_lm      PromptCache(model, memory=, disk=): in the place of mlx-lm's LRUPromptCache
    pagedkv.adapters.mlx_server  in_server(memory, disk): the same in mlx_lm.server
    pagedkv.adapters.onnx        CachedDecoder(session, memory=, disk=, revision=): for sessions with past KV
    pagedkv.adapters.store       PrefixStore: for adapters of your own; NumPy alone
"""
