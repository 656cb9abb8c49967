#include "unique.h"

#include <algorithm>
#include <vector>

namespace cp {
namespace {

constexpr uint32_t DIGIT_BITS = 11;
constexpr uint64_t DIGITS = uint64_t(1) << DIGIT_BITS;

uint32_t bit_length(uint64_t number) { return number ? 64 - __builtin_clzll(number) : 0; }

// Radix sort by bits `low` to `high`, stable; returns the array that has the result.
uint64_t* radix_sort(uint64_t* from, uint64_t* to, uint64_t count, uint32_t low, uint32_t high) {
  std::vector<uint64_t> at(DIGITS);
  for (uint32_t shift = low; shift < high; shift += DIGIT_BITS) {
    std::fill(at.begin(), at.end(), 0);
    for (uint64_t k = 0; k < count; k++) at[(from[k] >> shift) & (DIGITS - 1)]++;
    uint64_t before = 0;
    for (uint64_t& start : at) {
      uint64_t here = start;
      start = before;
      before += here;
    }
    for (uint64_t k = 0; k < count; k++) to[at[(from[k] >> shift) & (DIGITS - 1)]++] = from[k];
    std::swap(from, to);
  }
  return from;
}

}  // namespace

int64_t unique(const int64_t* numbers, uint64_t count, int64_t* found, uint64_t* scratch) {
  if (!count) return 0;
  auto [least, most] = std::minmax_element(numbers, numbers + count);
  const uint32_t low = bit_length(count - 1), high = low + bit_length(static_cast<uint64_t>(*most));
  if (*least < 0 || high > 64) return -1;
  for (uint64_t k = 0; k < count; k++) scratch[k] = static_cast<uint64_t>(numbers[k]) << low | k;
  const uint64_t* ascending = radix_sort(scratch, scratch + count, count, low, high);
  int64_t *order = found, *starts = found + count, *rows = found + 2 * count, *places = found + 3 * count;
  int64_t num_rows = 0;
  for (uint64_t k = 0; k < count; k++) {
    const uint64_t at = low ? ascending[k] & ((uint64_t(1) << low) - 1) : 0;
    order[k] = static_cast<int64_t>(at);
    if (!k || numbers[at] != rows[num_rows - 1]) {
      starts[num_rows] = static_cast<int64_t>(k);
      rows[num_rows++] = numbers[at];
    }
    places[at] = num_rows - 1;
  }
  return num_rows;
}

}  // namespace cp
