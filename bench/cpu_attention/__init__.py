"""Attention on the CPU beside its peers and the machine's ceilings.

``python -m bench.attention --device cpu``.
"""
