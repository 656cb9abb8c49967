// Elementwise sum, max or min of several arrays, written to one or more arrays.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cp {

enum class Dtype : uint32_t { float32 = 0, float64 = 1, bfloat16 = 2, float16 = 3, int64 = 4, int32 = 5, bytes = 6 };
enum class ReduceOp : uint32_t { sum = 0, max = 1, min = 2 };

size_t size_of(Dtype dtype);

// outs[*][i] = ins[0][i] op ins[1][i] op ..., in this order, then times scale. An out may be one of the ins.
// 16-bit floats are widened to 32 bits first and rounded once, to nearest even.
void reduce(void* const* outs, int num_outs, const void* const* ins, int num_ins, size_t count, Dtype dtype,
            ReduceOp op, double scale);

// Instruction set that `reduce` uses on this processor: "avx512", "avx2" or "portable".
const char* instruction_set();

}  // namespace cp
