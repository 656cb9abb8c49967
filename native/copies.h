// Copies of many tensors into one, in a single call.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cp {

// Copies the elements of contiguous tensors of one dtype, those of tensor k to element starts[k] of `into` and on.
void copy_tensors(const void* const* tensors, const uint64_t* counts, const uint64_t* starts, uint64_t num_tensors,
                  uint64_t element_size, void* into);

}  // namespace cp
