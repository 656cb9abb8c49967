// A linear layer's output for few samples: the weights are read once, as they lie, and nothing of them is rearranged.
#pragma once
#include <cstdint>

namespace cp {

// Python fills it in. All arrays are float32, row by row: x has `rows` x `inputs`, weight `outputs` x `inputs`.
struct Layer {
  const float* x;
  const float* weight;
  const float* bias;          // or nothing
  float* y;                   // rows x outputs
  uint64_t rows, inputs, outputs;
};

// Returns whether this processor has the instructions for it; if not, nothing is done.
bool linear(const Layer& layer);

}  // namespace cp
