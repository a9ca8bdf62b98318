"""Benchmarks. A bench never asserts, a test never times.

Each bench uses :mod:`bench.timing`, writes JSON.
"""
