"""Gemma 3 in NumPy on a pagedkv cache: layers with a window beside others."""
