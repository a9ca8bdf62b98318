"""Recency lists and eviction policies; nothing here is callable from Python."""
