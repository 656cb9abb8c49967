#include "bags.h"

#include <cstring>

namespace cp {
namespace {

constexpr uint64_t AHEAD = 16;  // rows lie anywhere in memory, so that the next ones are asked for early
constexpr uint64_t BLOCK = 32;  // numbers of a sum at once
constexpr uint64_t MOST_BYTES = 512;  // of a row that are asked for early

inline uint64_t end_of(const Bags& bags, uint64_t list) {
  return list + 1 < bags.num_lists ? static_cast<uint64_t>(bags.starts[list + 1]) : bags.num_members;
}

inline void prefetch(const void* row, uint64_t num_bytes) {
  const char* line = static_cast<const char*>(row);
  for (uint64_t byte = 0; byte < (num_bytes < MOST_BYTES ? num_bytes : MOST_BYTES); byte += 64)
    __builtin_prefetch(line + byte, 1);
}

#define CP_NAME(name) name##_portable
#define CP_TARGET
#include "bag_kernels.inc"
#undef CP_NAME
#undef CP_TARGET

#if defined(__x86_64__)
#define CP_NAME(name) name##_avx2
#define CP_TARGET __attribute__((target("avx2,f16c,fma")))
#include "bag_kernels.inc"
#undef CP_NAME
#undef CP_TARGET
#endif

}  // namespace

void add_sums(const Bags& bags) {
#if defined(__x86_64__)
  if (std::strcmp(instruction_set(), "portable")) return add_sums_of_avx2(bags);
#endif
  add_sums_of_portable(bags);
}

}  // namespace cp
