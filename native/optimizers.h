// One optimizer step on one flat tensor, fused with the sum of several replicas' gradients.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

enum class OptimizerKind : int32_t { sgd = 0, adam = 1, adagrad = 2 };

// Python fills it in. Arrays have `count` elements of `dtype`, float32 or float64.
struct OptimizerStep {
  OptimizerKind rule;
  Dtype dtype;
  int32_t num_parts;          // number of arrays whose sum, in this order, is the gradient
  int32_t is_first;           // SGD: the momentum buffer is uninitialized
  int32_t nesterov, decoupled, maximize, unused;
  const void* const* parts;
  void* weights;
  void* state[3];             // SGD: momentum; Adam: exp_avg, exp_avg_sq, max_exp_avg_sq; Adagrad: sum
  uint64_t count;
  double lr, weight_decay;
  double beta1, beta2;        // SGD: momentum and dampening
  double eps, step_number;    // Adam: step_number counts from 1
};

void optimizer_step(const OptimizerStep& step);

}  // namespace cp
