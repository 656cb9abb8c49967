#include "reduce.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace cp {
namespace {

constexpr size_t BLOCK = 1024;  // elements whose partial results stay in the L1 cache

using Reduce = void (*)(void* const*, int, const void* const*, int, size_t, Dtype, ReduceOp, double);

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uint32_t quiet = (bits >> 16) | 0x40;  // a NaN stays one
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

float from_bfloat16(uint16_t half) {
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float from_float16(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff, bits;
  float value;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + (112u << 23));
  } else {  // a subnormal is a multiple of 2^-24
    value = static_cast<float>(rest) * 0x1p-24f;
    return sign ? -value : value;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t to_float16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (rest >> 13 & 0x3ff));
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to infinity
  if (rest >= 0x38800000) {
    uint32_t shifted = rest - (112u << 23);
    return static_cast<uint16_t>(sign | (shifted + 0xfff + (shifted >> 13 & 1)) >> 13);
  }
  float magnitude;
  std::memcpy(&magnitude, &rest, 4);
  float lifted = magnitude + 0.5f;  // adding rounds to a multiple of 2^-24, to nearest even
  uint32_t number;
  std::memcpy(&number, &lifted, 4);
  return static_cast<uint16_t>(sign | (number - 0x3f000000));
}

// Output and inputs are identical or disjoint, so loops vectorize without overlap checks.
#if defined(__clang__)
#define CP_NO_PARTIAL_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define CP_NO_PARTIAL_OVERLAP _Pragma("GCC ivdep")
#endif

#define CP_KERNELS "reduce_kernels.inc"
#include "instruction_sets.inc"

struct Choice {
  Reduce reduce;
  const char* name;
};

#if defined(__x86_64__)
bool has_f16c() {  // clang's __builtin_cpu_supports lacks it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool has_avx2 = __builtin_cpu_supports("avx2") && has_f16c() && __builtin_cpu_supports("fma");
  bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) return {reduce_avx512, "avx512"};
  if (has_avx2) return {reduce_avx2, "avx2"};
#endif
  return {reduce_portable, "portable"};
}

const Choice CHOSEN = choose();

}  // namespace

size_t size_of(Dtype dtype) {
  constexpr size_t sizes[] = {4, 8, 2, 2, 8, 4, 1};
  return sizes[static_cast<uint32_t>(dtype)];
}

const char* instruction_set() { return CHOSEN.name; }

void reduce(void* const* outs, int num_outs, const void* const* ins, int num_ins, size_t count, Dtype dtype,
            ReduceOp op, double scale) {
  CHOSEN.reduce(outs, num_outs, ins, num_ins, count, dtype, op, scale);
}

}  // namespace cp
