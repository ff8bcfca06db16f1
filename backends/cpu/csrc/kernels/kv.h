// The KV cache as attention likes it: keys of a block are panels of 16 keys contiguous over head_dim, values are panels of 16
// value dims contiguous over keys. Attention is then two products over panels, with the tiles that linear uses.
//
//   K plane  [num_blocks, num_kv_heads, block_size / 16, head_dim, 16]            fp32, fp16
//            [num_blocks, num_kv_heads, block_size / 16, head_dim / 2, 16, 2]     bf16
//   V plane  [num_blocks, num_kv_heads, padded v_head_dim / 16, block_size, 16]   fp32, fp16
//            [num_blocks, num_kv_heads, padded v_head_dim / 16, block_size / 2, 16, 2]  bf16
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

CORE_INLINE int64_t k_head_elements(const KvArgs& a) { return int64_t(a.block_size) * a.head_dim; }
CORE_INLINE int64_t v_head_elements(const KvArgs& a) { return int64_t(a.block_size) * round_up(a.v_head_dim, 16); }

template <class T, class C>
CORE_INLINE void write_plain(const KvWriteArgs& a, int64_t token, int64_t block, int64_t offset) {
  for (int h = 0; h < a.kv.num_kv_heads; h++) {
    auto* key = static_cast<const T*>(a.key) + token * a.key_stride + h * a.key_head_stride;
    C* k = static_cast<C*>(a.kv.k_cache) + block * a.kv.k_block_stride + h * k_head_elements(a.kv) +
           offset / 16 * 16 * a.kv.head_dim + offset % 16;
    for (int d = 0; d < a.kv.head_dim; d++) put(k + d * 16, get(key + d));
    auto* value = static_cast<const T*>(a.value) + token * a.value_stride + h * a.value_head_stride;
    C* v = static_cast<C*>(a.kv.v_cache) + block * a.kv.v_block_stride + h * v_head_elements(a.kv) + offset * 16;
    for (int d = 0; d < a.kv.v_head_dim; d++) put(v + int64_t(d / 16) * a.kv.block_size * 16 + d % 16, get(value + d));
  }
}

template <class T>
CORE_INLINE void write_pairs(const KvWriteArgs& a, int64_t token, int64_t block, int64_t offset) {
  for (int h = 0; h < a.kv.num_kv_heads; h++) {
    auto* key = static_cast<const T*>(a.key) + token * a.key_stride + h * a.key_head_stride;
    BF16* k = static_cast<BF16*>(a.kv.k_cache) + block * a.kv.k_block_stride + h * k_head_elements(a.kv) +
              offset / 16 * 16 * a.kv.head_dim + offset % 16 * 2;
    for (int d = 0; d < a.kv.head_dim; d += 2) {
      put(k + d * 16, get(key + d));
      put(k + d * 16 + 1, get(key + d + 1));
    }
    auto* value = static_cast<const T*>(a.value) + token * a.value_stride + h * a.value_head_stride;
    BF16* v = static_cast<BF16*>(a.kv.v_cache) + block * a.kv.v_block_stride + h * v_head_elements(a.kv) +
              offset / 2 * 32 + offset % 2;
    for (int d = 0; d < a.kv.v_head_dim; d++)
      put(v + int64_t(d / 16) * a.kv.block_size * 16 + d % 16 * 2, get(value + d));
  }
}

template <class T>
static void kv_write_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const KvWriteArgs*>(context);
  for (int64_t t = begin; t < end; t++) {
    int64_t slot = a.slots[t];
    if (slot < 0) continue;
    int64_t block = slot / a.kv.block_size, offset = slot % a.kv.block_size;
    if (a.kv.cache_dtype == kBF16) write_pairs<T>(a, t, block, offset);
    else if (a.kv.cache_dtype == kF32) write_plain<T, float>(a, t, block, offset);
    else write_plain<T, F16>(a, t, block, offset);
  }
}

// Index of one element within the head's part of a block.
CORE_INLINE int64_t k_index(const KvArgs& a, int64_t offset, int64_t d) {
  int64_t at = offset / 16 * 16 * a.head_dim;
  return a.cache_dtype == kBF16 ? at + d / 2 * 32 + offset % 16 * 2 + d % 2 : at + d * 16 + offset % 16;
}
CORE_INLINE int64_t v_index(const KvArgs& a, int64_t offset, int64_t d) {
  int64_t at = d / 16 * a.block_size * 16;
  return a.cache_dtype == kBF16 ? at + offset / 2 * 32 + d % 16 * 2 + offset % 2 : at + offset * 16 + d % 16;
}

static void kv_read_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const KvReadArgs*>(context);
  int64_t size = dtype_bytes(a.kv.cache_dtype);
  for (int64_t t = begin; t < end; t++) {
    int64_t slot = a.slots[t], block = slot / a.kv.block_size, offset = slot % a.kv.block_size;
    for (int h = 0; h < a.kv.num_kv_heads; h++) {
      char* key = static_cast<char*>(a.key) + (t * a.kv.num_kv_heads + h) * a.kv.head_dim * size;
      char* value = static_cast<char*>(a.value) + (t * a.kv.num_kv_heads + h) * a.kv.v_head_dim * size;
      if (slot < 0) {
        memset(key, 0, size_t(a.kv.head_dim * size));
        memset(value, 0, size_t(a.kv.v_head_dim * size));
        continue;
      }
      auto* k = static_cast<const char*>(a.kv.k_cache) + (block * a.kv.k_block_stride + h * k_head_elements(a.kv)) * size;
      auto* v = static_cast<const char*>(a.kv.v_cache) + (block * a.kv.v_block_stride + h * v_head_elements(a.kv)) * size;
      for (int64_t d = 0; d < a.kv.head_dim; d++) memcpy(key + d * size, k + k_index(a.kv, offset, d) * size, size_t(size));
      for (int64_t d = 0; d < a.kv.v_head_dim; d++)
        memcpy(value + d * size, v + v_index(a.kv, offset, d) * size, size_t(size));
    }
  }
}

static void kv_read(const KvReadArgs& a) { parallel_static(a.count, 64, kv_read_range, const_cast<KvReadArgs*>(&a)); }

static void kv_write(const KvWriteArgs& a) {
  RangeFn fn = a.dtype == kF32 ? kv_write_range<float> : a.dtype == kBF16 ? kv_write_range<BF16> : kv_write_range<F16>;
  int64_t per_token = int64_t(a.kv.num_kv_heads) * (a.kv.head_dim + a.kv.v_head_dim);
  parallel_static(a.num_tokens, max64(1, 16384 / max64(1, per_token)), fn, const_cast<KvWriteArgs*>(&a));
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
