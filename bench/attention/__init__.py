"""Attention on the GPU.

This library's kernels, its peers and the memory's own speed, in one run.
"""
