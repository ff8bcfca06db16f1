// Python face of the kernels. Tensors come as addresses with sizes and strides; core_cpu.kernels checks them first.
// Every call releases the GIL. Calls that read or write a step's tensors are submitted, so that a tape can keep them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "args.h"
#include "pack.h"
#include "tape.h"
#include "threading.h"

namespace py = pybind11;
using namespace core_cpu;

namespace {

using Address = uintptr_t;
void* at(Address a) { return reinterpret_cast<void*>(a); }
template <class T> T* at(Address a) { return reinterpret_cast<T*>(a); }

std::vector<std::string> isa_levels() {
  std::vector<std::string> names;
  for (int i = 0; const char* name = isa_available(i); i++) names.emplace_back(name);
  return names;
}

void set_isa(const std::string& name) {
  if (!isa_select(name.c_str()))
    throw std::invalid_argument("instruction set '" + name + "' is not built in or not on this machine");
}

void require_no_tape(const char* name) {
  if (Tape::recording()) throw std::logic_error(std::string(name) + " cannot be part of a recorded step");
}

void define_weight(py::module_& m) {
  py::class_<Weight>(m, "Weight")
      .def(py::init([](int scheme, int64_t n, int64_t k, Address data, Address row_scale, Address block_scale,
                       Address row_sum) {
             Weight w;
             w.scheme = scheme;
             w.n = n;
             w.k = k;
             w.data = at(data);
             w.row_scale = at<float>(row_scale);
             w.block_scale = at<float>(block_scale);
             w.row_sum = at<int32_t>(row_sum);
             return w;
           }),
           py::arg("scheme"), py::arg("n"), py::arg("k"), py::arg("data"), py::arg("row_scale") = 0,
           py::arg("block_scale") = 0, py::arg("row_sum") = 0);
  m.def(
      "advise_huge_pages",
      [](Address memory, int64_t bytes) {
        const uintptr_t page = 2 << 20, begin = (uintptr_t(at(memory)) + page - 1) / page * page;
        const uintptr_t end = (uintptr_t(at(memory)) + bytes) / page * page;
        if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
      },
      py::arg("memory"), py::arg("bytes"), "Asks the system for large pages; where it has none, nothing changes.");
  m.def("packed_bytes", &packed_bytes, py::arg("scheme"), py::arg("n"), py::arg("k"));
  m.def(
      "pack",
      [](int scheme, int64_t n, int64_t k, Address source, int64_t row_stride, int source_dtype, Address out,
         Address row_sum, Address row_nan) {
        py::gil_scoped_release release;
        pack({scheme, n, k, at(source), row_stride, source_dtype, at(out), at<int32_t>(row_sum), at<uint8_t>(row_nan)});
      },
      py::arg("scheme"), py::arg("n"), py::arg("k"), py::arg("source"), py::arg("row_stride"), py::arg("source_dtype"),
      py::arg("out"), py::arg("row_sum") = 0, py::arg("row_nan") = 0);
}

void define_linear(py::module_& m) {
  m.def(
      "linear",
      [](const Weight& w, Address x, int x_dtype, int64_t m_rows, int64_t x_stride, Address y, int y_dtype,
         int64_t y_stride, Address bias, int bias_dtype, bool invariant, bool int8_activations) {
        py::gil_scoped_release release;
        LinearArgs a;
        a.w = w;
        a.w.bias = at(bias);
        a.w.bias_dtype = bias_dtype;
        a.x = at(x);
        a.x_dtype = x_dtype;
        a.m = m_rows;
        a.x_stride = x_stride;
        a.y = at(y);
        a.y_dtype = y_dtype;
        a.y_stride = y_stride;
        a.invariant = invariant;
        a.int8_activations = int8_activations;
        submit(a);
      },
      py::arg("weight"), py::arg("x"), py::arg("x_dtype"), py::arg("m"), py::arg("x_stride"), py::arg("y"),
      py::arg("y_dtype"), py::arg("y_stride"), py::arg("bias") = 0, py::arg("bias_dtype") = 0,
      py::arg("invariant") = false, py::arg("int8_activations") = false);
  m.def(
      "embed",
      [](const Weight& w, Address ids, int64_t count, Address out, int out_dtype, int64_t out_stride, float scale) {
        py::gil_scoped_release release;
        submit(EmbedArgs{w, at<int32_t>(ids), at(out), out_dtype, count, out_stride, scale});
      },
      py::arg("weight"), py::arg("ids"), py::arg("count"), py::arg("out"), py::arg("out_dtype"), py::arg("out_stride"),
      py::arg("scale") = 1.f);
  m.def(
      "dequantize",
      [](const Weight& w, Address out) {
        require_no_tape("dequantize");
        py::gil_scoped_release release;
        kernels().dequantize(w, at<float>(out));
      },
      py::arg("weight"), py::arg("out"));
}

void define_cache(py::module_& m) {
  py::class_<KvArgs>(m, "Cache").def(
      py::init([](Address k, Address v, int dtype, int64_t k_stride, int64_t v_stride, int heads, int head_dim,
                  int v_head_dim, int block_size) {
        return KvArgs{at(k), at(v), dtype, k_stride, v_stride, heads, head_dim, v_head_dim, block_size};
      }),
      py::arg("k"), py::arg("v"), py::arg("dtype"), py::arg("k_block_stride"), py::arg("v_block_stride"),
      py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("v_head_dim"), py::arg("block_size"));
  m.def(
      "kv_write",
      [](const KvArgs& kv, Address key, int64_t key_stride, int64_t key_head_stride, Address value,
         int64_t value_stride, int64_t value_head_stride, int dtype, int64_t num_tokens, Address slots) {
        py::gil_scoped_release release;
        submit(KvWriteArgs{kv, at(key), at(value), dtype, num_tokens, key_stride, key_head_stride, value_stride,
                            value_head_stride, at<int32_t>(slots)});
      },
      py::arg("cache"), py::arg("key"), py::arg("key_stride"), py::arg("key_head_stride"), py::arg("value"),
      py::arg("value_stride"), py::arg("value_head_stride"), py::arg("dtype"), py::arg("num_tokens"), py::arg("slots"));
  m.def(
      "kv_write_planned",
      [](const KvArgs& kv, Address key, int64_t key_stride, int64_t key_head_stride, Address value,
         int64_t value_stride, int64_t value_head_stride, int dtype, const StepPlan& plan) {
        py::gil_scoped_release release;
        KvWriteArgs write{kv,           at(key),         at(value),         dtype,  0, key_stride, key_head_stride,
                          value_stride, value_head_stride, nullptr};
        submit(PlannedWrite{write, &plan});
      },
      py::arg("cache"), py::arg("key"), py::arg("key_stride"), py::arg("key_head_stride"), py::arg("value"),
      py::arg("value_stride"), py::arg("value_head_stride"), py::arg("dtype"), py::arg("plan"));
  m.def(
      "kv_read",
      [](const KvArgs& kv, Address key, Address value, int64_t count, Address slots) {
        py::gil_scoped_release release;
        submit(KvReadArgs{kv, at(key), at(value), count, at<int32_t>(slots)});
      },
      py::arg("cache"), py::arg("key"), py::arg("value"), py::arg("count"), py::arg("slots"));
  m.def(
      "copy_blocks",
      [](Address source, Address target, int64_t block_bytes, const std::vector<std::pair<int64_t, int64_t>>& pairs) {
        require_no_tape("copy_blocks");
        py::gil_scoped_release release;
        for (auto& [from, to] : pairs)
          std::memcpy(at<char>(target) + to * block_bytes, at<char>(source) + from * block_bytes,
                      static_cast<size_t>(block_bytes));
      },
      py::arg("source"), py::arg("target"), py::arg("block_bytes"), py::arg("pairs"));
}

void define_tape(py::module_& m) {
  py::class_<StepPlan>(m, "Plan")
      .def(py::init<>())
      .def(
          "set",
          [](StepPlan& p, int64_t num_requests, Address query_start_loc, Address seq_lens, Address block_table,
             int64_t table_stride, Address slots, int64_t num_slots, int64_t num_tokens, Address num_valid_tokens) {
            p = {num_requests,        at<int32_t>(query_start_loc), at<int32_t>(seq_lens), at<int32_t>(block_table),
                 table_stride,        at<int32_t>(slots),           num_slots,             num_tokens,
                 at<int32_t>(num_valid_tokens)};
          },
          py::arg("num_requests"), py::arg("query_start_loc"), py::arg("seq_lens"), py::arg("block_table"),
          py::arg("table_stride"), py::arg("slots"), py::arg("num_slots"), py::arg("num_tokens"),
          py::arg("num_valid_tokens"));
  py::class_<Tape>(m, "Tape")
      .def(py::init<>())
      .def("record", &Tape::record, "Keeps the calls of this thread from now on instead of running them.",
           py::arg("plan").none(true))
      .def("stop", &Tape::stop, "Ends the recording.")
      .def("replay", &Tape::replay, "Runs the calls in order.", py::call_guard<py::gil_scoped_release>())
      .def("profile", &Tape::profile, "As replay; [(operation, seconds)], a pair for each call.",
           py::call_guard<py::gil_scoped_release>())
      .def("__len__", &Tape::size);
}

// Static half of an attention call; a call adds the tensors.
struct Attention {
  AttentionArgs base;
};

void define_attention(py::module_& m) {
  py::class_<Attention>(m, "Attention")
      .def(py::init([](int num_heads, int dtype, int out_dtype, float scale, bool causal, int window, float softcap,
                       int64_t split_keys, bool int16) {
             Attention a;
             a.base.num_heads = num_heads;
             a.base.dtype = dtype;
             a.base.out_dtype = out_dtype;
             a.base.scale = scale;
             a.base.causal = causal;
             a.base.window = window;
             a.base.softcap = softcap;
             a.base.split_keys = split_keys;
             a.base.int16 = int16;
             return a;
           }),
           py::arg("num_heads"), py::arg("dtype"), py::arg("out_dtype"), py::arg("scale"), py::arg("causal") = true,
           py::arg("window") = 0, py::arg("softcap") = 0.f, py::arg("split_keys") = 0,
           py::arg("int16") = false)
      .def(
          "paged",
          [](const Attention& self, const KvArgs& kv, Address query, int64_t query_stride, int64_t query_head_stride,
             Address out, int64_t out_stride, int64_t out_head_stride, int64_t num_requests, Address query_start_loc,
             Address seq_lens, Address block_table, int64_t table_stride, Address sinks, Address lse) {
            py::gil_scoped_release release;
            AttentionArgs a = self.base;
            a.kv = kv;
            a.query = at(query);
            a.query_stride = query_stride;
            a.query_head_stride = query_head_stride;
            a.out = at(out);
            a.out_stride = out_stride;
            a.out_head_stride = out_head_stride;
            a.num_requests = num_requests;
            a.query_start_loc = at<int32_t>(query_start_loc);
            a.seq_lens = at<int32_t>(seq_lens);
            a.block_table = at<int32_t>(block_table);
            a.table_stride = table_stride;
            a.sinks = at<float>(sinks);
            a.lse = at<float>(lse);
            submit(a);
          },
          py::arg("cache"), py::arg("query"), py::arg("query_stride"), py::arg("query_head_stride"), py::arg("out"),
          py::arg("out_stride"), py::arg("out_head_stride"), py::arg("num_requests"), py::arg("query_start_loc"),
          py::arg("seq_lens"), py::arg("block_table"), py::arg("table_stride"), py::arg("sinks") = 0,
          py::arg("lse") = 0)
      .def(
          "planned",
          [](const Attention& self, const KvArgs& kv, Address query, int64_t query_stride, int64_t query_head_stride,
             Address out, int64_t out_stride, int64_t out_head_stride, const StepPlan& plan, Address sinks, Address lse) {
            py::gil_scoped_release release;
            AttentionArgs a = self.base;
            a.kv = kv;
            a.query = at(query);
            a.query_stride = query_stride;
            a.query_head_stride = query_head_stride;
            a.out = at(out);
            a.out_stride = out_stride;
            a.out_head_stride = out_head_stride;
            a.sinks = at<float>(sinks);
            a.lse = at<float>(lse);
            submit(PlannedAttention{a, &plan});
          },
          "The plan must outlive a tape that keeps the call.", py::arg("cache"), py::arg("query"),
          py::arg("query_stride"), py::arg("query_head_stride"), py::arg("out"), py::arg("out_stride"),
          py::arg("out_head_stride"), py::arg("plan"), py::arg("sinks") = 0, py::arg("lse") = 0)
      .def(
          "ragged",
          [](const Attention& self, int num_kv_heads, int head_dim, int v_head_dim, Address query, int64_t query_stride,
             int64_t query_head_stride, Address key, int64_t key_stride, int64_t key_head_stride, Address value,
             int64_t value_stride, int64_t value_head_stride, Address out, int64_t out_stride, int64_t out_head_stride,
             int64_t num_requests, Address query_start_loc, Address key_start_loc, Address sinks, Address lse) {
            py::gil_scoped_release release;
            RaggedArgs r;
            AttentionArgs& a = r.attention;
            a = self.base;
            a.kv.num_kv_heads = num_kv_heads;
            a.kv.head_dim = head_dim;
            a.kv.v_head_dim = v_head_dim;
            a.query = at(query);
            a.query_stride = query_stride;
            a.query_head_stride = query_head_stride;
            a.out = at(out);
            a.out_stride = out_stride;
            a.out_head_stride = out_head_stride;
            a.num_requests = num_requests;
            a.query_start_loc = at<int32_t>(query_start_loc);
            a.sinks = at<float>(sinks);
            a.lse = at<float>(lse);
            r.key = at(key);
            r.key_stride = key_stride;
            r.key_head_stride = key_head_stride;
            r.value = at(value);
            r.value_stride = value_stride;
            r.value_head_stride = value_head_stride;
            r.key_start_loc = at<int32_t>(key_start_loc);
            submit(r);
          },
          py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("v_head_dim"), py::arg("query"),
          py::arg("query_stride"), py::arg("query_head_stride"), py::arg("key"), py::arg("key_stride"),
          py::arg("key_head_stride"), py::arg("value"), py::arg("value_stride"), py::arg("value_head_stride"),
          py::arg("out"), py::arg("out_stride"), py::arg("out_head_stride"), py::arg("num_requests"),
          py::arg("query_start_loc"), py::arg("key_start_loc"), py::arg("sinks") = 0, py::arg("lse") = 0);
}

void define_rowwise(py::module_& m) {
  m.def(
      "rms_norm",
      [](Address x, int64_t x_stride, int64_t x_head_stride, Address out, int64_t out_stride, int64_t out_head_stride,
         Address weight, int dtype, int weight_dtype, int64_t rows, int64_t heads, int64_t dim, float eps, float offset,
         Address residual, int64_t residual_stride, Address residual_out, int64_t residual_out_stride) {
        py::gil_scoped_release release;
        NormArgs a;
        a.x = at(x);
        a.x_stride = x_stride;
        a.x_head_stride = x_head_stride;
        a.out = at(out);
        a.out_stride = out_stride;
        a.out_head_stride = out_head_stride;
        a.weight = at(weight);
        a.dtype = dtype;
        a.weight_dtype = weight_dtype;
        a.rows = rows;
        a.heads = heads;
        a.dim = dim;
        a.eps = eps;
        a.weight_offset = offset;
        a.residual_in = at(residual);
        a.residual_in_stride = residual_stride;
        a.residual_out = at(residual_out);
        a.residual_out_stride = residual_out_stride;
        submit(a);
      },
      py::arg("x"), py::arg("x_stride"), py::arg("x_head_stride"), py::arg("out"), py::arg("out_stride"),
      py::arg("out_head_stride"), py::arg("weight"), py::arg("dtype"), py::arg("weight_dtype"), py::arg("rows"),
      py::arg("heads"), py::arg("dim"), py::arg("eps"), py::arg("offset") = 0.f, py::arg("residual") = 0,
      py::arg("residual_stride") = 0, py::arg("residual_out") = 0, py::arg("residual_out_stride") = 0);
  m.def(
      "qk_norm_rope_write",
      [](const KvArgs& kv, Address query, int64_t query_stride, int64_t query_head_stride, int64_t num_heads, Address key,
         int64_t key_stride, int64_t key_head_stride, Address value, int64_t value_stride, int64_t value_head_stride,
         int dtype, int64_t num_tokens, Address q_weight, Address k_weight, int weight_dtype, float eps, float offset,
         int rotary_dim, bool interleaved, Address positions, Address cos_sin, const StepPlan& plan) {
        py::gil_scoped_release release;
        auto norm = [&](Address x, int64_t stride, int64_t head_stride, int64_t heads, Address weight) {
          NormArgs a;
          a.x = a.out = at(x);
          a.x_stride = a.out_stride = stride;
          a.x_head_stride = a.out_head_stride = head_stride;
          a.weight = at(weight);
          a.dtype = dtype;
          a.weight_dtype = weight_dtype;
          a.rows = num_tokens;
          a.heads = heads;
          a.dim = kv.head_dim;
          a.eps = eps;
          a.weight_offset = offset;
          submit(a);
        };
        auto turn = [&](Address x, int64_t stride, int64_t head_stride, int64_t heads) {
          submit(RopeArgs{at(x), dtype, num_tokens, heads, stride, head_stride, rotary_dim, interleaved,
                      at<int32_t>(positions), at<float>(cos_sin)});
        };
        if (q_weight) norm(query, query_stride, query_head_stride, num_heads, q_weight);
        if (k_weight) norm(key, key_stride, key_head_stride, kv.num_kv_heads, k_weight);
        if (rotary_dim) {
          turn(query, query_stride, query_head_stride, num_heads);
          turn(key, key_stride, key_head_stride, kv.num_kv_heads);
        }
        KvWriteArgs write{kv,           at(key),         at(value),         dtype,  0, key_stride, key_head_stride,
                          value_stride, value_head_stride, nullptr};
        submit(PlannedWrite{write, &plan});
      });
  m.def(
      "act_mul",
      [](Address x, int64_t x_stride, int64_t up_offset, Address out, int64_t out_stride, int dtype, int activation,
         int64_t rows, int64_t dim) {
        py::gil_scoped_release release;
        submit(ActArgs{at(x), at(out), dtype, activation, rows, dim, x_stride, up_offset, out_stride});
      },
      py::arg("x"), py::arg("x_stride"), py::arg("up_offset"), py::arg("out"), py::arg("out_stride"), py::arg("dtype"),
      py::arg("activation"), py::arg("rows"), py::arg("dim"));
  m.def(
      "rope",
      [](Address x, int64_t stride, int64_t head_stride, int dtype, int64_t num_tokens, int64_t heads, int rotary_dim,
         bool interleaved, Address positions, Address cos_sin) {
        py::gil_scoped_release release;
        submit(RopeArgs{at(x), dtype, num_tokens, heads, stride, head_stride, rotary_dim, interleaved,
                        at<int32_t>(positions), at<float>(cos_sin)});
      },
      py::arg("x"), py::arg("stride"), py::arg("head_stride"), py::arg("dtype"), py::arg("num_tokens"),
      py::arg("heads"), py::arg("rotary_dim"), py::arg("interleaved"), py::arg("positions"), py::arg("cos_sin"));
}

void define_sampling(py::module_& m) {
  m.def(
      "sample",
      [](Address logits, int64_t rows, int64_t vocab, int64_t stride, Address out, Address temperature, Address seeds,
         Address positions, Address top_k, Address top_p, Address min_p) {
        py::gil_scoped_release release;
        submit(SampleArgs{at<float>(logits), rows, vocab, stride, at<float>(temperature), at<int32_t>(top_k),
                          at<float>(top_p), at<float>(min_p), at<uint64_t>(seeds), at<int32_t>(positions),
                          at<int32_t>(out)});
      },
      py::arg("logits"), py::arg("rows"), py::arg("vocab"), py::arg("stride"), py::arg("out"),
      py::arg("temperature") = 0, py::arg("seeds") = 0, py::arg("positions") = 0, py::arg("top_k") = 0,
      py::arg("top_p") = 0, py::arg("min_p") = 0);
  m.def(
      "token_bitmask",
      [](Address logits, int64_t rows, int64_t vocab, int64_t stride, Address mask, int64_t mask_stride) {
        py::gil_scoped_release release;
        submit(BitmaskArgs{at<float>(logits), at<uint32_t>(mask), rows, vocab, stride, mask_stride});
      },
      py::arg("logits"), py::arg("rows"), py::arg("vocab"), py::arg("stride"), py::arg("mask"), py::arg("mask_stride"));
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
  m.doc() = "Kernels over raw addresses; use core_cpu.kernels, which checks what it passes on.";
  m.def("isa", [] { return std::string(kernels().name); }, "Name of the instruction-set level in use.");
  m.def("rounds_attention", [] { return kernels().rounds_attention; }, "Whether attention can round to int16.");
  m.def("isa_levels", &isa_levels, "Levels that this build and this machine share, from low to high.");
  m.def("set_isa", &set_isa, py::arg("name"), "Takes another level; ValueError where it is not available.");
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, py::arg("count"), "Threads of later calls; 0 takes what the runtime says.");
  define_weight(m);
  define_linear(m);
  define_tape(m);
  define_cache(m);
  define_attention(m);
  define_rowwise(m);
  define_sampling(m);
  if (const char* name = std::getenv("CORE_CPU_ISA")) set_isa(name);
}
