// What the glue of max_pool2d and avg_pool2d shares: the checks of their arguments, and the geometry for the kernels.
#pragma once

#include <ATen/core/DimVector.h>

#include <algorithm>
#include <limits>

#include "checks.h"
#include "cuda_ops/pool2d.h"
#include "halves.h"

namespace cuda_ops
{

// The arguments of both poolings; each pair is height, width.
struct PoolArguments {
    at::IntArrayRef kernel_size, stride, padding, dilation;
    bool ceil_mode;
};

// Geometry for an input of these sizes (3 or 4 of them, of which only the batch may be 0), or an error.
inline cuda_ops_pool2d make_pool2d(const char *op, at::IntArrayRef sizes, const PoolArguments &arguments,
                                   bool channels_last)
{
    const int64_t dim = static_cast<int64_t>(sizes.size());
    TORCH_CHECK(dim == 3 || dim == 4, op, ": expected input to have 3 or 4 dimensions, got shape ", sizes);
    for (int64_t d = dim - 3; d < dim; d++)
        TORCH_CHECK(sizes[d] > 0, op, ": expected input to have no empty dimension but the batch, got shape ", sizes);
    const auto check_pair = [&](const char *name, at::IntArrayRef pair, int64_t minimum) {
        TORCH_CHECK(pair.size() == 2, op, ": expected ", name, " to be an int or two ints, got ", pair);
        for (const int64_t value : pair)
            TORCH_CHECK(minimum <= value && value <= std::numeric_limits<int32_t>::max(), op, ": expected ", name,
                        " to be ", minimum == 0 ? "non-negative" : "positive", " 32-bit integers, got ", pair);
    };
    check_pair("kernel_size", arguments.kernel_size, 1);
    check_pair("stride", arguments.stride, 1);
    check_pair("padding", arguments.padding, 0);
    check_pair("dilation", arguments.dilation, 1);
    cuda_ops_pool2d pool{};
    pool.batch = dim == 4 ? sizes[0] : 1;
    pool.channels = sizes[dim - 3];
    pool.channels_last = channels_last;
    for (int axis = 0; axis < 2; axis++) {
        const int64_t kernel = arguments.kernel_size[axis], stride = arguments.stride[axis],
                      padding = arguments.padding[axis], dilation = arguments.dilation[axis],
                      input = sizes[dim - 2 + axis];
        TORCH_CHECK(padding <= kernel / 2, op, ": expected padding to be at most half of kernel_size, got padding ",
                    arguments.padding, " and kernel_size ", arguments.kernel_size);
        const int64_t output = cuda_ops_pool_output_size(input, kernel, stride, padding, dilation, arguments.ceil_mode);
        TORCH_CHECK(output > 0, op, ": expected input to have room for a window of kernel_size ", arguments.kernel_size,
                    ", padding ", arguments.padding, " and dilation ", arguments.dilation, ", got shape ", sizes);
        // Sizes beyond 32 bits are clamped; the check below refuses the result.
        const auto narrow = [](int64_t size) {
            return static_cast<int32_t>(std::min<int64_t>(size, std::numeric_limits<int32_t>::max()));
        };
        cuda_ops_pool_axis &geometry = axis == 0 ? pool.height : pool.width;
        geometry = cuda_ops_pool_axis{narrow(input),  narrow(output),  narrow(kernel),
                                      narrow(stride), narrow(padding), narrow(dilation)};
    }
    TORCH_CHECK(cuda_ops_pool2d_valid(&pool), op,
                ": expected input's planes, and the reach of a window, to have less than 2^31 positions, got shape ",
                sizes);
    return pool;
}

// Sizes like `sizes`, with another height and width.
inline at::DimVector with_plane(at::IntArrayRef sizes, int64_t height, int64_t width)
{
    at::DimVector result(sizes);
    result[result.size() - 2] = height;
    result[result.size() - 1] = width;
    return result;
}

inline at::DimVector pooled_sizes(at::IntArrayRef sizes, const cuda_ops_pool2d &pool)
{
    return with_plane(sizes, pool.height.output, pool.width.output);
}

// The input's sizes for pooled sizes, in backward; input_size is height, width.
inline at::DimVector unpooled_sizes(const char *op, const Tensor &pooled, const char *argument,
                                    at::IntArrayRef input_size)
{
    check_dim(op, argument, pooled, 3, 4);
    TORCH_CHECK(input_size.size() == 2, op, ": expected input_size to be two ints, got ", input_size);
    return with_plane(pooled.sizes(), input_size[0], input_size[1]);
}

inline void check_pooled_shape(const char *op, const char *argument, const Tensor &pooled, const cuda_ops_pool2d &pool)
{
    TORCH_CHECK(pooled.size(-2) == pool.height.output && pooled.size(-1) == pool.width.output, op, ": expected ",
                argument, " to have height ", pool.height.output, " and width ", pool.width.output, ", got shape ",
                pooled.sizes());
}

// The arrays of one call of a pooling on the CPU, as parallel_rows (halves.h) takes them: of planes, or, with
// channels_last, of whole images.
template <typename Pool>
int64_t pool2d_input(const Pool &pool)
{
    return (pool.channels_last ? pool.channels : 1) * int64_t(pool.height.input) * pool.width.input;
}

template <typename Pool>
int64_t pool2d_output(const Pool &pool)
{
    return (pool.channels_last ? pool.channels : 1) * int64_t(pool.height.output) * pool.width.output;
}

// parallel_rows over planes, or over rows of `rows` to the image with channels_last; `elements` are all that are read and
// written.
template <typename Pool, typename Kernel, typename... Arrays>
void parallel_pool2d(const char *op, const Pool &pool, int64_t rows, int64_t elements, cuda_ops_dtype dtype,
                     const Kernel &kernel, const Arrays &...arrays)
{
    const int64_t units = pool.channels_last ? pool.batch * rows : pool.batch * pool.channels;
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN * units / std::max<int64_t>(elements, 1));
    parallel_rows(op, units, pool.channels_last ? rows : 1, grain, dtype, kernel, arrays...);
}

// Calls kernel(begin, end) over the same ranges.
template <typename Pool, typename Kernel>
void parallel_pool2d(const char *op, const Pool &pool, int64_t rows, int64_t elements, const Kernel &kernel)
{
    const int64_t units = pool.channels_last ? pool.batch * rows : pool.batch * pool.channels;
    const int64_t grain = std::max<int64_t>(1, ELEMENTWISE_GRAIN * units / std::max<int64_t>(elements, 1));
    parallel_ranges(op, units, grain, kernel);
}

} // namespace cuda_ops
