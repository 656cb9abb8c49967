// Gradients as rows: of a table only those rows are named that somebody has looked up.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

// Row `rows[k]` of the table gets row `at[k]` of `values`; without `at`, so many in turn as `each` says get the same one.
// A row below 0 is passed over.
struct RowPart {
  const int64_t* rows;
  const int64_t* at;
  const void* values;
  uint64_t count;
  uint64_t each;
};

// Python fills it in. `into` are the numbers of the table from `low` to `high`, of float32 or float64.
struct Rows {
  Dtype dtype;
  int32_t num_parts;
  int32_t is_clearing;        // named rows become zeros, whatever the values
  int32_t unused;
  const RowPart* parts;
  void* into;
  uint64_t width, low, high;
  double factor;              // what values are multiplied with before they are added
};

// Adds all parts, one after the other, in the order of their rows.
void add_rows(const Rows& rows);

}  // namespace cp
