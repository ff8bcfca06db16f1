// Attention from a batch to tasks and from tasks to results: planning, splits and their merging, and keys that are in no cache.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

CORE_INLINE bool is_cold(const AttentionArgs& a, const AttentionTask& t) {
  return (t.query1 - t.query0) * (a.num_heads / a.kv.num_kv_heads) <= kColdRows;
}

// The keys of a task's first chunk, asked for while another task computes.
CORE_INLINE void fetch_first(const AttentionArgs& a, const AttentionTask& t) {
  if (is_cold(a, t)) fetch_keys(a, t, t.key0, min64(t.key1, t.key0 / kKeyChunk * kKeyChunk + kKeyChunk));
}

// Sums up what the rows see of a run of keys.
template <class K>
CORE_INLINE void attend(const AttentionPlan& p, const AttentionTask& t, const Chunk& c, RowState& s, bool int16) {
  const AttentionArgs& a = *p.args;
#ifdef CORE_DOT2
  if (int16) {
    attend_int16(a, t, c, s);
    return;
  }
#endif
  (void)int16;
  scores<K>(a, t, c, s);
  for (int64_t i = 0; i < s.rows; i++) softmax_row(a, c, s, i, p.dp);
  weigh_values<K>(a, t, c, s);
}

template <class T>
CORE_INLINE void bring_queries(const AttentionPlan& p, const AttentionTask& t, const RequestShape& q, RowState& s, bool int16) {
#ifdef CORE_DOT2
  if (int16) {
    for (int64_t row = 0; row < s.rows; row += kTaskRows) {
      RowState r = rows_of(*p.args, s, row, min64(row + kTaskRows, s.rows));
      pack_queries_int16(*p.args, t, q, r);
    }
    return;
  }
#endif
  (void)int16;
  pack_queries<T>(*p.args, t, q, s, p.dp);
}

CORE_INLINE bool in_int16(const AttentionPlan& p, int64_t rows) {
  return p.int16 && (rows >= kInt16Rows || p.args->split_keys != 0);  // where splits are fixed, a row's bits depend on no others
}

// `next`: the task that this thread will probably take up behind this one, or null.
template <class K, class T>
static void attention_task(const AttentionPlan& p, const AttentionTask& t, const AttentionTask* next) {
  const AttentionArgs& a = *p.args;
  RequestShape q = shape_of(a, t.request);
  int64_t group = a.num_heads / a.kv.num_kv_heads;
  bool cold = is_cold(a, t), int16 = in_int16(p, (t.query1 - t.query0) * group);
  RowState s = carve(a, (t.query1 - t.query0) * group, int16);
  bring_queries<T>(p, t, q, s, int16);
  start_rows(a, t, q, s);
  for (int64_t base = t.key0 / kKeyChunk * kKeyChunk; base < t.key1; base += kKeyChunk) {
    Chunk c{base, max64(base, t.key0), min64(base + kKeyChunk, t.key1)};
    if (cold) fetch_values(a, t, c.begin, c.end);
    if (cold && c.end < t.key1) fetch_keys(a, t, c.end, min64(c.end + kKeyChunk, t.key1));
    else if (next) fetch_first(a, *next);
    for (int64_t end = c.end; next_run(a, t, c, end); c.begin = c.end) attend<K>(p, t, c, s, int16);
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

CORE_INLINE int64_t tile_queries(const AttentionArgs& a, int64_t rows) {
  return max64(1, rows / (a.num_heads / a.kv.num_kv_heads));
}

static int64_t count_tiles(const AttentionArgs& a, int64_t rows) {
  int64_t tiles = 0;
  for (int64_t r = 0; r < a.num_requests; r++) tiles += ceil_div(shape_of(a, r).count, tile_queries(a, rows));
  return tiles * a.kv.num_kv_heads;
}

// Rows of a task: in integers more of them share what is done to keys and values, as long as all threads have several tasks.
static int64_t rows_of_tasks(const AttentionPlan& p) {
  if (!p.int16) return kTaskRows;
  int64_t rows = 4 * kTaskRows;
  while (rows > kTaskRows && count_tiles(*p.args, rows) < 4 * num_threads()) rows /= 2;
  return rows;
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
static int64_t list_tasks(const AttentionPlan& p, const SplitRule& rule, AttentionTask* out, int64_t& partial_floats) {
  const AttentionArgs& a = *p.args;
  int64_t group = a.num_heads / a.kv.num_kv_heads, step = tile_queries(a, p.task_rows), dv = sum_stride(a.kv), n = 0;
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
  p.int16 = kRoundsAttention && a.int16 && a.dtype == kBF16 && a.kv.cache_dtype == kBF16;
  p.task_rows = rows_of_tasks(p);
  SplitRule rule = split_rule(a, count_tiles(a, p.task_rows));
  int64_t floats = 0;
  p.num_tasks = list_tasks(p, rule, nullptr, floats);
  p.tasks = static_cast<AttentionTask*>(scratch(kScratchInput, size_t(p.num_tasks + 1) * sizeof(AttentionTask)));
  p.partials = static_cast<float*>(scratch(kScratchPartial, size_t(floats + 16) * 4));
  int64_t again = 0;
  list_tasks(p, rule, p.tasks, again);
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
