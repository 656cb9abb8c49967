#include "linear.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "reduce.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define CP_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace cp {
#if defined(__x86_64__)
namespace {

constexpr uint64_t SAMPLES = 32;  // two AVX-512 registers
constexpr int ROWS = 12;          // of the weight: 24 accumulators and 2 inputs fit the registers
constexpr uint64_t LINE = 16;     // floats of a cache line
constexpr uint64_t RUN = 512;     // inputs summed at a time; longer float32 sums lose accuracy
constexpr uint64_t AHEAD = 320;

// Accumulates inputs `first` to `stop` into `sums` (R x SAMPLES); x is transposed: inputs x SAMPLES.
template <int R>
CP_AVX512 void add(const float* weight, uint64_t inputs, const float* x, uint64_t first, uint64_t stop, float* sums) {
  __m512 low[R], high[R];
  for (int r = 0; r < R; r++) low[r] = high[r] = _mm512_setzero_ps();
  for (uint64_t k = first; k < stop; k++) {
    if (k % LINE == 0)
      for (int r = 0; r < R; r++)
        _mm_prefetch(reinterpret_cast<const char*>(weight + r * inputs + k + AHEAD), _MM_HINT_T0);
    __m512 x0 = _mm512_load_ps(x + k * SAMPLES), x1 = _mm512_load_ps(x + k * SAMPLES + LINE);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      __m512 w = _mm512_set1_ps(weight[r * inputs + k]);
      low[r] = _mm512_fmadd_ps(w, x0, low[r]);
      high[r] = _mm512_fmadd_ps(w, x1, high[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    float* at = sums + r * SAMPLES;
    _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), low[r]));
    _mm512_store_ps(at + LINE, _mm512_add_ps(_mm512_load_ps(at + LINE), high[r]));
  }
}

void transpose_samples(const LinearArgs& layer, uint64_t first, uint64_t count, float* x) {
  for (uint64_t begin = 0; begin < layer.inputs; begin += LINE) {
    uint64_t end = std::min(layer.inputs, begin + LINE);
    for (uint64_t m = 0; m < SAMPLES; m++)
      for (uint64_t k = begin; k < end; k++)
        x[k * SAMPLES + m] = m < count ? layer.x[(first + m) * layer.inputs + k] : 0;
  }
}

CP_AVX512 void linear_of_samples(const LinearArgs& layer, uint64_t first, uint64_t count, const float* x) {
  alignas(64) float sums[ROWS * SAMPLES];
  for (uint64_t n = 0; n < layer.outputs; n += ROWS) {
    uint64_t rows = std::min<uint64_t>(ROWS, layer.outputs - n);
    std::memset(sums, 0, sizeof(sums));
    for (uint64_t k = 0; k < layer.inputs; k += RUN) {
      uint64_t stop = std::min(layer.inputs, k + RUN);
      const float* weight = layer.weight + n * layer.inputs;
      if (rows == ROWS)
        add<ROWS>(weight, layer.inputs, x, k, stop, sums);
      else
        for (uint64_t r = 0; r < rows; r++)
          add<1>(weight + r * layer.inputs, layer.inputs, x, k, stop, sums + r * SAMPLES);
    }
    for (uint64_t m = 0; m < count; m++)
      for (uint64_t r = 0; r < rows; r++)
        layer.y[(first + m) * layer.outputs + n + r] = sums[r * SAMPLES + m] + (layer.bias ? layer.bias[n + r] : 0);
  }
}

}  // namespace

bool linear(const LinearArgs& layer) {
  if (std::strcmp(instruction_set(), "avx512")) return false;
  uint64_t bytes = std::max<uint64_t>(layer.inputs, 1) * SAMPLES * sizeof(float);
  float* x = static_cast<float*>(std::aligned_alloc(64, bytes));
  if (!x) return false;
  for (uint64_t first = 0; first < layer.rows; first += SAMPLES) {
    uint64_t count = std::min(SAMPLES, layer.rows - first);
    transpose_samples(layer, first, count, x);
    linear_of_samples(layer, first, count, x);
  }
  std::free(x);
  return true;
}
#else
bool linear(const LinearArgs&) { return false; }
#endif

}  // namespace cp
