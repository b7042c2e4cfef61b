// The C ABI of dlrover._native: optimizer updates, each in one pass over a tensor's parameters, gradients and states.
// States are float32; parameters and gradients are both float32 or both bfloat16, which parameters are rounded to at
// random, to the upper or the lower neighbour, so that the mean of many updates is right. The draw depends on the
// seed, the tensor's index and the element's: not on the threads. Without fused multiply-add (-ffp-contract=off)
// every instruction set gives the same bits.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "threads.h"
#include "xxh3.h"

#define DLROVER_EXPORT extern "C" __attribute__((visibility("default")))
#define DLROVER_INLINE __attribute__((always_inline)) inline

namespace dlrover {
namespace {

constexpr size_t kAhead = 8;  // pieces whose first bytes are fetched before their turn

template <class To, class From>
DLROVER_INLINE To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// 32 random bits for an element; the finalizer is lowbias32 of C. Wellons's hash-prospector.
DLROVER_INLINE uint32_t draw(uint32_t key, uint32_t index) {
  uint32_t value = key ^ index;
  value = (value ^ value >> 16) * 0x7feb352d;
  value = (value ^ value >> 15) * 0x846ca68b;
  return value ^ value >> 16;
}

struct Float32 {
  using Stored = float;
  static DLROVER_INLINE float load(float stored) { return stored; }
  static DLROVER_INLINE float store(float value, uint32_t, uint32_t) { return value; }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static DLROVER_INLINE float load(uint16_t stored) { return bits<float>(static_cast<uint32_t>(stored) << 16); }
  // What is not finite is cut: infinity stays, and so does NaN, which arithmetic leaves with its highest bit set.
  static DLROVER_INLINE uint16_t store(float value, uint32_t key, uint32_t index) {
    const uint32_t word = bits<uint32_t>(value), finite = (word & 0x7f800000) != 0x7f800000;
    const uint32_t noise = (draw(key, index) & 0xffff) * finite;
    return static_cast<uint16_t>((word + noise) >> 16);
  }
};

// Decoupled weight decay; decay = 1 - lr * weight_decay (Loshchilov and Hutter, 2019).
struct Adamw {
  float decay, one_less_beta1, beta2, one_less_beta2, root, epsilon, step;

  DLROVER_INLINE float operator()(float parameter, float gradient, float* mean, float* square) const {
    *mean = *mean + (gradient - *mean) * one_less_beta1;
    *square = *square * beta2 + gradient * gradient * one_less_beta2;
    return parameter * decay - step * (*mean / (std::sqrt(*square) * root + epsilon));
  }
};

// Differences of successive means instead of gradients, and a floor instead of an epsilon (AGD, Yue et al., 2023).
struct Agd {
  float decay, one_less_beta1, beta2, one_less_beta2, correction, last_correction, floor, clip, step;

  DLROVER_INLINE float operator()(float parameter, float gradient, float* mean, float* square) const {
    const float last = *mean;
    *mean = last + (gradient - last) * one_less_beta1;
    const float change = *mean * correction - last * last_correction;
    *square = *square * beta2 + change * change * one_less_beta2;
    const float root = std::sqrt(*square);
    float direction = *mean / (root > floor ? root : floor);
    direction = direction > clip ? clip : direction;
    direction = direction < -clip ? -clip : direction;
    return parameter * decay - step * direction;
  }
};

// Duchi et al., 2011. For the rows of a table that have a gradient; it has no means.
struct Adagrad {
  float epsilon, step;

  DLROVER_INLINE float operator()(float parameter, float gradient, float*, float* square) const {
    *square = *square + gradient * gradient;
    return parameter - step * (gradient / (std::sqrt(*square) + epsilon));
  }
};

struct Tensor {
  uint64_t parameters, gradients, means, squares, begin, end;
  uint32_t key;
};

template <class Rule, class Kind>
DLROVER_INLINE void update(const Rule& rule, const Tensor& tensor) {
  using Stored = typename Kind::Stored;
  auto* __restrict parameters = reinterpret_cast<Stored*>(tensor.parameters);
  const auto* __restrict gradients = reinterpret_cast<const Stored*>(tensor.gradients);
  auto* __restrict means = reinterpret_cast<float*>(tensor.means);
  auto* __restrict squares = reinterpret_cast<float*>(tensor.squares);
  for (uint64_t i = tensor.begin; i < tensor.end; ++i) {
    const float value = rule(Kind::load(parameters[i]), Kind::load(gradients[i]), &means[i], &squares[i]);
    parameters[i] = Kind::store(value, tensor.key, static_cast<uint32_t>(i));
  }
}

#if defined(__x86_64__)
template <class Rule, class Kind>
__attribute__((target("avx2"))) void update_avx2(const Rule& rule, const Tensor& tensor) {
  update<Rule, Kind>(rule, tensor);
}
#endif

template <class Rule, class Kind>
void update_plain(const Rule& rule, const Tensor& tensor) {
  update<Rule, Kind>(rule, tensor);
}

template <class Rule>
auto chosen(bool half) {
#if defined(__x86_64__)
  if (std::strcmp(variant(), "plain") != 0) return half ? update_avx2<Rule, Bfloat16> : update_avx2<Rule, Float32>;
#endif
  return half ? update_plain<Rule, Bfloat16> : update_plain<Rule, Float32>;
}

// Fetch the beginnings of a piece that is updated later.
DLROVER_INLINE void fetch(const uint64_t* addresses, size_t index, size_t last) {
  if (index < last) __builtin_prefetch(reinterpret_cast<const void*>(addresses[index]), 1);
}

template <class Rule>
void update_all(size_t count, const uint64_t* parameters, const uint64_t* gradients, const uint64_t* means,
                const uint64_t* squares, const uint64_t* sizes, const Rule& rule, uint64_t seed, bool half,
                size_t threads) {
  const auto one = chosen<Rule>(half);
  const uint32_t step_key = draw(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  handle(count, sizes, true, threads, sum(count, sizes), [=, &rule](const Run& run) {
    for (size_t i = run.first; i < run.last; ++i) {
      fetch(parameters, i + kAhead, run.last);
      fetch(squares, i + kAhead, run.last);
      const uint64_t begin = run.part ? run.begin : 0, end = run.part ? run.end : sizes[i];
      const uint32_t key = draw(step_key, static_cast<uint32_t>(i));
      one(rule, {parameters[i], gradients[i], means[i], squares[i], begin, end, key});
    }
  });
}

}  // namespace

// Sizes are numbers of elements, here and below.
DLROVER_EXPORT void dlrover_adamw(size_t count, const uint64_t* parameters, const uint64_t* gradients,
                                  const uint64_t* means, const uint64_t* squares, const uint64_t* sizes,
                                  const float* scalars, uint64_t seed, uint32_t half, size_t threads) {
  Adamw rule;
  std::memcpy(&rule, scalars, sizeof rule);
  update_all(count, parameters, gradients, means, squares, sizes, rule, seed, half != 0, threads);
}

DLROVER_EXPORT void dlrover_agd(size_t count, const uint64_t* parameters, const uint64_t* gradients,
                                const uint64_t* means, const uint64_t* squares, const uint64_t* sizes,
                                const float* scalars, uint64_t seed, uint32_t half, size_t threads) {
  Agd rule;
  std::memcpy(&rule, scalars, sizeof rule);
  update_all(count, parameters, gradients, means, squares, sizes, rule, seed, half != 0, threads);
}

DLROVER_EXPORT void dlrover_adagrad(size_t count, const uint64_t* parameters, const uint64_t* gradients,
                                    const uint64_t* squares, const uint64_t* sizes, const float* scalars, uint64_t seed,
                                    uint32_t half, size_t threads) {
  Adagrad rule;
  std::memcpy(&rule, scalars, sizeof rule);
  update_all(count, parameters, gradients, squares, squares, sizes, rule, seed, half != 0, threads);
}

}  // namespace dlrover
