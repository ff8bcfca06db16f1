// y = x W^T + bias over packed panels. Three separate concerns: rows of x are brought into the form that the tiles read
// (pack_*), the output is cut into tasks (panel groups x row chunks), and a task walks k in blocks (run_task).
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

constexpr int64_t kDenseKBlock = 512, kTileKBlock = 128;  // k values between two visits of C
constexpr int kChunkTiles = 20;                           // row tiles that share a dequantized panel

struct LinearPlan {
  const LinearArgs* args;
  int64_t k_padded;      // elements of a packed row of x
  int64_t num_tiles;     // row tiles; the first m % num_tiles of them have one row more
  int np;                // panels of a task
  int64_t num_panels, num_groups, num_chunks;
  void* a;               // packed activations
  float* a_scale;        // [m]; only where c is int32, of int8 weights against int8 rows
  float* a_sum;          // [k / kSub][mr] by tile, direct path only
  const char* data;
  int64_t panel_bytes;
  TileFn tile;
  bool dp;               // bf16 dot products
};

CORE_INLINE int64_t tile_start(const LinearPlan& p, int64_t i) {
  int64_t base = p.args->m / p.num_tiles, rest = p.args->m % p.num_tiles;
  return i * base + min64(i, rest);
}

// ------------------------------------------------------------------ activations
template <class T>
static void pack_float_tile(const LinearPlan& p, int64_t m0, int64_t mr) {
  const LinearArgs& a = *p.args;
  float* out = static_cast<float*>(p.a) + m0 * p.k_padded;
  for (int64_t k = 0; k < p.k_padded; k += 16) {
    int64_t count = min64(16, p.k_padded - k), have = min64(count, a.w.k - k);
    for (int64_t m = 0; m < mr; m++) {
      F v = have > 0 ? load_part(static_cast<const T*>(a.x) + (m0 + m) * a.x_stride + k, have) : zero();
      if (mr == 1 && count == 16) {
        store(out + k, v);
        continue;
      }
      float lanes[16];
      store(lanes, v);
      for (int64_t i = 0; i < count; i++) out[(k + i) * mr + m] = lanes[i];
    }
  }
}

template <class T>
CORE_INLINE float row_absmax(const T* x, int64_t k) {
  F top = zero();
  int64_t i = 0;
  for (; i + 16 <= k; i += 16) top = vmax(vabs(loadx(x + i)), top);
  if (i < k) top = vmax(vabs(load_part(x + i, k - i)), top);
  return hmax(top);
}

// Row to int8 with one scale, absmax / 127, held as unsigned bytes (value + 128) in quads.
template <class T>
static void pack_int8_tile(const LinearPlan& p, int64_t m0, int64_t mr) {
  const LinearArgs& a = *p.args;
  auto* out = static_cast<uint8_t*>(p.a) + m0 * p.k_padded;
  for (int64_t m = 0; m < mr; m++) {
    const T* x = static_cast<const T*>(a.x) + (m0 + m) * a.x_stride;
    float scale = row_absmax(x, a.w.k) / 127.f;
    F divisor = set1(scale > 0.f ? scale : 1.f);
    p.a_scale[m0 + m] = scale;
    for (int64_t k = 0; k < p.k_padded; k += 16) {
      int32_t lanes[16];
      F v = k < a.w.k ? div(load_part(x + k, a.w.k - k), divisor) : zero();
      storei(lanes, addi(to_int(vmax(vmin(v, set1(127.f)), set1(-127.f))), set1i(128)));
      int64_t count = min64(16, p.k_padded - k);
      for (int64_t i = 0; i < count; i++) out[((k + i) / 4 * mr + m) * 4 + (k + i) % 4] = uint8_t(lanes[i]);
    }
  }
}

static void pack_pairs_tile(const LinearPlan& p, int64_t m0, int64_t mr) {
  const LinearArgs& a = *p.args;
  auto* out = static_cast<uint32_t*>(p.a) + m0 * (p.k_padded / 2);
  for (int64_t m = 0; m < mr; m++) {
    auto* x = static_cast<const uint16_t*>(a.x) + (m0 + m) * a.x_stride;
    int64_t pairs = a.w.k / 2;
    for (int64_t i = 0; i < pairs; i++) memcpy(out + i * mr + m, x + 2 * i, 4);
    if (a.w.k & 1) out[pairs * mr + m] = x[a.w.k - 1];
  }
}

template <int SUB>
static void sum_tile(const LinearPlan& p, int64_t m0, int64_t mr) {
  const float* a = static_cast<const float*>(p.a) + m0 * p.k_padded;
  float* out = p.a_sum + m0 * (p.k_padded / SUB);
  for (int64_t s = 0; s < p.k_padded / SUB; s++)
    for (int64_t m = 0; m < mr; m++) {
      float sum = 0;
      for (int64_t i = 0; i < SUB; i++) sum += a[(s * SUB + i) * mr + m];
      out[s * mr + m] = sum;
    }
}

static void pack_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  int dtype = p.args->x_dtype;
  for (int64_t i = begin; i < end; i++) {
    int64_t m0 = tile_start(p, i), mr = tile_start(p, i + 1) - m0;
    if (p.args->w.scheme == kWInt8) {
      if (dtype == kF32) pack_int8_tile<float>(p, m0, mr);
      else if (dtype == kBF16) pack_int8_tile<BF16>(p, m0, mr);
      else pack_int8_tile<F16>(p, m0, mr);
    } else if (p.dp) {
      pack_pairs_tile(p, m0, mr);
    } else {
      if (dtype == kF32) pack_float_tile<float>(p, m0, mr);
      else if (dtype == kBF16) pack_float_tile<BF16>(p, m0, mr);
      else pack_float_tile<F16>(p, m0, mr);
      if (p.a_sum) sum_tile<32>(p, m0, mr);
    }
  }
}

// ------------------------------------------------------------------ results
CORE_INLINE F bias16(const Weight& w, int64_t n0, int64_t count) {
  if (w.bias_dtype == kF32) return load_part(static_cast<const float*>(w.bias) + n0, count);
  if (w.bias_dtype == kBF16) return load_part(static_cast<const BF16*>(w.bias) + n0, count);
  return load_part(static_cast<const F16*>(w.bias) + n0, count);
}

template <class T>
CORE_INLINE void finish_panel(const LinearPlan& p, const void* c, int64_t m, int64_t panel) {
  const LinearArgs& a = *p.args;
  int64_t n0 = panel * kPanel, count = min64(kPanel, a.w.n - n0);
  F v;
  if (p.a_scale) {
    I sums = loadi(a.w.row_sum + n0);
    v = to_float(subi(loadi(c), shl<7>(sums)));
    v = mul(v, set1(p.a_scale[m]));
  } else {
    v = load(static_cast<const float*>(c));
  }
  if (a.w.row_scale) v = mul(v, load(a.w.row_scale + n0));
  if (a.w.bias) v = add(v, bias16(a.w, n0, count));
  store_part(static_cast<T*>(a.y) + m * a.y_stride + n0, v, count);
}

static __attribute__((noinline)) void finish_row(const LinearPlan& p, const char* c, int64_t m, int64_t panel, int count) {
  for (int i = 0; i < count; i++) {
    if (p.args->y_dtype == kF32) finish_panel<float>(p, c + i * 64, m, panel + i);
    else if (p.args->y_dtype == kBF16) finish_panel<BF16>(p, c + i * 64, m, panel + i);
    else finish_panel<F16>(p, c + i * 64, m, panel + i);
  }
}

template <class T>
CORE_INLINE void finish_plain(const LinearPlan& p, const float* c, int64_t m0, int64_t m1, int64_t panel, int np, int real) {
  const LinearArgs& a = *p.args;
  for (int q = 0; q < real; q++) {
    int64_t n0 = (panel + q) * kPanel;
    T* y = static_cast<T*>(a.y) + m0 * a.y_stride + n0;
    const float* sums = c + q * 16;
    if (a.w.row_scale) {
      F scale = load(a.w.row_scale + n0);
      for (int64_t m = m0; m < m1; m++, y += a.y_stride, sums += np * 16) storex(y, mul(load(sums), scale));
    } else {
      for (int64_t m = m0; m < m1; m++, y += a.y_stride, sums += np * 16) storex(y, load(sums));
    }
  }
}

// Results of rows [m0, m1) and `real` panels, which lie in c as [m1 - m0][np][16].
static __attribute__((noinline)) void finish_rows(const LinearPlan& p, const float* c, int64_t m0, int64_t m1, int64_t panel,
                                                  int np, int real) {
  const LinearArgs& a = *p.args;
  if (a.w.bias || p.a_scale || (panel + real) * kPanel > a.w.n) {
    for (int64_t m = m0; m < m1; m++) finish_row(p, reinterpret_cast<const char*>(c + (m - m0) * np * 16), m, panel, real);
  } else if (a.y_dtype == kF32) {
    finish_plain<float>(p, c, m0, m1, panel, np, real);
  } else if (a.y_dtype == kBF16) {
    finish_plain<BF16>(p, c, m0, m1, panel, np, real);
  } else {
    finish_plain<F16>(p, c, m0, m1, panel, np, real);
  }
}

CORE_INLINE void prefetch(const char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// ------------------------------------------------------------------ tasks
constexpr int64_t kMaxChunkRows = kChunkTiles * 12;
struct TaskScratch {
  float c[kMaxChunkRows * 64];
  float part[12 * 64];
  float tile[4 * kTileKBlock * 16];
};

// Adds one k block of a row tile to C. With block scales the products of the block are summed first.
template <class K>
CORE_INLINE void run_tile(const LinearPlan& p, const void* a, const void* const* b, int64_t k, float* c, int mr, int np,
                          int real, int64_t panel, int64_t k0, float* part) {
  MicroFn fn = pick_micro<K>(mr, np);
  int64_t ldc = np * 16;
  if (!p.args->w.block_scale) {
    fn(a, b, k, c, ldc, k0 ? kContinue : kStart, p.tile ? 0 : kPrefetchBytes);
    return;
  }
  fn(a, b, k, part, ldc, kStart, 0);
  int64_t per_panel = ceil_div(p.args->w.k, kFp8Block);
  for (int q = 0; q < real; q++) {
    F s = set1(p.args->w.block_scale[(panel + q) * per_panel + k0 / kFp8Block]);
    for (int m = 0; m < mr; m++) {
      F old = k0 ? load(c + m * ldc + q * 16) : zero();
      store(c + m * ldc + q * 16, fma(load(part + m * ldc + q * 16), s, old));
    }
  }
}

template <class K>
static void run_task(const LinearPlan& p, int64_t panel, int np, int real, int64_t tile0, int64_t tile1, TaskScratch& s) {
  const LinearArgs& a = *p.args;
  int64_t block = p.tile ? kTileKBlock : tile1 - tile0 == 1 ? a.w.k : kDenseKBlock;
  int64_t row0 = tile_start(p, tile0);
  for (int64_t k0 = 0; k0 < a.w.k; k0 += block) {
    int64_t k = min64(block, a.w.k - k0);
    const void* b[4] = {};
    for (int q = 0; q < real; q++) {
      const char* base = p.data + (panel + q) * p.panel_bytes;
      if (p.tile) {
        float* tile = s.tile + q * kTileKBlock * 16;
        prefetch(base + (k0 + k) * p.panel_bytes / a.w.k, k * p.panel_bytes / a.w.k);  // the next block of k
        p.tile(base, k0, k, tile);
        b[q] = tile;
      } else {
        b[q] = base + k0 / K::kStep * 16 * int64_t(sizeof(typename K::B));
      }
    }
    for (int q = real; q < np; q++) b[q] = b[0];
    for (int64_t t = tile0; t < tile1; t++) {
      int64_t m0 = tile_start(p, t), mr = tile_start(p, t + 1) - m0;
      auto* x = static_cast<const typename K::A*>(p.a) + (m0 * p.k_padded + k0 * mr) / K::kActStep;
      run_tile<K>(p, x, b, k, s.c + (m0 - row0) * np * 16, int(mr), np, real, panel, k0, s.part);
    }
  }
  finish_rows(p, s.c, row0, tile_start(p, tile1), panel, np, real);
}

template <class K>
CORE_INLINE void run_panels(const LinearPlan& p, int64_t panel, int64_t last, int64_t tile0, int64_t tile1, TaskScratch& s) {
  while (panel < last) {
    int left = int(min64(last - panel, p.np)), np = p.np <= left ? p.np : left >= 2 ? 2 : kMinPanels;
    int real = np < left ? np : left;
    run_task<K>(p, panel, np, real, tile0, tile1, s);
    panel += real;
  }
}

// Items are groups of panels for each chunk of rows, chunk by chunk: its rows stay in the cache. With one chunk items are
// panels, so that threads get equal shares.
template <class K>
static void run_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  auto& s = *static_cast<TaskScratch*>(scratch(kScratchTask, sizeof(TaskScratch)));
  if (p.num_chunks == 1) {
    run_panels<K>(p, begin, end, 0, p.num_tiles, s);
    return;
  }
  int64_t tiles_per_chunk = ceil_div(p.num_tiles, p.num_chunks);
  for (int64_t i = begin; i < end; i++) {
    int64_t chunk = i / p.num_groups, group = i % p.num_groups;
    int64_t tile0 = chunk * tiles_per_chunk, tile1 = min64(p.num_tiles, tile0 + tiles_per_chunk);
    if (tile0 < tile1) run_panels<K>(p, group * p.np, min64(p.num_panels, (group + 1) * p.np), tile0, tile1, s);
  }
}

// ------------------------------------------------------------------ few rows, quantized: no tile in between
template <class S, int MR>
CORE_INLINE void direct_panel(const void* panel, const float* a, const float* a_sum, int64_t k, F (&acc)[MR]) {
  constexpr int U = kAccumulators == 24 ? (MR == 1 ? 4 : MR == 2 ? 2 : 1) : MR == 1 ? 2 : 1;
  auto* blocks = static_cast<const typename S::Block*>(panel);
  CORE_UNROLL for (int m = 0; m < MR; m++) acc[m] = zero();
  for (int64_t i = 0; i < k / S::kBlock; i++) {
    const typename S::Block& b = blocks[i];
    for (int s = 0; s < S::kBlock / S::kSub; s++) {
      F part[MR][U];
      CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int u = 0; u < U; u++) part[m][u] = zero();
      const float* x = a + (i * S::kBlock + s * S::kSub) * MR;
      constexpr int64_t kSubBytes = int64_t(sizeof(b)) / (S::kBlock / S::kSub);
      prefetch(reinterpret_cast<const char*>(&b) + s * kSubBytes + kPrefetchBlocksBytes, kSubBytes);
      S::each(b, s, [&](int base, int c, F q) CORE_LAMBDA {
        CORE_UNROLL for (int m = 0; m < MR; m++)
          part[m][c % U] = fma(set1(x[(base + c) * MR + m]), q, part[m][c % U]);
      });
      F d = S::scale(b, s);
      CORE_UNROLL for (int m = 0; m < MR; m++) {
        F sum = part[m][0];
        CORE_UNROLL for (int u = 1; u < U; u++) sum = add(sum, part[m][u]);
        acc[m] = fma(sum, d, acc[m]);
      }
      if constexpr (S::kHasMin) {
        F low = S::minimum(b, s);
        const float* sums = a_sum + (i * (S::kBlock / S::kSub) + s) * MR;
        CORE_UNROLL for (int m = 0; m < MR; m++) acc[m] = fma(set1(sums[m]), low, acc[m]);
      }
    }
  }
}

template <class S, int MR>
static void direct_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  for (int64_t panel = begin; panel < end; panel++) {
    F acc[MR];
    direct_panel<S, MR>(p.data + panel * p.panel_bytes, static_cast<const float*>(p.a), p.a_sum, p.args->w.k, acc);
    float c[MR * 16];
    CORE_UNROLL for (int m = 0; m < MR; m++) store(c + m * 16, acc[m]);
    finish_rows(p, c, 0, MR, panel, 1, 1);
  }
}

template <class S>
CORE_INLINE RangeFn direct_rows(int64_t m) {
  return m == 1 ? direct_range<S, 1> : direct_range<S, 2>;
}

constexpr int64_t kDirectRows = 2;

static RangeFn direct_fn(int scheme, int64_t m) {
  if constexpr (kAccumulators < 6) return nullptr;
  else if (m > kDirectRows) return nullptr;
  else switch (scheme) {
    case kWQ8_0: return direct_rows<SchemeQ8_0>(m);
    case kWQ4_0: return direct_rows<SchemeQ4_0>(m);
    case kWQ4_1: return direct_rows<SchemeQ4_1>(m);
    case kWQ5_0: return direct_rows<SchemeQ5_0>(m);
    case kWQ5_1: return direct_rows<SchemeQ5_1>(m);
    case kWQ4_K: return direct_rows<SchemeQ4_K>(m);
    case kWQ5_K: return direct_rows<SchemeQ5_K>(m);
    case kWQ6_K: return direct_rows<SchemeQ6_K>(m);
    default: return nullptr;
  }
}

// ------------------------------------------------------------------ entry
CORE_INLINE int row_cap(int64_t m) {
  if (m <= max_rows(4)) return int(m);
  if (max_rows(2) == kMaxRows || m > max_rows(2)) return kMaxRows;
  return int(m);
}

static void plan_shape(LinearPlan& p, const LinearArgs& a) {
  SchemeShape shape = scheme_shape(a.w.scheme);
  p.args = &a;
  p.data = static_cast<const char*>(a.w.data);
  p.panel_bytes = ceil_div(a.w.k, shape.k_block) * shape.block_bytes;
  p.k_padded = round_up(a.w.k, 4);
  p.num_panels = ceil_div(a.w.n, kPanel);
  int cap = row_cap(a.m);
  p.num_tiles = ceil_div(a.m, cap);
  p.np = panels_for(int(ceil_div(a.m, p.num_tiles)), p.num_panels);
  p.num_groups = ceil_div(p.num_panels, p.np);
  p.num_chunks = ceil_div(p.num_tiles, kChunkTiles);
  p.tile = tile_fn(a.w.scheme);
  p.a_sum = nullptr;
  p.a_scale = nullptr;
#ifdef CORE_DPBF16
  p.dp = a.x_dtype == kBF16 && (a.w.scheme == kWBF16 || a.w.scheme == kWFp8);
  if (p.dp && p.tile) p.tile = fp8_pairs;
#else
  p.dp = false;
#endif
}

// Input scratch: packed activations, then the rows' scales or block sums.
static void plan_memory(LinearPlan& p, bool direct) {
  const LinearArgs& a = *p.args;
  size_t packed = size_t(round_up(a.m * p.k_padded * 4, 64));
  size_t extra = size_t(a.m) * 4 + size_t(a.m * p.k_padded / 32 + a.m) * 4;
  char* memory = static_cast<char*>(scratch(kScratchInput, packed + extra + 64));
  p.a = memory;
  if (a.w.scheme == kWInt8) p.a_scale = reinterpret_cast<float*>(memory + packed);
  if (direct) p.a_sum = reinterpret_cast<float*>(memory + packed);
}

CORE_INLINE RangeFn range_fn(const LinearPlan& p) {
#ifdef CORE_DPBF16
  if (p.dp) return run_range<KindDP>;
#endif
  switch (p.args->w.scheme) {
    case kWBF16: return run_range<KindBF16>;
    case kWF16: return run_range<KindF16>;
    case kWInt8: return run_range<KindS8>;
    default: return run_range<KindF32>;
  }
}

// Items of a static split that keep a thread busy for some 10 microseconds.
CORE_INLINE int64_t task_grain(const LinearPlan& p, int64_t panels_per_item) {
  int64_t work = panels_per_item * 16 * p.args->w.k * (min64(p.args->m, kMaxChunkRows) + 3);
  return max64(1, 400000 / max64(1, work));
}

static bool linear_int8(const LinearArgs& a);  // linear_int8.h

static void linear(const LinearArgs& a) {
  if (a.m <= 0 || a.w.n <= 0) return;
  if (a.int8_activations && linear_int8(a)) return;
  LinearPlan p;
  plan_shape(p, a);
  RangeFn direct = a.invariant ? nullptr : direct_fn(a.w.scheme, a.m);
  if (direct) p.num_tiles = 1;
  plan_memory(p, direct != nullptr);
  parallel_static(p.num_tiles, max64(1, 65536 / max64(1, a.w.k * ceil_div(a.m, p.num_tiles))), pack_range, &p);
  if (direct) parallel_static(p.num_panels, task_grain(p, 1), direct, &p);
  else if (p.num_chunks == 1) parallel_static(p.num_panels, task_grain(p, 1), range_fn(p), &p);
  else parallel_static(p.num_groups * p.num_chunks, task_grain(p, p.np), range_fn(p), &p);
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
