#include "philox.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#include "reduce.h"

namespace cp {
namespace {

constexpr uint64_t LANES = 16;
constexpr uint64_t LOW = 0xFFFFFFFF;
constexpr uint64_t MULTIPLIER_0 = 0xD2511F53, MULTIPLIER_1 = 0xCD9E8D57;  // the constants of the paper
constexpr uint64_t WEYL_0 = 0x9E3779B9, WEYL_1 = 0xBB67AE85;
constexpr uint64_t NUMBERS_PER_THREAD = 1 << 18;  // for which starting a thread, about 50 us, pays

#define CP_KERNELS "philox_kernels.inc"
#include "instruction_sets.inc"

template <typename T>
void fill_range(const PhiloxArgs& given, uint64_t start, uint64_t stop) {
#if defined(__x86_64__)
  if (!std::strcmp(instruction_set(), "avx512")) return philox_range_avx512<T>(given, start, stop);
  if (!std::strcmp(instruction_set(), "avx2")) return philox_range_avx2<T>(given, start, stop);
#endif
  philox_range_portable<T>(given, start, stop);
}

}  // namespace

void philox_fill(const PhiloxArgs& given) {
  auto fill = given.element_bytes == 1   ? fill_range<uint8_t>
              : given.element_bytes == 2 ? fill_range<uint16_t>
              : given.element_bytes == 4 ? fill_range<uint32_t>
                                         : fill_range<uint64_t>;
  uint64_t total = given.samples * given.width;
  uint64_t num_threads = std::max<uint64_t>(std::min(given.max_threads, total / NUMBERS_PER_THREAD), 1);
  std::vector<std::thread> threads;
  uint64_t first = 0;
  for (uint64_t k = 1; k < num_threads; k++) {
    uint64_t last = total * k / num_threads;
    try {
      threads.emplace_back(fill, std::cref(given), first, last);
    } catch (const std::system_error&) {
      break;  // no more threads: this one does the rest
    }
    first = last;
  }
  fill(given, first, total);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cp
