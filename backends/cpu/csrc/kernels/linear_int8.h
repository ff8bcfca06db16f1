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
constexpr int kInt8Blocks = 8;                                // blocks of 32 between two visits of C
constexpr int kInt8ChunkTiles = 20;

// A block of 32 activations of `mr` rows, in dwords: q [8][mr], d [mr], then for each of `subs` sub-blocks of the weight
// start [mr] and low [mr] (d_x * sum q_x).
constexpr int act_dwords(int mr, int subs) { return mr * (9 + 2 * subs); }

// ------------------------------------------------------------------ activations
// Two vectors to int8. Returns the scale; the whole numbers stay in v0, v1.
CORE_INLINE float round_block(F& v0, F& v1) {
  float top = hmax(vmax(vabs(v0), vabs(v1)));
  bool some = top > 1e-30f;  // smaller ones are zero: 127 / top would overflow
  F inverse = set1(some ? 127.f / top : 0.f);
  v0 = round_even(vmax(vmin(mul(v0, inverse), set1(127.f)), set1(-127.f)));
  v1 = round_even(vmax(vmin(mul(v1, inverse), set1(127.f)), set1(-127.f)));
  return some ? top / 127.f : 0.f;
}

template <class T, int SUBS, int OFFSET>
CORE_INLINE void quantize_row(const T* x, int64_t k, uint32_t* out, int64_t mr) {
  const int64_t stride = act_dwords(int(mr), SUBS);
  F bad = zero();
  uint32_t* block = out;
  for (int64_t i = 0; i < k; i += kActBlock, block += stride) {
    F v0 = loadx(x + i), v1 = loadx(x + i + 16);
    bad = fma(v0, zero(), fma(v1, zero(), bad));
    float d = round_block(v0, v1);
    int8_t q[kActBlock];
    store_i8(q, to_int(v0));
    store_i8(q + 16, to_int(v1));
    for (int g = 0; g < 8; g++) memcpy(block + g * mr, q + 4 * g, 4);
    block[8 * mr] = float_bits(d);
    float sums[2] = {SUBS == 1 ? hsum(add(v0, v1)) : hsum(v0), SUBS == 1 ? 0.f : hsum(v1)};
    for (int s = 0; s < SUBS; s++) {
      block[(9 + 2 * s) * mr] = uint32_t(-OFFSET * int32_t(sums[s]));
      block[(10 + 2 * s) * mr] = float_bits(d * sums[s]);
    }
  }
  float nan = hsum(bad);  // an infinity or NaN has no scale: the row's results are NaN
  if (nan == nan) return;
  for (block = out; block < out + k / kActBlock * stride; block += stride) block[8 * mr] = float_bits(nan);
}

template <int SUBS, int OFFSET>
static void quantize_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  const LinearArgs& a = *p.args;
  for (int64_t i = begin; i < end; i++) {
    int64_t m0 = tile_start(p, i), mr = tile_start(p, i + 1) - m0;
    auto* out = static_cast<uint32_t*>(p.a) + m0 * p.k_padded;
    for (int64_t m = 0; m < mr; m++) {
      int64_t at = (m0 + m) * a.x_stride;
      if (a.x_dtype == kF32) quantize_row<float, SUBS, OFFSET>(static_cast<const float*>(a.x) + at, a.w.k, out + m, mr);
      else if (a.x_dtype == kBF16) quantize_row<BF16, SUBS, OFFSET>(static_cast<const BF16*>(a.x) + at, a.w.k, out + m, mr);
      else quantize_row<F16, SUBS, OFFSET>(static_cast<const F16*>(a.x) + at, a.w.k, out + m, mr);
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
  constexpr int kSubs = kActBlock / S::kSub, kPerBlock = S::kBlock / kActBlock;
  for (int64_t panel = begin; panel < end; panel++) {
    auto* blocks = reinterpret_cast<const typename S::Block*>(p.data + panel * p.panel_bytes);
    auto* a = static_cast<const uint32_t*>(p.a);
    F acc[MR];
    CORE_UNROLL for (int m = 0; m < MR; m++) acc[m] = zero();
    for (int64_t i = 0; i < p.args->w.k / S::kBlock; i++) {
      const typename S::Block& b = blocks[i];
      prefetch(reinterpret_cast<const char*>(&b) + kPrefetchBlocksBytes, int64_t(sizeof(b)));
      for (int j = 0; j < kPerBlock; j++, a += act_dwords(MR, kSubs)) {
        CORE_UNROLL for (int s = 0; s < kSubs; s++) {
          const uint32_t* extra = a + (9 + 2 * s) * MR;
          I dot[MR];
          CORE_UNROLL for (int m = 0; m < MR; m++) dot[m] = set1i(int32_t(extra[m]));
          S::quads(b, j * kSubs + s, [&](int g, I w) CORE_LAMBDA {
            const uint32_t* x = a + (s * (S::kSub / 4) + g) * MR;
            CORE_UNROLL for (int m = 0; m < MR; m++) dot[m] = dot4_signed(dot[m], w, int32_t(x[m]));
          });
          F d = S::scale(b, j * kSubs + s), low = S::minimum(b, j * kSubs + s);
          CORE_UNROLL for (int m = 0; m < MR; m++)
            acc[m] = block_sum<S>(acc[m], dot[m], d, low, bits_float(a[8 * MR + m]), bits_float(extra[MR + m]));
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
    constexpr int64_t kSubBytes = int64_t(sizeof(b)) / kSubs;
    prefetch(reinterpret_cast<const char*>(&b) + s * kSubBytes + kPrefetchBlocksBytes, kSubBytes);
    if constexpr (S::kHasScale) store(out->d, S::scale(b, s));
    if constexpr (S::kHasMin) store(out->minimum, S::minimum(b, s));
    S::quads(b, s, [&](int g, I w) CORE_LAMBDA { storei(out->q[g], w); });
  }
}

// C [MR][NP * 16] (+)= activations * `count` blocks of 32 of NP unpacked panels that lie `ldb` sub-blocks apart.
// `S` says only what the blocks have: schemes of one UnpackedForm share the code.
template <class S, int MR>
static __attribute__((noinline)) void int8_tile(const uint32_t* a, const UnpackedBlock<S::kQuads>* b, int64_t ldb,
                                                int64_t count, float* c, bool first) {
  constexpr int NP = kInt8Panels, QUADS = S::kQuads, kSubs = kActBlock / (4 * QUADS);
  F acc[MR][NP];
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++)
    acc[m][p] = first ? zero() : load(c + (m * NP + p) * 16);
  for (int64_t i = 0; i < count; i++, a += act_dwords(MR, kSubs), b += kSubs) {
    CORE_UNROLL for (int s = 0; s < kSubs; s++) {
      const uint32_t* extra = a + (9 + 2 * s) * MR;
      I dot[MR][NP];
      CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++) dot[m][p] = set1i(int32_t(extra[m]));
      CORE_UNROLL for (int g = 0; g < QUADS; g++) {
        I w[NP];
        CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = loadi(b[p * ldb + s].q[g]);
        CORE_UNROLL for (int m = 0; m < MR; m++) {
          int32_t x = int32_t(a[(s * QUADS + g) * MR + m]);
          CORE_UNROLL for (int p = 0; p < NP; p++) dot[m][p] = dot4_signed(dot[m][p], w[p], x);
        }
      }
      CORE_UNROLL for (int p = 0; p < NP; p++) {
        F d = S::kHasScale ? load(b[p * ldb + s].d) : zero(), low = S::kHasMin ? load(b[p * ldb + s].minimum) : zero();
        CORE_UNROLL for (int m = 0; m < MR; m++)
          acc[m][p] = block_sum<S>(acc[m][p], dot[m][p], d, low, bits_float(a[8 * MR + m]), bits_float(extra[MR + m]));
      }
    }
  }
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++)
    store(c + (m * NP + p) * 16, acc[m][p]);
}

template <int QUADS>
using Int8Tile = void (*)(const uint32_t*, const UnpackedBlock<QUADS>*, int64_t, int64_t, float*, bool);

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

template <class S>
static void int8_range(void* context, int64_t begin, int64_t end) {
  auto& p = *static_cast<LinearPlan*>(context);
  constexpr int kQuads = S::kSub / 4, kSubs = kActBlock / S::kSub, NP = kInt8Panels;
  constexpr int64_t kLdb = kInt8Blocks * kSubs;
  auto& scratch_ = *static_cast<Int8Scratch<kQuads>*>(scratch(kScratchTask, sizeof(Int8Scratch<kQuads>)));
  int64_t tiles_per_chunk = ceil_div(p.num_tiles, p.num_chunks), blocks = p.args->w.k / kActBlock;
  for (int64_t i = begin; i < end; i++) {
    int64_t chunk = i / p.num_groups, panel = i % p.num_groups * NP;
    int64_t tile0 = chunk * tiles_per_chunk, tile1 = min64(p.num_tiles, tile0 + tiles_per_chunk);
    int real = int(min64(NP, p.num_panels - panel));
    if (tile0 >= tile1) continue;
    int64_t row0 = tile_start(p, tile0);
    for (int64_t k0 = 0; k0 < blocks; k0 += kInt8Blocks) {
      int64_t count = min64(kInt8Blocks, blocks - k0);
      for (int q = 0; q < real; q++)
        unpack_blocks<S>(p.data + (panel + q) * p.panel_bytes, k0 * kSubs, count * kSubs, scratch_.b + q * kLdb);
      for (int64_t t = tile0; t < tile1; t++) {
        int64_t m0 = tile_start(p, t), mr = tile_start(p, t + 1) - m0;
        auto* a = static_cast<const uint32_t*>(p.a) + m0 * p.k_padded + k0 * act_dwords(int(mr), kSubs);
        float* c = scratch_.c + (m0 - row0) * NP * 16;
        pick_int8_tile<UnpackedForm<kQuads, S::kHasScale, S::kHasMin>>(mr)(a, scratch_.b, real == NP ? kLdb : 0, count, c, k0 == 0);
      }
    }
    finish_rows(p, scratch_.c, row0, tile_start(p, tile1), panel, NP, real);
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
  p.k_padded = a.w.k / kActBlock * act_dwords(1, kSubs);  // dwords of a row
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
