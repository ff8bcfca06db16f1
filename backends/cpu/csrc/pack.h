// Brings a checkpoint's weight into panels (panels.h). Done once a weight, at load.
#pragma once
#include "args.h"

namespace core_cpu {

struct PackArgs {
  int scheme = 0;
  int64_t n = 0, k = 0;
  const void* source = nullptr;
  int64_t row_stride = 0;  // bytes from a source row to the next
  int source_dtype = 0;    // dense weights: what the source holds; the scheme says what is kept
  void* out = nullptr;     // packed_bytes(scheme, n, k)
  int32_t* row_sum = nullptr;  // [padded n], int8: sums of the rows
  uint8_t* row_nan = nullptr;  // [padded n], fp8: whether the row holds a NaN
};

int64_t packed_bytes(int scheme, int64_t n, int64_t k);
void pack(const PackArgs& args);

}  // namespace core_cpu
