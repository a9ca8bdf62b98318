"""Tools for a cache directory: its content, its integrity, and the speed of its disk.

The commands ``pagedkv inspect``, ``pagedkv verify`` and ``pagedkv doctor --disk``.
"""
