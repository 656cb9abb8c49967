#include "tensor_addresses.h"

namespace cp {

namespace {

constexpr int32_t CPU = 1;  // of DLDeviceType
constexpr uint8_t INT = 0, FLOAT = 2, BFLOAT = 4;  // of DLDataTypeCode

bool has_dtype(const DLTensor& tensor, Dtype dtype) {
  const uint8_t code = dtype == Dtype::bfloat16 ? BFLOAT : dtype >= Dtype::int64 ? INT : FLOAT;
  return tensor.dtype.code == code && tensor.dtype.bits == 8 * size_of(dtype) && tensor.dtype.lanes == 1;
}

// A dimension of size 1 may have any stride, and all dimensions of a tensor without elements.
bool is_contiguous(const DLTensor& tensor, int64_t count) {
  int64_t stride = 1;
  for (int32_t dim = tensor.num_dims - 1; dim >= 0; dim--) {
    if (tensor.shape[dim] == 0) return count == 0;
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != stride) return false;
    stride *= tensor.shape[dim];
  }
  return stride == count;
}

}  // namespace

uint64_t read_addresses(const DLPackExchangeAPI* api, void* const* objects, uint64_t num_tensors,
                        const uint64_t* counts, Dtype dtype, void** addresses) {
  for (uint64_t k = 0; k < num_tensors; k++) {
    DLTensor tensor;
    if (api->tensor_from_object(objects[k], &tensor) != 0) return k;
    const bool fits = tensor.device.type == CPU && has_dtype(tensor, dtype) && is_contiguous(tensor, counts[k]);
    if (!fits) return k;
    addresses[k] = static_cast<char*>(tensor.data) + tensor.byte_offset;
  }
  return num_tensors;
}

}  // namespace cp
