#include "threading.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace core_cpu {
namespace {

std::atomic<int> g_num_threads{0};

struct Scratch {
  void* memory[kNumScratchSlots] = {};
  size_t bytes[kNumScratchSlots] = {};
  ~Scratch() {
    for (void* m : memory) std::free(m);
  }
};

thread_local Scratch t_scratch;

}  // namespace

int num_threads() {
  int count = g_num_threads.load(std::memory_order_relaxed);
  return count > 0 ? count : omp_get_max_threads();
}

void set_num_threads(int count) { g_num_threads.store(count, std::memory_order_relaxed); }

void parallel_static(int64_t total, int64_t grain, RangeFn fn, void* context) {
  if (total <= 0) return;
  int64_t parts = std::min<int64_t>(num_threads(), (total + grain - 1) / std::max<int64_t>(grain, 1));
  if (parts <= 1) {
    fn(context, 0, total);
    return;
  }
#pragma omp parallel num_threads(static_cast<int>(parts))
  {
    // The runtime may grant fewer threads than were asked for: split by what came.
    int64_t count = omp_get_num_threads(), id = omp_get_thread_num();
    int64_t begin = total * id / count, end = total * (id + 1) / count;
    if (begin < end) fn(context, begin, end);
  }
}

void parallel_dynamic(int64_t total, RangeFn fn, void* context) {
  if (total <= 0) return;
  int64_t parts = std::min<int64_t>(num_threads(), total);
  if (parts <= 1) {
    fn(context, 0, total);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(parts))
  {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;) fn(context, i, i + 1);
  }
}

void* scratch(ScratchSlot slot, size_t bytes) {
  Scratch& s = t_scratch;
  if (s.bytes[slot] < bytes) {
    std::free(s.memory[slot]);
    size_t size = (bytes + bytes / 4 + 4095) & ~size_t{4095};
    s.memory[slot] = std::aligned_alloc(64, size);
    s.bytes[slot] = s.memory[slot] ? size : 0;
    if (!s.memory[slot]) throw std::bad_alloc();
  }
  return s.memory[slot];
}

}  // namespace core_cpu
