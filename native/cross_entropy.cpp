#include "cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "reduce.h"

namespace cp {
namespace {

constexpr float MIN_EXPONENT = -87.0f;            // exp of less is subnormal or 0
constexpr float ROUNDING = 12582912.0f;    // 1.5 * 2^23: adding it rounds to an integer

#define CP_KERNELS "cross_entropy_kernels.inc"
#include "instruction_sets.inc"

struct Kernels {
  double (*log_sum)(const float* row, uint64_t classes);
  void (*gradient_of)(const float* row, uint64_t classes, float sum, float factor, float* into);
};

Kernels kernels() {
#if defined(__x86_64__)
  if (!std::strcmp(instruction_set(), "avx512")) return {log_sum_avx512, gradient_of_avx512};
  if (!std::strcmp(instruction_set(), "avx2")) return {log_sum_avx2, gradient_of_avx2};
#endif
  return {log_sum_portable, gradient_of_portable};
}

}  // namespace

bool cross_entropy(const CrossEntropyArgs& given, LossSum& lost) {
  Kernels chosen = kernels();
  lost = {0.0, 0};
  for (uint64_t row = 0; row < given.rows; row++) {
    int64_t target = given.targets[row];
    if (target == given.ignored) continue;
    if (target < 0 || uint64_t(target) >= given.classes) return false;
    const float* scores = given.scores + row * given.classes;
    double sum = chosen.log_sum(scores, given.classes);
    given.sums[row] = float(sum);
    lost.sum += sum - double(scores[target]);
    lost.count++;
  }
  return true;
}

void cross_entropy_backward(const CrossEntropyArgs& given) {
  Kernels chosen = kernels();
  float factor = float(given.factor);
  for (uint64_t row = 0; row < given.rows; row++) {
    float* into = given.gradient + row * given.classes;
    int64_t target = given.targets[row];
    if (target == given.ignored) {
      std::memset(into, 0, given.classes * sizeof(float));
      continue;
    }
    chosen.gradient_of(given.scores + row * given.classes, given.classes, given.sums[row], factor, into);
    into[target] -= factor;
  }
}

}  // namespace cp
