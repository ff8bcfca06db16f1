// A pool of worker threads made for kernels of 10 to 1,000 microseconds beside other processes.
//
// A job has `parts` parts; the caller takes part 0 at once. Whoever is running claims the next part, so that a worker that
// the system has put aside delays nobody: the caller does its part as well. Workers spin briefly between jobs, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace core_cpu {

class Pool {
 public:
  using PartFn = void (*)(void* context, int64_t part, int64_t parts);

  // Runs fn for every part in [0, parts), parts at most 65,535, and returns when all are done. A call that comes while
  // another thread's job runs does all its parts itself.
  void run(int64_t parts, PartFn fn, void* context);

  // Memory that a later job will read, each part its share. Whoever waits meanwhile asks for the beginning of its share;
  // null for nothing. A thread that has work to do is not held up.
  void expect(const void* data, int64_t bytes);

  // The process's pool. A forked child gets a new one: threads do not survive a fork.
  static Pool& instance();

 private:
  bool claim(uint64_t epoch, int64_t& part, int64_t& parts);
  void finish_one() { unfinished_.fetch_sub(1, std::memory_order_acq_rel); }
  void work(int64_t part);
  void grow(int64_t workers);
  void publish(int64_t parts);
  struct Ahead {  // how far a waiting thread got with what is expected
    uint32_t version = 0;
    int64_t done = 0;
  };
  void wait_a_little(Ahead& ahead, int64_t part);
  uint32_t next_job(uint32_t seen, Ahead& ahead, int64_t part);

  std::mutex running_;                // held by the caller of the job that runs
  std::atomic<uint64_t> state_{0};    // epoch (32 bits), parts (16), next part to claim (16)
  std::atomic<int64_t> unfinished_{0};
  // Written before the epoch is published and stable while a claimed part is unfinished.
  PartFn fn_ = nullptr;
  void* context_ = nullptr;

  // Read without a lock: a mix of two expectations asks for the wrong lines and harms nothing.
  std::atomic<uint32_t> expected_version_{0};
  std::atomic<const char*> expected_{nullptr};
  std::atomic<int64_t> expected_bytes_{0};

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<int64_t> workers_{0};
};

}  // namespace core_cpu
