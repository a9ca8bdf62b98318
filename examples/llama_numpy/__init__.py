"""A real language model in NumPy whose attention and cache are pagedkv's.

``python -m examples.llama_numpy "prompt"``.

Read in this order: ``model`` (the forward pass over a step), ``generation`` (decoding, parallel samples), ``beams``,
``serving`` (many requests, by pagedkv.Scheduler); then where the weights come from: ``source``, ``gguf_file``,
``weight_cache``, ``weights``; then ``tokenizer``, ``options`` and ``command``.
"""
