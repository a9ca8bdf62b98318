"""Every eviction policy on the development traces, at many sizes, between LRU and MIN."""
