#include "magnitudes.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

namespace cp {
namespace {

constexpr size_t ELEMENTS_PER_THREAD = 1 << 20;  // for which starting a thread, about 50 us, pays

#define CP_KERNELS "magnitudes_kernels.inc"
#include "instruction_sets.inc"

using LargestBits = uint64_t (*)(const void*, size_t, size_t, size_t);

LargestBits choose() {
#if defined(__x86_64__)
  if (!std::strcmp(instruction_set(), "avx512")) return largest_bits_avx512;
  if (!std::strcmp(instruction_set(), "avx2")) return largest_bits_avx2;
#endif
  return largest_bits_portable;
}

// Returns the number whose bits these are; a 16-bit one by way of the bits of a 32-bit one.
double from_bits(uint64_t bits, Dtype dtype) {
  if (dtype == Dtype::float64) {
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
  }
  if (dtype == Dtype::float16) {
    uint32_t exponent = static_cast<uint32_t>(bits >> 10), fraction = static_cast<uint32_t>(bits & 0x3ff);
    if (exponent == 0x1f)
      return fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    if (exponent == 0) return fraction * 0x1p-24;
    return (1.0 + fraction * 0x1p-10) * (exponent >= 15 ? double(1u << (exponent - 15)) : 1.0 / (1u << (15 - exponent)));
  }
  uint32_t word = static_cast<uint32_t>(dtype == Dtype::bfloat16 ? bits << 16 : bits);
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Returns the largest bits of one tensor, read by several threads if it is large.
uint64_t largest_bits(LargestBits read, const void* data, size_t count, size_t element_size, int32_t max_threads) {
  size_t num_threads = std::max<size_t>(std::min<size_t>(max_threads, count / ELEMENTS_PER_THREAD), 1);
  if (num_threads == 1) return read(data, 0, count, element_size);
  std::vector<uint64_t> largest(num_threads, 0);
  std::vector<std::thread> threads;
  auto read_part = [&, read](size_t part, size_t stop_part) {
    largest[part] = read(data, count * part / num_threads, count * stop_part / num_threads, element_size);
  };
  size_t started = 1;
  for (; started < num_threads; started++) {
    try {
      threads.emplace_back(read_part, started, started + 1);
    } catch (const std::system_error&) {
      break;  // no more threads: this one reads the rest
    }
  }
  read_part(0, 1);
  uint64_t rest = 0;
  if (started < num_threads) rest = read(data, count * started / num_threads, count, element_size);
  for (std::thread& thread : threads) thread.join();
  return std::max(rest, *std::max_element(largest.begin(), largest.end()));
}

template <class T>
uint64_t largest_bits_of_column(const void* data, size_t rows, size_t columns) {
  const T* bits = static_cast<const T*>(data);
  constexpr T without_sign = static_cast<T>(~T(0)) >> 1;
  T largest = 0;
  for (size_t row = 0; row < rows; row++) largest = std::max(largest, static_cast<T>(bits[row * columns] & without_sign));
  return largest;
}

}  // namespace

double find_magnitudes(const void* const* tensors, const uint64_t* counts, uint64_t num_tensors, Dtype dtype,
                       int32_t max_threads, double* largest) {
  static const LargestBits read = choose();
  uint64_t largest_of_all = 0;
  for (uint64_t k = 0; k < num_tensors; k++) {
    uint64_t bits = largest_bits(read, tensors[k], counts[k], size_of(dtype), max_threads);
    largest[k] = from_bits(bits, dtype);
    largest_of_all = std::max(largest_of_all, bits);
  }
  return from_bits(largest_of_all, dtype);
}

void find_edge_magnitudes(const void* const* matrices, const uint64_t* rows, const uint64_t* columns,
                          uint64_t num_matrices, Dtype dtype, double* largest) {
  static const LargestBits read = choose();
  const size_t element_size = size_of(dtype);
  const auto read_column = element_size == 2   ? largest_bits_of_column<uint16_t>
                           : element_size == 4 ? largest_bits_of_column<uint32_t>
                                               : largest_bits_of_column<uint64_t>;
  for (uint64_t k = 0; k < num_matrices; k++) {
    uint64_t row = read(matrices[k], 0, columns[k], element_size);
    largest[k] = from_bits(std::max(row, read_column(matrices[k], rows[k], columns[k])), dtype);
  }
}

}  // namespace cp
