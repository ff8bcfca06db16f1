#include "tape.h"

#include <chrono>
#include <stdexcept>

#include "pack.h"
#include "threading.h"

namespace core_cpu {
namespace {

thread_local Tape* t_recording = nullptr;

}  // namespace

Tape* Tape::recording() { return t_recording; }

void Tape::record(const StepPlan* plan) {
  if (t_recording) throw std::logic_error("this thread is recording already");
  calls_.clear();
  token_counts_.clear();
  plan_ = plan;
  num_tokens_ = live_tokens_ = plan ? plan->num_tokens : 0;
  t_recording = this;
}

void Tape::stop() {
  if (t_recording == this) t_recording = nullptr;
  find_weights();
  if (!plan_) return;
  for (Call& call : calls_) {
    if (auto* attention = std::get_if<PlannedAttention>(&call)) attention->skip_padding = true;
    int64_t* count = token_count(call);
    if (count && *count == num_tokens_) token_counts_.push_back(count);
  }
}

void Tape::cut_rows(int64_t tokens) {
  if (tokens == live_tokens_) return;
  for (int64_t* count : token_counts_) *count = tokens;
  live_tokens_ = tokens;
}

void Tape::follow_plan() {
  if (!plan_ || !plan_->num_valid_tokens) return;
  int64_t valid = *plan_->num_valid_tokens;
  cut_rows(valid >= 0 && valid < num_tokens_ ? valid : num_tokens_);
}

// Weights are what a step of few requests waits for, and calls that read none leave the memory idle.
void Tape::find_weights() {
  next_weights_.assign(calls_.size(), {});
  Weights next;
  for (size_t i = calls_.size(); i-- > 0;) {
    next_weights_[i] = next;
    if (auto* linear = std::get_if<LinearArgs>(&calls_[i]))
      next = {linear->w.data, packed_bytes(linear->w.scheme, linear->w.n, linear->w.k)};
  }
}

void Tape::run_call(size_t index) {
  if (index == 0 || next_weights_[index].data != next_weights_[index - 1].data)
    expect_read(next_weights_[index].data, next_weights_[index].bytes);
  run(calls_[index]);
}

void Tape::replay() {
  follow_plan();
  for (size_t i = 0; i < calls_.size(); i++) run_call(i);
}

std::vector<std::pair<const char*, double>> Tape::profile() {
  using Clock = std::chrono::steady_clock;
  follow_plan();
  std::vector<std::pair<const char*, double>> found;
  found.reserve(calls_.size());
  Clock::time_point begin = Clock::now();
  for (size_t i = 0; i < calls_.size(); i++) {
    run_call(i);
    Clock::time_point end = Clock::now();
    found.emplace_back(kind(calls_[i]), std::chrono::duration<double>(end - begin).count());
    begin = end;
  }
  return found;
}

}  // namespace core_cpu
