// The one place where work meets threads. Kernels call these two functions and nothing else, so that the pool can be
// replaced without touching them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace core_cpu {

// Runs on [begin, end) of the range; `context` is the caller's struct.
using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

int num_threads();
void set_num_threads(int count);

// Splits [0, total) into at most num_threads() contiguous parts of at least `grain` items, one for each thread: the
// static split keeps a thread on the same weights in every step.
void parallel_static(int64_t total, int64_t grain, RangeFn fn, void* context);

// Hands out items of [0, total) one at a time, in order, to whoever is free. For tasks of unequal cost.
void parallel_dynamic(int64_t total, RangeFn fn, void* context);

// Memory that a later call will read from beginning to end in a static split: threads that wait until then ask for the
// first of it. Null forgets.
void expect_read(const void* data, int64_t bytes);

// Scratch memory of the calling thread, 64-byte aligned, grown on demand and kept: no allocation once warm.
// A slot's contents are lost at the next call for the same slot of the same thread.
enum ScratchSlot { kScratchInput = 0, kScratchTask = 1, kScratchPartial = 2, kScratchTile = 3, kNumScratchSlots = 4 };
void* scratch(ScratchSlot slot, size_t bytes);

}  // namespace core_cpu
