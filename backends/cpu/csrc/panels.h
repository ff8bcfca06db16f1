// Layout of packed weights: panels of 16 output rows, contiguous over k. The same on every machine, so that a packed
// weight can be kept on disk. Rows past n are zero; k is padded to kKStep[scheme] with zeros.
//
//   F32   [k][16] float               BF16  [k / 2][16][2] bf16
//   F16   [k][16] half                INT8  [k / 4][16][4] int8
//   FP8   [k][16] e4m3 bytes          Q*    blocks below, in order of k
#pragma once
#include <cstdint>

#include "args.h"

namespace core_cpu {

// d, m: fp16 bits by row. q of Q8: dwords of 4 consecutive k. q of 4 bits: dwords of 8 consecutive k, low nibbles of the four bytes
// are k 0..3 and high nibbles 4..7. h: bit k of a row's dword is the fifth bit; for Q6_K bits 2k, 2k + 1.
struct BlockQ8_0 { uint16_t d[16]; uint32_t q[8][16]; };
struct BlockQ4_0 { uint16_t d[16]; uint32_t q[4][16]; };
struct BlockQ4_1 { uint16_t d[16], m[16]; uint32_t q[4][16]; };
struct BlockQ5_0 { uint16_t d[16]; uint32_t h[16]; uint32_t q[4][16]; };
struct BlockQ5_1 { uint16_t d[16], m[16]; uint32_t h[16]; uint32_t q[4][16]; };
struct BlockQ4_K { uint16_t d[16], dmin[16]; uint8_t scale[8][16], minimum[8][16]; uint32_t q[8][4][16]; };
struct BlockQ5_K { uint16_t d[16], dmin[16]; uint8_t scale[8][16], minimum[8][16]; uint32_t h[8][16]; uint32_t q[8][4][16]; };
struct BlockQ6_K { uint16_t d[16]; int8_t scale[16][16]; uint32_t h[16][16]; uint32_t q[16][2][16]; };

struct SchemeShape {
  int k_block;          // k values of a stored block
  int64_t block_bytes;  // bytes of a block of 16 rows
  bool partial;         // k may end inside a block (padded)
};

static inline SchemeShape scheme_shape(int scheme) {
  switch (scheme) {
    case kWF32: return {1, 64, true};
    case kWBF16: return {2, 64, true};
    case kWF16: return {1, 32, true};
    case kWInt8: return {4, 64, true};
    case kWFp8: return {1, 16, true};
    case kWQ8_0: return {32, sizeof(BlockQ8_0), false};
    case kWQ4_0: return {32, sizeof(BlockQ4_0), false};
    case kWQ4_1: return {32, sizeof(BlockQ4_1), false};
    case kWQ5_0: return {32, sizeof(BlockQ5_0), false};
    case kWQ5_1: return {32, sizeof(BlockQ5_1), false};
    case kWQ4_K: return {256, sizeof(BlockQ4_K), false};
    case kWQ5_K: return {256, sizeof(BlockQ5_K), false};
    case kWQ6_K: return {256, sizeof(BlockQ6_K), false};
    default: return {0, 0, false};
  }
}

}  // namespace core_cpu
