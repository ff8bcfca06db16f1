// y = x W^T for block and int8 weights against activations in int8: 32 values of a row of x share a scale, their largest magnitude / 127.
// Products of a block are exact in int32; a row's block sums are added in float, k ascending, whatever the number of rows:
//
//   y = sum over blocks of  d_w * d_x * (sum q_w q_x)  +  minimum_w * d_x * (sum q_x)
//
// The dot products take unsigned weights, q_w + offset. A block's accumulators therefore start at -offset * (sum q_x), which
// is computed once, with the rows of x, and serves all panels.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

constexpr int kActBlock = 32;
constexpr int kInt8Rows = kAccumulators == 24 ? 6 : kAccumulators / 2 + 1 > 3 ? 3 : 2;  // rows of a tile
constexpr int kInt8Panels = kAccumulators == 24 ? 2 : 1;
constexpr int kInt8DirectRows = kAccumulators == 24 ? 8 : 2;  // up to so many, weights are not unpacked into a tile first
constexpr int64_t kInt8Blocks = 10;                           // most blocks of 32 between two visits of C
constexpr int kInt8ChunkTiles = 20;

// A tile's rows lie block by block of 32 activations, row by row; a row's block is, in dwords: q [8], d, then start and
// low (d_x * sum q_x) of each of `subs` sub-blocks of the weight.
constexpr int act_dwords(int subs) { return 9 + 2 * subs; }

// ------------------------------------------------------------------ activations
constexpr int kQuantizeBlocks = 4;  // of a row at a time: what is found across lanes is found for all of them together

struct ActScales {
  float d[kQuantizeBlocks], inverse[kQuantizeBlocks];
  bool finite;
};

// From largest magnitudes as bits, which order as the values do: infinities and NaN come last.
CORE_INLINE ActScales act_scales(const int32_t* tops) {
  ActScales s;
  s.finite = true;
  for (int j = 0; j < kQuantizeBlocks; j++) {
    float top = bits_float(uint32_t(tops[j]));
    bool some = top > 1e-30f;  // smaller ones are zero: 127 / top would overflow
    s.d[j] = some ? top / 127.f : 0.f;
    s.inverse[j] = some ? 127.f / top : 0.f;
    s.finite &= tops[j] < 0x7f800000;
  }
  return s;
}

// Blocks [0, count) of x to `out`, `stride` dwords apart. False where a value is not finite.
template <class T, int SUBS, int OFFSET>
CORE_INLINE bool quantize_blocks(const T* x, int64_t count, uint32_t* out, int64_t stride) {
  I top[kQuantizeBlocks], half[2][kQuantizeBlocks];
  const I magnitude = set1i(0x7fffffff);
  const T* at[kQuantizeBlocks];
  CORE_UNROLL for (int64_t j = 0; j < kQuantizeBlocks; j++) {
    at[j] = x + min64(j, count - 1) * kActBlock;
    top[j] = maxi(andi(as_int(loadx(at[j])), magnitude), andi(as_int(loadx(at[j] + 16)), magnitude));
  }
  int32_t tops[kQuantizeBlocks], sums[2][kQuantizeBlocks];
  reduce4(top, true, tops);
  ActScales scales = act_scales(tops);
  CORE_UNROLL for (int64_t j = 0; j < kQuantizeBlocks; j++) {
    F inverse = set1(scales.inverse[j]);
    I q0 = to_int(mul(loadx(at[j]), inverse)), q1 = to_int(mul(loadx(at[j] + 16), inverse));  // in [-127, 127]
    half[0][j] = SUBS == 1 ? addi(q0, q1) : q0;
    half[1][j] = q1;
    auto* q = reinterpret_cast<int8_t*>(out + min64(j, count - 1) * stride);
    store_i8(q, q0);
    store_i8(q + 16, q1);
  }
  CORE_UNROLL for (int s = 0; s < SUBS; s++) reduce4(half[s], false, sums[s]);
  CORE_UNROLL for (int64_t j = 0; j < kQuantizeBlocks; j++) {
    uint32_t* block = out + min64(j, count - 1) * stride;
    block[8] = float_bits(scales.d[j]);
    for (int s = 0; s < SUBS; s++) {
      block[9 + 2 * s] = uint32_t(-OFFSET * sums[s][j]);
      block[10 + 2 * s] = float_bits(scales.d[j] * float(sums[s][j]));
    }
  }
  return scales.finite;
}

template <class T, int SUBS, int OFFSET>
CORE_INLINE void quantize_row(const T* x, int64_t k, uint32_t* out, int64_t mr) {
  const int64_t stride = mr * act_dwords(SUBS), blocks = k / kActBlock;
  bool finite = true;
  int64_t i = 0;
  for (; i + kQuantizeBlocks <= blocks; i += kQuantizeBlocks)
    finite &= quantize_blocks<T, SUBS, OFFSET>(x + i * kActBlock, kQuantizeBlocks, out + i * stride, stride);
  if (i < blocks) finite &= quantize_blocks<T, SUBS, OFFSET>(x + i * kActBlock, blocks - i, out + i * stride, stride);
  if (finite) return;
  // An infinity or NaN has no scale: the row's results are NaN.
  for (i = 0; i < blocks; i++) out[i * stride + 8] = 0x7fc00000u;
}

template <int SUBS, int OFFSET>
static void quantize_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  const LinearArgs& a = *p.args;
  for (int64_t i = begin; i < end; i++) {
    int64_t m0 = tile_start(p, i), mr = tile_start(p, i + 1) - m0;
    auto* out = static_cast<uint32_t*>(p.a) + m0 * p.k_padded;
    for (int64_t m = 0; m < mr; m++, out += act_dwords(SUBS)) {
      int64_t at = (m0 + m) * a.x_stride;
      if (a.x_dtype == kF32) quantize_row<float, SUBS, OFFSET>(static_cast<const float*>(a.x) + at, a.w.k, out, mr);
      else if (a.x_dtype == kBF16) quantize_row<BF16, SUBS, OFFSET>(static_cast<const BF16*>(a.x) + at, a.w.k, out, mr);
      else quantize_row<F16, SUBS, OFFSET>(static_cast<const F16*>(a.x) + at, a.w.k, out, mr);
    }
  }
}

// What a block adds to a sum. One expression for all paths: a row's bits depend on it.
template <class S>
CORE_INLINE F block_sum(F acc, I dot, F d_w, F minimum, float d_x, float low) {
  acc = fma(to_float(dot), S::kHasScale ? mul(d_w, set1(d_x)) : set1(d_x), acc);
  if constexpr (S::kHasMin) acc = fma(minimum, set1(low), acc);
  return acc;
}

// ------------------------------------------------------------------ few rows: weights go from memory into products
template <class S, int MR>
static void int8_direct(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  constexpr int kSubs = kActBlock / S::kSub, kPerBlock = S::kBlock / kActBlock, kRow = act_dwords(kSubs);
  for (int64_t panel = begin; panel < end; panel++) {
    auto* blocks = reinterpret_cast<const typename S::Block*>(p.data + panel * p.panel_bytes);
    auto* a = static_cast<const uint32_t*>(p.a);
    F acc[MR];
    CORE_UNROLL for (int m = 0; m < MR; m++) acc[m] = zero();
    for (int64_t i = 0; i < p.args->w.k / S::kBlock; i++) {
      const typename S::Block& b = blocks[i];
      prefetch(reinterpret_cast<const char*>(&b) + kPrefetchBlocksBytes, int64_t(sizeof(b)));
      for (int j = 0; j < kPerBlock; j++, a += MR * kRow) {
        CORE_UNROLL for (int s = 0; s < kSubs; s++) {
          const uint32_t* extra = a + 9 + 2 * s;
          I dot[MR];
          CORE_UNROLL for (int m = 0; m < MR; m++) dot[m] = set1i(int32_t(extra[m * kRow]));
          S::quads(b, j * kSubs + s, [&](int g, I w) CORE_LAMBDA {
            const uint32_t* x = a + s * (S::kSub / 4) + g;
            CORE_UNROLL for (int m = 0; m < MR; m++) dot[m] = dot4_signed(dot[m], w, int32_t(x[m * kRow]));
          });
          F d = S::scale(b, j * kSubs + s), low = S::minimum(b, j * kSubs + s);
          CORE_UNROLL for (int m = 0; m < MR; m++)
            acc[m] = block_sum<S>(acc[m], dot[m], d, low, bits_float(a[m * kRow + 8]), bits_float(extra[m * kRow + 1]));
        }
      }
    }
    float c[MR * 16];
    CORE_UNROLL for (int m = 0; m < MR; m++) store(c + m * 16, acc[m]);
    finish_rows(p, c, 0, MR, panel, 1, 1);
  }
}

// ------------------------------------------------------------------ many rows: each weight unpacked once a chunk of rows
template <int QUADS, bool SCALE, bool MIN>
struct UnpackedForm {
  static constexpr int kQuads = QUADS;
  static constexpr bool kHasScale = SCALE, kHasMin = MIN;
};

template <int QUADS>
struct UnpackedBlock {
  float d[16], minimum[16];
  uint32_t q[QUADS][16];
};

template <class S>
CORE_INLINE void unpack_blocks(const char* panel, int64_t sub0, int64_t count, UnpackedBlock<S::kSub / 4>* out) {
  constexpr int kSubs = S::kBlock / S::kSub;
  auto* blocks = reinterpret_cast<const typename S::Block*>(panel);
  for (int64_t i = sub0; i < sub0 + count; i++, out++) {
    const typename S::Block& b = blocks[i / kSubs];
    int s = int(i % kSubs);
    if constexpr (S::kHasScale) store(out->d, S::scale(b, s));
    if constexpr (S::kHasMin) store(out->minimum, S::minimum(b, s));
    S::quads(b, s, [&](int g, I w) CORE_LAMBDA { storei(out->q[g], w); });
  }
}

// C [MR][NP * 16] (+)= activations * `count` blocks of 32 of NP unpacked panels that lie `ldb` sub-blocks apart; meanwhile
// asks for `lines` cache lines a block from `ahead` on.
// `S` says only what the blocks have: schemes of one UnpackedForm share the code.
template <class S, int MR>
static __attribute__((noinline)) void int8_tile(const uint32_t* a, const UnpackedBlock<S::kQuads>* b, int64_t ldb,
                                                int64_t count, float* c, bool first, const char* ahead, int lines) {
  constexpr int NP = kInt8Panels, QUADS = S::kQuads, kSubs = kActBlock / (4 * QUADS), kRow = act_dwords(kSubs);
  F acc[MR][NP];
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++)
    acc[m][p] = first ? zero() : load(c + (m * NP + p) * 16);
  for (int64_t i = 0; i < count; i++, a += MR * kRow, b += kSubs) {
    CORE_NO_UNROLL for (int j = 0; j < lines; j++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    CORE_UNROLL for (int s = 0; s < kSubs; s++) {
      const uint32_t* extra = a + 9 + 2 * s;
      I dot[MR][NP];
      CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++)
        dot[m][p] = set1i(int32_t(extra[m * kRow]));
      CORE_UNROLL for (int g = 0; g < QUADS; g++) {
        I w[NP];
        CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = loadi(b[p * ldb + s].q[g]);
        CORE_UNROLL for (int m = 0; m < MR; m++) {
          int32_t x = int32_t(a[m * kRow + s * QUADS + g]);
          CORE_UNROLL for (int p = 0; p < NP; p++) dot[m][p] = dot4_signed(dot[m][p], w[p], x);
        }
      }
      CORE_UNROLL for (int p = 0; p < NP; p++) {
        F d = S::kHasScale ? load(b[p * ldb + s].d) : zero(), low = S::kHasMin ? load(b[p * ldb + s].minimum) : zero();
        CORE_UNROLL for (int m = 0; m < MR; m++)
          acc[m][p] = block_sum<S>(acc[m][p], dot[m][p], d, low, bits_float(a[m * kRow + 8]), bits_float(extra[m * kRow + 1]));
      }
    }
  }
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++)
    store(c + (m * NP + p) * 16, acc[m][p]);
}

template <int QUADS>
using Int8Tile = void (*)(const uint32_t*, const UnpackedBlock<QUADS>*, int64_t, int64_t, float*, bool, const char*, int);

template <class U, int MR>
constexpr Int8Tile<U::kQuads> tile_or_null() {
  if constexpr (MR <= kInt8Rows) return int8_tile<U, MR>;
  else return nullptr;
}

template <class U>
CORE_INLINE Int8Tile<U::kQuads> pick_int8_tile(int64_t mr) {
  static constexpr Int8Tile<U::kQuads> kTable[6] = {tile_or_null<U, 1>(), tile_or_null<U, 2>(), tile_or_null<U, 3>(),
                                                    tile_or_null<U, 4>(), tile_or_null<U, 5>(), tile_or_null<U, 6>()};
  return kTable[mr - 1];
}

template <int QUADS>
struct Int8Scratch {
  float c[kInt8ChunkTiles * kInt8Rows * kInt8Panels * 16];
  UnpackedBlock<QUADS> b[kInt8Panels * kInt8Blocks * (kActBlock / (4 * QUADS))];
};

// Where the weights lie that are unpacked after the ones at hand: `bytes` of each of a group's panels.
struct NextWeights {
  const char* at;
  int64_t bytes;
};

// The part of them that the tile number `t` of `tiles` asks for: the first tiles one panel's, the last ones the other's.
CORE_INLINE const char* ahead_of(const LinearPlan& p, const NextWeights& next, int64_t t, int64_t tiles, int64_t count, int* lines) {
  int64_t tiles_each = max64(1, tiles / kInt8Panels), panel = min64(t / tiles_each, kInt8Panels - 1);
  *lines = next.at ? int(ceil_div(next.bytes, 64 * count * tiles_each)) : 0;
  return next.at + panel * p.panel_bytes + (t - panel * tiles_each) * *lines * count * 64;
}

template <class S>
static void int8_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  constexpr int kQuads = S::kSub / 4, kSubs = kActBlock / S::kSub, NP = kInt8Panels;
  constexpr int64_t kLdb = kInt8Blocks * kSubs;
  auto& scratch_ = *static_cast<Int8Scratch<kQuads>*>(scratch(kScratchTask, sizeof(Int8Scratch<kQuads>)));
  int64_t tiles_per_chunk = ceil_div(p.num_tiles, p.num_chunks), blocks = p.args->w.k / kActBlock;
  int64_t visits = ceil_div(blocks, kInt8Blocks), per_visit = ceil_div(blocks, visits);
  int64_t visit_bytes = per_visit * p.panel_bytes / blocks;
  for (int64_t i = begin; i < end; i++) {
    int64_t chunk = i / p.num_groups, panel = i % p.num_groups * NP;
    int64_t tile0 = chunk * tiles_per_chunk, tile1 = min64(p.num_tiles, tile0 + tiles_per_chunk);
    int real = int(min64(NP, p.num_panels - panel));
    if (tile0 >= tile1) continue;
    int64_t row0 = tile_start(p, tile0);
    for (int64_t k0 = 0; k0 < blocks; k0 += per_visit) {
      int64_t count = min64(per_visit, blocks - k0);
      bool last = k0 + count == blocks;
      const char* from = p.data + panel * p.panel_bytes + k0 * p.panel_bytes / blocks;
      for (int q = 0; q < real; q++)
        unpack_blocks<S>(p.data + (panel + q) * p.panel_bytes, k0 * kSubs, count * kSubs, scratch_.b + q * kLdb);
      NextWeights next = {last ? p.data + (panel + NP) * p.panel_bytes : from + visit_bytes, visit_bytes};
      if (last && panel + NP >= p.num_panels) next.at = nullptr;
      for (int64_t t = tile0; t < tile1; t++) {
        int64_t m0 = tile_start(p, t), mr = tile_start(p, t + 1) - m0;
        auto* a = static_cast<const uint32_t*>(p.a) + m0 * p.k_padded + k0 * mr * act_dwords(kSubs);
        float* c = scratch_.c + (m0 - row0) * NP * 16;
        int lines;
        const char* ahead = ahead_of(p, next, t - tile0, tile1 - tile0, count, &lines);
        pick_int8_tile<UnpackedForm<kQuads, S::kHasScale, S::kHasMin>>(mr)(a, scratch_.b, real == NP ? kLdb : 0, count, c,
                                                                           k0 == 0, ahead, lines);
        if (last) finish_rows(p, c, m0, m0 + mr, panel, NP, real);
      }
    }
  }
}

// ------------------------------------------------------------------ entry
template <class S>
CORE_INLINE RangeFn int8_direct_fn(int64_t m) {
  if (m > kInt8DirectRows) return nullptr;
  if constexpr (kInt8DirectRows == 2) {
    return m == 1 ? int8_direct<S, 1> : int8_direct<S, 2>;
  } else {
    static constexpr RangeFn kTable[8] = {int8_direct<S, 1>, int8_direct<S, 2>, int8_direct<S, 3>, int8_direct<S, 4>,
                                          int8_direct<S, 5>, int8_direct<S, 6>, int8_direct<S, 7>, int8_direct<S, 8>};
    return kTable[m - 1];
  }
}

template <class S>
static bool run_int8(const LinearArgs& a) {
  constexpr int kSubs = kActBlock / S::kSub;
  SchemeShape shape = scheme_shape(a.w.scheme);
  RangeFn direct = int8_direct_fn<S>(a.m);
  LinearPlan p{};
  p.args = &a;
  p.data = static_cast<const char*>(a.w.data);
  p.panel_bytes = a.w.k / shape.k_block * shape.block_bytes;
  p.k_padded = a.w.k / kActBlock * act_dwords(kSubs);  // dwords of a row
  p.num_panels = ceil_div(a.w.n, kPanel);
  p.num_tiles = direct ? 1 : ceil_div(a.m, kInt8Rows);
  p.np = direct ? 1 : kInt8Panels;
  p.num_groups = ceil_div(p.num_panels, p.np);
  p.num_chunks = ceil_div(p.num_tiles, kInt8ChunkTiles);
  p.a = scratch(kScratchInput, size_t(a.m * p.k_padded) * 4 + 64);
  int64_t quantize_grain = max64(1, 65536 / max64(1, a.w.k * ceil_div(a.m, p.num_tiles)));
  parallel_static(p.num_tiles, quantize_grain, quantize_range<kSubs, S::kOffset>, &p);
  // A block costs some sixteenth of what it does in float.
  parallel_static(p.num_groups * p.num_chunks, task_grain(p, p.np * 1), direct ? direct : int8_range<S>, &p);
  return true;
}

static bool linear_int8(const LinearArgs& a) {
  switch (a.w.scheme) {
    case kWInt8: return a.w.k % kActBlock == 0 && run_int8<SchemeInt8>(a);
    case kWQ8_0: return run_int8<SchemeQ8_0>(a);
    case kWQ4_0: return run_int8<SchemeQ4_0>(a);
    case kWQ4_1: return run_int8<SchemeQ4_1>(a);
    case kWQ5_0: return run_int8<SchemeQ5_0>(a);
    case kWQ5_1: return run_int8<SchemeQ5_1>(a);
    case kWQ4_K: return run_int8<SchemeQ4_K>(a);
    case kWQ5_K: return run_int8<SchemeQ5_K>(a);
    case kWQ6_K: return run_int8<SchemeQ6_K>(a);
    default: return false;
  }
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
