"""A cache's use of a remote store: questions about blocks, claims on them, and sends."""
