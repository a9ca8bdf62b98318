"""Blocks and prefixes for C; nothing here is callable from Python."""
