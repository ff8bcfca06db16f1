#include "pack.h"

#include <sys/mman.h>

#include <cstring>

#include "panels.h"
#include "threading.h"

namespace core_cpu {
namespace {

uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

float from_f16(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, em = h & 0x7fff;
  if (em >= 0x7c00) return float_of(sign | 0x7f800000u | (em << 13));
  if (em >= 0x0400) return float_of(sign | ((em << 13) + (112u << 23)));
  return float_of(bits_of(static_cast<float>(em) * 5.9604644775390625e-8f) | sign);
}

uint16_t to_bf16(float f) {
  uint32_t u = bits_of(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

uint16_t to_f16(float f) {
  uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (u < 0x38800000u) return static_cast<uint16_t>(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000u));
  u += 0xfff + ((u >> 13) & 1);
  return static_cast<uint16_t>(sign | ((u - (112u << 23)) >> 13));
}

float dense_at(const char* row, int dtype, int64_t k) {
  uint16_t h;
  float f;
  if (dtype == kF32) {
    std::memcpy(&f, row + k * 4, 4);
    return f;
  }
  std::memcpy(&h, row + k * 2, 2);
  return dtype == kBF16 ? float_of(uint32_t{h} << 16) : from_f16(h);
}

uint16_t half_at(const char* row, int dtype, int64_t k, int target) {
  uint16_t h;
  if (dtype == target) {
    std::memcpy(&h, row + k * 2, 2);
    return h;
  }
  return target == kBF16 ? to_bf16(dense_at(row, dtype, k)) : to_f16(dense_at(row, dtype, k));
}

void pack_dense(const PackArgs& a, const char* row, int64_t panel, int r, char* out) {
  (void)panel;
  if (a.scheme == kWF32) {
    auto* o = reinterpret_cast<float*>(out);
    for (int64_t k = 0; k < a.k; k++) o[k * 16 + r] = dense_at(row, a.source_dtype, k);
  } else if (a.scheme == kWBF16) {
    auto* o = reinterpret_cast<uint16_t*>(out);
    for (int64_t k = 0; k < a.k; k++) o[k / 2 * 32 + r * 2 + k % 2] = half_at(row, a.source_dtype, k, kBF16);
  } else {
    auto* o = reinterpret_cast<uint16_t*>(out);
    for (int64_t k = 0; k < a.k; k++) o[k * 16 + r] = half_at(row, a.source_dtype, k, kF16);
  }
}

void pack_int8(const PackArgs& a, const char* row, int64_t panel, int r, char* out) {
  int32_t sum = 0;
  for (int64_t k = 0; k < a.k; k++) {
    out[k / 4 * 64 + r * 4 + k % 4] = row[k];
    sum += static_cast<int8_t>(row[k]);
  }
  if (a.row_sum) a.row_sum[panel * 16 + r] = sum;
}

void pack_fp8(const PackArgs& a, const char* row, int64_t panel, int r, char* out) {
  bool nan = false;
  for (int64_t k = 0; k < a.k; k++) {
    out[k * 16 + r] = row[k];
    nan |= (row[k] & 0x7f) == 0x7f;
  }
  if (a.row_nan) a.row_nan[panel * 16 + r] = nan;
}

// ------------------------------------------------------------------ GGUF blocks of one row
uint16_t half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

// Puts 4-bit q[count] of row r into dwords of 8 k: low nibbles of the bytes are k 0..3, high ones 4..7.
void put_nibbles(uint32_t (*out)[16], int r, const uint8_t* q, int count) {
  for (int g = 0; g < count / 8; g++) {
    uint32_t w = 0;
    for (int j = 0; j < 8; j++) w |= uint32_t(q[g * 8 + j] & 15) << (j < 4 ? 8 * j : 8 * (j - 4) + 4);
    out[g][r] = w;
  }
}

void split_nibbles(const uint8_t* source, uint8_t* q) {  // 16 bytes: low nibbles are 0..15, high ones 16..31
  for (int i = 0; i < 16; i++) {
    q[i] = source[i] & 15;
    q[i + 16] = source[i] >> 4;
  }
}

void block_in(BlockQ8_0& b, int r, const uint8_t* s) {
  b.d[r] = half(s);
  for (int g = 0; g < 8; g++) b.q[g][r] = word(s + 2 + 4 * g);
}

void block_in(BlockQ4_0& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  split_nibbles(s + 2, q);
  put_nibbles(b.q, r, q, 32);
}

void block_in(BlockQ4_1& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  b.m[r] = half(s + 2);
  split_nibbles(s + 4, q);
  put_nibbles(b.q, r, q, 32);
}

void block_in(BlockQ5_0& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  b.h[r] = word(s + 2);
  split_nibbles(s + 6, q);
  put_nibbles(b.q, r, q, 32);
}

void block_in(BlockQ5_1& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  b.m[r] = half(s + 2);
  b.h[r] = word(s + 4);
  split_nibbles(s + 8, q);
  put_nibbles(b.q, r, q, 32);
}

// 6-bit scales and minima of a K block, eight of each in 12 bytes.
void k_scales(const uint8_t* s, uint8_t* scale, uint8_t* minimum) {
  for (int j = 0; j < 4; j++) {
    scale[j] = s[j] & 63;
    minimum[j] = s[j + 4] & 63;
    scale[j + 4] = uint8_t((s[j + 8] & 15) | ((s[j] >> 6) << 4));
    minimum[j + 4] = uint8_t((s[j + 8] >> 4) | ((s[j + 4] >> 6) << 4));
  }
}

template <class Block>
void k_head(Block& b, int r, const uint8_t* s) {
  uint8_t scale[8], minimum[8];
  b.d[r] = half(s);
  b.dmin[r] = half(s + 2);
  k_scales(s + 4, scale, minimum);
  for (int j = 0; j < 8; j++) {
    b.scale[j][r] = scale[j];
    b.minimum[j][r] = minimum[j];
  }
}

// Sub-block j of Q4_K and Q5_K: low nibbles of 32 bytes for even j, high ones for odd j.
void k_nibbles(uint32_t (*out)[16], int r, const uint8_t* s, int j) {
  uint8_t q[32];
  for (int i = 0; i < 32; i++) q[i] = uint8_t(s[j / 2 * 32 + i] >> (j % 2 * 4));
  put_nibbles(out, r, q, 32);
}

void block_in(BlockQ4_K& b, int r, const uint8_t* s) {
  k_head(b, r, s);
  for (int j = 0; j < 8; j++) k_nibbles(b.q[j], r, s + 16, j);
}

void block_in(BlockQ5_K& b, int r, const uint8_t* s) {
  k_head(b, r, s);
  for (int j = 0; j < 8; j++) {
    k_nibbles(b.q[j], r, s + 48, j);
    uint32_t high = 0;
    for (int i = 0; i < 32; i++) high |= uint32_t((s[16 + i] >> j) & 1) << i;
    b.h[j][r] = high;
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of high bit pairs, 16 scales, d. Each half of 128 values is four runs of 32.
void block_in(BlockQ6_K& b, int r, const uint8_t* s) {
  b.d[r] = half(s + 208);
  for (int sub = 0; sub < 16; sub++) {
    b.scale[sub][r] = static_cast<int8_t>(s[192 + sub]);
    uint8_t q[16];
    uint32_t high = 0;
    for (int i = 0; i < 16; i++) {
      int at = sub * 16 + i, part = at / 128, run = at % 128 / 32, l = at % 32;
      q[i] = uint8_t(s[part * 64 + l + (run & 1) * 32] >> (run >> 1) * 4);
      high |= uint32_t((s[128 + part * 32 + l] >> (2 * run)) & 3) << (2 * i);
    }
    put_nibbles(b.q[sub], r, q, 16);
    b.h[sub][r] = high;
  }
}

template <class Block, int ELEMENTS, int BYTES>
void pack_blocks(const PackArgs& a, const char* row, int64_t, int r, char* out) {
  auto* source = reinterpret_cast<const uint8_t*>(row);
  auto* blocks = reinterpret_cast<Block*>(out);
  for (int64_t i = 0; i < a.k / ELEMENTS; i++) block_in(blocks[i], r, source + i * BYTES);
}

using RowFn = void (*)(const PackArgs&, const char*, int64_t, int, char*);

RowFn row_fn(int scheme) {
  switch (scheme) {
    case kWInt8: return pack_int8;
    case kWFp8: return pack_fp8;
    case kWQ8_0: return pack_blocks<BlockQ8_0, 32, 34>;
    case kWQ4_0: return pack_blocks<BlockQ4_0, 32, 18>;
    case kWQ4_1: return pack_blocks<BlockQ4_1, 32, 20>;
    case kWQ5_0: return pack_blocks<BlockQ5_0, 32, 22>;
    case kWQ5_1: return pack_blocks<BlockQ5_1, 32, 24>;
    case kWQ4_K: return pack_blocks<BlockQ4_K, 256, 144>;
    case kWQ5_K: return pack_blocks<BlockQ5_K, 256, 176>;
    case kWQ6_K: return pack_blocks<BlockQ6_K, 256, 210>;
    default: return pack_dense;
  }
}

int64_t panel_bytes(int scheme, int64_t k) {
  SchemeShape shape = scheme_shape(scheme);
  return (k + shape.k_block - 1) / shape.k_block * shape.block_bytes;
}

void pack_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const PackArgs*>(context);
  RowFn fn = row_fn(a.scheme);
  int64_t bytes = panel_bytes(a.scheme, a.k);
  for (int64_t panel = begin; panel < end; panel++) {
    char* out = static_cast<char*>(a.out) + panel * bytes;
    std::memset(out, 0, static_cast<size_t>(bytes));
    for (int r = 0; r < 16; r++) {
      int64_t n = panel * 16 + r;
      if (n < a.n) {
        fn(a, static_cast<const char*>(a.source) + n * a.row_stride, panel, r, out);
      } else {
        if (a.row_sum) a.row_sum[n] = 0;
        if (a.row_nan) a.row_nan[n] = 0;
      }
    }
  }
}

// Streams over many small pages stall at each; the system may back whole 2 MiB pieces with one page. Only a wish.
void ask_for_large_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kLarge = uintptr_t{1} << 21;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kLarge - 1) & ~(kLarge - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) & ~(kLarge - 1);
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

}  // namespace

int64_t packed_bytes(int scheme, int64_t n, int64_t k) { return (n + 15) / 16 * panel_bytes(scheme, k); }

void pack(const PackArgs& args) {
  ask_for_large_pages(args.out, packed_bytes(args.scheme, args.n, args.k));
  parallel_static((args.n + 15) / 16, 1, pack_range, const_cast<PackArgs*>(&args));
}

}  // namespace core_cpu
