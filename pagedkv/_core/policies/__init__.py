"""Eviction policies: one file or folder each, chosen by name through the registry."""
