// Sparse gradients of embedding tables: only rows that were looked up.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

// Row `rows[k]` of the table gets row `at[k]` of `values`; without `at`, row `k / each`. Negative rows are skipped.
struct SparseRowsPart {
  const int64_t* rows;
  const int64_t* at;
  const void* values;
  uint64_t count;
  uint64_t each;
};

// Python fills it in. `into` holds the elements `low` to `high` of the table, float32 or float64.
struct SparseRowsArgs {
  Dtype dtype;
  int32_t num_parts;
  int32_t is_clearing;        // set the rows to zero instead of adding to them
  int32_t unused;
  const SparseRowsPart* parts;
  void* into;
  uint64_t width, low, high;
  double factor;              // of the values
};

// Adds all parts, one after the other.
void add_rows(const SparseRowsArgs& rows);

}  // namespace cp
