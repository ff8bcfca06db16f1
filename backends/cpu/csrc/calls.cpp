#include "calls.h"

#include <iterator>

namespace core_cpu {
namespace {

void start(const KernelTable& k, const LinearArgs& a) { k.linear(a); }
void start(const KernelTable& k, const EmbedArgs& a) { k.embed(a); }
void start(const KernelTable& k, const NormArgs& a) { k.rms_norm(a); }
void start(const KernelTable& k, const ActArgs& a) { k.act_mul(a); }
void start(const KernelTable& k, const RopeArgs& a) { k.rope(a); }
void start(const KernelTable& k, const AttentionArgs& a) { k.attention(a); }
void start(const KernelTable& k, const RaggedArgs& a) { k.attention_ragged(a); }
void start(const KernelTable& k, const KvWriteArgs& a) { k.kv_write(a); }
void start(const KernelTable& k, const KvReadArgs& a) { k.kv_read(a); }
void start(const KernelTable& k, const SampleArgs& a) { k.sample(a); }
void start(const KernelTable& k, const BitmaskArgs& a) { k.token_bitmask(a); }

void start(const KernelTable& k, const PlannedAttention& call) {
  AttentionArgs a = call.args;
  const StepPlan& plan = *call.plan;
  a.num_requests = plan.num_requests;
  a.query_start_loc = plan.query_start_loc;
  a.seq_lens = plan.seq_lens;
  a.block_table = plan.block_table;
  a.table_stride = plan.table_stride;
  if (call.skip_padding && plan.num_valid_tokens)
    while (a.num_requests > 0 && a.query_start_loc[a.num_requests - 1] >= *plan.num_valid_tokens) a.num_requests--;
  k.attention(a);
}

void start(const KernelTable& k, const PlannedWrite& call) {
  KvWriteArgs a = call.args;
  a.slots = call.plan->slots;
  a.num_tokens = call.plan->num_slots;
  k.kv_write(a);
}

int64_t* tokens_of(LinearArgs& a) { return &a.m; }
int64_t* tokens_of(EmbedArgs& a) { return &a.count; }
int64_t* tokens_of(NormArgs& a) { return &a.rows; }
int64_t* tokens_of(ActArgs& a) { return &a.rows; }
int64_t* tokens_of(RopeArgs& a) { return &a.num_tokens; }
template <class Other> int64_t* tokens_of(Other&) { return nullptr; }

}  // namespace

void run(const Call& call) {
  const KernelTable& table = kernels();
  std::visit([&](const auto& a) { start(table, a); }, call);
}

const char* kind(const Call& call) {
  static constexpr const char* names[] = {"linear",    "embed",            "rms_norm", "act_mul", "rope",   "attention", "kv_write",
                                          "attention", "attention_ragged", "kv_write", "kv_read", "sample", "apply_token_bitmask"};
  static_assert(std::size(names) == std::variant_size_v<Call>);
  return names[call.index()];
}

int64_t* token_count(Call& call) {
  return std::visit([](auto& a) { return tokens_of(a); }, call);
}

}  // namespace core_cpu
