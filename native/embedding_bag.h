// Gradients of embedding bags on a parameter server: sums of values, added to rows anywhere in a table's memory.
#pragma once
#include <cstdint>

#include "reduce.h"

namespace cp {

// Python fills it in. List `i` is `members[starts[i]:starts[i + 1]]`, the last one up to the end; the caller has
// checked that `starts` is ascending. Without `starts`, list `i` is `i`.
struct EmbeddingBagArgs {
  Dtype dtype;  // float32 or float64
  uint32_t unused;
  void* part;             // the table's memory, `width` elements per row
  const int64_t* places;  // index of each row in that memory
  const int32_t* members;
  const int32_t* starts;
  uint64_t num_members, num_lists, width;
  const void* values;  // `width` elements each
  double factor;
};

// Adds to row `places[i]` the sum of the values of list `i`, in list order, times the factor.
void add_embedding_bags(const EmbeddingBagArgs& bags);

}  // namespace cp
