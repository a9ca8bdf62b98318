// Parameters of bench_read. Python reads this file for the layout of the struct (kernels/params.py).
#pragma once
#include "pagedkv/base.cuh"

struct BenchReadParams {
  const void* data;  // page 0, 16-byte aligned
  const int* pages;  // [num_pages] ids of the pages to read, in this order; PAGED=0: null, pages 0..num_pages-1
  u32* sums;         // [gridDim.x], written: what each CTA summed
  i64 page_stride;   // vectors of 16 bytes from one page to the next
  u32 num_pages;     // times HEADS under 2^32
};
