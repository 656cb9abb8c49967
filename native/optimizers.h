// One optimizer step on many tensors, fused with the sum of several replicas' gradients.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

enum class OptimizerKind : int32_t { sgd = 0, adam = 1, adagrad = 2 };

// Python fills it in. All tensors have one dtype, float32 or float64, and are contiguous.
struct OptimizerStep {
  OptimizerKind kind;
  Dtype dtype;
  int32_t is_first;           // SGD: the momentum buffers are uninitialized
  int32_t nesterov, decoupled, maximize;
  int32_t max_threads, unused;
  uint64_t num_tensors;
  const uint64_t* counts;     // elements of each tensor
  const uint64_t* num_parts;  // of each tensor: number of arrays whose sum, in this order, is the gradient
  const void* const* parts;   // the arrays of all tensors, one tensor after the other
  void* const* weights;
  void* const* state[3];      // SGD: momentum; Adam: exp_avg, exp_avg_sq, max_exp_avg_sq; Adagrad: sum; null if absent
  double lr, weight_decay;
  double beta1, beta2;        // SGD: momentum and dampening
  double eps, step_number;    // Adam: step_number counts from 1
};

// Large steps are split among at most `max_threads` threads; the result is the same bit for bit.
void optimizer_step(const OptimizerStep& step);

}  // namespace cp
