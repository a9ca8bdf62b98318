"""Attention on the CPU, in C, on threads of its own, without the GIL.

There are kernels for AVX-512, AVX2 and every other CPU.
"""

from pagedkv.cpu.attention import attend
from pagedkv.cpu.kv_gatherer import gather
from pagedkv.cpu.kv_writer import write_kv
from pagedkv.cpu.threads import isa, isas, num_threads, set_isa, set_num_threads

__all__ = ["attend", "gather", "isa", "isas", "num_threads", "set_isa", "set_num_threads", "write_kv"]
