// Unique values of row indices: a radix sort.
#pragma once
#include <cstdint>

namespace cp {

// Returns the number of distinct values among `count` numbers; -1 if one is negative, or too large to be sorted this
// way. `found` holds four arrays of `count` elements: the indices that sort the numbers, stably; where in these each
// distinct value starts; the distinct values; and for each number the index of its value. `scratch` holds 2 * `count`
// elements.
int64_t unique(const int64_t* numbers, uint64_t count, int64_t* found, uint64_t* scratch);

}  // namespace cp
