#include "optimizers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace cp {
namespace {

constexpr size_t BLOCK = 2048;                   // elements whose gradient stays in the L1 cache
constexpr size_t ELEMENTS_PER_THREAD = 1 << 18;  // for which starting a thread, about 50 us, pays

// Elements `start` to `stop` of one tensor; `start` is a multiple of BLOCK.
struct TensorRange {
  const void* const* parts;
  uint64_t num_parts;
  void* weights;
  void* state[3];
  size_t start, stop;
};

#define CP_KERNELS "optimizer_kernels.inc"
#include "instruction_sets.inc"

void step_range(const OptimizerStep& step, const TensorRange& range) {
#if defined(__x86_64__)
  if (!std::strcmp(instruction_set(), "avx512")) return optimizer_step_avx512(step, range);
  if (!std::strcmp(instruction_set(), "avx2")) return optimizer_step_avx2(step, range);
#endif
  optimizer_step_portable(step, range);
}

size_t num_blocks(uint64_t count) { return (count + BLOCK - 1) / BLOCK; }

// Steps the blocks `first` to `last` of all tensors' blocks, numbered tensor by tensor.
void step_blocks(const OptimizerStep& step, size_t first, size_t last) {
  size_t before = 0;  // blocks of the tensors before this one
  const void* const* parts = step.parts;
  for (uint64_t k = 0; k < step.num_tensors && before < last; k++) {
    size_t blocks = num_blocks(step.counts[k]);
    if (before + blocks > first) {
      TensorRange range{parts, step.num_parts[k], step.weights[k], {}, 0, static_cast<size_t>(step.counts[k])};
      for (int s = 0; s < 3; s++) range.state[s] = step.state[s] ? step.state[s][k] : nullptr;
      if (first > before) range.start = (first - before) * BLOCK;
      range.stop = std::min(range.stop, (last - before) * BLOCK);
      step_range(step, range);
    }
    before += blocks;
    parts += step.num_parts[k];
  }
}

}  // namespace

void optimizer_step(const OptimizerStep& step) {
  size_t total = 0, elements = 0;
  for (uint64_t k = 0; k < step.num_tensors; k++) {
    total += num_blocks(step.counts[k]);
    elements += step.counts[k];
  }
  size_t num_threads = std::max<size_t>(std::min<size_t>(step.max_threads, elements / ELEMENTS_PER_THREAD), 1);
  std::vector<std::thread> threads;
  size_t first = 0;
  for (size_t k = 1; k < num_threads; k++) {
    size_t last = total * k / num_threads;
    try {
      threads.emplace_back(step_blocks, std::cref(step), first, last);
    } catch (const std::system_error&) {
      break;  // no more threads: this one does the rest
    }
    first = last;
  }
  step_blocks(step, first, total);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cp
