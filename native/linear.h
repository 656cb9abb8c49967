// Forward pass of a linear layer for small batches: reads the weights once, without packing them.
#pragma once
#include <cstdint>

namespace cp {

// Python fills it in. All arrays are float32 and row-major: x is `rows` x `inputs`, weight `outputs` x `inputs`.
struct LinearArgs {
  const float* x;
  const float* weight;
  const float* bias;          // may be null
  float* y;                   // rows x outputs
  uint64_t rows, inputs, outputs;
};

// Returns false, without doing anything, if this processor lacks the instructions for it.
bool linear(const LinearArgs& layer);

}  // namespace cp
