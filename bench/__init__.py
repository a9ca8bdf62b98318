"""Benchmarks. A bench never asserts, a test never times; each bench uses :mod:`bench.timing`, writes JSON."""
