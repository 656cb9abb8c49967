// Where torch's tensors are in memory, read through DLPack's C exchange API: no call of Python for each tensor.
#pragma once
#include <cstddef>
#include <cstdint>

#include "reduce.h"

namespace cp {

// The part of DLPack 1.x that is used: https://dmlc.github.io/dlpack/latest/c_api.html
struct DLTensor {
  void* data;
  struct { int32_t type, id; } device;
  int32_t num_dims;
  struct { uint8_t code, bits; uint16_t lanes; } dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackExchangeAPI {
  uint32_t major_version, minor_version;
  DLPackExchangeAPI* previous;
  void* allocate_managed;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, DLTensor* out);  // not 0: a Python exception is set
  void* current_work_stream;
};

// addresses[k] = where the elements of objects[k] begin. The objects are Python's; the caller holds its lock.
// Returns num_tensors, or the first k that is not a contiguous tensor on the host with this dtype and number of
// elements; a Python exception is set if it cannot be read at all.
uint64_t read_addresses(const DLPackExchangeAPI* api, void* const* objects, uint64_t num_tensors,
                        const uint64_t* counts, Dtype dtype, void** addresses);

}  // namespace cp
