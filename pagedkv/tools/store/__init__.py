"""Tools for a cache directory: what is in it, whether it is whole, and whether the disk below is worth it.

The commands ``pagedkv inspect``, ``pagedkv verify`` and ``pagedkv doctor --disk``.
"""
