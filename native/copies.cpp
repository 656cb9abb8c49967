#include "copies.h"

#include <cstring>

namespace cp {

void copy_tensors(const void* const* tensors, const uint64_t* counts, const uint64_t* starts, uint64_t num_tensors,
                  uint64_t element_size, void* into) {
  for (uint64_t k = 0; k < num_tensors; k++)
    if (counts[k])  // an empty tensor may have no address
      std::memcpy(static_cast<char*>(into) + starts[k] * element_size, tensors[k], counts[k] * element_size);
}

}  // namespace cp
