// float16 and bfloat16 on the CPU, whose kernels compute in float32 and float64. Halves are widened before a kernel and
// its results are rounded once: for kernels that go along rows by a few thousand elements at a time, so that the float32
// copies stay in the cache (parallel_rows); for products of matrices, and what else has no rows, as whole tensors
// (in_float32).
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"
#include "cuda_ops/halves_cpu.h"

#include <ATen/ops/empty_like.h>

namespace cuda_ops
{

inline bool is_half(at::ScalarType type)
{
    return type == at::kHalf || type == at::kBFloat16;
}

inline bool is_half(cuda_ops_dtype dtype)
{
    return dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16;
}

// Whether the CPU's kernels need it as float32.
inline bool is_cpu_half(const Tensor &tensor)
{
    return tensor.defined() && is_half(tensor.scalar_type()) && tensor.is_cpu();
}

// ---- Whole tensors -------------------------------------------------------------------------------------------------

// In float32 if it is a half of the CPU's, else as it is: tensors, optional ones, and everything else.
inline Tensor widened(const Tensor &tensor)
{
    return is_cpu_half(tensor) ? tensor.to(at::kFloat) : tensor;
}

inline std::optional<Tensor> widened(const std::optional<Tensor> &tensor)
{
    return tensor ? std::optional<Tensor>(widened(*tensor)) : tensor;
}

inline std::vector<Tensor> widened(at::TensorList tensors)
{
    std::vector<Tensor> result;
    for (const Tensor &tensor : tensors)
        result.push_back(widened(tensor));
    return result;
}

template <typename Argument>
const Argument &widened(const Argument &argument)
{
    return argument;
}

// The glue's `function` of widened tensors: what it returns is float32 where it would have been halves.
template <typename Result, typename... Parameters, typename... Arguments>
Result in_float32(Result (*function)(Parameters...), const Arguments &...arguments)
{
    return function(widened(arguments)...);
}

// For what a kernel writes instead of `tensor`: that itself, or as float32.
inline Tensor float32_like(const Tensor &tensor)
{
    return is_cpu_half(tensor) ? at::empty_like(tensor, tensor.options().dtype(at::kFloat)) : tensor;
}

// Copies what a kernel wrote instead of `tensor` back.
inline void round_back(const Tensor &tensor, const Tensor &computed)
{
    if (!computed.is_same(tensor))
        tensor.copy_(computed);
}

// ---- Rows ----------------------------------------------------------------------------------------------------------

// An array of a kernel's, of some elements a row: read, written, or both; converted if it is of halves. Null if it is
// not there.
struct Rows {
    char *data;
    int64_t cols, elements, element_bytes;
    cuda_ops_dtype dtype; // looked at where is_converted
    bool is_converted, is_read, is_written;

    char *row(int64_t number) const
    {
        return data + number * cols * element_bytes;
    }
    // Of the last row there may be less than the others have.
    int64_t count(int64_t first, int64_t rows) const
    {
        return std::min(rows * cols, elements - first * cols);
    }
};

namespace detail
{

inline Rows rows_of(const Tensor &tensor, int64_t cols, bool is_read, bool is_written)
{
    if (!tensor.defined())
        return {nullptr, cols, 0, 0, CUDA_OPS_FLOAT32, false, false, false};
    const at::ScalarType type = tensor.scalar_type();
    void *const data = is_written ? tensor.data_ptr() : const_cast<void *>(tensor.const_data_ptr());
    return {static_cast<char *>(data),
            cols,
            tensor.numel(),
            static_cast<int64_t>(tensor.element_size()),
            type == at::kHalf ? CUDA_OPS_FLOAT16 : CUDA_OPS_BFLOAT16,
            is_half(type),
            is_read,
            is_written};
}

} // namespace detail

inline Rows reads(const Tensor &tensor, int64_t cols = 1)
{
    return detail::rows_of(tensor, cols, true, false);
}

inline Rows writes(const Tensor &tensor, int64_t cols = 1)
{
    return detail::rows_of(tensor, cols, false, true);
}

inline Rows updates(const Tensor &tensor, int64_t cols = 1)
{
    return detail::rows_of(tensor, cols, true, true);
}

// Elements of an array that are converted at a time: a few such arrays fit into the first-level cache, and while a tile is
// computed the processor's prefetching of the next one does not run dry (of 2048 an addition took twice the time).
constexpr int64_t TILE_ELEMENTS = 512;
// Rows that are longer are converted as whole arrays, on all threads.
constexpr int64_t LONGEST_ROW = int64_t{1} << 20;

namespace detail
{

// Calls kernel(pointers..., begin, end, dtype).
template <typename Kernel, size_t... index>
cuda_ops_status call_kernel(const Kernel &kernel, const std::array<void *, sizeof...(index)> &pointers, int64_t begin,
                            int64_t end, cuda_ops_dtype dtype, std::index_sequence<index...>)
{
    return kernel(pointers[index]..., begin, end, dtype);
}

// Rows [begin, end), `tile` of them at a time. A kernel counts rows from the beginning of its arrays, and is given the
// address at which a converted array would begin if all of it were there.
template <size_t count, typename Kernel>
cuda_ops_status run_tiles(const Kernel &kernel, const std::array<Rows, count> &arrays, int64_t tile, int64_t unit,
                          int64_t begin, int64_t end)
{
    tile = std::min(tile, end - begin);
    int64_t elements = 0;
    for (const Rows &array : arrays)
        elements += array.is_converted ? array.cols * tile : 0;
    const std::unique_ptr<float[]> memory(new float[elements]);
    for (int64_t first = begin; first < end; first += tile) {
        const int64_t rows = std::min(tile, end - first);
        std::array<void *, count> pointers;
        std::array<float *, count> copies;
        float *next = memory.get();
        for (size_t i = 0; i < count; i++) {
            const Rows &array = arrays[i];
            pointers[i] = array.data;
            copies[i] = next;
            if (!array.is_converted)
                continue;
            if (array.is_read)
                cuda_ops_widen_cpu(next, array.row(first), array.count(first, rows), array.dtype);
            const uintptr_t offset = static_cast<uintptr_t>(first * array.cols) * sizeof(float);
            pointers[i] = reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(next) - offset);
            next += array.cols * tile;
        }
        const cuda_ops_status status = call_kernel(kernel, pointers, first * unit, (first + rows) * unit,
                                                   CUDA_OPS_FLOAT32, std::make_index_sequence<count>());
        if (status != CUDA_OPS_SUCCESS)
            return status;
        for (size_t i = 0; i < count; i++) {
            const Rows &array = arrays[i];
            if (array.is_converted && array.is_written)
                cuda_ops_round_cpu(array.row(first), copies[i], array.count(first, rows), array.dtype);
        }
    }
    return CUDA_OPS_SUCCESS;
}

template <typename... Arrays>
std::array<void *, sizeof...(Arrays)> pointers_of(const Arrays &...arrays)
{
    return {arrays.data...};
}

} // namespace detail

// Calls kernel(pointers..., begin, end, dtype) once, with the pointers of the arrays; of halves with these rows alone, as
// float32.
template <typename Kernel, typename... Arrays>
cuda_ops_status call_rows(cuda_ops_dtype dtype, int64_t begin, int64_t end, const Kernel &kernel,
                          const Arrays &...arrays)
{
    if (is_half(dtype))
        return detail::run_tiles(kernel, std::array<Rows, sizeof...(Arrays)>{arrays...}, end - begin, 1, begin, end);
    return detail::call_kernel(kernel, detail::pointers_of(arrays...), begin, end, dtype,
                               std::make_index_sequence<sizeof...(Arrays)>());
}

// Likewise, of halves a few rows at a time, one tile after the other.
template <typename Kernel, typename... Arrays>
cuda_ops_status call_tiles(cuda_ops_dtype dtype, int64_t begin, int64_t end, const Kernel &kernel,
                           const Arrays &...arrays)
{
    if (!is_half(dtype))
        return call_rows(dtype, begin, end, kernel, arrays...);
    const int64_t tile = std::max<int64_t>(1, TILE_ELEMENTS / std::max<int64_t>({1, arrays.cols...}));
    return detail::run_tiles(kernel, std::array<Rows, sizeof...(Arrays)>{arrays...}, tile, 1, begin, end);
}

// Calls kernel(pointers..., begin, end, dtype) over ranges of [0, count) on PyTorch's threads, as parallel_ranges does,
// with the pointers of the arrays. `unit`: the numbers of the range that make a row of the arrays. Where dtype is a
// half's, the kernel is given whole rows as float32, and must touch no others.
template <typename Kernel, typename... Arrays>
void parallel_rows(const char *op, int64_t count, int64_t unit, int64_t grain, cuda_ops_dtype dtype,
                   const Kernel &kernel, const Arrays &...given)
{
    constexpr size_t arrays_count = sizeof...(Arrays);
    const std::array<Rows, arrays_count> arrays{given...};
    const auto sequence = std::make_index_sequence<arrays_count>();
    std::array<void *, arrays_count> pointers = detail::pointers_of(given...);
    if (!is_half(dtype)) {
        parallel_ranges(op, count, grain, [&](int64_t begin, int64_t end) {
            return detail::call_kernel(kernel, pointers, begin, end, dtype, sequence);
        });
        return;
    }
    int64_t cols = 1;
    for (const Rows &array : arrays)
        cols = std::max(cols, array.cols);
    if (cols <= LONGEST_ROW) {
        const int64_t tile = std::max<int64_t>(1, TILE_ELEMENTS / cols);
        parallel_ranges(op, count / unit, std::max<int64_t>(1, grain / unit), [&](int64_t begin, int64_t end) {
            return detail::run_tiles(kernel, arrays, tile, unit, begin, end);
        });
        return;
    }
    std::array<std::unique_ptr<float[]>, arrays_count> copies;
    const auto convert = [&](bool is_output) {
        for (size_t i = 0; i < arrays_count; i++) {
            const Rows &array = arrays[i];
            if (!copies[i] || !(is_output ? array.is_written : array.is_read))
                continue;
            parallel_ranges(op, array.elements, ELEMENTWISE_GRAIN, [&](int64_t begin, int64_t end) {
                char *const halves = array.data + begin * array.element_bytes;
                return is_output ? cuda_ops_round_cpu(halves, copies[i].get() + begin, end - begin, array.dtype)
                                 : cuda_ops_widen_cpu(copies[i].get() + begin, halves, end - begin, array.dtype);
            });
        }
    };
    for (size_t i = 0; i < arrays_count; i++)
        if (arrays[i].is_converted) {
            copies[i].reset(new float[arrays[i].elements]);
            pointers[i] = copies[i].get();
        }
    convert(/*is_output=*/false);
    parallel_ranges(op, count, grain, [&](int64_t begin, int64_t end) {
        return detail::call_kernel(kernel, pointers, begin, end, CUDA_OPS_FLOAT32, sequence);
    });
    convert(/*is_output=*/true);
}

// Likewise of kernels that go element by element.
template <typename Kernel, typename... Arrays>
void parallel_elements(const char *op, int64_t count, cuda_ops_dtype dtype, const Kernel &kernel,
                       const Arrays &...arrays)
{
    parallel_rows(op, count, 1, ELEMENTWISE_GRAIN, dtype, kernel, arrays...);
}

} // namespace cuda_ops
