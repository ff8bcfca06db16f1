// Plain records that cross from Python to a kernel: pointers, sizes, strides (in elements unless said otherwise).
// They hold no ownership, so that a recorded step can be replayed from them.
#pragma once
#include <cstdint>

namespace core_cpu {

enum DType : int { kF32 = 0, kBF16 = 1, kF16 = 2 };
static constexpr int dtype_bytes(int dtype) { return dtype == kF32 ? 4 : 2; }

// How a packed weight is stored. Values are part of the Python interface (core_cpu.kernels.Scheme).
enum Scheme : int {
  kWF32 = 0, kWBF16 = 1, kWF16 = 2, kWInt8 = 3, kWFp8 = 4,
  kWQ8_0 = 5, kWQ4_0 = 6, kWQ4_1 = 7, kWQ5_0 = 8, kWQ5_1 = 9, kWQ4_K = 10, kWQ5_K = 11, kWQ6_K = 12,
  kNumSchemes = 13
};

// Every packed weight is cut into panels of 16 output rows, each contiguous over k. See pack.h for the panels.
inline constexpr int kPanel = 16;
inline constexpr int kFp8Block = 128;  // input columns that share one block scale

struct Weight {
  int scheme = 0;
  int64_t n = 0, k = 0;
  const void* data = nullptr;          // [ceil(n / 16)] panels
  const float* row_scale = nullptr;    // [padded n] or null
  const float* block_scale = nullptr;  // [panels, ceil(k / 128)] or null; fp8 only
  const int32_t* row_sum = nullptr;    // [padded n]: sum of a row's int8 weights
  const void* bias = nullptr;          // [n] or null
  int bias_dtype = 0;
};

struct LinearArgs {
  Weight w;
  const void* x = nullptr;
  void* y = nullptr;
  int x_dtype = 0, y_dtype = 0;
  int64_t m = 0, x_stride = 0, y_stride = 0;
  bool invariant = false;  // a row's bits may not depend on the number of rows
  bool int8_activations = false;  // GGUF and int8: x is rounded to int8, 32 values to a scale
};

struct EmbedArgs {
  Weight w;
  const int32_t* ids = nullptr;
  void* out = nullptr;
  int out_dtype = 0;
  int64_t count = 0, out_stride = 0;
  float scale = 1.f;
};

struct KvArgs {
  void* k_cache = nullptr;
  void* v_cache = nullptr;
  int cache_dtype = 0;
  int64_t k_block_stride = 0, v_block_stride = 0;  // elements of the cache from a block to the next
  int num_kv_heads = 0, head_dim = 0, v_head_dim = 0, block_size = 0;
};

struct KvWriteArgs {
  KvArgs kv;
  const void* key = nullptr;
  const void* value = nullptr;
  int dtype = 0;
  int64_t num_tokens = 0, key_stride = 0, key_head_stride = 0, value_stride = 0, value_head_stride = 0;
  const int32_t* slots = nullptr;
};

struct AttentionArgs {
  KvArgs kv;
  const void* query = nullptr;
  void* out = nullptr;
  int dtype = 0, out_dtype = 0;
  int64_t query_stride = 0, query_head_stride = 0, out_stride = 0, out_head_stride = 0;
  int num_heads = 0;
  int64_t num_requests = 0;
  const int32_t* query_start_loc = nullptr;  // [num_requests + 1]
  const int32_t* seq_lens = nullptr;         // [num_requests]
  const int32_t* block_table = nullptr;      // [num_requests, table_stride]
  int64_t table_stride = 0;
  float scale = 1.f, softcap = 0.f;
  int window = 0;  // 0 = all
  bool causal = true;
  const float* sinks = nullptr;  // [num_heads]
  float* lse = nullptr;          // [T, num_heads]
  int64_t split_keys = 0;        // 0 = split long streams by what the threads need; > 0 = always at this many keys
  bool int16 = false;            // queries, keys, probabilities and values in bf16 may be rounded to int16; head_dim <= 512
};

// What a step's kernels read of its requests. Made once a step and cache group; a recorded call keeps the address and reads
// the contents when it is replayed.
struct StepPlan {
  int64_t num_requests = 0;
  const int32_t* query_start_loc = nullptr;  // [num_requests + 1]
  const int32_t* seq_lens = nullptr;         // [num_requests]
  const int32_t* block_table = nullptr;      // [num_requests, table_stride]
  int64_t table_stride = 0;
  const int32_t* slots = nullptr;  // [num_slots]
  int64_t num_slots = 0;
  int64_t num_tokens = 0;                     // padding included
  const int32_t* num_valid_tokens = nullptr;  // [1]
};

struct RaggedArgs {
  AttentionArgs attention;  // kv: only the shape is read
  const void* key = nullptr;
  const void* value = nullptr;
  int64_t key_stride = 0, key_head_stride = 0, value_stride = 0, value_head_stride = 0;
  const int32_t* key_start_loc = nullptr;  // [num_requests + 1]
};

struct NormArgs {
  const void* x = nullptr;
  void* out = nullptr;
  void* residual_in = nullptr;   // or null
  void* residual_out = nullptr;  // or null; may be residual_in
  const void* weight = nullptr;  // or null
  int dtype = 0, weight_dtype = 0;
  int64_t rows = 0, heads = 1, dim = 0;
  int64_t x_stride = 0, x_head_stride = 0, out_stride = 0, out_head_stride = 0, residual_in_stride = 0,
          residual_out_stride = 0;
  float eps = 0.f, weight_offset = 0.f;
};

enum Activation : int { kSilu = 0, kGelu = 1, kGeluTanh = 2 };
struct ActArgs {
  const void* x = nullptr;
  void* out = nullptr;
  int dtype = 0, activation = 0;
  int64_t rows = 0, dim = 0, x_stride = 0, up_offset = 0, out_stride = 0;  // up_offset: elements from gate to up
};

struct RopeArgs {
  void* x = nullptr;
  int dtype = 0;
  int64_t num_tokens = 0, heads = 0, stride = 0, head_stride = 0;
  int rotary_dim = 0;
  bool interleaved = false;
  const int32_t* positions = nullptr;
  const float* cos_sin = nullptr;  // [max_pos, rotary_dim], cosines then sines
};

struct BitmaskArgs {
  float* logits = nullptr;
  const uint32_t* mask = nullptr;  // bit v % 32 of word v / 32 allows token v
  int64_t rows = 0, vocab = 0, stride = 0, mask_stride = 0;
};

// Rows of a cache as [count, num_kv_heads, dim] in the cache's own type; slot < 0 gives zeros.
struct KvReadArgs {
  KvArgs kv;
  void* key = nullptr;
  void* value = nullptr;
  int64_t count = 0;
  const int32_t* slots = nullptr;
};

struct SampleArgs {
  const float* logits = nullptr;
  int64_t rows = 0, vocab = 0, stride = 0;
  const float* temperature = nullptr;  // null: greedy
  const int32_t* top_k = nullptr;      // null or <= 0: all
  const float* top_p = nullptr;        // null or >= 1: all
  const float* min_p = nullptr;        // null or <= 0: all
  const uint64_t* seeds = nullptr;
  const int32_t* positions = nullptr;
  int32_t* out = nullptr;
};

struct KernelTable {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*embed)(const EmbedArgs&);
  void (*dequantize)(const Weight&, float* out);
  void (*kv_write)(const KvWriteArgs&);
  void (*kv_read)(const KvReadArgs&);
  void (*attention)(const AttentionArgs&);
  void (*attention_ragged)(const RaggedArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*act_mul)(const ActArgs&);
  void (*rope)(const RopeArgs&);
  void (*sample)(const SampleArgs&);
  void (*token_bitmask)(const BitmaskArgs&);
  bool rounds_attention;  // whether AttentionArgs::int16 changes anything
};

// The table in use: the best level that this machine has, or the one that CORE_CPU_ISA names.
const KernelTable& kernels();
const char* isa_available(int index);  // names from low to high, then null
bool isa_select(const char* name);     // false: not built or not on this machine

}  // namespace core_cpu
