// Cross entropy loss of rows of logits, and its gradient. Nothing of the size of the logits is stored in between.
#pragma once
#include <cstdint>

namespace cp {

// Python fills it in. Arrays are float32 and row-major; `scores` are the logits.
struct CrossEntropyArgs {
  const float* scores;        // rows x classes
  const int64_t* targets;     // the class of each row
  float* sums;                // log-sum-exp of each row
  float* gradient;            // rows x classes
  uint64_t rows, classes;
  int64_t ignored;            // rows with this target have no loss and no gradient
  double factor;              // of the gradient
};

// Total loss, and the number of rows that are not ignored.
struct LossSum {
  double sum;
  uint64_t count;
};

// Computes `sums` and the loss. Returns whether all targets are valid; if not, the loss is unspecified.
bool cross_entropy(const CrossEntropyArgs& given, LossSum& lost);

// Computes `gradient` from `sums`.
void cross_entropy_backward(const CrossEntropyArgs& given);

}  // namespace cp
