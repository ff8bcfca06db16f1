// One token a row: argmax, or the Gumbel trick with the noise that every backend shares, over what top-k, top-p and min-p keep.
//
// No full sort. z = logits / temperature is cut into 4,096 bins by its distance to the largest; bins keep the order, so
// the bin in which a filter ends is found by counting (top-k) or by adding probabilities (top-p), and only its members are
// sorted.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

constexpr int kBins = 4096;
constexpr float kBinsPerUnit = 128.f;  // the last bin takes everything more than 32 below the top
constexpr float kReach = 19.5f;  // Gumbel draws lie in [-2.82, 16.64]: a z further below the top than their span never wins

struct Candidate {
  float z;
  int32_t id;
};

// What may still be drawn, and room for the next cut.
struct Candidates {
  float *z, *next_z;
  int32_t *id, *next_id;
  Candidate* sorted;
  int32_t* bin_count;  // [kBins]
  double* bin_mass;    // [kBins]
  int64_t count;
  float top;
};

// ------------------------------------------------------------------ noise
// First output words of Philox4x32-10 for counters (position, ids[i], 0, 0).
CORE_INLINE void philox16(uint64_t seed, uint32_t position, const uint32_t* ids, uint32_t* words) {
  uint32_t c0[16], c1[16], c2[16], c3[16], k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int i = 0; i < 16; i++) c0[i] = position, c1[i] = ids[i], c2[i] = 0, c3[i] = 0;
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < 16; i++) {
      uint64_t p0 = uint64_t{0xD2511F53u} * c0[i], p1 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
      c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
      c1[i] = uint32_t(p1);
      c3[i] = uint32_t(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  memcpy(words, c0, 64);
}

// Natural log of positive normal floats, to about 1 ulp.
CORE_INLINE F vlog(F x) {
  I bits = subi(as_int(x), set1i(0x3f3504f3));  // sqrt(1/2): mantissa in [sqrt(1/2), sqrt(2))
  F e = to_float(sra<23>(bits));
  F m = sub(as_float(addi(andi(bits, set1i(0x007fffff)), set1i(0x3f3504f3))), set1(1.f));
  F p = set1(7.0376836292e-2f);
  p = fma(p, m, set1(-1.1514610310e-1f));
  p = fma(p, m, set1(1.1676998740e-1f));
  p = fma(p, m, set1(-1.2420140846e-1f));
  p = fma(p, m, set1(1.4249322787e-1f));
  p = fma(p, m, set1(-1.6668057665e-1f));
  p = fma(p, m, set1(2.0000714765e-1f));
  p = fma(p, m, set1(-2.4999993993e-1f));
  p = fma(p, m, set1(3.3333331174e-1f));
  F square = mul(m, m);
  p = mul(mul(p, m), square);
  p = fma(e, set1(-2.12194440e-4f), p);
  p = fma(square, set1(-0.5f), p);
  return fma(e, set1(0.693359375f), add(m, p));
}

// -log(-log(u)) of 16 tokens, u = (word / 512 + 1/2) / 2^23.
CORE_INLINE F gumbel16(const uint32_t* words) {
  F u = mul(add(to_float(shr<9>(loadi(words))), set1(0.5f)), set1(1.f / 8388608.f));
  return sub(zero(), vlog(sub(zero(), vlog(u))));
}

// ------------------------------------------------------------------ plain argmax
CORE_INLINE int32_t argmax(const float* x, int64_t n) {
  F top = set1(-__builtin_inff());
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) top = vmax(load(x + i), top);
  float best = hmax(top);
  for (; i < n; i++) best = x[i] > best ? x[i] : best;
  for (i = 0; i < n; i++)
    if (x[i] == best) return int32_t(i);
  return 0;
}

// Largest z + noise; among equals the lowest id. `ids` null: tokens [0, n) themselves.
CORE_INLINE int32_t draw(const float* z, const int32_t* ids, int64_t n, float top, uint64_t seed, uint32_t position) {
  float best = -__builtin_inff();
  int32_t token = ids ? ids[0] : 0;
  for (int64_t i = 0; i < n; i += 16) {
    int64_t count = min64(16, n - i);
    F v = load_part(z + i, count, -__builtin_inff());
    if (hmax(v) < top - kReach) continue;
    uint32_t index[16], words[16];
    float scores[16];
    for (int64_t j = 0; j < 16; j++) index[j] = ids && j < count ? uint32_t(ids[i + j]) : uint32_t(i + j);
    philox16(seed, position, index, words);
    store(scores, add(v, gumbel16(words)));
    for (int64_t j = 0; j < count; j++) {
      int32_t id = int32_t(index[j]);
      if (scores[j] > best || (scores[j] == best && id < token)) best = scores[j], token = id;
    }
  }
  return token;
}

// ------------------------------------------------------------------ filters
CORE_INLINE int bin_of(float z, float top) {
  float d = (top - z) * kBinsPerUnit;
  return d < float(kBins - 1) ? int(d) : kBins - 1;
}

CORE_INLINE bool comes_before(const Candidate& a, const Candidate& b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }

static void sift(Candidate* x, int64_t i, int64_t n) {
  for (int64_t c; (c = 2 * i + 1) < n; i = c) {
    if (c + 1 < n && comes_before(x[c], x[c + 1])) c++;
    if (!comes_before(x[i], x[c])) return;
    Candidate t = x[i];
    x[i] = x[c];
    x[c] = t;
  }
}

static void sort_candidates(Candidate* x, int64_t n) {  // heap sort: largest z, then lowest id, first
  for (int64_t i = n / 2 - 1; i >= 0; i--) sift(x, i, n);
  for (int64_t i = n - 1; i > 0; i--) {
    Candidate t = x[0];
    x[0] = x[i];
    x[i] = t;
    sift(x, 0, i);
  }
}

// Keeps bins [0, bin]: members of earlier bins in any order, then those of `bin` in order. Returns where the latter start.
static int64_t cut_at(Candidates& c, int bin) {
  int64_t kept = 0, inside = 0;
  for (int64_t i = 0; i < c.count; i++) {
    int b = bin_of(c.z[i], c.top);
    if (b < bin) {
      c.next_z[kept] = c.z[i];
      c.next_id[kept++] = c.id[i];
    } else if (b == bin) {
      c.sorted[inside++] = {c.z[i], c.id[i]};
    }
  }
  sort_candidates(c.sorted, inside);
  for (int64_t i = 0; i < inside; i++) {
    c.next_z[kept + i] = c.sorted[i].z;
    c.next_id[kept + i] = c.sorted[i].id;
  }
  c.count = kept + inside;
  float* z = c.z;
  c.z = c.next_z, c.next_z = z;
  int32_t* id = c.id;
  c.id = c.next_id, c.next_id = id;
  return kept;
}

static void keep_top_k(Candidates& c, int64_t k) {
  if (k <= 0 || k >= c.count) return;
  memset(c.bin_count, 0, kBins * sizeof(int32_t));
  for (int64_t i = 0; i < c.count; i++) c.bin_count[bin_of(c.z[i], c.top)]++;
  int bin = 0;
  for (int64_t sum = 0; (sum += c.bin_count[bin]) < k;) bin++;
  cut_at(c, bin);
  c.count = k;
}

static void keep_top_p(Candidates& c, float p) {
  if (!(p < 1.f)) return;
  memset(c.bin_mass, 0, kBins * sizeof(double));
  double total = 0;
  for (int64_t i = 0; i < c.count; i += 16) {
    float e[16];
    int64_t n = min64(16, c.count - i);
    store(e, vexp(sub(load_part(c.z + i, n), set1(c.top))));
    for (int64_t j = 0; j < n; j++) {
      c.bin_mass[bin_of(c.z[i + j], c.top)] += double(e[j]);
      total += double(e[j]);
    }
  }
  double limit = double(p) * total, sum = 0;
  int bin = 0;
  while (bin < kBins - 1 && sum + c.bin_mass[bin] < limit) sum += c.bin_mass[bin++];
  int64_t at = cut_at(c, bin);
  for (; at < c.count && (sum < limit || at == 0); at++) sum += double(expf(c.z[at] - c.top));
  c.count = max64(at, 1);
}

static void keep_min_p(Candidates& c, float p) {
  if (!(p > 0.f)) return;
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; i++) {
    if (expf(c.z[i] - c.top) < p) continue;
    c.z[kept] = c.z[i];
    c.id[kept++] = c.id[i];
  }
  c.count = kept;
}

// ------------------------------------------------------------------ entry
static Candidates carve_candidates(int64_t vocab) {
  int64_t row = round_up(vocab, 16) * 4;
  char* at = static_cast<char*>(scratch(kScratchTask, size_t(row * 6 + kBins * 12)));
  Candidates c{};
  c.z = reinterpret_cast<float*>(at);
  c.next_z = reinterpret_cast<float*>(at + row);
  c.id = reinterpret_cast<int32_t*>(at + 2 * row);
  c.next_id = reinterpret_cast<int32_t*>(at + 3 * row);
  c.sorted = reinterpret_cast<Candidate*>(at + 4 * row);
  c.bin_mass = reinterpret_cast<double*>(at + 6 * row);
  c.bin_count = reinterpret_cast<int32_t*>(at + 6 * row + kBins * 8);
  return c;
}

static int32_t sample_row(const SampleArgs& a, int64_t r) {
  const float* logits = a.logits + r * a.stride;
  float temperature = a.temperature ? a.temperature[r] : 0.f;
  if (!(temperature > 0.f)) return argmax(logits, a.vocab);
  Candidates c = carve_candidates(a.vocab);
  F divisor = set1(temperature > 1e-5f ? temperature : 1e-5f), top = set1(-__builtin_inff());
  for (int64_t i = 0; i < a.vocab; i += 16) {
    F z = div(load_part(logits + i, a.vocab - i, -__builtin_inff()), divisor);
    store(c.z + i, z);
    top = vmax(z, top);
  }
  c.top = hmax(top);
  c.count = a.vocab;
  int64_t k = a.top_k ? a.top_k[r] : 0;
  float top_p = a.top_p ? a.top_p[r] : 1.f, min_p = a.min_p ? a.min_p[r] : 0.f;
  uint32_t position = uint32_t(a.positions[r]);
  if ((k <= 0 || k >= a.vocab) && !(top_p < 1.f) && !(min_p > 0.f))
    return draw(c.z, nullptr, c.count, c.top, a.seeds[r], position);
  for (int64_t i = 0; i < a.vocab; i++) c.id[i] = int32_t(i);
  keep_top_k(c, k);
  keep_top_p(c, top_p);
  keep_min_p(c, min_p);
  return draw(c.z, c.id, c.count, c.top, a.seeds[r], position);
}

static void sample_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const SampleArgs*>(context);
  for (int64_t r = begin; r < end; r++) a.out[r] = sample_row(a, r);
}

static void sample(const SampleArgs& a) { parallel_dynamic(a.rows, sample_range, const_cast<SampleArgs*>(&a)); }

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
