// Random numbers by Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011).
//
// A sample's numbers depend on the key and on the sample's position only: block b of the sample at position s is
// philox(counter = (b, b >> 32, s, s >> 32), key), and number i is word i % 4 of block i / 4.
#pragma once
#include <cstdint>

namespace cp {

// Python fills it in. `out` is row-major: a row for each sample.
struct PhiloxArgs {
  void* out;
  uint64_t element_bytes;   // of `out`: 1, 2, 4 or 8
  uint64_t samples, width;  // width: numbers of each sample
  uint64_t first_sample;    // position of the first row
  uint64_t key;
  uint64_t bound;           // numbers below it select 0, the others `value`; 0 writes the numbers themselves, as int64
  uint64_t value;           // as bits
  uint64_t max_threads;
};

void philox_fill(const PhiloxArgs& given);

}  // namespace cp
