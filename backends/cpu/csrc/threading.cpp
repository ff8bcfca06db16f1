#include "threading.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "pool.h"

namespace core_cpu {
namespace {

constexpr int64_t kMaxParts = 4096;

std::atomic<int> g_num_threads{0};

struct Scratch {
  void* memory[kNumScratchSlots] = {};
  size_t bytes[kNumScratchSlots] = {};
  ~Scratch() {
    for (void* m : memory) std::free(m);
  }
};

thread_local Scratch t_scratch;

// OMP_NUM_THREADS where it is set, else the processors that this process may use.
int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    int count = std::atoi(text);
    if (count > 0) return count;
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

struct Range {
  int64_t total;
  RangeFn fn;
  void* context;
  std::atomic<int64_t> next{0};
};

void run_part(void* context, int64_t part, int64_t parts) {
  auto& r = *static_cast<Range*>(context);
  int64_t begin = r.total * part / parts, end = r.total * (part + 1) / parts;
  if (begin < end) r.fn(r.context, begin, end);
}

void run_items(void* context, int64_t, int64_t) {
  auto& r = *static_cast<Range*>(context);
  for (int64_t i; (i = r.next.fetch_add(1, std::memory_order_relaxed)) < r.total;) r.fn(r.context, i, i + 1);
}

}  // namespace

int num_threads() {
  int count = g_num_threads.load(std::memory_order_relaxed);
  if (count > 0) return count;
  static const int automatic = default_threads();
  return automatic;
}

void set_num_threads(int count) { g_num_threads.store(count, std::memory_order_relaxed); }

void parallel_static(int64_t total, int64_t grain, RangeFn fn, void* context) {
  if (total <= 0) return;
  int64_t parts = (total + grain - 1) / std::max<int64_t>(grain, 1);
  parts = std::min({parts, static_cast<int64_t>(num_threads()), kMaxParts});
  if (parts <= 1) {
    fn(context, 0, total);
    return;
  }
  Range range{total, fn, context};
  Pool::instance().run(parts, run_part, &range);
}

void parallel_dynamic(int64_t total, RangeFn fn, void* context) {
  if (total <= 0) return;
  int64_t parts = std::min({total, static_cast<int64_t>(num_threads()), kMaxParts});
  if (parts <= 1) {
    fn(context, 0, total);
    return;
  }
  Range range{total, fn, context};
  Pool::instance().run(parts, run_items, &range);
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
