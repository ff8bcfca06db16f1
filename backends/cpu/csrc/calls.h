// A kernel call whose tensors are known: plain arguments that are run at once, or kept on a tape and run step by step.
#pragma once
#include <variant>

#include "args.h"

namespace core_cpu {

// Attention and cache write of a step: requests, lengths and slots are those that the plan holds when the call runs.
struct PlannedAttention {
  AttentionArgs args;
  const StepPlan* plan = nullptr;
  bool skip_padding = false;  // requests that begin at or after the plan's num_valid_tokens get no result
};
struct PlannedWrite {
  KvWriteArgs args;
  const StepPlan* plan = nullptr;
};

using Call = std::variant<LinearArgs, EmbedArgs, NormArgs, ActArgs, RopeArgs, PlannedAttention, PlannedWrite, AttentionArgs,
                          RaggedArgs, KvWriteArgs, KvReadArgs, SampleArgs, BitmaskArgs>;

void run(const Call& call);

// The contract's name of the operation, for a profile.
const char* kind(const Call& call);

// Where a call keeps the number of packed tokens that it works on; null for calls that are not cut by tokens.
int64_t* token_count(Call& call);

}  // namespace core_cpu
