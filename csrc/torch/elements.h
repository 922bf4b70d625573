// Kernels of the CPU's that take bfloat16 as it lies (csrc/cpu/common/stored.h).
#pragma once

#include "halves.h"

namespace cuda_ops
{

// As parallel_rows, but bfloat16 is not widened: all arrays are of `dtype`.
template <typename Kernel, typename... Arrays>
void parallel_stored_rows(const char *op, int64_t count, int64_t unit, int64_t grain, cuda_ops_dtype dtype,
                          const Kernel &kernel, const Arrays &...arrays)
{
    if (dtype != CUDA_OPS_BFLOAT16) {
        parallel_rows(op, count, unit, grain, dtype, kernel, arrays...);
        return;
    }
    const std::array<void *, sizeof...(Arrays)> pointers = detail::pointers_of(arrays...);
    parallel_ranges(op, count, grain, [&](int64_t begin, int64_t end) {
        return detail::call_kernel(kernel, pointers, begin, end, dtype, std::make_index_sequence<sizeof...(Arrays)>());
    });
}

// Likewise of kernels that go element by element.
template <typename Kernel, typename... Arrays>
void parallel_stored_elements(const char *op, int64_t count, cuda_ops_dtype dtype, const Kernel &kernel,
                              const Arrays &...arrays)
{
    parallel_stored_rows(op, count, 1, ELEMENTWISE_GRAIN, dtype, kernel, arrays...);
}

} // namespace cuda_ops
