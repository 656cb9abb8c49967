#include "update.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace cp {
namespace {

constexpr size_t BLOCK = 2048;  // numbers whose gradient stays in the nearest cache

#define CP_NAME(name) name##_portable
#define CP_TARGET
#include "update_kernels.inc"
#undef CP_NAME
#undef CP_TARGET

#if defined(__x86_64__)
#define CP_NAME(name) name##_avx2
#define CP_TARGET __attribute__((target("avx2,f16c,fma")))
#include "update_kernels.inc"
#undef CP_NAME
#undef CP_TARGET

#define CP_NAME(name) name##_avx512
#define CP_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma,prefer-vector-width=512")))
#include "update_kernels.inc"
#undef CP_NAME
#undef CP_TARGET
#endif

}  // namespace

void update(const Step& step) {
#if defined(__x86_64__)
  if (!std::strcmp(instruction_set(), "avx512")) return update_avx512(step);
  if (!std::strcmp(instruction_set(), "avx2")) return update_avx2(step);
#endif
  update_portable(step);
}

}  // namespace cp
