"""Goodput and latencies of examples/server under a load of chats, as clients see them."""
