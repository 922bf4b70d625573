// histc and bincount for PyTorch: checks, ranges, allocation and the choice of backend.
#include "cuda_ops/histogram.h"

#include <ATen/Parallel.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "checks.h"
#include "empty.h"
#include "halves.h"
#include "loss.h"

namespace cuda_ops
{

// Counts on the CPU: each thread its own, unless these are more than the elements; count(counts, begin, end).
template <typename Count>
static Tensor count_cpu(const char *op, int64_t elements, int64_t bins, const Count &count)
{
    Tensor counts = at::zeros({bins}, at::kLong);
    int64_t *const total = counts.data_ptr<int64_t>();
    std::mutex mutex;
    parallel_ranges(op, elements, std::max(ELEMENTWISE_GRAIN, bins), [&](int64_t begin, int64_t end) {
        std::vector<int64_t> own(bins);
        const cuda_ops_status status = count(own.data(), begin, end);
        const std::lock_guard<std::mutex> lock(mutex); // integers: the same in any order
        for (int64_t bin = 0; bin < bins; bin++)
            total[bin] += own[bin];
        return status;
    });
    return counts;
}

static void check_bins(const char *op, const char *argument, int64_t bins, int64_t least)
{
    TORCH_CHECK(bins >= least, op, ": expected ", argument, " to be at least ", least, ", got ", bins);
    TORCH_CHECK_NOT_IMPLEMENTED(bins <= std::numeric_limits<int32_t>::max(), op, ": expected ", argument,
                                " to be less than 2^31, got ", bins);
}

// The numbers that min and max are as elements of the input: halves are compared with float32.
static double as_element(double value, const Tensor &input)
{
    return input.scalar_type() == at::kDouble ? value : static_cast<double>(static_cast<float>(value));
}

// The smallest and the largest element, by the reductions; this waits for the device.
static std::pair<double, double> range_of(const Tensor &input)
{
    using Extreme = Tensor(const Tensor &, at::IntArrayRef, bool);
    static const auto amin = registered_op<Extreme>("cuda_ops::amin_forward");
    static const auto amax = registered_op<Extreme>("cuda_ops::amax_forward");
    const Tensor range =
        at::stack({amin.call(input, {}, false), amax.call(input, {}, false)}).to(at::kCPU, at::kDouble);
    return {range.const_data_ptr<double>()[0], range.const_data_ptr<double>()[1]};
}

static Tensor histc_forward(const Tensor &input, int64_t bins, double min, double max)
{
    const char *const op = "histc";
    const cuda_ops_dtype dtype = check_dtype(op, "input", input);
    check_bins(op, "bins", bins, 1);
    double low = as_element(min, input), high = as_element(max, input);
    TORCH_CHECK(std::isfinite(low) && std::isfinite(high), op, ": expected min and max to be finite, got ", min,
                " and ", max);
    TORCH_CHECK(low <= high, op, ": expected max to be at least min, got ", min, " and ", max);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor x = dense(input);
    if (low == high && x.numel() > 0) {
        std::tie(low, high) = range_of(x);
        TORCH_CHECK(std::isfinite(low) && std::isfinite(high), op,
                    ": expected the elements to be finite where min is max, got a range from ", low, " to ", high);
    }
    if (low == high) {
        low -= 1;
        high += 1;
    }
    if (x.is_cuda()) {
        Tensor output = empty({bins}, x.options());
        const Tensor workspace = empty_workspace(x, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_histc_workspace_cuda(bins)));
        (void)dtype;
        CUDA_OPS_LAUNCH(op, cuda_ops_histc_cuda(output.data_ptr(), workspace.data_ptr(), x.const_data_ptr(), x.numel(),
                                                bins, low, high, dtype, current_stream(op)));
        return output;
    }
    return count_cpu(op, x.numel(), bins,
                     [&](int64_t *counts, int64_t begin, int64_t end) {
                         return call_rows(
                             dtype, begin, end,
                             [&](const void *from, int64_t first, int64_t last, cuda_ops_dtype type) {
                                 return cuda_ops_histc_cpu(counts, from, first, last, bins, low, high, type);
                             },
                             reads(x));
                     })
        .to(x.scalar_type());
}

// Integers as the kernels read them: uint8, int32 or int64.
static Tensor as_keys(const char *op, const Tensor &input)
{
    TORCH_CHECK(at::isIntegralType(input.scalar_type(), /*includeBool=*/false) &&
                    !at::isBarebonesUnsignedType(input.scalar_type()),
                op, ": expected input to be of integers, got ", c10::getDtypeNames(input.scalar_type()).first);
    TORCH_CHECK(input.dim() == 1, op, ": expected input to have 1 dimension, got shape ", input.sizes());
    const bool is_small = input.scalar_type() == at::kShort || input.scalar_type() == at::kChar;
    return (is_small ? input.to(at::kInt) : input).contiguous();
}

// [smallest, largest] of the integers, on their device; [0, -1] of none. Of CUDA's the smallest of non-negative ones is 0,
// and the largest of negative ones -1.
static Tensor bincount_range(const Tensor &input)
{
    const char *const op = "bincount";
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor keys = as_keys(op, input);
    const int key_bytes = static_cast<int>(keys.element_size());
    Tensor range = empty({2}, keys.options().dtype(at::kLong));
    if (keys.is_cuda()) {
        (void)key_bytes;
        CUDA_OPS_LAUNCH(op, cuda_ops_bincount_range_cuda(range.data_ptr<int64_t>(), keys.const_data_ptr(), key_bytes,
                                                         keys.numel(), current_stream(op)));
        range.select(0, 0).bitwise_not_();
        return range;
    }
    int64_t *const values = range.data_ptr<int64_t>();
    values[0] = 0;
    values[1] = -1;
    if (keys.numel() > 0)
        check_status(op, cuda_ops_bincount_range_cpu(values, keys.const_data_ptr(), key_bytes, 0, keys.numel()));
    return range;
}

// `size`: the bins. Integers that are in none of them are left out.
static Tensor bincount_forward(const Tensor &input, const std::optional<Tensor> &weights, int64_t size)
{
    const char *const op = "bincount";
    check_bins(op, "size", size, 0);
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const Tensor keys = as_keys(op, input);
    const int key_bytes = static_cast<int>(keys.element_size());
    Tensor w;
    if (weights) {
        check_same_device(op, "weights", *weights, "input", input);
        TORCH_CHECK(weights->sizes() == input.sizes(), op, ": expected weights to have the shape of input, ",
                    input.sizes(), ", got ", weights->sizes());
        // As in PyTorch: all others are added up in float64.
        w = weights->scalar_type() == at::kFloat ? weights->contiguous() : weights->to(at::kDouble).contiguous();
    }
    if (!w.defined()) {
        if (!keys.is_cuda())
            return count_cpu(op, keys.numel(), size, [&](int64_t *counts, int64_t begin, int64_t end) {
                return cuda_ops_bincount_cpu(counts, keys.const_data_ptr(), key_bytes, begin, end, size);
            });
        Tensor counts = empty({size}, keys.options().dtype(at::kLong));
        CUDA_OPS_LAUNCH(op, cuda_ops_bincount_cuda(counts.data_ptr<int64_t>(), keys.const_data_ptr(), key_bytes,
                                                   keys.numel(), size, current_stream(op)));
        return counts;
    }
    const cuda_ops_dtype dtype = check_dtype(op, "weights", w);
    if (keys.is_cuda()) {
        Tensor sums = empty({size}, w.options());
        const int deterministic = at::globalContext().deterministicAlgorithms();
        const Tensor workspace = empty_workspace(w, CUDA_OPS_WORKSPACE_BYTES(cuda_ops_bincount_weights_workspace_cuda(
                                                        keys.numel(), size, dtype, deterministic)));
        (void)dtype, (void)deterministic;
        CUDA_OPS_LAUNCH(op, cuda_ops_bincount_weights_cuda(sums.data_ptr(), workspace.data_ptr(), keys.const_data_ptr(),
                                                           key_bytes, w.const_data_ptr(), keys.numel(), size, dtype,
                                                           deterministic, current_stream(op)));
        return sums;
    }
    const Tensor sums = at::zeros({size}, at::kDouble);
    check_status(op, cuda_ops_bincount_weights_cpu(sums.data_ptr<double>(), keys.const_data_ptr(), key_bytes,
                                                   w.const_data_ptr(), 0, keys.numel(), size, dtype));
    return sums.to(w.scalar_type());
}

// As in PyTorch, which has none.
static Tensor bincount_backward(const Tensor & /* grad_output */)
{
    TORCH_CHECK_NOT_IMPLEMENTED(false, "bincount: expected no gradient to be asked for: weights have none");
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("histc_forward(Tensor input, int bins, float min, float max) -> (Tensor output)");
    CUDA_OPS_IMPLEMENT(library, "histc_forward", cuda_ops::histc_forward);
    // Counts have no gradient, whatever their dtype.
    library.impl("histc_forward", c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough());
    library.def("bincount_range(Tensor input) -> (Tensor range)");
    CUDA_OPS_IMPLEMENT(library, "bincount_range", cuda_ops::bincount_range);
    library.def("bincount_forward(Tensor input, Tensor? weights, SymInt size) -> (Tensor output)");
    CUDA_OPS_IMPLEMENT(library, "bincount_forward", cuda_ops::bincount_forward);
    library.def("bincount_backward(Tensor grad_output) -> Tensor", cuda_ops::bincount_backward);
    CUDA_OPS_DERIVATIVES(library, "bincount_forward", {"weights: bincount_backward(grad_output)"});
}
