// Bags of rows as a server hears of them: sums of values, which are added to rows that lie anywhere in a table's memory.
#pragma once
#include <cstdint>

#include "reduce.h"

namespace cp {

// Python fills it in. List `i` is `members[starts[i]]` and what follows up to `starts[i + 1]`, the last one to the end;
// it has been checked that each list begins where the one before it ends. Without `starts`, list `i` is `i` alone.
struct Bags {
  Dtype dtype;                // float32 or float64
  uint32_t unused;
  void* part;                 // the table's memory, `width` numbers a row
  const int64_t* places;      // of the rows that are meant, in that memory
  const int32_t* members;
  const int32_t* starts;
  uint64_t num_members, num_lists, width;
  const void* values;         // `width` numbers each
  double factor;
};

// The row at place `i` gets the sum of the values that list `i` names, in their order, times the factor.
void add_sums(const Bags& bags);

}  // namespace cp
