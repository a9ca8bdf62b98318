"""An HTTP server in the manner of OpenAI's over pagedkv: ``python -m examples.server``.

Read in this order: ``engine`` (what the server needs of a model), ``toy`` and ``llama`` (two models), ``asks`` (what a
request may say, and what is refused), ``replies`` (what it gets), ``app`` (the routes), ``front`` (connections, and the
end of them), ``command`` (options, start and stop). The loop that steps is :class:`pagedkv.serving.AsyncScheduler`.
"""
