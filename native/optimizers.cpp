#include "optimizers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace cp {
namespace {

constexpr size_t BLOCK = 2048;  // elements whose gradient stays in the L1 cache

#define CP_NAME(name) name##_portable
#define CP_TARGET
#include "optimizer_kernels.inc"
#undef CP_NAME
#undef CP_TARGET

#if defined(__x86_64__)
#define CP_NAME(name) name##_avx2
#define CP_TARGET __attribute__((target("avx2,f16c,fma")))
#include "optimizer_kernels.inc"
#undef CP_NAME
#undef CP_TARGET

#define CP_NAME(name) name##_avx512
#define CP_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma,prefer-vector-width=512")))
#include "optimizer_kernels.inc"
#undef CP_NAME
#undef CP_TARGET
#endif

}  // namespace

void optimizer_step(const OptimizerStep& step) {
#if defined(__x86_64__)
  if (!std::strcmp(instruction_set(), "avx512")) return optimizer_step_avx512(step);
  if (!std::strcmp(instruction_set(), "avx2")) return optimizer_step_avx2(step);
#endif
  optimizer_step_portable(step);
}

}  // namespace cp
