#include "sparse_rows.h"

#include <algorithm>

namespace cp {
namespace {

constexpr uint64_t AHEAD = 16;  // rows to prefetch ahead, because they are scattered

template <typename T>
void add_part(const SparseRowsArgs& all, const SparseRowsPart& part) {
  const int64_t width = static_cast<int64_t>(all.width);
  const int64_t low = static_cast<int64_t>(all.low), high = static_cast<int64_t>(all.high);
  T* into = static_cast<T*>(all.into);
  const T* values = static_cast<const T*>(part.values);
  const T factor = T(all.factor);
  for (uint64_t k = 0; k < part.count; k++) {
    if (k + AHEAD < part.count) {
      int64_t next = part.rows[k + AHEAD] * width;
      if (next >= low && next < high) {
        const char* line = reinterpret_cast<const char*>(into + (next - low));
        for (int64_t byte = 0; byte < std::min<int64_t>(width * int64_t(sizeof(T)), 512); byte += 64)
          __builtin_prefetch(line + byte, 1);
      }
    }
    if (part.rows[k] < 0) continue;
    int64_t begin = part.rows[k] * width;
    int64_t first = std::max(begin, low), last = std::min(begin + width, high);
    if (first >= last) continue;
    T* target = into + (first - low);
    int64_t n = last - first;
    if (all.is_clearing) {
      std::fill(target, target + n, T(0));
      continue;
    }
    uint64_t at = part.at ? static_cast<uint64_t>(part.at[k]) : k / part.each;
    const T* value = values + at * all.width + (first - begin);
    for (int64_t i = 0; i < n; i++) target[i] += factor * value[i];
  }
}

}  // namespace

void add_rows(const SparseRowsArgs& rows) {
  for (int32_t k = 0; k < rows.num_parts; k++) {
    if (rows.dtype == Dtype::float32) add_part<float>(rows, rows.parts[k]);
    if (rows.dtype == Dtype::float64) add_part<double>(rows, rows.parts[k]);
  }
}

}  // namespace cp
