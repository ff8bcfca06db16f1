// Operations on rows: norms, gated activations, rotary embedding, token bitmasks.
#pragma once

namespace core_cpu {
namespace CORE_ISA {
namespace {

// ------------------------------------------------------------------ rms_norm
// x (+ residual), rounded to T, into `sum` (which may be x or residual); returns the sum of squares of what was rounded.
template <class T>
CORE_INLINE float add_and_square(const T* x, const T* residual, T* sum, int64_t dim) {
  F squares = zero();
  for (int64_t i = 0; i < dim; i += 16) {
    int64_t count = min64(16, dim - i);
    F v = load_part(x + i, count);
    if (residual) {
      store_part(sum + i, add(v, load_part(residual + i, count)), count);
      v = load_part(sum + i, count);
    }
    squares = fma(v, v, squares);
  }
  return hsum(squares);
}

template <class T, class W>
CORE_INLINE void norm_row(const T* x, const W* weight, T* out, int64_t dim, float factor, float offset) {
  for (int64_t i = 0; i < dim; i += 16) {
    int64_t count = min64(16, dim - i);
    F v = mul(load_part(x + i, count), set1(factor));
    if (weight) v = mul(v, add(load_part(weight + i, count), set1(offset)));
    store_part(out + i, v, count);
  }
}

template <class T, class W>
static void norm_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const NormArgs*>(context);
  for (int64_t i = begin; i < end; i++) {
    int64_t row = i / a.heads, head = i % a.heads;
    auto* x = static_cast<const T*>(a.x) + row * a.x_stride + head * a.x_head_stride;
    auto* out = static_cast<T*>(a.out) + row * a.out_stride + head * a.out_head_stride;
    const T* source = x;
    float squares;
    if (a.residual_in) {
      auto* residual = static_cast<const T*>(a.residual_in) + row * a.residual_in_stride;
      auto* sum = static_cast<T*>(a.residual_out) + row * a.residual_out_stride;
      squares = add_and_square(x, residual, sum, a.dim);
      source = sum;
    } else {
      squares = add_and_square<T>(x, nullptr, nullptr, a.dim);
    }
    float factor = 1.f / sqrtf(squares / float(a.dim) + a.eps);
    norm_row(source, static_cast<const W*>(a.weight), out, a.dim, factor, a.weight_offset);
  }
}

template <class T>
CORE_INLINE RangeFn norm_fn(int weight_dtype) {
  return weight_dtype == kF32 ? norm_range<T, float> : weight_dtype == kBF16 ? norm_range<T, BF16> : norm_range<T, F16>;
}

static void rms_norm(const NormArgs& a) {
  RangeFn fn = a.dtype == kF32 ? norm_fn<float>(a.weight_dtype) : a.dtype == kBF16 ? norm_fn<BF16>(a.weight_dtype)
                                                                                   : norm_fn<F16>(a.weight_dtype);
  parallel_static(a.rows * a.heads, max64(1, 32768 / max64(1, a.dim)), fn, const_cast<NormArgs*>(&a));
}

// ------------------------------------------------------------------ act_mul
CORE_INLINE F gelu_erf(F x) {
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; i++) lanes[i] = 0.5f * lanes[i] * erfcf(-0.70710678118654752f * lanes[i]);
  return load(lanes);
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x sigmoid(2 ...)
CORE_INLINE F gelu_tanh(F x) {
  F inner = mul(x, fma(mul(x, x), set1(0.0713548162726f), set1(1.59576912160573f)));
  return mul(x, vsigmoid(inner));
}

CORE_INLINE F activate(F x, int activation) {
  return activation == kSilu ? mul(x, vsigmoid(x)) : activation == kGeluTanh ? gelu_tanh(x) : gelu_erf(x);
}

template <class T>
static void act_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const ActArgs*>(context);
  for (int64_t row = begin; row < end; row++) {
    auto* x = static_cast<const T*>(a.x) + row * a.x_stride;
    auto* out = static_cast<T*>(a.out) + row * a.out_stride;
    for (int64_t i = 0; i < a.dim; i += 16) {
      int64_t count = min64(16, a.dim - i);
      F gate = activate(load_part(x + i, count), a.activation);
      store_part(out + i, mul(gate, load_part(x + a.up_offset + i, count)), count);
    }
  }
}

static void act_mul(const ActArgs& a) {
  RangeFn fn = a.dtype == kF32 ? act_range<float> : a.dtype == kBF16 ? act_range<BF16> : act_range<F16>;
  parallel_static(a.rows, max64(1, 16384 / max64(1, a.dim)), fn, const_cast<ActArgs*>(&a));
}

// ------------------------------------------------------------------ rope
template <class T>
CORE_INLINE void rotate_halves(T* x, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    int64_t count = min64(16, half - i);
    F a = load_part(x + i, count), b = load_part(x + half + i, count);
    F c = load_part(cosines + i, count), s = load_part(sines + i, count);
    store_part(x + i, sub(mul(a, c), mul(b, s)), count);
    store_part(x + half + i, add(mul(b, c), mul(a, s)), count);
  }
}

template <class T>
CORE_INLINE void rotate_pairs(T* x, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    float a = get(x + 2 * i), b = get(x + 2 * i + 1);
    put(x + 2 * i, a * cosines[i] - b * sines[i]);
    put(x + 2 * i + 1, b * cosines[i] + a * sines[i]);
  }
}

template <class T>
static void rope_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const RopeArgs*>(context);
  int64_t half = a.rotary_dim / 2;
  for (int64_t t = begin; t < end; t++) {
    const float* cosines = a.cos_sin + int64_t(a.positions[t]) * a.rotary_dim;
    for (int64_t h = 0; h < a.heads; h++) {
      T* x = static_cast<T*>(a.x) + t * a.stride + h * a.head_stride;
      if (a.interleaved) rotate_pairs(x, cosines, cosines + half, half);
      else rotate_halves(x, cosines, cosines + half, half);
    }
  }
}

static void rope(const RopeArgs& a) {
  RangeFn fn = a.dtype == kF32 ? rope_range<float> : a.dtype == kBF16 ? rope_range<BF16> : rope_range<F16>;
  parallel_static(a.num_tokens, max64(1, 16384 / max64(1, a.heads * a.rotary_dim)), fn, const_cast<RopeArgs*>(&a));
}

// ------------------------------------------------------------------ token bitmask
static void bitmask_range(void* context, int64_t begin, int64_t end) {
  auto& a = *static_cast<const BitmaskArgs*>(context);
  for (int64_t row = begin; row < end; row++) {
    float* logits = a.logits + row * a.stride;
    const uint32_t* mask = a.mask + row * a.mask_stride;
    for (int64_t base = 0; base < a.vocab; base += 32) {
      uint32_t word = mask[base / 32];
      if (word == 0xffffffffu) continue;
      int64_t count = min64(32, a.vocab - base);
      for (int64_t i = 0; i < count; i++)
        if (!((word >> i) & 1)) logits[base + i] = -__builtin_inff();
    }
  }
}

static void token_bitmask(const BitmaskArgs& a) {
  parallel_static(a.rows, 1, bitmask_range, const_cast<BitmaskArgs*>(&a));
}

}  // namespace
}  // namespace CORE_ISA
}  // namespace core_cpu
