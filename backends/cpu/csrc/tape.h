// A recorded step: the calls that a thread submitted while it recorded, in order, and one function that runs them again.
//
// The calls hold addresses. Whoever recorded keeps the memory alive: inputs, temporaries, weights, and the plans.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "calls.h"

namespace core_cpu {

class Tape {
 public:
  // Calls that this thread submits from now on are kept and not run. `plan` (may be null) belongs to the step: with
  // fewer valid tokens than the plan has tokens, a replay works on the leading valid rows alone.
  void record(const StepPlan* plan);
  void stop();
  void replay();
  // Replays, and tells for each call its kind and its seconds.
  std::vector<std::pair<const char*, double>> profile();
  size_t size() const { return calls_.size(); }

  static Tape* recording();  // this thread's, or null
  void append(const Call& call) { calls_.push_back(call); }

 private:
  void cut_rows(int64_t tokens);
  void follow_plan();
  void run_call(size_t index);
  void find_weights();

  struct Weights {
    const void* data = nullptr;
    int64_t bytes = 0;
  };

  std::vector<Call> calls_;
  std::vector<Weights> next_weights_;   // by call: those of the first matrix product behind it
  std::vector<int64_t*> token_counts_;  // of the calls on all tokens of the step
  const StepPlan* plan_ = nullptr;
  int64_t num_tokens_ = 0, live_tokens_ = 0;
};

// Runs the call, or keeps it where this thread is recording.
inline void submit(const Call& call) {
  if (Tape* tape = Tape::recording()) tape->append(call);
  else run(call);
}

}  // namespace core_cpu
