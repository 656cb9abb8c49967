// Largest magnitudes of tensors: whether gradients are finite, and how near to the largest number they are.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

// largest[k] = max |x| over the elements of tensor k: 0 without elements, infinity or NaN if one is not finite.
// Returns that of all tensors. All tensors have one dtype of floating-point numbers and are contiguous. Large ones are read by at most `max_threads`.
double find_magnitudes(const void* const* tensors, const uint64_t* counts, uint64_t num_tensors, Dtype dtype,
                       int32_t max_threads, double* largest);

// largest[k] = max |x| over the first row and the first column of matrix k, which is contiguous and has elements.
void find_edge_magnitudes(const void* const* matrices, const uint64_t* rows, const uint64_t* columns,
                          uint64_t num_matrices, Dtype dtype, double* largest);

}  // namespace cp
