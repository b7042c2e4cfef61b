// Optimizers of a table's rows. A rule sees one row: its values, its states, and one gradient for each value.
// Every operation is one in float32, in the order of the twin in Python (`dlrover._native.twin_rules`).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#define DLROVER_ROW __attribute__((always_inline)) inline

namespace dlrover {

// Hyperparameters in the order of `dlrover.embedding.optimizers`; unused ones are zero.
struct Hyper {
  float rate, beta1, beta2, epsilon, decay, l1, l2, l21;
};

// One row: values and states of `dim` elements each; the rows of states lie one after the other.
struct Row {
  float* values;
  float* states;
  const float* gradients;
  size_t dim;
  float step;  // updates of this row, with this one

  float* state(size_t index) const { return states + index * dim; }
};

// Powers of a beta for the correction of the bias, by repeated squaring, as the twin has it.
DLROVER_ROW float power(float base, uint32_t exponent) {
  float result = 1.0f;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) result = result * base;
    base = base * base;
  }
  return result;
}

DLROVER_ROW float larger(float one, float other) { return one > other ? one : other; }

struct Sgd {
  static constexpr size_t kStates = 0;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    for (size_t i = 0; i < row.dim; ++i)
      row.values[i] = row.values[i] - h.rate * (row.gradients[i] + h.decay * row.values[i]);
    return false;
  }
};

struct Momentum {
  static constexpr size_t kStates = 1;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    float* speed = row.state(0);
    for (size_t i = 0; i < row.dim; ++i) {
      speed[i] = h.beta1 * speed[i] + row.gradients[i];
      row.values[i] = row.values[i] - h.rate * speed[i];
    }
    return false;
  }
};

// Duchi et al., 2011.
struct AdagradRow {
  static constexpr size_t kStates = 1;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    float* square = row.state(0);
    for (size_t i = 0; i < row.dim; ++i) {
      square[i] = square[i] + row.gradients[i] * row.gradients[i];
      row.values[i] = row.values[i] - h.rate * (row.gradients[i] / (std::sqrt(square[i]) + h.epsilon));
    }
    return false;
  }
};

// Zeiler, 2012.
struct Adadelta {
  static constexpr size_t kStates = 2;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    float *square = row.state(0), *change = row.state(1);
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i];
      square[i] = h.beta2 * square[i] + (1 - h.beta2) * (g * g);
      const float delta = std::sqrt(change[i] + h.epsilon) / std::sqrt(square[i] + h.epsilon) * g;
      change[i] = h.beta2 * change[i] + (1 - h.beta2) * (delta * delta);
      row.values[i] = row.values[i] - h.rate * delta;
    }
    return false;
  }
};

// Adam (Kingma and Ba, 2015) with decoupled weight decay.
struct Adam {
  static constexpr size_t kStates = 2;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    const uint32_t t = static_cast<uint32_t>(row.step);
    const float first = 1 - power(h.beta1, t), second = 1 - power(h.beta2, t), keep = 1 - h.rate * h.decay;
    float *mean = row.state(0), *square = row.state(1);
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i];
      mean[i] = h.beta1 * mean[i] + (1 - h.beta1) * g;
      square[i] = h.beta2 * square[i] + (1 - h.beta2) * (g * g);
      const float direction = (mean[i] / first) / (std::sqrt(square[i] / second) + h.epsilon);
      row.values[i] = row.values[i] * keep - h.rate * direction;
    }
    return false;
  }
};

// AMSGrad (Reddi et al., 2018).
struct Amsgrad {
  static constexpr size_t kStates = 3;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    const uint32_t t = static_cast<uint32_t>(row.step);
    const float first = 1 - power(h.beta1, t), second = 1 - power(h.beta2, t);
    float *mean = row.state(0), *square = row.state(1), *most = row.state(2);
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i];
      mean[i] = h.beta1 * mean[i] + (1 - h.beta1) * g;
      square[i] = h.beta2 * square[i] + (1 - h.beta2) * (g * g);
      most[i] = larger(most[i], square[i]);
      row.values[i] = row.values[i] - h.rate * ((mean[i] / first) / (std::sqrt(most[i] / second) + h.epsilon));
    }
    return false;
  }
};

// RAdam (Liu et al., 2020): without the second moment until its variance is tractable.
struct RectifiedAdam {
  static constexpr size_t kStates = 2;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    const uint32_t t = static_cast<uint32_t>(row.step);
    const float power2 = power(h.beta2, t), first = 1 - power(h.beta1, t), second = 1 - power2;
    const float limit = 2 / (1 - h.beta2) - 1, length = limit - 2 * row.step * power2 / second;
    const bool rectified = length > 5;
    const float over = (length - 4) * (length - 2) * limit, under = (limit - 4) * (limit - 2) * length;
    const float factor = rectified ? std::sqrt(over / under) : 1.0f;
    float *mean = row.state(0), *square = row.state(1);
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i];
      mean[i] = h.beta1 * mean[i] + (1 - h.beta1) * g;
      square[i] = h.beta2 * square[i] + (1 - h.beta2) * (g * g);
      const float divisor = rectified ? std::sqrt(square[i] / second) + h.epsilon : 1.0f;
      row.values[i] = row.values[i] - h.rate * factor * ((mean[i] / first) / divisor);
    }
    return false;
  }
};

// AdaBelief (Zhuang et al., 2020).
struct Adabelief {
  static constexpr size_t kStates = 2;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    const uint32_t t = static_cast<uint32_t>(row.step);
    const float first = 1 - power(h.beta1, t), second = 1 - power(h.beta2, t);
    float *mean = row.state(0), *spread = row.state(1);
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i];
      mean[i] = h.beta1 * mean[i] + (1 - h.beta1) * g;
      const float off = g - mean[i];
      spread[i] = h.beta2 * spread[i] + (1 - h.beta2) * (off * off) + h.epsilon;
      row.values[i] =
          row.values[i] - h.rate * ((mean[i] / first) / (std::sqrt(spread[i] / second) + h.epsilon));
    }
    return false;
  }
};

// LAMB (You et al., 2020), with each row as a layer.
struct Lamb {
  static constexpr size_t kStates = 2;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    const uint32_t t = static_cast<uint32_t>(row.step);
    const float first = 1 - power(h.beta1, t), second = 1 - power(h.beta2, t);
    float *mean = row.state(0), *square = row.state(1);
    float size = 0, length = 0;
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i];
      mean[i] = h.beta1 * mean[i] + (1 - h.beta1) * g;
      square[i] = h.beta2 * square[i] + (1 - h.beta2) * (g * g);
      const float direction =
          (mean[i] / first) / (std::sqrt(square[i] / second) + h.epsilon) + h.decay * row.values[i];
      size = size + row.values[i] * row.values[i];
      length = length + direction * direction;
    }
    const float trust = size > 0 && length > 0 ? std::sqrt(size) / std::sqrt(length) : 1.0f;
    for (size_t i = 0; i < row.dim; ++i) {
      const float direction =
          (mean[i] / first) / (std::sqrt(square[i] / second) + h.epsilon) + h.decay * row.values[i];
      row.values[i] = row.values[i] - h.rate * trust * direction;
    }
    return false;
  }
};

// AGD (Yue et al., 2023): differences of successive means, and a floor instead of an epsilon.
struct AgdRow {
  static constexpr size_t kStates = 2;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    const uint32_t t = static_cast<uint32_t>(row.step);
    const float first = 1 - power(h.beta1, t), second = 1 - power(h.beta2, t);
    const float before = t > 1 ? 1 - power(h.beta1, t - 1) : 1.0f, keep = 1 - h.rate * h.decay;
    float *mean = row.state(0), *square = row.state(1);
    for (size_t i = 0; i < row.dim; ++i) {
      const float last = mean[i];
      mean[i] = h.beta1 * last + (1 - h.beta1) * row.gradients[i];
      const float change = mean[i] / first - last / before;
      square[i] = h.beta2 * square[i] + (1 - h.beta2) * (change * change);
      const float divisor = larger(std::sqrt(square[i] / second), h.epsilon);
      row.values[i] = row.values[i] * keep - h.rate * ((mean[i] / first) / divisor);
    }
    return false;
  }
};

// FTRL-Proximal (McMahan et al., 2013), the group's norm besides: arXiv 2107.14432, with sqrt(n)/rate as its Q.
// Returns whether the penalties leave nothing of the row.
struct Ftrl {
  static constexpr size_t kStates = 2;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    float *linear = row.state(0), *square = row.state(1);
    float norm = 0;
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i], before = std::sqrt(square[i]);
      square[i] = square[i] + g * g;
      linear[i] = linear[i] + g - (std::sqrt(square[i]) - before) / h.rate * row.values[i];
      const float rest = shrunk(linear[i], h.l1);
      norm = norm + rest * rest;
    }
    const float kept = remains(norm, h.l21, row.dim);
    for (size_t i = 0; i < row.dim; ++i) {
      const float divisor = (h.beta1 + std::sqrt(square[i])) / h.rate + 2 * h.l2;
      row.values[i] = -(shrunk(linear[i], h.l1) * kept) / divisor;
    }
    return kept == 0;
  }

  static DLROVER_ROW float shrunk(float value, float l1) {
    const float over = larger(std::fabs(value) - l1, 0.0f);
    return value < 0 ? -over : over;
  }

  static DLROVER_ROW float remains(float norm, float l21, size_t dim) {
    if (l21 == 0) return 1;
    const float length = std::sqrt(norm), penalty = std::sqrt(static_cast<float>(dim)) * l21;
    return length > penalty ? 1 - penalty / length : 0.0f;
  }
};

// Group Adam (arXiv 2107.14432, algorithm 1). Without penalties it is Adam.
struct GroupAdam {
  static constexpr size_t kStates = 3;
  static DLROVER_ROW bool update(const Hyper& h, const Row& row) {
    const uint32_t t = static_cast<uint32_t>(row.step);
    const float first = 1 - power(h.beta1, t), second = std::sqrt(1 - power(h.beta2, t));
    const float last = t > 1 ? std::sqrt(1 - power(h.beta2, t - 1)) : 1.0f;
    float *mean = row.state(0), *square = row.state(1), *linear = row.state(2);
    float norm = 0;
    for (size_t i = 0; i < row.dim; ++i) {
      const float g = row.gradients[i];
      const float before = t > 1 ? std::sqrt(square[i]) / last + h.epsilon : 0.0f;
      mean[i] = h.beta1 * mean[i] + (1 - h.beta1) * g;
      square[i] = h.beta2 * square[i] + (1 - h.beta2) * (g * g);
      const float after = std::sqrt(square[i]) / second + h.epsilon;
      linear[i] = linear[i] + h.rate * (mean[i] / first) - (after - before) * row.values[i];
      const float rest = Ftrl::shrunk(linear[i], h.rate * h.l1);
      norm = norm + rest * rest;
    }
    const float kept = Ftrl::remains(norm, h.rate * h.l21, row.dim);
    for (size_t i = 0; i < row.dim; ++i) {
      const float after = std::sqrt(square[i]) / second + h.epsilon;
      row.values[i] = -(Ftrl::shrunk(linear[i], h.rate * h.l1) * kept) / (after + 2 * h.rate * h.l2);
    }
    return kept == 0;
  }
};

}  // namespace dlrover
