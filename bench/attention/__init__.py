"""Attention on the GPU: this library's kernels, its peers and the memory's own speed, in one run."""
