// The innermost tiles: C[MR x NP*16] (+)= A[MR x k] * B, B given as NP panels of 16 columns, contiguous over k.
//
// A comes either packed, element (m, k) at a[k * MR + m], or as rows of kRowStride elements (attention's probabilities).
// Every variant adds the products of one output element in the same order, k ascending, into one accumulator: a row's
// bits do not depend on how many rows were computed with it.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

constexpr int kRowStride = 144;  // elements of A from a row to the next in the row form

// How a panel is stored: one step of `kStep` k values reads a `B` a column; an `A` holds kActStep k values of a row.
struct KindF32 {
  using A = float;
  using B = float;
  using Acc = F;
  using C = float;
  static constexpr int kStep = 1, kActStep = 1;
};
struct KindF16 : KindF32 {
  using B = F16;
};
struct KindBF16 : KindF32 {  // pairs [k / 2][16][2] against float activations
  using B = uint32_t;
  static constexpr int kStep = 2;
};
struct KindS8 {  // quads [k / 4][16][4] against quads of unsigned bytes
  using A = int32_t;
  using B = uint32_t;
  using Acc = I;
  using C = int32_t;
  static constexpr int kStep = 4, kActStep = 4;
};
#ifdef CORE_DOT2
struct KindI16 {  // pairs against pairs, all of int16; k is even
  using A = uint32_t;
  using B = uint32_t;
  using Acc = I;
  using C = int32_t;
  static constexpr int kStep = 2, kActStep = 2;
};
#endif
#ifdef CORE_DPBF16
struct KindDP : KindF32 {  // pairs against pairs of bf16 activations
  using A = uint32_t;
  using B = uint32_t;
  static constexpr int kStep = 2, kActStep = 2;
};
#endif

CORE_INLINE F acc_load(const float* p) { return load(p); }
CORE_INLINE I acc_load(const int32_t* p) { return loadi(p); }
CORE_INLINE void acc_store(float* p, F a) { store(p, a); }
CORE_INLINE void acc_store(int32_t* p, I a) { storei(p, a); }
CORE_INLINE void acc_clear(F& a) { a = zero(); }
CORE_INLINE void acc_clear(I& a) { a = zeroi(); }

// How far ahead of use weights are asked for: plain ones into the first-level cache, blocks that are unpacked first, which
// come by more slowly, into the second. Measured; other distances and levels lose up to a tenth.
constexpr int64_t kPrefetchBytes = 1024, kPrefetchBlocksBytes = 4096;

// Four panels side by side are what few rows take: they wait for memory. `ahead` is kPrefetchBytes, or 0 for panels that lie
// elsewhere than behind each other.
template <int NP, class B>
CORE_INLINE void stream(const B* const* b, int64_t at, int64_t ahead) {
  if constexpr (NP >= 2) {
    if (ahead == 0) return;
    CORE_UNROLL for (int p = 0; p < NP; p++) __builtin_prefetch(reinterpret_cast<const char*>(b[p] + at) + ahead, 0, 3);
  }
}

template <int MR, int NP, int SM, int SK>
CORE_INLINE void steps(KindF32, const float* a, const float* const* b, int64_t k, F (&acc)[MR][NP], int64_t ahead) {
  for (int64_t i = 0; i < k; i++) {
    F w[NP];
    CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = load(b[p] + i * 16);
    stream<NP>(b, i * 16, ahead);
    CORE_UNROLL for (int m = 0; m < MR; m++) {
      F x = set1(a[i * SK + m * SM]);
      CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = fma(x, w[p], acc[m][p]);
    }
  }
}

template <int MR, int NP, int SM, int SK>
CORE_INLINE void steps(KindF16, const float* a, const F16* const* b, int64_t k, F (&acc)[MR][NP], int64_t ahead) {
  for (int64_t i = 0; i < k; i++) {
    F w[NP];
    CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = loadx(b[p] + i * 16);
    if (i % 2 == 0) stream<NP>(b, i * 16, ahead);
    CORE_UNROLL for (int m = 0; m < MR; m++) {
      F x = set1(a[i * SK + m * SM]);
      CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = fma(x, w[p], acc[m][p]);
    }
  }
}

template <int MR, int NP, int SM, int SK>
CORE_INLINE void steps(KindBF16, const float* a, const uint32_t* const* b, int64_t k, F (&acc)[MR][NP], int64_t ahead) {
  for (int64_t i = 0; i + 2 <= k; i += 2) {
    if (NP <= 2) {
      I w[NP];
      F half[NP];
      CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = loadi(b[p] + i * 8);
      stream<NP>(b, i * 8, ahead);
      CORE_UNROLL for (int p = 0; p < NP; p++) half[p] = bf16_even(w[p]);
      CORE_UNROLL for (int m = 0; m < MR; m++) {
        F x = set1(a[i * SK + m * SM]);
        CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = fma(x, half[p], acc[m][p]);
      }
      CORE_UNROLL for (int p = 0; p < NP; p++) half[p] = bf16_odd(w[p]);
      CORE_UNROLL for (int m = 0; m < MR; m++) {
        F x = set1(a[(i + 1) * SK + m * SM]);
        CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = fma(x, half[p], acc[m][p]);
      }
    } else {  // few rows: keep both activations of each row in registers, one panel at a time
      F x0[MR], x1[MR];
      CORE_UNROLL for (int m = 0; m < MR; m++) {
        x0[m] = set1(a[i * SK + m * SM]);
        x1[m] = set1(a[(i + 1) * SK + m * SM]);
      }
      stream<NP>(b, i * 8, ahead);
      CORE_UNROLL for (int p = 0; p < NP; p++) {
        I w = loadi(b[p] + i * 8);
        F even = bf16_even(w), odd = bf16_odd(w);
        CORE_UNROLL for (int m = 0; m < MR; m++) acc[m][p] = fma(x1[m], odd, fma(x0[m], even, acc[m][p]));
      }
    }
  }
  if (k & 1) {  // the other half of the last pair is not ours: it may be anything
    int64_t i = k - 1;
    CORE_UNROLL for (int p = 0; p < NP; p++) {
      F even = bf16_even(loadi(b[p] + i * 8));
      CORE_UNROLL for (int m = 0; m < MR; m++) acc[m][p] = fma(set1(a[i * SK + m * SM]), even, acc[m][p]);
    }
  }
}

template <int MR, int NP, int SM, int SK>
CORE_INLINE void steps(KindS8, const int32_t* a, const uint32_t* const* b, int64_t k, I (&acc)[MR][NP], int64_t ahead) {
  for (int64_t i = 0; i < k; i += 4) {
    I w[NP];
    CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = loadi(b[p] + i * 4);
    stream<NP>(b, i * 4, ahead);
    CORE_UNROLL for (int m = 0; m < MR; m++) {
      int32_t x = a[i / 4 * SK + m * SM];
      CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = dot4(acc[m][p], x, w[p]);
    }
  }
}

#ifdef CORE_DOT2
template <int MR, int NP, int SM, int SK>
CORE_INLINE void steps(KindI16, const uint32_t* a, const uint32_t* const* b, int64_t k, I (&acc)[MR][NP], int64_t ahead) {
  for (int64_t i = 0; i < k / 2; i++) {
    I w[NP];
    CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = loadi(b[p] + i * 16);
    stream<NP>(b, i * 16, ahead);
    CORE_UNROLL for (int m = 0; m < MR; m++) {
      uint32_t x = a[i * SK + m * SM];
      CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = dot2(acc[m][p], x, w[p]);
    }
  }
}
#endif

#ifdef CORE_DPBF16
template <int MR, int NP, int SM, int SK>
CORE_INLINE void steps(KindDP, const uint32_t* a, const uint32_t* const* b, int64_t k, F (&acc)[MR][NP], int64_t ahead) {
  int64_t i = 0;
  for (; i < k / 2; i++) {
    I w[NP];
    CORE_UNROLL for (int p = 0; p < NP; p++) w[p] = loadi(b[p] + i * 16);
    stream<NP>(b, i * 16, ahead);
    CORE_UNROLL for (int m = 0; m < MR; m++) {
      uint32_t x = a[i * SK + m * SM];
      CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = dpbf16(acc[m][p], x, w[p]);
    }
  }
  if (k & 1) {
    CORE_UNROLL for (int p = 0; p < NP; p++) {
      I w = andi(loadi(b[p] + i * 16), set1i(0xffff));
      CORE_UNROLL for (int m = 0; m < MR; m++) acc[m][p] = dpbf16(acc[m][p], a[i * SK + m * SM] & 0xffff, w);
    }
  }
}
#endif

enum MicroMode { kStart, kContinue };  // C = A B, or C = C + A B

template <class K, int MR, int NP>
static __attribute__((noinline)) void micro(const void* a, const void* const* b, int64_t k, void* c, int64_t ldc,
                                            MicroMode mode, int64_t ahead) {
  const typename K::B* bp[NP];
  CORE_UNROLL for (int p = 0; p < NP; p++) bp[p] = static_cast<const typename K::B*>(b[p]);
  auto* out = static_cast<typename K::C*>(c);
  typename K::Acc acc[MR][NP];
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++) {
    if (mode == kStart) acc_clear(acc[m][p]);
    else acc[m][p] = acc_load(out + m * ldc + p * 16);
  }
  steps<MR, NP, 1, MR>(K{}, static_cast<const typename K::A*>(a), bp, k, acc, ahead);
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++)
    acc_store(out + m * ldc + p * 16, acc[m][p]);
}

// A run of k that lies together in B: `count` values of k from column `column` of A's rows on.
struct Run {
  const char* b;
  int64_t column, count;
};

// C += A B over several runs of k, A as rows; panel p of a run begins at b + offset[p].
template <class K, int MR, int NP>
static __attribute__((noinline)) void micro_runs(const void* a, const Run* runs, int64_t num_runs, const int64_t* offset,
                                                 float* c, int64_t ldc) {
  F acc[MR][NP];
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++) acc[m][p] = load(c + m * ldc + p * 16);
  for (int64_t i = 0; i < num_runs; i++) {
    const typename K::B* bp[NP];
    CORE_UNROLL for (int p = 0; p < NP; p++) bp[p] = reinterpret_cast<const typename K::B*>(runs[i].b + offset[p]);
    auto* x = static_cast<const typename K::A*>(a) + runs[i].column / K::kActStep;
    steps<MR, NP, kRowStride / K::kActStep, 1>(K{}, x, bp, runs[i].count, acc, 0);
  }
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int p = 0; p < NP; p++) store(c + m * ldc + p * 16, acc[m][p]);
}

using MicroFn = void (*)(const void*, const void* const*, int64_t, void*, int64_t, MicroMode, int64_t);

constexpr int kMaxRows = kAccumulators == 24 ? 12 : kAccumulators;  // rows of the tallest tile
// Rows that NP panels leave room for. Four panels want the activations of all rows in registers as well.
constexpr int max_rows(int np) {
  return np == 4 ? (kAccumulators == 24 ? 4 : kAccumulators / 6) : np == 2 ? kAccumulators / 2 : kMaxRows;
}
// With many registers one panel alone does not pay for code of its own: the odd last panel goes twice.
constexpr int kMinPanels = kAccumulators == 24 ? 2 : 1;

template <class K, int NP>
struct MicroForm {
  using Fn = MicroFn;
  template <int MR> static constexpr Fn of() { return micro<K, MR, NP>; }
};
template <class K, int NP>
struct RunsForm {
  using Fn = void (*)(const void*, const Run*, int64_t, const int64_t*, float*, int64_t);
  template <int MR> static constexpr Fn of() { return micro_runs<K, MR, NP>; }
};

template <class Form, int NP, int MR>
constexpr typename Form::Fn form_or_null() {
  if constexpr (MR <= max_rows(NP)) return Form::template of<MR>();
  else return nullptr;
}

template <class Form, int NP>
CORE_INLINE typename Form::Fn pick_rows(int mr) {
  static constexpr typename Form::Fn kTable[12] = {
      form_or_null<Form, NP, 1>(),  form_or_null<Form, NP, 2>(),  form_or_null<Form, NP, 3>(), form_or_null<Form, NP, 4>(),
      form_or_null<Form, NP, 5>(),  form_or_null<Form, NP, 6>(),  form_or_null<Form, NP, 7>(), form_or_null<Form, NP, 8>(),
      form_or_null<Form, NP, 9>(),  form_or_null<Form, NP, 10>(), form_or_null<Form, NP, 11>(), form_or_null<Form, NP, 12>()};
  return kTable[mr - 1];
}

template <class K, template <class, int> class Form>
CORE_INLINE typename Form<K, 2>::Fn pick_form(int mr, int np) {
  if (np == 4) return pick_rows<Form<K, 4>, 4>(mr);
  if constexpr (kMinPanels == 2) return pick_rows<Form<K, 2>, 2>(mr);
  else return np == 2 ? pick_rows<Form<K, 2>, 2>(mr) : pick_rows<Form<K, 1>, 1>(mr);
}

template <class K>
static MicroFn pick_micro(int mr, int np) { return pick_form<K, MicroForm>(mr, np); }

// Panels side by side for tiles of `mr` rows when `left` remain; may be one more than that.
CORE_INLINE int panels_for(int mr, int64_t left) {
  if (left >= 4 && mr <= max_rows(4)) return 4;
  return left >= 2 && mr <= max_rows(2) ? 2 : kMinPanels;
}

// Rows of the next tile when `left` rows remain: equal tiles rather than full ones and a sliver.
CORE_INLINE int rows_for(int64_t left, int cap) {
  return int(ceil_div(left, ceil_div(left, cap)));
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
