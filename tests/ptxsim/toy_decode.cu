// A paged kernel small enough to read at a glance, with bugs that -DBUG_... plants one at a time.
// o[seq][split][d] = sum over the split's tokens of (q . k) * v[d]; pages of 8 tokens, 32 dims, one CTA per split and sequence.
constexpr int kPage = 8, kDim = 32, kWarps = 4;

__device__ void copy16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

extern "C" __global__ void k(const float* q, const float* key, const float* value, const int* table, const int* lengths, float* o,
                             int max_pages) {
  __shared__ __align__(16) float s[kWarps][2][kPage][kDim];
  const int seq = blockIdx.y, split = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pages = (lengths[seq] + kPage - 1) / kPage, per_split = (pages + gridDim.x - 1) / gridDim.x;
  const int first = split * per_split, last = min(first + per_split, pages);
  const float my_q = q[seq * kDim + lane];
  float sum = 0;
#ifdef BUG_EARLY_EXIT
  if (first + warp >= last) return;
#endif
  for (int page = first + warp; page < last; page += kWarps) {
#ifdef BUG_TABLE
    const int block = table[seq * max_pages + page + 1];
#else
    const int block = table[seq * max_pages + page];
#endif
#ifndef BUG_NO_SYNCWARP_BEFORE
    __syncwarp();  // the buffer has been read
#endif
    for (int i = lane; i < kPage * kDim / 4; i += 32) {
      const int token = i / (kDim / 4), d = i % (kDim / 4) * 4;
#ifdef BUG_TAIL
      const bool valid = true;
#else
      const bool valid = page * kPage + token < lengths[seq];
#endif
      copy16(&s[warp][0][token][d], key + (block * kPage + token) * kDim + d, valid);
      copy16(&s[warp][1][token][d], value + (block * kPage + token) * kDim + d, valid);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#ifndef BUG_NO_WAIT
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
#ifndef BUG_NO_SYNCWARP_AFTER
    __syncwarp();  // all lanes' copies have landed
#endif
    for (int token = 0; token < kPage; ++token) {
      float dot = my_q * s[warp][0][token][lane];
#ifdef BUG_SHUFFLE
      if (dot > 0)
#endif
        for (int step = 16; step; step >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
      sum += dot * s[warp][1][token][lane];
    }
  }
#ifndef BUG_NO_SYNC_BEFORE_REUSE
  __syncthreads();
#endif
  float(*parts)[kDim] = reinterpret_cast<float(*)[kDim]>(s);
  parts[warp][lane] = sum;
#ifdef BUG_SYNC_IN_BRANCH
  if (first < last)
#endif
#ifndef BUG_NO_SYNC
    __syncthreads();
#endif
  if (warp) return;
  for (int i = 1; i < kWarps; ++i) sum += parts[i][lane];
#ifdef BUG_SAME_OUTPUT
  o[seq * gridDim.x * kDim + lane] = sum;
#else
  o[(seq * gridDim.x + split) * kDim + lane] = sum;
#endif
}
