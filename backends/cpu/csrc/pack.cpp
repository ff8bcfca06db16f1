#include "pack.h"

#include <sys/mman.h>

#include <cstring>

#include "pack_gguf.h"
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

template <int SOURCE>
float dense_at(const char* row, int64_t k) {
  uint16_t h;
  float f;
  if (SOURCE == kF32) {
    std::memcpy(&f, row + k * 4, 4);
    return f;
  }
  std::memcpy(&h, row + k * 2, 2);
  return SOURCE == kBF16 ? float_of(uint32_t{h} << 16) : from_f16(h);
}

// `count` values of a row from k on, in the type that is kept.
template <int SOURCE, int TARGET>
void halves(const char* row, int64_t k, int64_t count, uint16_t* out) {
  if (SOURCE == TARGET) {
    std::memcpy(out, row + k * 2, static_cast<size_t>(count) * 2);
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    float f = dense_at<SOURCE>(row, k + i);
    out[i] = TARGET == kBF16 ? to_bf16(f) : to_f16(f);
  }
}

// 16 rows of the source that make one panel; those past the end of the weight are zero in it.
struct PanelRows {
  const PackArgs& args;
  int64_t first;
  int count;
  const char* at(int r) const { return static_cast<const char*>(args.source) + (first + r) * args.row_stride; }
};

// out[w * 16 + r] = word w of row r. Read by cache lines: rows whose distance is a power of two share a place in the
// cache, where not all 16 would stay until their next word.
template <class Word, class Fill>
void interleave(int64_t num_words, int num_rows, char* out, Fill fill) {
  constexpr int kPiece = 64 / sizeof(Word);
  Word piece[16][kPiece] = {};
  auto* o = reinterpret_cast<Word*>(out);
  for (int64_t w = 0; w < num_words; w += kPiece) {
    int count = static_cast<int>(num_words - w < kPiece ? num_words - w : kPiece);
    for (int r = 0; r < num_rows; r++) fill(r, w, count, piece[r]);
    for (int i = 0; i < count; i++)
      for (int r = 0; r < 16; r++) o[(w + i) * 16 + r] = piece[r][i];
  }
}

// Elements in words [w, w + count) of `per_word` elements each that a row of k elements has; the last word may be short.
int64_t elements_of(int64_t w, int count, int per_word, int64_t k) {
  int64_t left = k - w * per_word, all = int64_t{count} * per_word;
  return left < all ? left : all;
}

template <int SOURCE>
void pack_dense_from(const PanelRows& rows, char* out) {
  int64_t k = rows.args.k;
  if (rows.args.scheme == kWF32) {
    interleave<float>(k, rows.count, out, [&](int r, int64_t w, int count, float* to) {
      for (int i = 0; i < count; i++) to[i] = dense_at<SOURCE>(rows.at(r), w + i);
    });
  } else if (rows.args.scheme == kWBF16) {
    interleave<uint32_t>((k + 1) / 2, rows.count, out, [&](int r, int64_t w, int count, uint32_t* to) {
      int64_t present = elements_of(w, count, 2, k);
      if (present % 2) to[present / 2] = 0;
      uint16_t values[32];
      halves<SOURCE, kBF16>(rows.at(r), w * 2, present, values);
      std::memcpy(to, values, static_cast<size_t>(present) * 2);
    });
  } else {
    interleave<uint16_t>(k, rows.count, out, [&](int r, int64_t w, int count, uint16_t* to) {
      halves<SOURCE, kF16>(rows.at(r), w, count, to);
    });
  }
}

void pack_dense(const PanelRows& rows, char* out) {
  switch (rows.args.source_dtype) {
    case kF32: return pack_dense_from<kF32>(rows, out);
    case kBF16: return pack_dense_from<kBF16>(rows, out);
    default: return pack_dense_from<kF16>(rows, out);
  }
}

void pack_int8(const PanelRows& rows, char* out) {
  int64_t k = rows.args.k;
  interleave<uint32_t>((k + 3) / 4, rows.count, out, [&](int r, int64_t w, int count, uint32_t* to) {
    int64_t present = elements_of(w, count, 4, k);
    if (present % 4) to[present / 4] = 0;
    std::memcpy(to, rows.at(r) + w * 4, static_cast<size_t>(present));
  });
  for (int r = 0; r < 16 && rows.args.row_sum; r++) {
    int32_t sum = 0;
    for (int64_t i = 0; r < rows.count && i < k; i++) sum += static_cast<int8_t>(rows.at(r)[i]);
    rows.args.row_sum[rows.first + r] = sum;
  }
}

void pack_fp8(const PanelRows& rows, char* out) {
  int64_t k = rows.args.k;
  interleave<uint8_t>(k, rows.count, out, [&](int r, int64_t w, int count, uint8_t* to) {
    std::memcpy(to, rows.at(r) + w, static_cast<size_t>(count));
  });
  for (int r = 0; r < 16 && rows.args.row_nan; r++) {
    bool nan = false;
    for (int64_t i = 0; r < rows.count && i < k; i++) nan |= (rows.at(r)[i] & 0x7f) == 0x7f;
    rows.args.row_nan[rows.first + r] = nan;
  }
}

template <class Block, int ELEMENTS, int BYTES>
void pack_blocks(const PanelRows& rows, char* out) {
  auto* blocks = reinterpret_cast<Block*>(out);
  int64_t count = rows.args.k / ELEMENTS;
  if (rows.count < 16) std::memset(out, 0, static_cast<size_t>(count) * sizeof(Block));
  for (int r = 0; r < rows.count; r++) {
    auto* source = reinterpret_cast<const uint8_t*>(rows.at(r));
    for (int64_t i = 0; i < count; i++) block_in(blocks[i], r, source + i * BYTES);
  }
}

using PanelFn = void (*)(const PanelRows&, char*);

PanelFn panel_fn(int scheme) {
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
  PanelFn fn = panel_fn(a.scheme);
  int64_t bytes = panel_bytes(a.scheme, a.k);
  for (int64_t panel = begin; panel < end; panel++) {
    int64_t first = panel * 16;
    int count = static_cast<int>(a.n - first < 16 ? a.n - first : 16);
    fn({a, first, count}, static_cast<char*>(a.out) + panel * bytes);
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
