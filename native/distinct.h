// Rows that are looked up, each once: a sort of short numbers by their digits.
#pragma once
#include <cstdint>

namespace cp {

// Returns how many different ones there are among `count` numbers; -1 where one is below 0 or too large to be sorted so.
// `found` has room for four times `count` numbers, behind one another: places of the numbers by their size, those of
// equal ones ascending; where in these each different number begins; the different numbers; for each number its place
// among the different ones. `scratch` has room for twice `count`.
int64_t distinct(const int64_t* numbers, uint64_t count, int64_t* found, uint64_t* scratch);

}  // namespace cp
