// Who computes what. The work of a call is a list of row tiles: ROW_TILE rows (query, head of the group) of one sequence and one
// KV head, over TILE_TOKENS-token tiles of its keys. A schedule gives each CTA segments of that list:
//
//   WHOLE        (V1) one CTA per row tile: grid (num_seqs, num_kv_heads, row tiles of the longest sequence)
//   PARTITIONED  (V2) one CTA per partition of fixed size: grid z also counts partitions; decode_reduce merges them
//   EVEN         a constant grid; each CTA takes an equal slice of all units. A row tile costs its tiles and kOverheadUnits for
//                its start and its end, so that a thousand short sequences are shared out as well as one long one. The slices
//                follow from unit_indptr, which the plan kernel computes from seq_lens on the device: a captured graph replays
//                with other lengths. The last CTA to arrive at a row tile merges its parts.
//   LISTED       CTAs take items of a list that the prefill_plan kernel makes on the device from the lengths: row tiles, longest
//                sequence and last rows first, KV heads as neighbours. Where few row tiles have many keys, a row tile is several
//                items, parts of its keys (parts.cuh); the last CTA to arrive at it merges them. The grid is a CTA per item that may
//                be, or as many as the GPU runs at once, each CTA coming for the next item as soon as it is done with one.
//
// EVEN after FlashMLA's even split and stream-K (Osama et al. 2023).
#pragma once
#include "pagedkv/variants.cuh"

namespace pagedkv {

constexpr int kWhole = 0, kPartitioned = 1, kEven = 2, kListed = 3;
constexpr int kOverheadUnits = 2, kLeastUnits = 4;

// The least and the greatest position of some queries.
struct PositionSpan {
  int least, greatest;
};
// Of the queries from `first` to `last` of a sequence, in order from its last key back, or of all where `spans` are given.
__device__ __forceinline__ PositionSpan span_of(const int* spans, int seq, int seq_len, int q_len, int first, int last) {
  if (spans) return {spans[2 * seq], spans[2 * seq + 1]};
  return {seq_len - q_len + first, seq_len - q_len + last};
}

// First and one past the last tile that any query of a sequence sees, the first of which stands at `first_position`. No query: none.
struct TileRange {
  int begin, end;
};
__device__ __forceinline__ TileRange sequence_tiles(int seq_len, int q_len, int first_position, int window, int tile_tokens) {
  if (q_len == 0) return {0, 0};
  const int begin = window > 0 ? max(first_position + 1 - window, 0) : 0;
  return {min(begin, seq_len) / tile_tokens, ceil_div(seq_len, tile_tokens)};
}

// Units of a sequence for one KV head; 0 where it has no query.
__device__ __forceinline__ int sequence_units(int seq_len, int q_len, int first_position, int window, int group_size, int row_tile,
                                              int tile_tokens) {
  const TileRange tiles = sequence_tiles(seq_len, q_len, first_position, window, tile_tokens);
  return ceil_div(q_len * group_size, row_tile) * (tiles.end - tiles.begin + kOverheadUnits);
}

// An entry of the LISTED schedule's list, the same for every KV head.
struct WorkItem {
  int seq, row_tile;
  int part, num_parts;  // of the row tile's keys
  int first_slot;       // of the row tile's parts among those of one KV head; nothing where num_parts is 1
};

#ifdef SCHEDULE
// What a CTA computes next: some rows over some keys, and where the result goes.
struct Segment {
  int seq, seq_len;
  int q_first, q_len;  // the sequence's queries in q
  int kv_head;
  int row_begin, num_rows;  // rows of the sequence: row r is query r / GROUP_SIZE, head r % GROUP_SIZE of the group
  int begin, end;           // keys; begin >= end: none
  int slot;                 // where the partial state goes; -1: this is all of the row tile, write the output
  int first_cta, last_cta;  // who computes parts of the row tile: EVEN the CTAs, LISTED the slots of their parts

  __device__ __forceinline__ int num_parts() const { return last_cta - first_cta + 1; }

  __device__ __forceinline__ int query(int row) const { return (row_begin + row) / GROUP_SIZE; }
  __device__ __forceinline__ int position(const AttentionParams& p, int query) const {
    return POSITIONS ? p.q_positions[q_first + query] : seq_len - q_len + query;
  }
  // Of the queries of rows first..last; POSITIONS: a bound, that of the whole sequence.
  __device__ __forceinline__ PositionSpan positions(const AttentionParams& p, int first, int last) const {
    return span_of(POSITIONS ? p.position_spans : nullptr, seq, seq_len, q_len, query(first), query(last));
  }
  __device__ __forceinline__ int qo_head(int row) const { return kv_head * GROUP_SIZE + (row_begin + row) % GROUP_SIZE; }
};

// The query of a segment's row.
__device__ __forceinline__ const Q_TYPE* query_row(const AttentionParams& p, const Segment& s, int row) {
  return static_cast<const Q_TYPE*>(p.q) + (s.q_first + s.query(row)) * p.q_token_stride + s.qo_head(row) * p.q_head_stride;
}

// Slot of a CTA's part of a row tile: the first CTA's part is the last of its slice, every other CTA's the first of its own.
__device__ __forceinline__ int even_slot(int cta, int first_cta) { return 2 * cta + (cta == first_cta); }

// Slot of a part of a row tile, counted from its first keys.
__device__ __forceinline__ int part_slot(const Segment& s, int part) {
  return SCHEDULE == kListed ? s.first_cta + part : even_slot(s.first_cta + part, s.first_cta);
}

class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const AttentionParams& params) : p(params) {
    if constexpr (SCHEDULE == kEven) {
      const u32 total = units_before(p.num_seqs);
      // No slice is empty: a CTA between two that have a part of a row tile has one too, and arrives.
      const u32 ctas = min_of<u32>(gridDim.x, total < kLeastUnits ? min_of<u32>(total, 1) : total / kLeastUnits);
      slice = ctas ? total / ctas : 0;
      longer = ctas ? total % ctas : 0;
      unit = blockIdx.x < ctas ? slice_begin(blockIdx.x) : total;
      unit_end = blockIdx.x < ctas ? slice_begin(blockIdx.x + 1) : total;
      seq = unit < unit_end ? sequence_of(unit) : 0;
    } else {
      unit = 0;
    }
  }

  // The next segment of this CTA, the same in all its threads; false at the end, and then not to be called again. LISTED: by one
  // thread of the CTA alone, for all.
  __device__ __forceinline__ bool next(Segment& s) {
    if constexpr (SCHEDULE == kListed) {
      return listed(s);
    } else if constexpr (SCHEDULE != kEven) {
      return unit++ == 0 && fixed(s);
    } else {
      while (unit < unit_end)
        if (even(s)) return true;
      return false;
    }
  }

 private:
  const AttentionParams& p;
  u32 unit, unit_end;  // EVEN: what is left of this CTA's slice; else `unit` counts segments
  u32 slice, longer;   // units of a slice; the first `longer` slices have one more
  int seq;

  __device__ __forceinline__ void open(Segment& s, int seq_, int kv_head, int row_tile) {
    s.seq = seq_;
    s.seq_len = p.seq_lens[seq_];
    s.q_first = p.q_indptr ? p.q_indptr[seq_] : seq_;
    s.q_len = p.q_indptr ? p.q_indptr[seq_ + 1] - s.q_first : 1;
    s.kv_head = kv_head;
    s.row_begin = row_tile * ROW_TILE;
    s.num_rows = min(ROW_TILE, s.q_len * GROUP_SIZE - s.row_begin);
    s.slot = -1;
    s.first_cta = s.last_cta = blockIdx.x;
  }

  // Cuts the keys to what some row of the segment sees.
  __device__ __forceinline__ void clamp(Segment& s, int begin, int end) {
    const PositionSpan at = s.positions(p, 0, s.num_rows - 1);
    s.begin = max(begin, visible_keys(at.least, s.seq_len, p.window).begin);
    s.end = min(end, visible_keys(at.greatest, s.seq_len, p.window).end);
  }

  // The first items belong to the CTAs, the others to who comes for them. Every CTA that had a first one comes until there are no
  // more, which is once for each item in all: the counter returns to zero with the last.
  __device__ __forceinline__ bool listed(Segment& s) {
    const u32 all = static_cast<u32>(*p.schedule.num_items) * p.num_kv_heads;
    u32 at = blockIdx.x;
    if (unit++ > 0) at = gridDim.x + atomicInc(p.schedule.next_item, all - 1);
    if (at >= all) return false;
    const WorkItem item = reinterpret_cast<const WorkItem*>(p.schedule.work_list)[at / p.num_kv_heads];
    open(s, item.seq, at % p.num_kv_heads, item.row_tile);
    clamp(s, 0, s.seq_len);
    if (item.num_parts > 1) {
      // Parts differ by one tile at most, the longer ones first.
      const int first_tile = s.begin / TILE_TOKENS, tiles = max(ceil_div(s.end, TILE_TOKENS) - first_tile, 0);
      const int part_tiles = tiles / item.num_parts, longer = tiles % item.num_parts;
      const int tile = first_tile + item.part * part_tiles + min(item.part, longer);
      s.begin = max(s.begin, tile * TILE_TOKENS);
      s.end = min(s.end, (tile + part_tiles + (item.part < longer)) * TILE_TOKENS);
      s.first_cta = s.kv_head * p.schedule.part_slots + item.first_slot;
      s.last_cta = s.first_cta + item.num_parts - 1;
      s.slot = part_slot(s, item.part);
    }
    return true;
  }

  __device__ __forceinline__ bool fixed(Segment& s) {
    const int num_partitions = SCHEDULE == kPartitioned ? p.schedule.num_partitions : 1;
    const int row_tile = blockIdx.z / num_partitions, partition = blockIdx.z % num_partitions;
    open(s, blockIdx.x, blockIdx.y, row_tile);
    if (s.num_rows <= 0) return false;
    if (SCHEDULE == kWhole) {
      clamp(s, 0, s.seq_len);
      return true;
    }
    const int tokens = p.schedule.partition_tokens;
    clamp(s, partition * tokens, (partition + 1) * tokens);
    s.slot = ((s.seq * p.num_kv_heads + s.kv_head) * (gridDim.z / num_partitions) + row_tile) * num_partitions + partition;
    return s.begin < s.end;
  }

  // ---- EVEN: units are numbered through all sequences, the KV heads of each, and the row tiles of each head

  __device__ __forceinline__ u32 units_before(int seq_) const {
    return static_cast<u32>(p.schedule.unit_indptr[seq_]) * p.num_kv_heads;
  }
  __device__ __forceinline__ u32 slice_begin(u32 cta) const { return cta * slice + min(cta, longer); }
  __device__ __forceinline__ int cta_of(u32 at) const {
    const u32 in_longer = longer * (slice + 1);
    return at < in_longer ? at / (slice + 1) : longer + (at - in_longer) / slice;
  }

  // The last sequence that begins at or before a unit. A warp looks at 32 places at a time: two reads for a thousand sequences.
  __device__ __forceinline__ int sequence_of(u32 at) const {
    int low = 0, count = p.num_seqs;
    while (count > 1) {
      const int step = ceil_div(count, kWarpSize), ahead = lane_id() * step;
      const bool begun = ahead < count && units_before(low + ahead) <= at;
      const int skipped = (__popc(__ballot_sync(kFullMask, begun)) - 1) * step;
      low += skipped;
      count = min(step, count - skipped);
    }
    return low;
  }

  __device__ __forceinline__ bool even(Segment& s) {
    while (units_before(seq + 1) <= unit) ++seq;
    const u32 base = units_before(seq);
    const int units = p.schedule.unit_indptr[seq + 1] - p.schedule.unit_indptr[seq];
    open(s, seq, 0, 0);
    const u32 row_tiles = ceil_div(s.q_len * GROUP_SIZE, ROW_TILE);
    const u32 per_item = units / row_tiles;  // tiles and overhead of one row tile
    const u32 item = (unit - base) / per_item;
    const u32 item_begin = base + item * per_item, item_end = item_begin + per_item;
    open(s, seq, item / row_tiles, item % row_tiles);

    const u32 taken = unit, tiles_begin = item_begin + kOverheadUnits;
    unit = min(unit_end, item_end);
    const int tile_begin = max(taken, tiles_begin) - tiles_begin, tile_end = max(unit, tiles_begin) - tiles_begin;
    if (tiles_begin == item_end ? taken != item_begin : tile_begin == tile_end) return false;  // only overhead
    if (tiles_begin < item_end) {
      s.first_cta = cta_of(tiles_begin);
      s.last_cta = cta_of(item_end - 1);
      if (s.first_cta != s.last_cta) s.slot = even_slot(blockIdx.x, s.first_cta);
    }
    const PositionSpan sequence = span_of(POSITIONS ? p.position_spans : nullptr, seq, s.seq_len, s.q_len, 0, s.q_len - 1);
    const int first_tile = sequence_tiles(s.seq_len, s.q_len, sequence.least, WINDOW ? p.window : 0, TILE_TOKENS).begin;
    clamp(s, (first_tile + tile_begin) * TILE_TOKENS, (first_tile + tile_end) * TILE_TOKENS);
    return true;
  }
};
#endif  // SCHEDULE

}  // namespace pagedkv
