#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include <thread>

namespace core_cpu {
namespace {

constexpr int kSpins = 4000;       // looks at the state before a worker sleeps: some 50 to 150 microseconds
constexpr int kWaitSpins = 2000;   // looks before a waiting caller starts to give its core away

constexpr int64_t kLinesAtATime = 8;  // asked for between two looks at the state

std::atomic<Pool*> g_pool{nullptr};

// Bytes that a waiting thread asks for at most: a part of its second-level cache, so that what it holds stays.
int64_t ahead_bytes() {
  static const int64_t bytes = std::max<long>(sysconf(_SC_LEVEL2_CACHE_SIZE), 256 << 10) / 4;
  return bytes;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

uint32_t epoch_of(uint64_t state) { return static_cast<uint32_t>(state >> 32); }

// With CORE_CPU_BIND=1 worker i stays on the i-th processor that the process may use, the caller's being number 0. Not by
// default: beside other processes a bound worker waits for its processor while another one is free.
void bind_worker(int64_t index) {
  const char* text = std::getenv("CORE_CPU_BIND");
  cpu_set_t allowed, one;
  if (!text || std::atoi(text) != 1 || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  int64_t left = index % CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed) || left-- > 0) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);  // of the calling thread alone
    return;
  }
}

void forget_in_child() { g_pool.store(nullptr, std::memory_order_relaxed); }

}  // namespace

// The pool is never destroyed: workers may look at it until the process is gone.
Pool& Pool::instance() {
  Pool* pool = g_pool.load(std::memory_order_acquire);
  if (pool) return *pool;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
  (void)registered;
  Pool* made = new Pool;
  if (g_pool.compare_exchange_strong(pool, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *pool;
}

bool Pool::claim(uint64_t epoch, int64_t& part, int64_t& parts) {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (epoch_of(state) == epoch) {
    part = static_cast<int64_t>(state & 0xffff);
    parts = static_cast<int64_t>((state >> 16) & 0xffff);
    if (part >= parts) return false;
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void Pool::publish(int64_t parts) {
  uint64_t epoch = epoch_of(state_.load(std::memory_order_relaxed)) + uint32_t{1};
  unfinished_.store(parts, std::memory_order_relaxed);
  state_.store((epoch & 0xffffffffu) << 32 | static_cast<uint64_t>(parts) << 16 | 1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
}

void Pool::expect(const void* data, int64_t bytes) {
  expected_bytes_.store(bytes, std::memory_order_relaxed);
  expected_.store(static_cast<const char*>(data), std::memory_order_relaxed);
  expected_version_.fetch_add(1, std::memory_order_release);
}

// Asks for a few lines of this part's share of what is expected; where there are none left, gives way to the other
// hardware thread for a moment.
void Pool::wait_a_little(Ahead& ahead, int64_t part) {
  uint32_t version = expected_version_.load(std::memory_order_acquire);
  if (version != ahead.version) ahead = {version, 0};
  const char* data = expected_.load(std::memory_order_relaxed);
  int64_t share = expected_bytes_.load(std::memory_order_relaxed) / (workers_ + 1);
  if (!data || ahead.done >= std::min(share, ahead_bytes())) {
    pause();
    return;
  }
  const char* at = data + share * part + ahead.done;
  for (int64_t i = 0; i < kLinesAtATime; i++) __builtin_prefetch(at + i * 64, 0, 2);
  ahead.done += kLinesAtATime * 64;
}

void Pool::run(int64_t parts, PartFn fn, void* context) {
  std::unique_lock<std::mutex> lock(running_, std::try_to_lock);
  if (parts <= 1 || !lock.owns_lock()) {
    for (int64_t i = 0; i < parts; i++) fn(context, i, parts);
    return;
  }
  grow(parts - 1);
  fn_ = fn;
  context_ = context;
  publish(parts);
  uint32_t epoch = epoch_of(state_.load(std::memory_order_relaxed));
  int64_t part = 0;
  do {
    fn(context, part, parts);
    finish_one();
  } while (claim(epoch, part, parts));
  Ahead ahead;
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) > 0; spins++) {
    if (spins < kWaitSpins) wait_a_little(ahead, 0);
    else std::this_thread::yield();
  }
}

void Pool::grow(int64_t workers) {
  for (; workers_ < workers; workers_++) {
    std::thread([this, index = workers_ + 1] {
      bind_worker(index);
      work(index);
    }).detach();
  }
}

// Waits for an epoch other than `seen`: spinning first, then asleep.
uint32_t Pool::next_job(uint32_t seen, Ahead& ahead, int64_t part) {
  for (int i = 0; i < kSpins; i++) {
    uint32_t epoch = epoch_of(state_.load(std::memory_order_acquire));
    if (epoch != seen) return epoch;
    wait_a_little(ahead, part);
  }
  std::unique_lock<std::mutex> lock(sleep_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [&] { return epoch_of(state_.load(std::memory_order_seq_cst)) != seen; });
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return epoch_of(state_.load(std::memory_order_acquire));
}

void Pool::work(int64_t own) {
  uint32_t seen = 0;
  Ahead ahead;
  for (;;) {
    seen = next_job(seen, ahead, own);
    int64_t part = 0, parts = 0;
    while (claim(seen, part, parts)) {
      fn_(context_, part, parts);
      finish_one();
    }
  }
}

}  // namespace core_cpu
