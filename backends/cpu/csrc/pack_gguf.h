// GGUF blocks of one row into the blocks of a panel (panels.h): `block_in` puts the block at `s` into row r.
#pragma once
#include <cstdint>
#include <cstring>

#include "panels.h"

namespace core_cpu {

static inline uint16_t half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

static inline uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}

// Puts 4-bit q[count] of row r into dwords of 8 k: low nibbles of the bytes are k 0..3, high ones 4..7.
static inline void put_nibbles(uint32_t (*out)[16], int r, const uint8_t* q, int count) {
  for (int g = 0; g < count / 8; g++) {
    uint32_t w = 0;
    for (int j = 0; j < 8; j++) w |= uint32_t(q[g * 8 + j] & 15) << (j < 4 ? 8 * j : 8 * (j - 4) + 4);
    out[g][r] = w;
  }
}

static inline void split_nibbles(const uint8_t* source, uint8_t* q) {  // 16 bytes: low nibbles are 0..15, high ones 16..31
  for (int i = 0; i < 16; i++) {
    q[i] = source[i] & 15;
    q[i + 16] = source[i] >> 4;
  }
}

static inline void block_in(BlockQ8_0& b, int r, const uint8_t* s) {
  b.d[r] = half(s);
  for (int g = 0; g < 8; g++) b.q[g][r] = word(s + 2 + 4 * g);
}

static inline void block_in(BlockQ4_0& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  split_nibbles(s + 2, q);
  put_nibbles(b.q, r, q, 32);
}

static inline void block_in(BlockQ4_1& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  b.m[r] = half(s + 2);
  split_nibbles(s + 4, q);
  put_nibbles(b.q, r, q, 32);
}

static inline void block_in(BlockQ5_0& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  b.h[r] = word(s + 2);
  split_nibbles(s + 6, q);
  put_nibbles(b.q, r, q, 32);
}

static inline void block_in(BlockQ5_1& b, int r, const uint8_t* s) {
  uint8_t q[32];
  b.d[r] = half(s);
  b.m[r] = half(s + 2);
  b.h[r] = word(s + 4);
  split_nibbles(s + 8, q);
  put_nibbles(b.q, r, q, 32);
}

// 6-bit scales and minima of a K block, eight of each in 12 bytes.
static inline void k_scales(const uint8_t* s, uint8_t* scale, uint8_t* minimum) {
  for (int j = 0; j < 4; j++) {
    scale[j] = s[j] & 63;
    minimum[j] = s[j + 4] & 63;
    scale[j + 4] = uint8_t((s[j + 8] & 15) | ((s[j] >> 6) << 4));
    minimum[j + 4] = uint8_t((s[j + 8] >> 4) | ((s[j + 4] >> 6) << 4));
  }
}

template <class Block>
static inline void k_head(Block& b, int r, const uint8_t* s) {
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
static inline void k_nibbles(uint32_t (*out)[16], int r, const uint8_t* s, int j) {
  uint8_t q[32];
  for (int i = 0; i < 32; i++) q[i] = uint8_t(s[j / 2 * 32 + i] >> (j % 2 * 4));
  put_nibbles(out, r, q, 32);
}

static inline void block_in(BlockQ4_K& b, int r, const uint8_t* s) {
  k_head(b, r, s);
  for (int j = 0; j < 8; j++) k_nibbles(b.q[j], r, s + 16, j);
}

static inline void block_in(BlockQ5_K& b, int r, const uint8_t* s) {
  k_head(b, r, s);
  for (int j = 0; j < 8; j++) {
    k_nibbles(b.q[j], r, s + 48, j);
    uint32_t high = 0;
    for (int i = 0; i < 32; i++) high |= uint32_t((s[16 + i] >> j) & 1) << i;
    b.h[j][r] = high;
  }
}

// Q6_K: 128 bytes of low nibbles, 64 of high bit pairs, 16 scales, d. Each half of 128 values is four runs of 32.
static inline void block_in(BlockQ6_K& b, int r, const uint8_t* s) {
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

}  // namespace core_cpu
