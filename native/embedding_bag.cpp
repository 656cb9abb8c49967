#include "embedding_bag.h"

#include <cstring>

namespace cp {
namespace {

constexpr uint64_t AHEAD = 16;  // rows to prefetch ahead, because they are scattered
constexpr uint64_t BLOCK = 32;  // elements of a sum at once
constexpr uint64_t MAX_PREFETCH_BYTES = 512;  // of a row to prefetch

inline uint64_t end_of(const EmbeddingBagArgs& bags, uint64_t list) {
  return list + 1 < bags.num_lists ? static_cast<uint64_t>(bags.starts[list + 1]) : bags.num_members;
}

inline void prefetch(const void* row, uint64_t num_bytes) {
  const char* line = static_cast<const char*>(row);
  for (uint64_t byte = 0; byte < (num_bytes < MAX_PREFETCH_BYTES ? num_bytes : MAX_PREFETCH_BYTES); byte += 64)
    __builtin_prefetch(line + byte, 1);
}

#define CP_NAME(name) name##_portable
#define CP_TARGET
#include "embedding_bag_kernels.inc"
#undef CP_NAME
#undef CP_TARGET

#if defined(__x86_64__)
#define CP_NAME(name) name##_avx2
#define CP_TARGET __attribute__((target("avx2,f16c,fma")))
#include "embedding_bag_kernels.inc"
#undef CP_NAME
#undef CP_TARGET
#endif

}  // namespace

void add_embedding_bags(const EmbeddingBagArgs& bags) {
#if defined(__x86_64__)
  if (std::strcmp(instruction_set(), "portable")) return add_embedding_bags_avx2(bags);
#endif
  add_embedding_bags_portable(bags);
}

}  // namespace cp
