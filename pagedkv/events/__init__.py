"""KV events over ZeroMQ: tell routers the prefixes of this cache, in vLLM's format.

::

    with pk.KVCache(spec, "8GiB", event_words=1 << 20) as cache:
        with pk.events.ZmqPublisher(cache, "tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558") as publisher:
            ...  # after each step:
            publisher.publish()

An event holds the tokens of its blocks, so who can connect can read prompts. Needs the extra ``events``.
"""

from pagedkv.events.publisher import ZmqPublisher
from pagedkv.events.wire import Labels

__all__ = ["Labels", "ZmqPublisher"]
