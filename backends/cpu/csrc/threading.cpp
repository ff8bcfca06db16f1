#include "threading.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
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

// Cores' worth of time that the control group of a container allows, rounded up; 0 where it sets no limit.
int quota_cores() {
  long long quota = -1, period = 0;
  if (std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {  // version 2: "200000 100000" or "max 100000"
    if (std::fscanf(file, "%lld %lld", &quota, &period) != 2) quota = -1;
    std::fclose(file);
  } else {
    auto number = [](const char* path) {
      long long value = -1;
      if (std::FILE* one = std::fopen(path, "r")) {
        if (std::fscanf(one, "%lld", &value) != 1) value = -1;
        std::fclose(one);
      }
      return value;
    };
    quota = number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    period = number("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  }
  return quota > 0 && period > 0 ? int((quota + period - 1) / period) : 0;
}

// OMP_NUM_THREADS where it is set, else the processors that this process may use, at most what a container's quota pays for:
// more threads than that spend it spinning and are then all put aside together.
int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    int count = std::atoi(text);
    if (count > 0) return count;
  }
  cpu_set_t set;
  int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : int(std::thread::hardware_concurrency());
  if (int quota = quota_cores()) cores = std::min(cores, quota);
  return std::max(1, cores);
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

void expect_read(const void* data, int64_t bytes) { Pool::instance().expect(data, bytes); }

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
