// Paged attention, one entry for prefill, chunk, decode and mixed batches. A task is (request, kv head, run of queries, run of
// keys): the queries of all heads that share the kv head are rows of one tile, so that each key block is read once for them.
// Keys go by in chunks of 128 that start at multiples of 128, whatever the batch: without splits, or with splits at fixed
// keys, a row's bits do not depend on the batch, on the chunking of its prompt, or on the number of threads.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

constexpr int64_t kKeyChunk = 128;  // keys between two visits of the running sums; rows of scores have room for 16 more
constexpr int kTaskRows = 48;       // rows of a task where a head group is not larger by itself
constexpr int64_t kMinSplit = 128;  // keys that are worth a task of their own
constexpr int64_t kColdRows = 12;   // up to so many rows, a task waits for its keys and values rather than computing
constexpr float kMinusInf = -__builtin_inff();

struct AttentionTask {
  int32_t request, kv_head, query0, query1;  // queries [query0, query1) of the request
  int32_t key0, key1;                        // keys [key0, key1) that the task looks at
  int32_t split, num_splits;
  int64_t partial;  // floats from the start of the partial results; splits of one tile follow each other
};

struct AttentionPlan {
  const AttentionArgs* args;
  AttentionTask* tasks;
  int64_t num_tasks, num_tiles;
  float* partials;
  bool dp;
};

struct RowState {  // buffers of one task
  int64_t rows, dv;
  void* q;       // packed tiles
  float* s;      // [rows, kRowStride] scores, then probabilities
  uint16_t* p;   // [rows, kRowStride] probabilities in bf16
  float* o;      // [rows, dv]
  float* m;      // [rows] running maximum
  float* l;      // [rows] running sum
  int32_t* lo;   // [rows] keys that the row sees: [lo, hi)
  int32_t* hi;
  char* v;       // one head's values of a block
};

// Floats of a row of the output sums.
CORE_INLINE int64_t sum_stride(const KvArgs& a) { return round_up(a.v_head_dim, 16 * kMinPanels); }

CORE_INLINE int64_t state_bytes(const AttentionArgs& a, int64_t rows) {
  int64_t dv = sum_stride(a.kv);
  return rows * (round_up(a.kv.head_dim, 4) * 4 + kRowStride * 6 + dv * 4 + 16) + v_head_elements(a.kv) * 4 + 1024;
}

static RowState carve(const AttentionArgs& a, int64_t rows) {
  RowState s;
  char* at = static_cast<char*>(scratch(kScratchTask, size_t(state_bytes(a, rows))));
  auto take = [&](int64_t bytes) { char* r = at; at += round_up(bytes, 64); return r; };
  s.rows = rows;
  s.dv = sum_stride(a.kv);
  s.q = take(rows * round_up(a.kv.head_dim, 4) * 4);
  s.s = reinterpret_cast<float*>(take(rows * kRowStride * 4));
  s.p = reinterpret_cast<uint16_t*>(take(rows * kRowStride * 2));
  s.o = reinterpret_cast<float*>(take(rows * s.dv * 4));
  s.m = reinterpret_cast<float*>(take(rows * 4));
  s.l = reinterpret_cast<float*>(take(rows * 4));
  s.lo = reinterpret_cast<int32_t*>(take(rows * 4));
  s.hi = reinterpret_cast<int32_t*>(take(rows * 4));
  s.v = take(v_head_elements(a.kv) * 4);
  return s;
}

// ------------------------------------------------------------------ rows
struct RequestShape {
  int64_t first, count, len;  // query_start_loc, queries, seq_len
};

CORE_INLINE RequestShape shape_of(const AttentionArgs& a, int64_t r) {
  return {a.query_start_loc[r], a.query_start_loc[r + 1] - a.query_start_loc[r], a.seq_lens[r]};
}

CORE_INLINE int64_t last_key(const AttentionArgs& a, const RequestShape& q, int64_t query) {
  return a.causal ? min64(q.len, q.len - q.count + query + 1) : q.len;
}

CORE_INLINE int64_t first_key(const AttentionArgs& a, const RequestShape& q, int64_t query) {
  return a.causal && a.window > 0 ? max64(0, q.len - q.count + query - a.window + 1) : 0;
}

template <class T>
CORE_INLINE const T* query_row(const AttentionArgs& a, const AttentionTask& t, const RequestShape& q, int64_t row) {
  int64_t group = a.num_heads / a.kv.num_kv_heads;
  return static_cast<const T*>(a.query) + (q.first + t.query0 + row / group) * a.query_stride +
         (t.kv_head * group + row % group) * a.query_head_stride;
}

// Row tiles of Q: tiles of rows_for(left, kMaxRows) rows, each [head_dim][mr].
template <class T>
static void pack_queries(const AttentionArgs& a, const AttentionTask& t, const RequestShape& q, RowState& s, bool dp) {
  int64_t d = a.kv.head_dim;
  for (int64_t m0 = 0; m0 < s.rows;) {
    int mr = rows_for(s.rows - m0, kMaxRows);
    for (int m = 0; m < mr; m++) {
      const T* x = query_row<T>(a, t, q, m0 + m);
      if (dp) {
        auto* out = static_cast<uint32_t*>(s.q) + m0 * d / 2 + m;
        for (int64_t k = 0; k < d / 2; k++) memcpy(out + k * mr, x + 2 * k, 4);
      } else {
        auto* out = static_cast<float*>(s.q) + m0 * d + m;
        for (int64_t k = 0; k < d; k++) out[k * mr] = get(x + k);
      }
    }
    m0 += mr;
  }
}

static void start_rows(const AttentionArgs& a, const AttentionTask& t, const RequestShape& q, RowState& s) {
  int64_t group = a.num_heads / a.kv.num_kv_heads;
  for (int64_t i = 0; i < s.rows; i++) {
    int64_t query = t.query0 + i / group;
    s.lo[i] = int32_t(max64(t.key0, first_key(a, q, query)));
    s.hi[i] = int32_t(min64(t.key1, last_key(a, q, query)));
    s.m[i] = kMinusInf;
    s.l[i] = 0.f;
  }
  memset(s.o, 0, size_t(s.rows * s.dv) * 4);
}

// ------------------------------------------------------------------ one chunk of keys
struct Chunk {
  int64_t base, begin, end;  // keys [begin, end) of [base, base + 128)
};

template <class K>
CORE_INLINE const char* key_panel(const AttentionArgs& a, const AttentionTask& t, int64_t key) {
  int64_t block = a.block_table[t.request * a.table_stride + key / a.kv.block_size];
  int64_t at = block * a.kv.k_block_stride + t.kv_head * k_head_elements(a.kv) + key % a.kv.block_size * a.kv.head_dim;
  return static_cast<const char*>(a.kv.k_cache) + at * int64_t(sizeof(typename K::B)) / K::kStep;
}

template <class K>
static void scores(const AttentionArgs& a, const AttentionTask& t, const Chunk& c, RowState& s) {
  int64_t first = c.begin / 16 * 16, d = a.kv.head_dim;
  for (int64_t m0 = 0; m0 < s.rows;) {
    int mr = rows_for(s.rows - m0, kMaxRows);
    auto* q = static_cast<const typename K::A*>(s.q) + m0 * d / K::kActStep;
    for (int64_t key = first; key < c.end;) {
      int np = panels_for(mr, ceil_div(c.end - key, 16));
      const void* b[4] = {};
      for (int i = 0; i < np; i++) b[i] = key + i * 16 < c.end ? key_panel<K>(a, t, key + i * 16) : b[0];
      pick_micro<K>(mr, np)(q, b, d, s.s + m0 * kRowStride + (key - c.base), kRowStride, kStart, 0);
      key += np * 16;
    }
    m0 += mr;
  }
}

// Asks for the keys or values of [begin, end), which lie in blocks all over the cache, before they are used.
CORE_INLINE void fetch_blocks(const AttentionArgs& a, const AttentionTask& t, const void* cache, int64_t block_stride,
                              int64_t head_elements, int64_t begin, int64_t end) {
  int64_t bytes = dtype_bytes(a.kv.cache_dtype), size = a.kv.block_size;
  for (int64_t key = begin / size * size; key < end; key += size) {
    int64_t block = a.block_table[t.request * a.table_stride + key / size];
    if (block == 0) continue;
    prefetch(static_cast<const char*>(cache) + (block * block_stride + t.kv_head * head_elements) * bytes, head_elements * bytes);
  }
}

CORE_INLINE void fetch_keys(const AttentionArgs& a, const AttentionTask& t, int64_t begin, int64_t end) {
  fetch_blocks(a, t, a.kv.k_cache, a.kv.k_block_stride, k_head_elements(a.kv), begin, end);
}

CORE_INLINE void fetch_values(const AttentionArgs& a, const AttentionTask& t, int64_t begin, int64_t end) {
  fetch_blocks(a, t, a.kv.v_cache, a.kv.v_block_stride, v_head_elements(a.kv), begin, end);
}

CORE_INLINE F iota() {
  const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lanes);
}

// Scores of 16 keys before scaling, or scaled and capped where a cap asks for that; a hidden key is -inf whatever its cache
// slot holds. What changes is written back.
CORE_INLINE F score16(const AttentionArgs& a, const RowState& s, int64_t row, int64_t key, float* x) {
  F v = load(x);
  bool hidden = key < s.lo[row] || key + 16 > s.hi[row];
  if (a.softcap > 0.f) v = mul(vtanh(div(mul(v, set1(a.scale)), set1(a.softcap))), set1(a.softcap));
  else if (!hidden) return v;
  if (hidden) {
    F index = add(iota(), set1(float(key)));
    v = select_lt(index, set1(float(s.hi[row])), v, set1(kMinusInf));
    v = select_lt(index, set1(float(s.lo[row])), set1(kMinusInf), v);
  }
  store(x, v);
  return v;
}

constexpr float kLog2E = 1.44269504088896341f;

// Whether a chunk of keys is looked at vector by vector does not show in a row's bits: which vectors hide keys is the row's
// own, and the others are treated alike.
static void softmax_row(const AttentionArgs& a, const Chunk& c, RowState& s, int64_t row, bool dp) {
  int64_t first = c.begin / 16 * 16;
  float* x = s.s + row * kRowStride - c.base;
  float unit = a.softcap > 0.f ? 1.f : a.scale;  // positive: the largest score is that of the largest product
  F top = set1(kMinusInf);
  for (int64_t key = first; key < c.end; key += 16) top = vmax(top, score16(a, s, row, key, x + key));
  float m = hmax(top);
  if (m != kMinusInf) m *= unit;
  float before = s.m[row];
  m = m > before ? m : before;
  bool none = m == kMinusInf;
  F factor = set1(unit * kLog2E), shift = set1(none ? 0.f : -m * kLog2E), sum = zero();
  for (int64_t key = first; key < c.end; key += 16) {
    F p = vexp2(fma(load(x + key), factor, shift));
#ifdef CORE_DPBF16
    if (dp) {
      store_bf16(s.p + row * kRowStride + (key - c.base), p);  // the sum keeps full precision, for lse
    } else
#endif
    {
      (void)dp;
      store(x + key, p);
    }
    sum = add(sum, p);
  }
  if (none) return;
  if (m == before) {
    s.l[row] += hsum(sum);
    return;
  }
  float lane[16];
  store(lane, vexp(set1(before - m)));
  s.l[row] = s.l[row] * lane[0] + hsum(sum);
  if (before != kMinusInf) {
    F alpha = set1(lane[0]);
    for (int64_t d = 0; d < s.dv; d += 16) store(s.o + row * s.dv + d, mul(load(s.o + row * s.dv + d), alpha));
  }
  s.m[row] = m;
}

// The head's values of a block from key `begin` on, the key before an odd `begin` zeroed (it shares a pair).
static const char* value_pairs_from_odd(const AttentionArgs& a, const char* values, int64_t begin, int64_t end, char* copy) {
  int64_t panel_bytes = int64_t(a.kv.block_size) * 32;
  for (int64_t d = 0; d < v_head_elements(a.kv) * 2; d += panel_bytes) {
    for (int64_t pair = begin / 2; pair < ceil_div(end, 2); pair++) {
      I w = loadi(values + d + pair * 64);
      storei(copy + d + pair * 64, pair == begin / 2 ? andi(w, set1i(int32_t(0xffff0000u))) : w);
    }
  }
  return copy;
}

// The keys of a chunk as runs of one block each; a run never holds keys of two blocks.
template <class K>
CORE_INLINE int64_t value_runs(const AttentionArgs& a, const AttentionTask& t, const Chunk& c, RowState& s, Run* runs) {
  constexpr int64_t kBytes = int64_t(sizeof(typename K::B)) / K::kStep;
  int64_t num_runs = 0;
  for (int64_t key = c.begin; key < c.end;) {
    int64_t end = min64(c.end, (key / a.kv.block_size + 1) * a.kv.block_size);
    int64_t block = a.block_table[t.request * a.table_stride + key / a.kv.block_size];
    const char* values = static_cast<const char*>(a.kv.v_cache) +
                         (block * a.kv.v_block_stride + t.kv_head * v_head_elements(a.kv)) * kBytes;
    int64_t offset = key % a.kv.block_size, count = end - key, column = key - c.base;
    if (K::kStep == 2 && (offset & 1)) {  // the first run of a task alone: the others begin with a block
      values = value_pairs_from_odd(a, values, offset, offset + count, s.v);
      offset--, count++, column--;
    }
    runs[num_runs++] = {values + offset * 16 * kBytes, column, count};
    key = end;
  }
  return num_runs;
}

template <class K>
static void weigh_values(const AttentionArgs& a, const AttentionTask& t, const Chunk& c, RowState& s) {
  constexpr int64_t kBytes = int64_t(sizeof(typename K::B)) / K::kStep;
  Run runs[kKeyChunk / 16];
  int64_t num_runs = value_runs<K>(a, t, c, s, runs);
  int64_t panel_bytes = int64_t(a.kv.block_size) * 16 * kBytes, panels = ceil_div(a.kv.v_head_dim, 16);
  const char* p = K::kActStep == 2 ? reinterpret_cast<const char*>(s.p) : reinterpret_cast<const char*>(s.s);
  constexpr int64_t kRowBytes = K::kActStep == 2 ? kRowStride * 2 : kRowStride * 4;
  for (int64_t panel = 0; panel < panels;) {
    int np = panels_for(rows_for(s.rows, kMaxRows), panels - panel);
    int64_t offset[4];
    for (int i = 0; i < np; i++) offset[i] = (panel + i < panels ? panel + i : panel) * panel_bytes;
    for (int64_t m0 = 0; m0 < s.rows;) {
      int mr = rows_for(s.rows - m0, kMaxRows);
      pick_form<K, RunsForm>(mr, np)(p + m0 * kRowBytes, runs, num_runs, offset, s.o + m0 * s.dv + panel * 16, s.dv);
      m0 += mr;
    }
    panel += np;
  }
}

// Moves [c.begin, c.end) to the next keys below `end` that lie in real blocks: the null block 0 (padding rows, blocks that
// fell out of a window) holds no keys and is never read.
CORE_INLINE bool next_run(const AttentionArgs& a, const AttentionTask& t, Chunk& c, int64_t end) {
  const int32_t* table = a.block_table + t.request * a.table_stride;
  int64_t size = a.kv.block_size;
  while (c.begin < end && table[c.begin / size] == 0) c.begin = (c.begin / size + 1) * size;
  if (c.begin >= end) return false;
  c.end = c.begin;
  while (c.end < end && table[c.end / size] != 0) c.end = (c.end / size + 1) * size;
  c.end = min64(c.end, end);
  return true;
}

// ------------------------------------------------------------------ results
CORE_INLINE void put_out(const AttentionArgs& a, int64_t token, int64_t head, const float* o, float factor) {
  int64_t at = token * a.out_stride + head * a.out_head_stride;
  for (int64_t d = 0; d < a.kv.v_head_dim; d += 16) {
    F v = mul(load(o + d), set1(factor));
    int64_t count = min64(16, a.kv.v_head_dim - d);
    if (a.out_dtype == kF32) store_part(static_cast<float*>(a.out) + at + d, v, count);
    else if (a.out_dtype == kBF16) store_part(static_cast<BF16*>(a.out) + at + d, v, count);
    else store_part(static_cast<F16*>(a.out) + at + d, v, count);
  }
}

// Divides by the sum (the sink's share included) and writes one row. A row that sees no key gives zeros.
CORE_INLINE void finish_attention_row(const AttentionArgs& a, int64_t token, int64_t head, const float* o, float m, float l) {
  float factor = l > 0.f ? 1.f / l : l == 0.f ? 0.f : l;  // NaN stays NaN
  float total = l, top = m;
  if (a.sinks) {
    float sink = a.sinks[head];
    top = sink > m ? sink : m;
    float mine = m == kMinusInf ? 0.f : expf(m - top);
    total = l * mine + expf(sink - top);
    factor = mine / total;
  }
  put_out(a, token, head, o, factor);
  if (a.lse) a.lse[token * a.num_heads + head] = l == 0.f && !a.sinks ? kMinusInf : top + logf(total);
}

static void finish_tile(const AttentionArgs& a, const AttentionTask& t, const float* o, const float* m, const float* l) {
  RequestShape q = shape_of(a, t.request);
  int64_t group = a.num_heads / a.kv.num_kv_heads, dv = sum_stride(a.kv);
  int64_t rows = (t.query1 - t.query0) * group;
  for (int64_t i = 0; i < rows; i++)
    finish_attention_row(a, q.first + t.query0 + i / group, t.kv_head * group + i % group, o + i * dv, m[i], l[i]);
}

CORE_INLINE bool is_cold(const AttentionArgs& a, const AttentionTask& t) {
  return (t.query1 - t.query0) * (a.num_heads / a.kv.num_kv_heads) <= kColdRows;
}

// The keys of a task's first chunk, asked for while another task computes.
CORE_INLINE void fetch_first(const AttentionArgs& a, const AttentionTask& t) {
  if (is_cold(a, t)) fetch_keys(a, t, t.key0, min64(t.key1, t.key0 / kKeyChunk * kKeyChunk + kKeyChunk));
}

// `next`: the task that this thread will probably take up behind this one, or null.
template <class K, class T>
static void attention_task(const AttentionPlan& p, const AttentionTask& t, const AttentionTask* next) {
  const AttentionArgs& a = *p.args;
  RequestShape q = shape_of(a, t.request);
  int64_t group = a.num_heads / a.kv.num_kv_heads;
  RowState s = carve(a, (t.query1 - t.query0) * group);
  bool cold = is_cold(a, t);
  pack_queries<T>(a, t, q, s, p.dp);
  start_rows(a, t, q, s);
  for (int64_t base = t.key0 / kKeyChunk * kKeyChunk; base < t.key1; base += kKeyChunk) {
    Chunk c{base, max64(base, t.key0), min64(base + kKeyChunk, t.key1)};
    if (cold) fetch_values(a, t, c.begin, c.end);
    if (cold && c.end < t.key1) fetch_keys(a, t, c.end, min64(c.end + kKeyChunk, t.key1));
    else if (next) fetch_first(a, *next);
    for (int64_t end = c.end; next_run(a, t, c, end); c.begin = c.end) {
      scores<K>(a, t, c, s);
      for (int64_t i = 0; i < s.rows; i++) softmax_row(a, c, s, i, p.dp);
      weigh_values<K>(a, t, c, s);
    }
  }
  if (t.num_splits == 1) {
    finish_tile(a, t, s.o, s.m, s.l);
    return;
  }
  float* out = p.partials + t.partial;
  memcpy(out, s.o, size_t(s.rows * s.dv) * 4);
  memcpy(out + s.rows * s.dv, s.m, size_t(s.rows) * 4);
  memcpy(out + s.rows * (s.dv + 1), s.l, size_t(s.rows) * 4);
}

template <class K, class T>
static void attention_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<AttentionPlan*>(context);
  int64_t step = num_threads();
  for (int64_t i = begin; i < end; i++) {
    if (i < step) fetch_first(*p.args, p.tasks[i]);
    attention_task<K, T>(p, p.tasks[i], i + step < p.num_tasks ? &p.tasks[i + step] : nullptr);
  }
}

// Joins the splits of a tile into its first split's partial result, in order of the keys.
static void merge_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<AttentionPlan*>(context);
  const AttentionArgs& a = *p.args;
  int64_t group = a.num_heads / a.kv.num_kv_heads, dv = sum_stride(a.kv);
  for (int64_t i = begin; i < end; i++) {
    const AttentionTask& t = p.tasks[i];
    if (t.split != 0 || t.num_splits == 1) continue;
    int64_t rows = (t.query1 - t.query0) * group, size = rows * (dv + 2);
    float* o = p.partials + t.partial;
    float *m = o + rows * dv, *l = m + rows;
    for (int64_t j = 1; j < t.num_splits; j++) {
      const float* other = o + j * size;
      for (int64_t r = 0; r < rows; r++) {
        float m2 = other[rows * dv + r], l2 = other[rows * (dv + 1) + r];
        if (m2 == kMinusInf) continue;
        float top = m2 > m[r] ? m2 : m[r];
        float f1 = m[r] == kMinusInf ? 0.f : expf(m[r] - top), f2 = expf(m2 - top);
        for (int64_t d = 0; d < dv; d += 16)
          store(o + r * dv + d, fma(load(other + r * dv + d), set1(f2), mul(load(o + r * dv + d), set1(f1))));
        l[r] = l[r] * f1 + l2 * f2;
        m[r] = top;
      }
    }
    finish_tile(a, t, o, m, l);
  }
}

// ------------------------------------------------------------------ planning
struct SplitRule {
  int64_t keys;  // keys a split takes at least; 0 = never split
  int64_t most;  // splits of one tile at most
  bool always;   // split at every multiple of `keys`, whatever the batch
};

CORE_INLINE int64_t tile_queries(const AttentionArgs& a) { return max64(1, kTaskRows / (a.num_heads / a.kv.num_kv_heads)); }

static int64_t count_tiles(const AttentionArgs& a) {
  int64_t tiles = 0;
  for (int64_t r = 0; r < a.num_requests; r++) tiles += ceil_div(shape_of(a, r).count, tile_queries(a));
  return tiles * a.kv.num_kv_heads;
}

static SplitRule split_rule(const AttentionArgs& a, int64_t tiles) {
  if (a.split_keys < 0) return {0, 1, false};
  if (a.split_keys > 0) return {round_up(a.split_keys, kKeyChunk), 0, true};
  int64_t want = 2 * num_threads();
  if (num_threads() == 1 || tiles >= want) return {0, 1, false};
  return {kMinSplit, ceil_div(want, max64(1, tiles)), false};
}

CORE_INLINE int64_t num_splits(const SplitRule& rule, int64_t key0, int64_t key1) {
  if (rule.keys == 0) return 1;
  if (rule.always) return max64(1, ceil_div(key1, rule.keys) - key0 / rule.keys);
  return max64(1, min64(rule.most, (key1 - key0) / rule.keys));
}

// Appends the splits of one tile. Borders between splits are multiples of a chunk.
static int64_t add_tile(AttentionTask* out, AttentionTask t, const SplitRule& rule, int64_t rows, int64_t dv,
                        int64_t& partial_floats) {
  int64_t key0 = t.key0, key1 = t.key1, count = num_splits(rule, key0, key1);
  int64_t unit = rule.always ? rule.keys : kKeyChunk;
  int64_t origin = key0 / unit * unit, step = round_up(ceil_div(key1 - origin, count), unit);
  count = max64(1, ceil_div(key1 - origin, max64(step, 1)));
  t.num_splits = int32_t(count);
  for (int64_t j = 0; j < count; j++) {
    t.split = int32_t(j);
    t.key0 = int32_t(max64(key0, origin + j * step));
    t.key1 = int32_t(j == count - 1 ? key1 : origin + (j + 1) * step);
    t.partial = partial_floats;
    if (count > 1) partial_floats += rows * (dv + 2);
    if (out) out[j] = t;
  }
  return count;
}

// Lists the tasks (or only counts them, with a null list): the longest of a request first.
static int64_t list_tasks(const AttentionArgs& a, const SplitRule& rule, AttentionTask* out, int64_t& partial_floats) {
  int64_t group = a.num_heads / a.kv.num_kv_heads, step = tile_queries(a), dv = sum_stride(a.kv), n = 0;
  for (int64_t r = 0; r < a.num_requests; r++) {
    RequestShape q = shape_of(a, r);
    for (int64_t q0 = (ceil_div(q.count, step) - 1) * step; q0 >= 0; q0 -= step) {
      int64_t q1 = min64(q.count, q0 + step);
      for (int64_t h = 0; h < a.kv.num_kv_heads; h++) {
        AttentionTask t{int32_t(r), int32_t(h), int32_t(q0), int32_t(q1), 0, 0, 0, 1, 0};
        t.key1 = int32_t(max64(0, last_key(a, q, q1 - 1)));
        t.key0 = int32_t(min64(t.key1, first_key(a, q, q0)));
        n += add_tile(out ? out + n : nullptr, t, rule, (q1 - q0) * group, dv, partial_floats);
      }
    }
  }
  return n;
}

template <class K>
CORE_INLINE RangeFn attention_fn(int dtype) {
  return dtype == kF32 ? attention_range<K, float> : dtype == kBF16 ? attention_range<K, BF16> : attention_range<K, F16>;
}

static RangeFn attention_fn(const AttentionPlan& p) {
#ifdef CORE_DPBF16
  if (p.dp) return attention_range<KindDP, BF16>;
#endif
  int cache = p.args->kv.cache_dtype, dtype = p.args->dtype;
  return cache == kF32 ? attention_fn<KindF32>(dtype) : cache == kF16 ? attention_fn<KindF16>(dtype)
                                                                       : attention_fn<KindBF16>(dtype);
}

static void attention(const AttentionArgs& a) {
  AttentionPlan p;
  p.args = &a;
#ifdef CORE_DPBF16
  p.dp = a.dtype == kBF16 && a.kv.cache_dtype == kBF16;
#else
  p.dp = false;
#endif
  SplitRule rule = split_rule(a, count_tiles(a));
  int64_t floats = 0;
  p.num_tasks = list_tasks(a, rule, nullptr, floats);
  p.tasks = static_cast<AttentionTask*>(scratch(kScratchInput, size_t(p.num_tasks + 1) * sizeof(AttentionTask)));
  p.partials = static_cast<float*>(scratch(kScratchPartial, size_t(floats + 16) * 4));
  int64_t again = 0;
  list_tasks(a, rule, p.tasks, again);
  parallel_dynamic(p.num_tasks, attention_fn(p), &p);
  if (floats) parallel_dynamic(p.num_tasks, merge_range, &p);
}

// ------------------------------------------------------------------ keys and values that are in no cache
// They are laid out as a cache of their own in scratch memory, with the identity as block table.
constexpr int kRaggedBlock = 64;

struct RaggedPlan {
  int64_t num_blocks, table_stride, num_keys;
  char *k, *v;
  int32_t *table, *lens, *slots;
};

static RaggedPlan plan_ragged(const RaggedArgs& a, const KvArgs& kv, int64_t bytes) {
  RaggedPlan p{};
  p.num_blocks = 1;
  int64_t requests = a.attention.num_requests;
  for (int64_t r = 0; r < requests; r++) {
    int64_t blocks = ceil_div(a.key_start_loc[r + 1] - a.key_start_loc[r], kRaggedBlock);
    p.num_blocks += blocks;
    p.table_stride = max64(p.table_stride, blocks);
  }
  p.num_keys = a.key_start_loc[requests];
  int64_t k_bytes = round_up(p.num_blocks * kv.k_block_stride * bytes, 64);
  int64_t v_bytes = round_up(p.num_blocks * kv.v_block_stride * bytes, 64);
  int64_t ints = requests * p.table_stride + requests + p.num_keys;
  char* memory = static_cast<char*>(scratch(kScratchTile, size_t(k_bytes + v_bytes + ints * 4 + 64)));
  p.k = memory;
  p.v = memory + k_bytes;
  p.table = reinterpret_cast<int32_t*>(memory + k_bytes + v_bytes);
  p.lens = p.table + requests * p.table_stride;
  p.slots = p.lens + requests;
  return p;
}

static void fill_ragged(const RaggedArgs& a, RaggedPlan& p) {
  int64_t block = 1;  // 0 is the null block
  for (int64_t r = 0; r < a.attention.num_requests; r++) {
    int64_t start = a.key_start_loc[r], len = a.key_start_loc[r + 1] - start;
    p.lens[r] = int32_t(len);
    for (int64_t i = 0; i < len; i++) p.slots[start + i] = int32_t(block * kRaggedBlock + i);
    for (int64_t i = 0; i < ceil_div(len, kRaggedBlock); i++) p.table[r * p.table_stride + i] = int32_t(block++);
  }
}

static void attention_ragged(const RaggedArgs& a) {
  AttentionArgs inner = a.attention;
  KvArgs& kv = inner.kv;
  kv.cache_dtype = inner.dtype;
  kv.block_size = kRaggedBlock;
  kv.k_block_stride = kv.num_kv_heads * k_head_elements(kv);
  kv.v_block_stride = kv.num_kv_heads * v_head_elements(kv);
  RaggedPlan p = plan_ragged(a, kv, dtype_bytes(kv.cache_dtype));
  fill_ragged(a, p);
  kv.k_cache = p.k;
  kv.v_cache = p.v;
  KvWriteArgs write{kv, a.key, a.value, inner.dtype, p.num_keys, a.key_stride, a.key_head_stride, a.value_stride,
                    a.value_head_stride, p.slots};
  kv_write(write);
  inner.seq_lens = p.lens;
  inner.block_table = p.table;
  inner.table_stride = p.table_stride;
  attention(inner);
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
