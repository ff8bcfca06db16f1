// Rows of a packed weight as floats: embedding lookups from the same panels that the output head multiplies with, and
// whole-weight dequantization.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

constexpr int64_t kRowBlock = 256;  // k values expanded at a time; a multiple of every scheme's block

// Floats of panel `panel` for k in [k0, k0 + count): out[(k - k0) * 16 + row], every scale applied.
static void expand_tile(const Weight& w, int64_t panel, int64_t k0, int64_t count, float* out) {
  SchemeShape shape = scheme_shape(w.scheme);
  const char* base = static_cast<const char*>(w.data) + panel * ceil_div(w.k, shape.k_block) * shape.block_bytes;
  if (TileFn tile = tile_fn(w.scheme)) {
    tile(base, k0, count, out);
  } else {
    for (int64_t i = 0; i < count; i++) {
      int64_t k = k0 + i;
      if (w.scheme == kWF32) store(out + i * 16, load(reinterpret_cast<const float*>(base) + k * 16));
      else if (w.scheme == kWF16) store(out + i * 16, load_f16(reinterpret_cast<const uint16_t*>(base) + k * 16));
      else if (w.scheme == kWBF16) {
        I pairs = loadi(base + k / 2 * 64);
        store(out + i * 16, k & 1 ? bf16_odd(pairs) : bf16_even(pairs));
      } else {
        auto* bytes = reinterpret_cast<const int8_t*>(base) + k / 4 * 64 + k % 4;
        for (int r = 0; r < 16; r++) out[i * 16 + r] = bytes[r * 4];
      }
    }
  }
  if (!w.row_scale) return;
  F rows = load(w.row_scale + panel * 16);
  for (int64_t i = 0; i < count; i++) {
    F v = load(out + i * 16);
    if (w.block_scale) v = mul(v, set1(w.block_scale[panel * ceil_div(w.k, kFp8Block) + (k0 + i) / kFp8Block]));
    store(out + i * 16, mul(v, rows));
  }
}

template <class T>
CORE_INLINE void embed_row(const EmbedArgs& a, int64_t index, float* tile) {
  int64_t id = a.ids[index], panel = id / kPanel, lane = id % kPanel;
  T* out = static_cast<T*>(a.out) + index * a.out_stride;
  for (int64_t k0 = 0; k0 < a.w.k; k0 += kRowBlock) {
    int64_t count = min64(kRowBlock, a.w.k - k0);
    expand_tile(a.w, panel, k0, count, tile);
    for (int64_t i = 0; i < count; i++) put(out + k0 + i, tile[i * 16 + lane] * a.scale);
  }
}

static void embed_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const EmbedArgs*>(context);
  auto* tile = static_cast<float*>(scratch(kScratchTask, kRowBlock * 16 * 4));
  for (int64_t i = begin; i < end; i++) {
    if (a.out_dtype == kF32) embed_row<float>(a, i, tile);
    else if (a.out_dtype == kBF16) embed_row<BF16>(a, i, tile);
    else embed_row<F16>(a, i, tile);
  }
}

static void embed(const EmbedArgs& a) {
  parallel_static(a.count, max64(1, 16384 / max64(1, a.w.k)), embed_range, const_cast<EmbedArgs*>(&a));
}

struct DequantizeContext {
  const Weight* w;
  float* out;
};

static void dequantize_range(void* context, int64_t begin, int64_t end) {
  auto& c = *static_cast<DequantizeContext*>(context);
  auto* tile = static_cast<float*>(scratch(kScratchTask, kRowBlock * 16 * 4));
  for (int64_t panel = begin; panel < end; panel++) {
    int64_t rows = min64(kPanel, c.w->n - panel * kPanel);
    for (int64_t k0 = 0; k0 < c.w->k; k0 += kRowBlock) {
      int64_t count = min64(kRowBlock, c.w->k - k0);
      expand_tile(*c.w, panel, k0, count, tile);
      for (int64_t r = 0; r < rows; r++) {
        float* out = c.out + (panel * kPanel + r) * c.w->k + k0;
        for (int64_t i = 0; i < count; i++) out[i] = tile[i * 16 + r];
      }
    }
  }
}

static void dequantize(const Weight& w, float* out) {
  DequantizeContext c{&w, out};
  parallel_static(ceil_div(w.n, kPanel), 1, dequantize_range, &c);
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
