"""CUDA kernels: sources, compilation, launchers, and one typed wrapper per kernel.

Knows arrays, not caches.
"""
