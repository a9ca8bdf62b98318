// Merges the partitions of the PARTITIONED schedule (V2). Grid (num_seqs, num_kv_heads, row tiles), as the partitions' kernel but
// for the partitions.
#include "pagedkv/finish.cuh"

using namespace pagedkv;

extern "C" __global__ __launch_bounds__(128) void decode_reduce(const __grid_constant__ AttentionParams p) {
  static_assert(SCHEDULE == kWhole, "one CTA per row tile");
  Schedule schedule(p);
  Segment s;
  if (!schedule.next(s)) return;
  const int tokens = p.schedule.partition_tokens, num_partitions = p.schedule.num_partitions;
  const int first = s.begin / tokens, num_parts = s.begin < s.end ? ceil_div(s.end, tokens) - first : 0;
  const int row_tile = blockIdx.z;
  const int base = ((s.seq * p.num_kv_heads + s.kv_head) * gridDim.z + row_tile) * num_partitions + first;
  merge_parts(p, s, num_parts, [&](int part) { return base + part; });
}
