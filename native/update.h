// One step of an optimizer on one flat tensor, with the gradients of several replicas added up on the way.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

enum class Rule : int32_t { sgd = 0, adam = 1, adagrad = 2 };

// Python fills it in. Arrays have `count` numbers of `dtype`, which is float32 or float64.
struct Step {
  Rule rule;
  Dtype dtype;
  int32_t num_parts;          // the gradient is the sum of so many arrays, in this order
  int32_t is_first;           // SGD: the momentum has no value yet
  int32_t nesterov, decoupled, maximize, unused;
  const void* const* parts;
  void* weights;
  void* state[3];             // SGD: momentum; Adam: first and second moment, largest second one; Adagrad: squares
  uint64_t count;
  double lr, weight_decay;
  double beta1, beta2;        // SGD: momentum and dampening
  double eps, turn;           // Adam: turn counts steps from 1
};

void update(const Step& step);

}  // namespace cp
