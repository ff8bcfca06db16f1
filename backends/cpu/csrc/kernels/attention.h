// Paged attention, one entry for prefill, chunk, decode and mixed batches. A task is (request, kv head, run of queries, run of
// keys): the queries of all heads that share the kv head are rows of one tile, so that each key block is read once for them.
// Keys go by in chunks of 128 that start at multiples of 128, whatever the batch: without splits, or with splits at fixed
// keys, a row's bits do not depend on the batch, on the chunking of its prompt, or on the number of threads.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

constexpr int64_t kKeyChunk = 128;  // keys between two visits of the running sums; rows of scores have room for 16 more
constexpr int kTaskRows = 48;       // rows at a time where a head group is not larger by itself
constexpr int64_t kMinSplit = 128;  // keys that are worth a task of their own
constexpr int64_t kColdRows = 12;   // up to so many rows, a task waits for its keys and values rather than computing
constexpr int64_t kInt16Rows = 24;  // rows that pay for bringing keys and values into integers
constexpr float kMinusInf = -__builtin_inff();
#ifdef CORE_DOT2
constexpr bool kRoundsAttention = true;
#else
constexpr bool kRoundsAttention = false;
#endif

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
  bool dp, int16;
  int64_t task_rows;  // of a task, where a head group is not larger by itself
};

struct RowState {  // buffers of a task, or of its rows [row0, row0 + rows)
  int64_t row0, rows, dv;
  void* q;       // packed tiles
  float* s;      // [rows, kRowStride] scores, then probabilities
  uint16_t* p;   // [rows, kRowStride] probabilities in bf16, or in int16
  float* o;      // [rows, dv]
  float* m;      // [rows] running maximum
  float* l;      // [rows] running sum
  int32_t* lo;   // [rows] keys that the row sees: [lo, hi)
  int32_t* hi;
  char* v;       // one head's values of a block
  // Only in int16: scales of queries and of a chunk's probabilities [rows], of keys and of values [kKeyChunk]; keys by panels
  // [head_dim / 2][16], values by panels of dims [kKeyChunk / 2][16].
  float *q_scale, *p_scale, *k_scale, *v_scale;
  float* v_poison;  // [kKeyChunk] NaN for values that are not finite, else 0
  uint32_t *k, *v_pairs;
  bool finite;   // all of the chunk's values are
};

// Floats of a row of the output sums.
CORE_INLINE int64_t sum_stride(const KvArgs& a) { return round_up(a.v_head_dim, 16 * kMinPanels); }

CORE_INLINE int64_t int16_bytes(const AttentionArgs& a, int64_t rows) {
  return rows * 8 + kKeyChunk * (12 + (a.kv.head_dim + round_up(a.kv.v_head_dim, 16)) * 2) + 512;
}

CORE_INLINE int64_t state_bytes(const AttentionArgs& a, int64_t rows, bool int16) {
  int64_t dv = sum_stride(a.kv);
  return rows * (round_up(a.kv.head_dim, 4) * 4 + kRowStride * 6 + dv * 4 + 16) + v_head_elements(a.kv) * 4 + 1024 +
         (int16 ? int16_bytes(a, rows) : 0);
}

static RowState carve(const AttentionArgs& a, int64_t rows, bool int16) {
  RowState s{};
  char* at = static_cast<char*>(scratch(kScratchTask, size_t(state_bytes(a, rows, int16))));
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
  if (!int16) return s;
  s.q_scale = reinterpret_cast<float*>(take(rows * 4));
  s.p_scale = reinterpret_cast<float*>(take(rows * 4));
  s.k_scale = reinterpret_cast<float*>(take(kKeyChunk * 4));
  s.v_scale = reinterpret_cast<float*>(take(kKeyChunk * 4));
  s.v_poison = reinterpret_cast<float*>(take(kKeyChunk * 4));
  s.k = reinterpret_cast<uint32_t*>(take(kKeyChunk * a.kv.head_dim * 2));
  s.v_pairs = reinterpret_cast<uint32_t*>(take(kKeyChunk * round_up(a.kv.v_head_dim, 16) * 2));
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
    int64_t query = t.query0 + (s.row0 + i) / group;
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

CORE_INLINE bool hides(const RowState& s, int64_t row, int64_t key) { return key < s.lo[row] || key + 16 > s.hi[row]; }

// Scores of the keys [key, key + 16): -inf for those that the row does not see, whatever their cache slots hold.
CORE_INLINE F hide(const RowState& s, int64_t row, int64_t key, F v) {
  F index = add(iota(), set1(float(key)));
  v = select_lt(index, set1(float(s.hi[row])), v, set1(kMinusInf));
  return select_lt(index, set1(float(s.lo[row])), set1(kMinusInf), v);
}

CORE_INLINE F cap(const AttentionArgs& a, F v) { return mul(vtanh(div(v, set1(a.softcap))), set1(a.softcap)); }

// Scores of 16 keys before scaling, or scaled and capped where a cap asks for that. What changes is written back.
CORE_INLINE F score16(const AttentionArgs& a, const RowState& s, int64_t row, int64_t key, float* x) {
  F v = load(x);
  bool hidden = hides(s, row, key);
  if (a.softcap > 0.f) v = cap(a, mul(v, set1(a.scale)));
  else if (!hidden) return v;
  if (hidden) v = hide(s, row, key, v);
  store(x, v);
  return v;
}

constexpr float kLog2E = 1.44269504088896341f;

// How a row's scores become probabilities: 2^(score * factor + shift).
struct RowShift {
  F factor, shift;
  float before, m;  // running maximum without and with the chunk
  bool none;        // no key was seen yet
};

// `top`: the chunk's largest score, which is to be multiplied with `unit`.
CORE_INLINE RowShift shift_row(const RowState& s, int64_t row, float top, float unit) {
  if (top != kMinusInf) top *= unit;
  float before = s.m[row], m = top > before ? top : before;
  bool none = m == kMinusInf;
  return {set1(unit * kLog2E), set1(none ? 0.f : -m * kLog2E), before, m, none};
}

// Adds a chunk's probabilities to the row's sum, whose parts are scaled anew where the maximum grew.
CORE_INLINE void add_to_row(RowState& s, int64_t row, const RowShift& shift, float sum) {
  if (shift.none) return;
  if (shift.m == shift.before || shift.before == kMinusInf) {
    s.l[row] += sum;
    s.m[row] = shift.m;
    return;
  }
  float lane[16];
  store(lane, vexp(set1(shift.before - shift.m)));
  s.l[row] = s.l[row] * lane[0] + sum;
  F alpha = set1(lane[0]);
  for (int64_t d = 0; d < s.dv; d += 16) store(s.o + row * s.dv + d, mul(load(s.o + row * s.dv + d), alpha));
  s.m[row] = shift.m;
}

// Whether a chunk of keys is looked at vector by vector does not show in a row's bits: which vectors hide keys is the row's
// own, and the others are treated alike.
static void softmax_row(const AttentionArgs& a, const Chunk& c, RowState& s, int64_t row, bool dp) {
  int64_t first = c.begin / 16 * 16;
  float* x = s.s + row * kRowStride - c.base;
  float unit = a.softcap > 0.f ? 1.f : a.scale;  // positive: the largest score is that of the largest product
  F top = set1(kMinusInf);
  for (int64_t key = first; key < c.end; key += 16) top = vmax(top, score16(a, s, row, key, x + key));
  RowShift shift = shift_row(s, row, hmax(top), unit);
  F sum = zero();
  for (int64_t key = first; key < c.end; key += 16) {
    F p = vexp2(fma(load(x + key), shift.factor, shift.shift));
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
  add_to_row(s, row, shift, hsum(sum));
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

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
