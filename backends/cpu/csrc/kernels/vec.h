// Sixteen lanes of float (F) or int32 (I) on every level: one zmm, two ymm, or the compiler's vectors. Panels are 16 wide, so kernels
// are written once in these terms.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define CORE_INLINE static inline __attribute__((always_inline))
#define CORE_LAMBDA __attribute__((always_inline))
#define CORE_UNROLL _Pragma("GCC unroll 64")
#define CORE_NO_UNROLL _Pragma("GCC unroll 1")

namespace core_cpu {
namespace CORE_ISA {
namespace {

CORE_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
CORE_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
CORE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
CORE_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

CORE_INLINE float bits_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
CORE_INLINE uint32_t float_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
CORE_INLINE float bf16_float(uint16_t h) { return bits_float(uint32_t{h} << 16); }
CORE_INLINE uint16_t float_bf16(float f) {  // round to nearest even; NaN stays NaN
  uint32_t u = float_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
CORE_INLINE float f16_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, em = h & 0x7fff;
  if (em >= 0x7c00) return bits_float(sign | 0x7f800000u | (em << 13));
  if (em >= 0x0400) return bits_float(sign | ((em << 13) + (112u << 23)));
  float f = static_cast<float>(em) * 5.9604644775390625e-8f;  // subnormal: em * 2^-24
  return bits_float(float_bits(f) | sign);
}
CORE_INLINE uint16_t float_f16(float f) {  // round to nearest even
  uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (u < 0x38800000u) {  // below 2^-14: let the adder round
    float r = bits_float(u) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(r) - 0x3f000000u));
  }
  u += 0xfff + ((u >> 13) & 1);
  return static_cast<uint16_t>(sign | ((u - (112u << 23)) >> 13));
}

#if defined(__AVX512F__)
// ---------------------------------------------------------------- AVX-512
struct F { __m512 v; };
struct I { __m512i v; };
constexpr int kAccumulators = 24;  // F registers that a micro-kernel may hold

CORE_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
CORE_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
CORE_INLINE F set1(float a) { return {_mm512_set1_ps(a)}; }
CORE_INLINE F zero() { return {_mm512_setzero_ps()}; }
CORE_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
CORE_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
CORE_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
CORE_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
CORE_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CORE_INLINE F vmax(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
CORE_INLINE F vmin(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
CORE_INLINE F vabs(F a) { return {_mm512_abs_ps(a.v)}; }
CORE_INLINE F round_even(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
CORE_INLINE F select_lt(F a, F b, F yes, F no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
CORE_INLINE float hsum(F a) { return _mm512_reduce_add_ps(a.v); }
CORE_INLINE float hmax(F a) { return _mm512_reduce_max_ps(a.v); }
CORE_INLINE I loadi(const void* p) { return {_mm512_loadu_si512(p)}; }
CORE_INLINE void storei(void* p, I a) { _mm512_storeu_si512(p, a.v); }
CORE_INLINE I set1i(int32_t a) { return {_mm512_set1_epi32(a)}; }
CORE_INLINE I zeroi() { return {_mm512_setzero_si512()}; }
CORE_INLINE I addi(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
CORE_INLINE I subi(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
CORE_INLINE I andi(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
CORE_INLINE I ori(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
CORE_INLINE I xori(I a, I b) { return {_mm512_xor_si512(a.v, b.v)}; }
CORE_INLINE I maxi(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
CORE_INLINE __m128i quarter(I a, bool largest) {
  __m256i x = _mm512_castsi512_si256(a.v), y = _mm512_extracti64x4_epi64(a.v, 1);
  x = largest ? _mm256_max_epi32(x, y) : _mm256_add_epi32(x, y);
  __m128i v = _mm256_castsi256_si128(x), w = _mm256_extracti128_si256(x, 1);
  return largest ? _mm_max_epi32(v, w) : _mm_add_epi32(v, w);
}
CORE_INLINE void reduce4(const I (&a)[4], bool largest, int32_t* out) {
  __m128i v[4];
  for (int i = 0; i < 4; i++) v[i] = quarter(a[i], largest);
  __m128i t0 = _mm_unpacklo_epi32(v[0], v[1]), t1 = _mm_unpackhi_epi32(v[0], v[1]);
  __m128i t2 = _mm_unpacklo_epi32(v[2], v[3]), t3 = _mm_unpackhi_epi32(v[2], v[3]);
  __m128i x = largest ? _mm_max_epi32(t0, t1) : _mm_add_epi32(t0, t1), y = largest ? _mm_max_epi32(t2, t3) : _mm_add_epi32(t2, t3);
  __m128i lo = _mm_unpacklo_epi64(x, y), hi = _mm_unpackhi_epi64(x, y);
  _mm_storeu_si128((__m128i*)out, largest ? _mm_max_epi32(lo, hi) : _mm_add_epi32(lo, hi));
}
CORE_INLINE void store_i8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
template <int S> CORE_INLINE I shl(I a) { return {_mm512_slli_epi32(a.v, S)}; }
template <int S> CORE_INLINE I shr(I a) { return {_mm512_srli_epi32(a.v, S)}; }
template <int S> CORE_INLINE I sra(I a) { return {_mm512_srai_epi32(a.v, S)}; }
CORE_INLINE F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
CORE_INLINE I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }
CORE_INLINE F as_float(I a) { return {_mm512_castsi512_ps(a.v)}; }
CORE_INLINE I as_int(F a) { return {_mm512_castps_si512(a.v)}; }
CORE_INLINE F load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
CORE_INLINE F load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
CORE_INLINE I load_i8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
CORE_INLINE I load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
// Each lane's 16 bits of bf16, rounded to nearest even, in its low half.
CORE_INLINE I round_bf16(F a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), lsb), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return {_mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0))};
}
CORE_INLINE void store_bf16(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(round_bf16(a).v)); }
CORE_INLINE void store_f16(uint16_t* p, F a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
CORE_INLINE F load_e4m3(const uint8_t* p) {  // value * 2^-8, NaN not special
  __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  w = _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16(int16_t(0xbfff)));
  return {_mm512_cvtph_ps(w)};
}
CORE_INLINE F scale_pow2(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }
template <int S, int OFFSET> CORE_INLINE F nibble(I w) {
  const __m512 lut = _mm512_setr_ps(0 - OFFSET, 1 - OFFSET, 2 - OFFSET, 3 - OFFSET, 4 - OFFSET, 5 - OFFSET, 6 - OFFSET,
                                    7 - OFFSET, 8 - OFFSET, 9 - OFFSET, 10 - OFFSET, 11 - OFFSET, 12 - OFFSET,
                                    13 - OFFSET, 14 - OFFSET, 15 - OFFSET);
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(w.v, S), lut)};
}
#elif defined(__AVX2__)
// ---------------------------------------------------------------- AVX2
struct F { __m256 a, b; };
struct I { __m256i a, b; };
constexpr int kAccumulators = 6;

#define CORE_MAP1(fn, x) {fn((x).a), fn((x).b)}
#define CORE_MAP2(fn, x, y) {fn((x).a, (y).a), fn((x).b, (y).b)}
CORE_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
CORE_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
CORE_INLINE F set1(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
CORE_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
CORE_INLINE F add(F x, F y) { return CORE_MAP2(_mm256_add_ps, x, y); }
CORE_INLINE F sub(F x, F y) { return CORE_MAP2(_mm256_sub_ps, x, y); }
CORE_INLINE F mul(F x, F y) { return CORE_MAP2(_mm256_mul_ps, x, y); }
CORE_INLINE F div(F x, F y) { return CORE_MAP2(_mm256_div_ps, x, y); }
CORE_INLINE F fma(F x, F y, F c) { return {_mm256_fmadd_ps(x.a, y.a, c.a), _mm256_fmadd_ps(x.b, y.b, c.b)}; }
CORE_INLINE F vmax(F x, F y) { return CORE_MAP2(_mm256_max_ps, x, y); }
CORE_INLINE F vmin(F x, F y) { return CORE_MAP2(_mm256_min_ps, x, y); }
CORE_INLINE F vabs(F x) {
  __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
CORE_INLINE F round_even(F x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
CORE_INLINE F select_lt(F x, F y, F yes, F no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
CORE_INLINE float hsum(F x) {
  __m256 v = _mm256_add_ps(x.a, x.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
CORE_INLINE float hmax(F x) {
  __m256 v = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
CORE_INLINE I loadi(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
CORE_INLINE void storei(void* p, I x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
CORE_INLINE I set1i(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
CORE_INLINE I zeroi() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
CORE_INLINE I addi(I x, I y) { return CORE_MAP2(_mm256_add_epi32, x, y); }
CORE_INLINE I subi(I x, I y) { return CORE_MAP2(_mm256_sub_epi32, x, y); }
CORE_INLINE I andi(I x, I y) { return CORE_MAP2(_mm256_and_si256, x, y); }
CORE_INLINE I ori(I x, I y) { return CORE_MAP2(_mm256_or_si256, x, y); }
CORE_INLINE I xori(I x, I y) { return CORE_MAP2(_mm256_xor_si256, x, y); }
CORE_INLINE I maxi(I x, I y) { return CORE_MAP2(_mm256_max_epi32, x, y); }
CORE_INLINE void store_i8(int8_t* p, I x) {  // values must fit
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
template <int S> CORE_INLINE I shl(I x) { return {_mm256_slli_epi32(x.a, S), _mm256_slli_epi32(x.b, S)}; }
template <int S> CORE_INLINE I shr(I x) { return {_mm256_srli_epi32(x.a, S), _mm256_srli_epi32(x.b, S)}; }
template <int S> CORE_INLINE I sra(I x) { return {_mm256_srai_epi32(x.a, S), _mm256_srai_epi32(x.b, S)}; }
CORE_INLINE F to_float(I x) { return CORE_MAP1(_mm256_cvtepi32_ps, x); }
CORE_INLINE I to_int(F x) { return CORE_MAP1(_mm256_cvtps_epi32, x); }
CORE_INLINE F as_float(I x) { return CORE_MAP1(_mm256_castsi256_ps, x); }
CORE_INLINE I as_int(F x) { return CORE_MAP1(_mm256_castps_si256, x); }
CORE_INLINE F load_bf16(const uint16_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1)), 16))};
}
CORE_INLINE F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
CORE_INLINE I load_i8(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
CORE_INLINE I load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
CORE_INLINE __m256i round_bf16_half(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), lsb), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
}
CORE_INLINE I round_bf16(F x) { return CORE_MAP1(round_bf16_half, x); }
CORE_INLINE void store_bf16(uint16_t* p, F x) {
  I r = round_bf16(x);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r.a, r.b), 0xd8);
  _mm256_storeu_si256((__m256i*)p, packed);
}
CORE_INLINE void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
CORE_INLINE F load_e4m3(const uint8_t* p) {  // value * 2^-8, NaN not special
  __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8);
  w = _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16(int16_t(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(w)), _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1))};
}
CORE_INLINE __m256 scale_pow2_half(__m256 x, __m256 n) {  // n integral, in [-126, 127]
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
CORE_INLINE F scale_pow2(F x, F n) { return CORE_MAP2(scale_pow2_half, x, n); }
template <int S, int OFFSET> CORE_INLINE F nibble(I w) {
  return to_float(subi(andi(shr<S>(w), set1i(15)), set1i(OFFSET)));
}
#else
// ---------------------------------------------------------------- any x86-64: the compiler's own vectors
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t WordLanes __attribute__((vector_size(64)));
typedef uint16_t HalfLanes __attribute__((vector_size(32)));
typedef int8_t ByteLanes __attribute__((vector_size(16)));
typedef uint8_t UByteLanes __attribute__((vector_size(16)));
struct F { Lanes v; };
struct I { IntLanes v; };
constexpr int kAccumulators = 2;

template <class T> CORE_INLINE T peek(const void* p) { T r; memcpy(&r, p, sizeof(T)); return r; }
CORE_INLINE F load(const float* p) { return {peek<Lanes>(p)}; }
CORE_INLINE void store(float* p, F a) { memcpy(p, &a.v, 64); }
CORE_INLINE F set1(float a) { return {Lanes{} + a}; }
CORE_INLINE F zero() { return {Lanes{}}; }
CORE_INLINE F add(F a, F b) { return {a.v + b.v}; }
CORE_INLINE F sub(F a, F b) { return {a.v - b.v}; }
CORE_INLINE F mul(F a, F b) { return {a.v * b.v}; }
CORE_INLINE F div(F a, F b) { return {a.v / b.v}; }
CORE_INLINE F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
CORE_INLINE F vmax(F a, F b) { return {a.v > b.v ? a.v : b.v}; }
CORE_INLINE F vmin(F a, F b) { return {a.v < b.v ? a.v : b.v}; }
CORE_INLINE F vabs(F a) { return {(Lanes)((IntLanes)a.v & 0x7fffffff)}; }
CORE_INLINE F round_even(F a) { return {(a.v + 12582912.f) - 12582912.f}; }  // |a| < 2^22
CORE_INLINE F select_lt(F a, F b, F yes, F no) { return {a.v < b.v ? yes.v : no.v}; }
CORE_INLINE float hsum(F a) {
  float s = 0;
  for (int i = 0; i < 16; i++) s += a.v[i];
  return s;
}
CORE_INLINE float hmax(F a) {
  float s = a.v[0];
  for (int i = 1; i < 16; i++) s = a.v[i] > s ? a.v[i] : s;
  return s;
}
CORE_INLINE I loadi(const void* p) { return {peek<IntLanes>(p)}; }
CORE_INLINE void storei(void* p, I a) { memcpy(p, &a.v, 64); }
CORE_INLINE I set1i(int32_t a) { return {IntLanes{} + a}; }
CORE_INLINE I zeroi() { return {IntLanes{}}; }
CORE_INLINE I addi(I a, I b) { return {(IntLanes)((WordLanes)a.v + (WordLanes)b.v)}; }
CORE_INLINE I subi(I a, I b) { return {(IntLanes)((WordLanes)a.v - (WordLanes)b.v)}; }
CORE_INLINE I andi(I a, I b) { return {a.v & b.v}; }
CORE_INLINE I ori(I a, I b) { return {a.v | b.v}; }
CORE_INLINE I xori(I a, I b) { return {a.v ^ b.v}; }
CORE_INLINE I maxi(I a, I b) { return {a.v > b.v ? a.v : b.v}; }
CORE_INLINE void store_i8(int8_t* p, I a) {
  ByteLanes b = __builtin_convertvector(a.v, ByteLanes);
  memcpy(p, &b, 16);
}
template <int S> CORE_INLINE I shl(I a) { return {(IntLanes)((WordLanes)a.v << S)}; }
template <int S> CORE_INLINE I shr(I a) { return {(IntLanes)((WordLanes)a.v >> S)}; }
template <int S> CORE_INLINE I sra(I a) { return {a.v >> S}; }
CORE_INLINE F to_float(I a) { return {__builtin_convertvector(a.v, Lanes)}; }
CORE_INLINE I to_int(F a) { return {__builtin_convertvector(round_even(a).v, IntLanes)}; }
CORE_INLINE F as_float(I a) { return {(Lanes)a.v}; }
CORE_INLINE I as_int(F a) { return {(IntLanes)a.v}; }
CORE_INLINE F load_bf16(const uint16_t* p) {
  return {(Lanes)(__builtin_convertvector(peek<HalfLanes>(p), WordLanes) << 16)};
}
CORE_INLINE F load_f16(const uint16_t* p) {
  float r[16];
  for (int i = 0; i < 16; i++) r[i] = f16_float(p[i]);
  return load(r);
}
CORE_INLINE I load_i8(const int8_t* p) { return {__builtin_convertvector(peek<ByteLanes>(p), IntLanes)}; }
CORE_INLINE I load_u8(const uint8_t* p) { return {__builtin_convertvector(peek<UByteLanes>(p), IntLanes)}; }
CORE_INLINE I round_bf16(F a) {
  WordLanes u = (WordLanes)a.v, r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return {a.v == a.v ? (IntLanes)r : IntLanes{} + 0x7fc0};
}
CORE_INLINE void store_bf16(uint16_t* p, F a) {
  HalfLanes h = __builtin_convertvector((WordLanes)round_bf16(a).v, HalfLanes);
  memcpy(p, &h, 32);
}
CORE_INLINE void store_f16(uint16_t* p, F a) {
  for (int i = 0; i < 16; i++) p[i] = float_f16(a.v[i]);
}
CORE_INLINE F load_e4m3(const uint8_t* p) {  // value * 2^-8, NaN not special
  uint16_t h[16];
  for (int i = 0; i < 16; i++) h[i] = uint16_t(((p[i] & 0x80) << 8) | ((p[i] & 0x7f) << 7));
  return load_f16(h);
}
CORE_INLINE F scale_pow2(F a, F n) { return {a.v * (Lanes)((to_int(n).v + 127) << 23)}; }
template <int S, int OFFSET> CORE_INLINE F nibble(I w) { return to_float(subi(andi(shr<S>(w), set1i(15)), set1i(OFFSET))); }
#endif

// ---------------------------------------------------------------- built from the above
#if !defined(__AVX512F__)
// The largest lane, or the sum of all lanes, of each of four.
CORE_INLINE void reduce4(const I (&a)[4], bool largest, int32_t* out) {
  for (int i = 0; i < 4; i++) {
    int32_t lanes[16];
    storei(lanes, a[i]);
    int32_t found = lanes[0];
    for (int j = 1; j < 16; j++) found = !largest ? found + lanes[j] : lanes[j] > found ? lanes[j] : found;
    out[i] = found;
  }
}
#endif

struct BF16 { uint16_t bits; };
struct F16 { uint16_t bits; };
CORE_INLINE F loadx(const float* p) { return load(p); }
CORE_INLINE F loadx(const BF16* p) { return load_bf16(&p->bits); }
CORE_INLINE F loadx(const F16* p) { return load_f16(&p->bits); }
CORE_INLINE void storex(float* p, F a) { store(p, a); }
CORE_INLINE void storex(BF16* p, F a) { store_bf16(&p->bits, a); }
CORE_INLINE void storex(F16* p, F a) { store_f16(&p->bits, a); }
CORE_INLINE float get(const float* p) { return *p; }
CORE_INLINE float get(const BF16* p) { return bf16_float(p->bits); }
CORE_INLINE float get(const F16* p) { return f16_float(p->bits); }
CORE_INLINE void put(float* p, float a) { *p = a; }
CORE_INLINE void put(BF16* p, float a) { p->bits = float_bf16(a); }
CORE_INLINE void put(F16* p, float a) { p->bits = float_f16(a); }

// The first `count` (1..16) elements; lanes past them are `fill`.
template <class T> CORE_INLINE F load_part(const T* p, int64_t count, float fill = 0.f) {
  if (count >= 16) return loadx(p);
  float t[16];
  for (int i = 0; i < 16; i++) t[i] = i < count ? get(p + i) : fill;
  return load(t);
}
template <class T> CORE_INLINE void store_part(T* p, F a, int64_t count) {
  if (count >= 16) {
    storex(p, a);
    return;
  }
  float t[16];
  store(t, a);
  for (int i = 0; i < count; i++) put(p + i, t[i]);
}

CORE_INLINE F bf16_even(I pairs) { return as_float(shl<16>(pairs)); }
CORE_INLINE F bf16_odd(I pairs) { return as_float(andi(pairs, set1i(int32_t(0xffff0000u)))); }

// e^x to about 1 ulp; 0 below -87.3 (also for -inf), x at most 88.
CORE_INLINE F vexp(F x) {
  F y = vmax(set1(-87.3f), vmin(set1(88.f), x));  // in this order NaN stays NaN
  F n = round_even(mul(y, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.f));
  return select_lt(x, set1(-87.3f), zero(), scale_pow2(p, n));
}

// 2^x to about 1 ulp for x at most 0 (a little above does no harm); 0 below -126 (also for -inf).
CORE_INLINE F vexp2(F x) {
  F y = vmax(set1(-126.f), x);  // in this order NaN stays NaN
  F n = round_even(y);
  F r = sub(y, n);
  F p = set1(1.53325077e-4f);
  p = fma(p, r, set1(1.33947012e-3f));
  p = fma(p, r, set1(9.61849101e-3f));
  p = fma(p, r, set1(5.55034228e-2f));
  p = fma(p, r, set1(2.40226474e-1f));
  p = fma(p, r, set1(6.93147199e-1f));
  p = fma(p, r, set1(1.f));
  return select_lt(x, set1(-126.f), zero(), scale_pow2(p, n));
}

CORE_INLINE F vsigmoid(F x) { return div(set1(1.f), add(set1(1.f), vexp(sub(zero(), x)))); }
CORE_INLINE F vtanh(F x) {  // absolute error near 1e-7
  F e = vexp(mul(x, set1(2.f)));
  return sub(set1(1.f), div(set1(2.f), add(e, set1(1.f))));
}

// acc += the four-byte dot product a . b in int32.
// a: four unsigned bytes, the same in every lane; b: four signed bytes a lane.
// dot4_signed turns the signs around: b holds four unsigned bytes a lane, a four signed ones.
#if defined(__AVX512VNNI__)
CORE_INLINE I dot4_signed(I acc, I b, int32_t a) { return {_mm512_dpbusd_epi32(acc.v, b.v, _mm512_set1_epi32(a))}; }
CORE_INLINE I dot4(I acc, int32_t a, I b) { return {_mm512_dpbusd_epi32(acc.v, _mm512_set1_epi32(a), b.v)}; }
#elif defined(__AVX512F__)
CORE_INLINE I dot4(I acc, int32_t a, I b) {
  __m512i even = _mm512_set1_epi32(a & 0x00ff00ff), odd = _mm512_set1_epi32((uint32_t(a) >> 8) & 0x00ff00ff);
  __m512i be = _mm512_srai_epi16(_mm512_slli_epi16(b.v, 8), 8), bo = _mm512_srai_epi16(b.v, 8);
  return {_mm512_add_epi32(acc.v, _mm512_add_epi32(_mm512_madd_epi16(be, even), _mm512_madd_epi16(bo, odd)))};
}
CORE_INLINE I dot4_signed(I acc, I b, int32_t a) {
  __m512i x = _mm512_set1_epi32(a), low = _mm512_set1_epi16(255);
  __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), odd = _mm512_srai_epi16(x, 8);
  __m512i be = _mm512_and_si512(b.v, low), bo = _mm512_srli_epi16(b.v, 8);
  return {_mm512_add_epi32(acc.v, _mm512_add_epi32(_mm512_madd_epi16(be, even), _mm512_madd_epi16(bo, odd)))};
}
#elif defined(__AVX2__)
CORE_INLINE __m256i dot4_signed_half(__m256i acc, __m256i b, __m256i even, __m256i odd) {
  __m256i be = _mm256_and_si256(b, _mm256_set1_epi16(255)), bo = _mm256_srli_epi16(b, 8);
  return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(be, even), _mm256_madd_epi16(bo, odd)));
}
CORE_INLINE I dot4_signed(I acc, I b, int32_t a) {
  __m256i x = _mm256_set1_epi32(a);
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
  return {dot4_signed_half(acc.a, b.a, even, odd), dot4_signed_half(acc.b, b.b, even, odd)};
}
CORE_INLINE __m256i dot4_half(__m256i acc, __m256i even, __m256i odd, __m256i b) {
  __m256i be = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), bo = _mm256_srai_epi16(b, 8);
  return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(be, even), _mm256_madd_epi16(bo, odd)));
}
CORE_INLINE I dot4(I acc, int32_t a, I b) {
  __m256i even = _mm256_set1_epi32(a & 0x00ff00ff), odd = _mm256_set1_epi32((uint32_t(a) >> 8) & 0x00ff00ff);
  return {dot4_half(acc.a, even, odd, b.a), dot4_half(acc.b, even, odd, b.b)};
}
#else
template <int J> CORE_INLINE I dot4_signed_byte(I acc, I b, int32_t a) {
  int32_t x = int32_t(int8_t(uint32_t(a) >> (8 * J)));
  return {acc.v + x * andi(shr<8 * J>(b), set1i(255)).v};
}
CORE_INLINE I dot4_signed(I acc, I b, int32_t a) {
  return dot4_signed_byte<3>(dot4_signed_byte<2>(dot4_signed_byte<1>(dot4_signed_byte<0>(acc, b, a), b, a), b, a), b, a);
}
template <int J> CORE_INLINE I dot4_byte(I acc, int32_t a, I b) {
  int32_t x = int32_t((uint32_t(a) >> (8 * J)) & 255);
  return {acc.v + x * sra<24>(shl<24 - 8 * J>(b)).v};
}
CORE_INLINE I dot4(I acc, int32_t a, I b) {
  return dot4_byte<3>(dot4_byte<2>(dot4_byte<1>(dot4_byte<0>(acc, a, b), a, b), a, b), a, b);
}
#endif

// acc += a0 * b0 + a1 * b1 over bf16 pairs, the pair a the same in every lane.
#if defined(__AVX512BF16__)
#define CORE_DPBF16 1
CORE_INLINE F dpbf16(F acc, uint32_t a, I b) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_set1_epi32(int32_t(a)), (__m512bh)b.v)};
}
#elif defined(CORE_EMULATE_BF16)
#define CORE_DPBF16 1
CORE_INLINE F dpbf16(F acc, uint32_t a, I b) {
  acc = fma(set1(bits_float(a & 0xffff0000u)), bf16_odd(b), acc);
  return fma(set1(bits_float(a << 16)), bf16_even(b), acc);
}
#endif

// acc += a0 * b0 + a1 * b1 over pairs of int16, the pair a the same in every lane; where there is no such product of bf16.
#if defined(__AVX512VNNI__) && !defined(CORE_DPBF16)
#define CORE_DOT2 1
CORE_INLINE I dot2(I acc, uint32_t a, I b) { return {_mm512_dpwssd_epi32(acc.v, _mm512_set1_epi32(int32_t(a)), b.v)}; }
CORE_INLINE I first_lanes(int64_t count, int32_t value) {  // the others are 0
  return {_mm512_maskz_set1_epi32(count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1), value)};
}
CORE_INLINE I max_u16(I a, I b) { return {_mm512_max_epu16(a.v, b.v)}; }
// Said behind a loop of sums that are turned into floats: without it gcc stores them to memory in each turn.
CORE_INLINE void keep_in_register(I& a) { asm("" : "+v"(a.v)); }
// Low halves of `even` and of `odd`, side by side in each lane.
CORE_INLINE I pack16(I even, I odd) { return {_mm512_mask_blend_epi16(0xaaaaaaaau, even.v, _mm512_slli_epi32(odd.v, 16))}; }
CORE_INLINE void store_i16(uint16_t* p, I a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
CORE_INLINE __m128i quarter_u16(I a) {
  __m256i x = _mm256_max_epu16(_mm512_castsi512_si256(a.v), _mm512_extracti64x4_epi64(a.v, 1));
  return _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
CORE_INLINE __m128 quarter_float(F a, bool largest) {
  __m256 x = _mm512_castps512_ps256(a.v), y = _mm512_extractf32x8_ps(a.v, 1);
  x = largest ? _mm256_max_ps(x, y) : _mm256_add_ps(x, y);
  __m128 v = _mm256_castps256_ps128(x), w = _mm256_extractf128_ps(x, 1);
  return largest ? _mm_max_ps(v, w) : _mm_add_ps(v, w);
}
// The largest lane, or the sum of all lanes, of each of four.
CORE_INLINE void reduce4_float(const F (&a)[4], bool largest, float* out) {
  __m128 v[4];
  for (int i = 0; i < 4; i++) v[i] = quarter_float(a[i], largest);
  __m128 t0 = _mm_unpacklo_ps(v[0], v[1]), t1 = _mm_unpackhi_ps(v[0], v[1]);
  __m128 t2 = _mm_unpacklo_ps(v[2], v[3]), t3 = _mm_unpackhi_ps(v[2], v[3]);
  __m128 x = largest ? _mm_max_ps(t0, t1) : _mm_add_ps(t0, t1), y = largest ? _mm_max_ps(t2, t3) : _mm_add_ps(t2, t3);
  __m128 lo = _mm_movelh_ps(x, y), hi = _mm_movehl_ps(y, x);
  _mm_storeu_ps(out, largest ? _mm_max_ps(lo, hi) : _mm_add_ps(lo, hi));
}
// 2^x to 3e-6 for x at most 0; below -100 (also for -inf) 2^-100, so that products with it are no denormals, which are slow.
CORE_INLINE F vexp2_short(F x) {
  F y = vmax(set1(-100.f), x);
  const F magic = set1(12582912.f);  // added to a number, its whole part stands in the lowest bits
  F t = add(y, magic), r = sub(y, sub(t, magic));
  F p = set1(9.5701e-3f);
  p = fma(p, r, set1(5.591786e-2f));
  p = fma(p, r, set1(2.4024745e-1f));
  p = fma(p, r, set1(6.9312181e-1f));
  p = fma(p, r, set1(9.9999926e-1f));
  return as_float(addi(as_int(p), shl<23>(as_int(t))));
}
// The largest low half and the largest high half of the lanes of each of four.
CORE_INLINE void reduce4_u16(const I (&a)[4], uint16_t* out) {
  __m128i v0 = quarter_u16(a[0]), v1 = quarter_u16(a[1]), v2 = quarter_u16(a[2]), v3 = quarter_u16(a[3]);
  __m128i x = _mm_max_epu16(_mm_unpacklo_epi32(v0, v1), _mm_unpackhi_epi32(v0, v1));
  __m128i y = _mm_max_epu16(_mm_unpacklo_epi32(v2, v3), _mm_unpackhi_epi32(v2, v3));
  _mm_storeu_si128((__m128i*)out, _mm_max_epu16(_mm_unpacklo_epi64(x, y), _mm_unpackhi_epi64(x, y)));
}
#endif

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
