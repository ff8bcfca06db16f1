#include "tape.h"

#include <stdexcept>

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

void Tape::replay() {
  if (plan_ && plan_->num_valid_tokens) {
    int64_t valid = *plan_->num_valid_tokens;
    cut_rows(valid >= 0 && valid < num_tokens_ ? valid : num_tokens_);
  }
  for (const Call& call : calls_) run(call);
}

}  // namespace core_cpu
