// Quantized panels: how each scheme stores 16 rows x a block of k, and how a block becomes floats in registers.
//
// A scheme gives `kSub` (k values that share a scale), `each(block, sub, f)` calling f(base, c, q) with the 16 rows' unscaled
// values at k = base + c in [0, kSub), c a constant below 8, `scale` and, where kHasMin, `minimum`: weight = q * scale + minimum.
// `quads(block, sub, f)` gives the same values as unsigned bytes, q + kOffset: f(g, dwords of k 4g .. 4g + 3), g a constant.
#pragma once
#include "panels.h"

namespace core_cpu {
namespace CORE_ISA {
namespace {

template <int J> CORE_INLINE F byte_of(I w) { return to_float(sra<24>(shl<24 - 8 * J>(w))); }

template <class Fn> CORE_INLINE void each_q8(const uint32_t (*q)[16], Fn f) {
  CORE_NO_UNROLL for (int g = 0; g < 8; g++) {
    I w = loadi(q[g]);
    f(4 * g, 0, byte_of<0>(w));
    f(4 * g, 1, byte_of<1>(w));
    f(4 * g, 2, byte_of<2>(w));
    f(4 * g, 3, byte_of<3>(w));
  }
}

// Dword of 8 nibbles: low nibbles of the bytes are k 0..3, high ones k 4..7.
template <int OFFSET, class Fn> CORE_INLINE void each_q4(const uint32_t (*q)[16], Fn f) {
  CORE_NO_UNROLL for (int g = 0; g < 4; g++) {
    I w = loadi(q[g]);
    f(8 * g, 0, nibble<0, OFFSET>(w));
    f(8 * g, 1, nibble<8, OFFSET>(w));
    f(8 * g, 2, nibble<16, OFFSET>(w));
    f(8 * g, 3, nibble<24, OFFSET>(w));
    f(8 * g, 4, nibble<4, OFFSET>(w));
    f(8 * g, 5, nibble<12, OFFSET>(w));
    f(8 * g, 6, nibble<20, OFFSET>(w));
    f(8 * g, 7, nibble<28, OFFSET>(w));
  }
}

template <int S, int OFFSET> CORE_INLINE F five(I w, I high) {  // bit 0 of `high` is the fifth bit
  return to_float(subi(ori(andi(shr<S>(w), set1i(15)), shl<4>(andi(high, set1i(1)))), set1i(OFFSET)));
}

template <int OFFSET, class Fn> CORE_INLINE void each_q5(const uint32_t (*q)[16], const uint32_t* high, Fn f) {
  I h = loadi(high);
  CORE_NO_UNROLL for (int g = 0; g < 4; g++) {
    I w = loadi(q[g]);
    f(8 * g, 0, five<0, OFFSET>(w, h));
    f(8 * g, 1, five<8, OFFSET>(w, shr<1>(h)));
    f(8 * g, 2, five<16, OFFSET>(w, shr<2>(h)));
    f(8 * g, 3, five<24, OFFSET>(w, shr<3>(h)));
    f(8 * g, 4, five<4, OFFSET>(w, shr<4>(h)));
    f(8 * g, 5, five<12, OFFSET>(w, shr<5>(h)));
    f(8 * g, 6, five<20, OFFSET>(w, shr<6>(h)));
    f(8 * g, 7, five<28, OFFSET>(w, shr<7>(h)));
    h = shr<8>(h);
  }
}

template <int S> CORE_INLINE F six(I w, I high) {  // bits 0, 1 of `high` are bits 4, 5
  return to_float(subi(ori(andi(shr<S>(w), set1i(15)), shl<4>(andi(high, set1i(3)))), set1i(32)));
}

template <class Fn> CORE_INLINE void quads_q8(const uint32_t (*q)[16], Fn f) {
  CORE_UNROLL for (int g = 0; g < 8; g++) f(g, xori(loadi(q[g]), set1i(int32_t(0x80808080u))));
}

template <class Fn> CORE_INLINE void quads_q4(const uint32_t (*q)[16], Fn f) {
  const I low = set1i(0x0f0f0f0f);
  CORE_UNROLL for (int g = 0; g < 4; g++) {
    I w = loadi(q[g]);
    f(2 * g, andi(w, low));
    f(2 * g + 1, andi(shr<4>(w), low));
  }
}

// Bits 0..3 to bit 4 of the four bytes: copies 7 bits apart bring bit j to bit 8 j.
CORE_INLINE I fifth_bits(I h) {
  I x = shl<4>(andi(h, set1i(15)));
  I y = ori(x, shl<14>(x));
  return andi(ori(y, shl<7>(y)), set1i(0x10101010));
}

template <class Fn> CORE_INLINE void quads_q5(const uint32_t (*q)[16], const uint32_t* high, Fn f) {
  const I low = set1i(0x0f0f0f0f);
  I h = loadi(high);
  CORE_UNROLL for (int g = 0; g < 4; g++) {
    I w = loadi(q[g]);
    f(2 * g, ori(andi(w, low), fifth_bits(h)));
    h = shr<4>(h);
    f(2 * g + 1, ori(andi(shr<4>(w), low), fifth_bits(h)));
    h = shr<4>(h);
  }
}

// Bit pairs 0..3 to bits 4, 5 of the four bytes: copies 6 bits apart.
CORE_INLINE I sixth_bits(I h) {
  I x = shl<4>(andi(h, set1i(255)));
  I y = ori(x, shl<12>(x));
  return andi(ori(y, shl<6>(y)), set1i(0x30303030));
}

struct SchemeQ8_0 {
  using Block = BlockQ8_0;
  static constexpr int kBlock = 32, kSub = 32, kOffset = 128;
  static constexpr bool kHasMin = false, kHasScale = true;
  CORE_INLINE F scale(const Block& b, int) { return load_f16(b.d); }
  template <class B> CORE_INLINE F minimum(const B&, int) { return zero(); }
  template <class Fn> CORE_INLINE void each(const Block& b, int, Fn f) { each_q8(b.q, f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int, Fn f) { quads_q8(b.q, f); }
};
struct BlockInt8 { uint32_t q[8][16]; };
struct SchemeInt8 : SchemeQ8_0 {  // 32 columns of a weight whose rows have one scale each, which is applied at the end
  using Block = BlockInt8;
  static constexpr bool kHasScale = false;
  CORE_INLINE F scale(const Block&, int) { return set1(1.f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int, Fn f) { quads_q8(b.q, f); }
};
struct SchemeQ4_0 : SchemeQ8_0 {
  using Block = BlockQ4_0;
  static constexpr int kOffset = 8;
  CORE_INLINE F scale(const Block& b, int) { return load_f16(b.d); }
  template <class Fn> CORE_INLINE void each(const Block& b, int, Fn f) { each_q4<8>(b.q, f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int, Fn f) { quads_q4(b.q, f); }
};
struct SchemeQ4_1 : SchemeQ8_0 {
  using Block = BlockQ4_1;
  static constexpr bool kHasMin = true;
  static constexpr int kOffset = 0;
  CORE_INLINE F scale(const Block& b, int) { return load_f16(b.d); }
  CORE_INLINE F minimum(const Block& b, int) { return load_f16(b.m); }
  template <class Fn> CORE_INLINE void each(const Block& b, int, Fn f) { each_q4<0>(b.q, f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int, Fn f) { quads_q4(b.q, f); }
};
struct SchemeQ5_0 : SchemeQ8_0 {
  using Block = BlockQ5_0;
  static constexpr int kOffset = 16;
  CORE_INLINE F scale(const Block& b, int) { return load_f16(b.d); }
  template <class Fn> CORE_INLINE void each(const Block& b, int, Fn f) { each_q5<16>(b.q, b.h, f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int, Fn f) { quads_q5(b.q, b.h, f); }
};
struct SchemeQ5_1 : SchemeQ4_1 {
  using Block = BlockQ5_1;
  CORE_INLINE F scale(const Block& b, int) { return load_f16(b.d); }
  CORE_INLINE F minimum(const Block& b, int) { return load_f16(b.m); }
  template <class Fn> CORE_INLINE void each(const Block& b, int, Fn f) { each_q5<0>(b.q, b.h, f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int, Fn f) { quads_q5(b.q, b.h, f); }
};
struct SchemeQ4_K {
  using Block = BlockQ4_K;
  static constexpr int kBlock = 256, kSub = 32, kOffset = 0;
  static constexpr bool kHasMin = true, kHasScale = true;
  CORE_INLINE F scale(const Block& b, int s) { return mul(load_f16(b.d), to_float(load_u8(b.scale[s]))); }
  CORE_INLINE F minimum(const Block& b, int s) {
    return sub(zero(), mul(load_f16(b.dmin), to_float(load_u8(b.minimum[s]))));
  }
  template <class Fn> CORE_INLINE void each(const Block& b, int s, Fn f) { each_q4<0>(b.q[s], f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int s, Fn f) { quads_q4(b.q[s], f); }
};
struct SchemeQ5_K {
  using Block = BlockQ5_K;
  static constexpr int kBlock = 256, kSub = 32, kOffset = 0;
  static constexpr bool kHasMin = true, kHasScale = true;
  CORE_INLINE F scale(const Block& b, int s) { return mul(load_f16(b.d), to_float(load_u8(b.scale[s]))); }
  CORE_INLINE F minimum(const Block& b, int s) {
    return sub(zero(), mul(load_f16(b.dmin), to_float(load_u8(b.minimum[s]))));
  }
  template <class Fn> CORE_INLINE void each(const Block& b, int s, Fn f) { each_q5<0>(b.q[s], b.h[s], f); }
  template <class Fn> CORE_INLINE void quads(const Block& b, int s, Fn f) { quads_q5(b.q[s], b.h[s], f); }
};
struct SchemeQ6_K {
  using Block = BlockQ6_K;
  static constexpr int kBlock = 256, kSub = 16, kOffset = 32;
  static constexpr bool kHasMin = false, kHasScale = true;
  CORE_INLINE F scale(const Block& b, int s) { return mul(load_f16(b.d), to_float(load_i8(b.scale[s]))); }
  CORE_INLINE F minimum(const Block&, int) { return zero(); }
  template <class Fn> CORE_INLINE void each(const Block& b, int s, Fn f) {
    I h = loadi(b.h[s]);
    CORE_NO_UNROLL for (int g = 0; g < 2; g++) {
      I w = loadi(b.q[s][g]);
      f(8 * g, 0, six<0>(w, h));
      f(8 * g, 1, six<8>(w, shr<2>(h)));
      f(8 * g, 2, six<16>(w, shr<4>(h)));
      f(8 * g, 3, six<24>(w, shr<6>(h)));
      f(8 * g, 4, six<4>(w, shr<8>(h)));
      f(8 * g, 5, six<12>(w, shr<10>(h)));
      f(8 * g, 6, six<20>(w, shr<12>(h)));
      f(8 * g, 7, six<28>(w, shr<14>(h)));
      h = shr<16>(h);
    }
  }
  template <class Fn> CORE_INLINE void quads(const Block& b, int s, Fn f) {
    const I low = set1i(0x0f0f0f0f);
    I h = loadi(b.h[s]);
    CORE_UNROLL for (int g = 0; g < 2; g++) {
      I w = loadi(b.q[s][g]);
      f(2 * g, ori(andi(w, low), sixth_bits(h)));
      h = shr<8>(h);
      f(2 * g + 1, ori(andi(shr<4>(w), low), sixth_bits(h)));
      h = shr<8>(h);
    }
  }
};

// Floats of one panel for k in [k0, k0 + count), both multiples of kSub: out[(k - k0) * 16 + row].
template <class S>
static void dequantize_tile(const void* panel, int64_t k0, int64_t count, float* out) {
  auto* blocks = static_cast<const typename S::Block*>(panel);
  for (int64_t k = k0; k < k0 + count; k += S::kSub, out += S::kSub * 16) {
    const typename S::Block& b = blocks[k / S::kBlock];
    int s = int(k % S::kBlock) / S::kSub;
    F d = S::scale(b, s), m = S::minimum(b, s);
    S::each(b, s, [&](int base, int c, F q) CORE_LAMBDA {
      store(out + (base + c) * 16, S::kHasMin ? fma(q, d, m) : mul(q, d));
    });
  }
}

// FP8 panels are bytes [k][16]. The values come out times 2^-8; the caller's scale makes up for it.
static void fp8_tile(const void* panel, int64_t k0, int64_t count, float* out) {
  auto* bytes = static_cast<const uint8_t*>(panel) + k0 * 16;
  for (int64_t k = 0; k < count; k++) store(out + k * 16, load_e4m3(bytes + k * 16));
}

#ifdef CORE_DPBF16
// The same as bf16 pairs (exact: e4m3 has 3 bits of mantissa).
static void fp8_pairs(const void* panel, int64_t k0, int64_t count, float* out) {
  auto* bytes = static_cast<const uint8_t*>(panel) + k0 * 16;
  for (int64_t k = 0; k < count; k += 2) {
    I even = shr<16>(as_int(load_e4m3(bytes + k * 16)));
    I odd = k + 1 < count ? as_int(load_e4m3(bytes + (k + 1) * 16)) : zeroi();
    storei(out + k * 8, ori(even, odd));
  }
}
#endif

using TileFn = void (*)(const void*, int64_t, int64_t, float*);

CORE_INLINE TileFn tile_fn(int scheme) {
  switch (scheme) {
    case kWFp8: return fp8_tile;
    case kWQ8_0: return dequantize_tile<SchemeQ8_0>;
    case kWQ4_0: return dequantize_tile<SchemeQ4_0>;
    case kWQ4_1: return dequantize_tile<SchemeQ4_1>;
    case kWQ5_0: return dequantize_tile<SchemeQ5_0>;
    case kWQ5_1: return dequantize_tile<SchemeQ5_1>;
    case kWQ4_K: return dequantize_tile<SchemeQ4_K>;
    case kWQ5_K: return dequantize_tile<SchemeQ5_K>;
    case kWQ6_K: return dequantize_tile<SchemeQ6_K>;
    default: return nullptr;
  }
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
