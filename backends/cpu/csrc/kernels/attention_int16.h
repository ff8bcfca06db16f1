// A chunk of keys in 16-bit integers, two multiply-adds a lane, for processors whose dot products take integers but not bf16.
// Queries and keys have a scale each, values one a key, probabilities one for a row's chunk: a row's bits depend on its own
// query and on the keys that it sees. Largest magnitudes become 2,047 or more, so that rounding is finer than that of the
// bf16 numbers that come in, and sums of a chunk fit into 32 bits.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

#ifdef CORE_DOT2
constexpr float kProbabilityTop = 8191.f, kValueTop = 2047.f;  // 128 products of them stay below 2^31
constexpr float kLeast = 1e-30f;        // smaller magnitudes are zero: their inverse would overflow

// Magnitude of the largest element of a query and of a key; d products of them stay below 2^31.
CORE_INLINE float qk_top(int64_t d) { return __builtin_floorf(__builtin_sqrtf(2147483648.f / float(d))) - 1.f; }

CORE_INLINE float largest_bits(I magnitudes) {
  int32_t lanes[4];
  reduce4({magnitudes, magnitudes, magnitudes, magnitudes}, true, lanes);
  return bits_float(uint32_t(lanes[0]));
}

// What elements are multiplied with; 0 where the largest magnitude is too small.
CORE_INLINE F inverse_of(F magnitude, float top) {
  return select_lt(set1(kLeast), magnitude, div(set1(top), magnitude), zero());
}

CORE_INLINE I round_pairs(I pairs, F even, F odd) {
  return pack16(to_int(mul(bf16_even(pairs), even)), to_int(mul(bf16_odd(pairs), odd)));
}

// Row tiles of Q as pairs, [head_dim / 2][mr], and the scale of each row.
static void pack_queries_int16(const AttentionArgs& a, const AttentionTask& t, const RequestShape& q, RowState& s) {
  int64_t d = a.kv.head_dim;
  float most = qk_top(d);
  for (int64_t m0 = 0; m0 < s.rows;) {
    int mr = rows_for(s.rows - m0, kMaxRows);
    for (int m = 0; m < mr; m++) {
      const BF16* x = query_row<BF16>(a, t, q, s.row0 + m0 + m);
      I top = zeroi();  // magnitudes as bits, which order as the values do: infinities and NaN come last
      for (int64_t k = 0; k < d; k += 16) top = maxi(top, andi(as_int(load_part(x + k, d - k)), set1i(0x7fffffff)));
      float largest = largest_bits(top);
      s.q_scale[m0 + m] = largest > kLeast ? largest / most : largest * 0.f + 1.f;  // NaN stays NaN
      F inverse = inverse_of(set1(largest), most);
      auto* out = static_cast<uint32_t*>(s.q) + m0 * d / 2 + m;
      for (int64_t k = 0; k < d; k += 16) {
        uint16_t rounded[16];
        store_i16(rounded, to_int(mul(load_part(x + k, d - k), inverse)));
        for (int64_t i = 0; i < min64(8, (d - k) / 2); i++) memcpy(out + (k / 2 + i) * mr, rounded + 2 * i, 4);
      }
    }
    m0 += mr;
  }
}

// The keys of a chunk, panel by panel [head_dim / 2][16], and their scales.
static void round_keys(const AttentionArgs& a, const AttentionTask& t, const Chunk& c, RowState& s) {
  int64_t pairs = a.kv.head_dim / 2;
  float most = qk_top(a.kv.head_dim);
  const I magnitude = set1i(0x7fff7fff);
  for (int64_t key = c.begin / 16 * 16; key < c.end; key += 16) {
    auto* from = reinterpret_cast<const uint32_t*>(key_panel<KindBF16>(a, t, key));
    uint32_t* out = s.k + (key - c.base) * pairs;
    I top = zeroi();
    for (int64_t i = 0; i < pairs; i++) top = max_u16(top, andi(loadi(from + i * 16), magnitude));
    F largest = as_float(maxi(shl<16>(top), andi(top, set1i(int32_t(0xffff0000u)))));
    store(s.k_scale + (key - c.base), mul(largest, set1(1.f / most)));
    F inverse = inverse_of(largest, most);
    for (int64_t i = 0; i < pairs; i++) storei(out + i * 16, round_pairs(loadi(from + i * 16), inverse, inverse));
  }
}

static void scores_int16(const AttentionArgs& a, const Chunk& c, RowState& s) {
  int64_t d = a.kv.head_dim, pairs = d / 2;
  for (int64_t m0 = 0; m0 < s.rows;) {
    int mr = rows_for(s.rows - m0, kMaxRows);
    auto* q = static_cast<const uint32_t*>(s.q) + m0 * pairs;
    for (int64_t key = c.begin / 16 * 16; key < c.end;) {
      int np = panels_for(mr, ceil_div(c.end - key, 16));
      const void* b[4] = {};
      for (int i = 0; i < np; i++) b[i] = s.k + (key + i * 16 < c.end ? key + i * 16 - c.base : key - c.base) * pairs;
      pick_micro<KindI16>(mr, np)(q, b, d, s.s + m0 * kRowStride + (key - c.base), kRowStride, kStart, 0);
      key += np * 16;
    }
    m0 += mr;
  }
}

// Values of the keys [key, key + 16): eight vectors of pairs of each panel. Keys out of the chunk have the scale 0.
static void round_values16(const AttentionArgs& a, const Chunk& c, const uint32_t* from, int64_t key, RowState& s) {
  int64_t panels = ceil_div(a.kv.v_head_dim, 16), panel_pairs = a.kv.block_size / 2;
  I top[8];
  CORE_UNROLL for (int j = 0; j < 8; j++) top[j] = zeroi();
  for (int64_t p = 0; p < panels; p++) {
    const I magnitude = first_lanes(a.kv.v_head_dim - p * 16, 0x7fff7fff);  // the rest of the last panel may be anything
    CORE_UNROLL for (int j = 0; j < 8; j++)
      top[j] = max_u16(top[j], andi(loadi(from + (p * panel_pairs + j) * 16), magnitude));
  }
  uint16_t tops[16];
  reduce4_u16({top[0], top[1], top[2], top[3]}, tops);
  reduce4_u16({top[4], top[5], top[6], top[7]}, tops + 8);
  F largest = load_bf16(tops), scale = mul(largest, set1(1.f / kValueTop));
  if (key < c.begin || key + 16 > c.end) {
    F index = add(iota(), set1(float(key)));
    scale = select_lt(index, set1(float(c.end)), select_lt(index, set1(float(c.begin)), zero(), scale), zero());
  }
  F poison = mul(scale, zero());  // NaN for what is not finite
  store(s.v_poison + (key - c.base), poison);
  store(s.v_scale + (key - c.base), select_lt(scale, set1(__builtin_inff()), scale, zero()));
  s.finite = s.finite && hsum(poison) == 0.f;
  float inverse[16];
  store(inverse, inverse_of(largest, kValueTop));
  for (int64_t p = 0; p < panels; p++) {
    uint32_t* out = s.v_pairs + (p * kKeyChunk + (key - c.base)) * 8;
    CORE_UNROLL for (int j = 0; j < 8; j++)
      storei(out + j * 16, round_pairs(loadi(from + (p * panel_pairs + j) * 16), set1(inverse[2 * j]), set1(inverse[2 * j + 1])));
  }
}

static void round_values(const AttentionArgs& a, const AttentionTask& t, const Chunk& c, RowState& s) {
  s.finite = true;
  for (int64_t key = c.begin / 16 * 16; key < c.end; key += 16) {
    int64_t block = a.block_table[t.request * a.table_stride + key / a.kv.block_size];
    auto* values = static_cast<const uint16_t*>(a.kv.v_cache) + block * a.kv.v_block_stride + t.kv_head * v_head_elements(a.kv);
    round_values16(a, c, reinterpret_cast<const uint32_t*>(values) + key % a.kv.block_size * 8, key, s);
  }
}

// Scores of a row's chunk, which lie there as integers, to floats: before scaling, or scaled and capped. The largest of each
// lane.
CORE_INLINE F score_row_int16(const AttentionArgs& a, const Chunk& c, RowState& s, int64_t row) {
  float* x = s.s + row * kRowStride - c.base;
  const float* scale = s.k_scale - c.base;
  F top = set1(kMinusInf);
  for (int64_t key = c.begin / 16 * 16; key < c.end; key += 16) {
    F v = mul(to_float(loadi(x + key)), load(scale + key));
    if (a.softcap > 0.f) v = cap(a, mul(v, set1(a.scale * s.q_scale[row])));
    if (hides(s, row, key)) v = hide(s, row, key, v);
    store(x + key, v);
    top = vmax(top, v);
  }
  return top;
}

// Probabilities of a row's chunk, and the same times the scales of the values, which are left in place of the scores.
CORE_INLINE void weights_row_int16(const Chunk& c, RowState& s, int64_t row, const RowShift& shift, F& sum, F& top) {
  float* x = s.s + row * kRowStride - c.base;
  const float* scale = s.v_scale - c.base;
  sum = top = zero();
  for (int64_t key = c.begin / 16 * 16; key < c.end; key += 16) {
    F p = vexp2_short(fma(load(x + key), shift.factor, shift.shift));
    sum = add(sum, p);
    p = mul(p, load(scale + key));
    top = vmax(top, p);
    store(x + key, p);
  }
}

CORE_INLINE void round_row_int16(const Chunk& c, RowState& s, int64_t row, float inverse) {
  const float* x = s.s + row * kRowStride - c.base;
  uint16_t* p = s.p + row * kRowStride - c.base;
  F factor = set1(inverse);
  for (int64_t key = c.begin / 16 * 16; key < c.end; key += 16) store_i16(p + key, to_int(mul(load(x + key), factor)));
}

// NaN where the row sees a value that is not finite, else 0.
static float poison(const Chunk& c, const RowState& s, int64_t row) {
  float found = 0.f;
  for (int64_t key = max64(c.begin, s.lo[row]); key < min64(c.end, s.hi[row]); key++) found += s.v_poison[key - c.base];
  return found;
}

// Four rows at a time: what is found across lanes is found for all of them together.
static void softmax_int16(const AttentionArgs& a, const Chunk& c, RowState& s) {
  for (int64_t row0 = 0; row0 < s.rows; row0 += 4) {
    int64_t count = min64(4, s.rows - row0);
    F top[4], sum[4], most[4];
    float tops[4], sums[4], mosts[4], inverse[4];
    RowShift shift[4];
    for (int64_t i = 0; i < 4; i++) top[i] = i < count ? score_row_int16(a, c, s, row0 + i) : zero();
    reduce4_float(top, true, tops);
    for (int64_t i = 0; i < 4; i++) {
      sum[i] = most[i] = zero();
      if (i >= count) continue;
      shift[i] = shift_row(s, row0 + i, tops[i], a.softcap > 0.f ? 1.f : a.scale * s.q_scale[row0 + i]);
      weights_row_int16(c, s, row0 + i, shift[i], sum[i], most[i]);
    }
    reduce4_float(sum, false, sums);
    reduce4_float(most, true, mosts);
    for (int64_t i = 0; i < count; i++) {
      inverse[i] = mosts[i] > kLeast ? kProbabilityTop / mosts[i] : 0.f;
      s.p_scale[row0 + i] = shift[i].none ? 0.f : mosts[i] * (1.f / kProbabilityTop);
      if (!(sums[i] < __builtin_inff())) s.p_scale[row0 + i] = __builtin_nanf("");  // of a query or key that is not finite
      if (!s.finite) s.p_scale[row0 + i] += poison(c, s, row0 + i);
    }
    for (int64_t i = 0; i < count; i++) {
      round_row_int16(c, s, row0 + i, inverse[i]);
      add_to_row(s, row0 + i, shift[i], sums[i]);
    }
  }
}

// o += p v over a chunk's keys: [mr] rows of pairs of probabilities, np panels of pairs of values.
template <class K, int MR, int NP>
static __attribute__((noinline)) void weigh_tile(const uint16_t* p, const uint32_t* const* b, int64_t k, const float* scale,
                                                 float* o, int64_t ldo) {
  I acc[MR][NP];
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int i = 0; i < NP; i++) acc_clear(acc[m][i]);
  steps<MR, NP, kRowStride / 2, 1>(K{}, reinterpret_cast<const uint32_t*>(p), b, k, acc, 0);
  CORE_UNROLL for (int m = 0; m < MR; m++) CORE_UNROLL for (int i = 0; i < NP; i++) keep_in_register(acc[m][i]);
  CORE_UNROLL for (int m = 0; m < MR; m++) {
    F factor = set1(scale[m]);
    CORE_UNROLL for (int i = 0; i < NP; i++) {
      float* at = o + m * ldo + i * 16;
      store(at, fma(to_float(acc[m][i]), factor, load(at)));
    }
  }
}

template <class K, int NP>
struct WeighForm {
  using Fn = void (*)(const uint16_t*, const uint32_t* const*, int64_t, const float*, float*, int64_t);
  template <int MR> static constexpr Fn of() { return weigh_tile<K, MR, NP>; }
};

static void weigh_values_int16(const AttentionArgs& a, const Chunk& c, RowState& s) {
  int64_t first = c.begin / 16 * 16 - c.base, count = round_up(c.end - c.base, 16) - first;
  int64_t panels = ceil_div(a.kv.v_head_dim, 16);
  for (int64_t panel = 0; panel < panels;) {
    int np = panels_for(rows_for(s.rows, kMaxRows), panels - panel);
    const uint32_t* b[4];
    for (int i = 0; i < np; i++) b[i] = s.v_pairs + ((panel + i < panels ? panel + i : panel) * kKeyChunk + first) * 8;
    for (int64_t m0 = 0; m0 < s.rows;) {
      int mr = rows_for(s.rows - m0, kMaxRows);
      pick_form<KindI16, WeighForm>(mr, np)(s.p + m0 * kRowStride + first, b, count, s.p_scale + m0,
                                            s.o + m0 * s.dv + panel * 16, s.dv);
      m0 += mr;
    }
    panel += np;
  }
}

// A task's rows [row0, row1), with the task's other buffers.
CORE_INLINE RowState rows_of(const AttentionArgs& a, const RowState& s, int64_t row0, int64_t row1) {
  RowState r = s;
  r.row0 = row0;
  r.rows = row1 - row0;
  r.q = static_cast<uint32_t*>(s.q) + row0 * a.kv.head_dim / 2;
  r.o += row0 * s.dv, r.m += row0, r.l += row0, r.lo += row0, r.hi += row0, r.q_scale += row0;
  return r;
}

// Sums up what a task's rows see of a chunk, which is brought into integers once for all of them.
static void attend_int16(const AttentionArgs& a, const AttentionTask& t, const Chunk& c, RowState& s) {
  round_keys(a, t, c, s);
  round_values(a, t, c, s);
  for (int64_t row = 0; row < s.rows; row += kTaskRows) {
    RowState r = rows_of(a, s, row, min64(row + kTaskRows, s.rows));
    if (r.hi[r.rows - 1] <= c.begin) continue;  // later rows see no fewer keys
    scores_int16(a, c, r);
    softmax_int16(a, c, r);
    weigh_values_int16(a, c, r);
  }
}
#endif

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
