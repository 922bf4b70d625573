// What cuda_ops.explain asks: the tables of paths for calls of given sizes, on the current device or one of which the
// facts are given. conv_bn_relu_pool's is in conv_bn_relu_pool.cpp, which knows its geometry.
#include "paths.h"

#include <ATen/Context.h>

#include <algorithm>
#include <cstring>

#include "cuda_ops/attention.h"
#include "cuda_ops/batch_norm.h"
#include "cuda_ops/conv2d.h"
#include "cuda_ops/cross_entropy.h"
#include "cuda_ops/gemm.h"
#include "cuda_ops/group_norm.h"
#include "cuda_ops/layer_norm.h"
#include "cuda_ops/linear_cross_entropy.h"
#include "cuda_ops/linear_gelu.h"
#include "cuda_ops/linear_relu.h"
#include "cuda_ops/log_softmax.h"
#include "cuda_ops/masked_softmax.h"
#include "cuda_ops/mnist_step.h"
#include "cuda_ops/softmax.h"
#include "cuda_ops/window_attention.h"

namespace cuda_ops
{

cuda_ops_dtype path_dtype(at::ScalarType type)
{
    switch (type) {
    case at::kFloat:
        return CUDA_OPS_FLOAT32;
    case at::kDouble:
        return CUDA_OPS_FLOAT64;
    case at::kHalf:
        return CUDA_OPS_FLOAT16;
    case at::kBFloat16:
        return CUDA_OPS_BFLOAT16;
    default:
        TORCH_CHECK(false, "explain: expected a floating point dtype, got ", c10::getDtypeNames(type).first);
    }
}

cuda_ops_device_facts facts_of(at::IntArrayRef device)
{
    if (device.empty()) {
        TORCH_CHECK(at::hasCUDA(), "explain: expected device to be capability, multiprocessors and bytes of shared "
                                   "memory, since there is no GPU whose they could be");
        return {};
    }
    // Far beyond any device, and products of them with sizes of tiles stay within an int.
    constexpr int64_t MOST_CAPABILITY = 9999, MOST_MULTIPROCESSORS = 1 << 16, MOST_SHARED_BYTES = 1 << 30;
    TORCH_CHECK(device.size() == 3 && device[0] > 0 && device[0] <= MOST_CAPABILITY && device[1] > 0 &&
                    device[1] <= MOST_MULTIPROCESSORS && device[2] >= 0 && device[2] <= MOST_SHARED_BYTES,
                "explain: expected device to be capability, multiprocessors and bytes of shared "
                "memory, got ",
                device);
    return {static_cast<int>(device[0]), static_cast<int>(device[1]), static_cast<int>(device[2])};
}

void throw_no_tables()
{
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "explain: this build of cuda_ops has no CUDA kernels, and so no tables of paths");
}

#ifdef CUDA_OPS_WITH_CUDA
// The number of the forced path; `name_of` gives the names of numbers below 100.
static int forced_number(const char *(*name_of)(int), const std::string &forced)
{
    for (int number = 1; number < 100 && !forced.empty(); number++)
        if (const char *const name = name_of(number); name && forced == name)
            return number;
    TORCH_CHECK_VALUE(forced.empty(), "explain: there is no path of the name ", forced);
    return 0;
}
#endif

// No tensor stands behind these sizes, whose extent would be bounded: tables round them up to tiles and multiply them.
static void check_path_sizes(const char *op, at::IntArrayRef sizes)
{
    int64_t product = 1;
    for (const int64_t size : sizes) {
        const int64_t factor = std::max<int64_t>(size, 1);
        TORCH_CHECK(size >= 0 && factor <= (INT64_C(1) << 60) / product, op,
                    ": expected sizes to be non-negative, and their product to be at most 2^60, got ", sizes);
        product *= factor;
    }
}

// sizes: as the fields of cuda_ops_conv2d_sizes; channels_last: of input, weight and output.
static cuda_ops_conv2d_sizes conv2d_sizes_of(int64_t pass, at::ScalarType type, at::IntArrayRef sizes,
                                             at::IntArrayRef channels_last, bool allow_tf32)
{
    TORCH_CHECK(sizes.size() == 17 && channels_last.size() == 3 && 0 <= pass && pass < 3,
                "conv2d_paths: expected pass to be 0 to 2, and 17 sizes and 3 formats");
    cuda_ops_conv2d_sizes s{};
    int64_t winograd = 0;
    int64_t *const fields[] = {&s.batch,          &s.groups,       &s.in_channels, &s.in_height,     &s.in_width,
                               &s.out_channels,   &s.out_height,   &s.out_width,   &s.kernel_height, &s.kernel_width,
                               &s.stride_height,  &s.stride_width, &s.padding_top, &s.padding_left,  &s.dilation_height,
                               &s.dilation_width, &winograd};
    for (size_t i = 0; i < sizes.size(); i++)
        *fields[i] = sizes[i];
    s.winograd = static_cast<int>(std::clamp<int64_t>(winograd, 0, 4));
    s.input_channels_last = channels_last[0] != 0;
    s.weight_channels_last = channels_last[1] != 0;
    s.output_channels_last = channels_last[2] != 0;
    s.allow_tf32 = allow_tf32 && type == at::kFloat;
    check_path_sizes("conv2d_paths", {s.batch, s.in_channels, s.in_height, s.in_width});
    check_path_sizes("conv2d_paths", {s.batch, s.out_channels, s.out_height, s.out_width});
    check_path_sizes("conv2d_paths", {s.in_channels, s.out_channels, s.kernel_height, s.kernel_width});
    for (const int64_t step : {s.groups, s.stride_height, s.stride_width, s.dilation_height, s.dilation_width})
        TORCH_CHECK(step >= 1 && step <= INT32_MAX,
                    "conv2d_paths: expected groups, strides and dilations to be from 1 to 2^31 - 1, got ", step);
    for (const int64_t padding : {s.padding_top, s.padding_left})
        TORCH_CHECK(padding >= -INT32_MAX && padding <= INT32_MAX,
                    "conv2d_paths: expected paddings to be from -(2^31 - 1) to 2^31 - 1, got ", padding);
    return s;
}

static PathRows conv2d_paths(int64_t pass, at::ScalarType type, at::IntArrayRef sizes, at::IntArrayRef channels_last,
                             bool allow_tf32, const std::string &forced, at::IntArrayRef device)
{
    const cuda_ops_conv2d_sizes s = conv2d_sizes_of(pass, type, sizes, channels_last, allow_tf32);
    (void)s, (void)forced, (void)device;
    return CUDA_OPS_PATHS(
        device, cuda_ops_conv2d_paths_cuda(reports, room, static_cast<cuda_ops_conv2d_pass>(pass), &s, path_dtype(type),
                                           forced_number(cuda_ops_conv2d_path_name_cuda, forced), facts));
}

// Whether the glue copies images to channels_last for the product, and the result back.
static bool conv2d_wants_channels_last(int64_t pass, at::ScalarType type, at::IntArrayRef sizes,
                                       at::IntArrayRef channels_last, bool allow_tf32, const std::string &forced,
                                       at::IntArrayRef device)
{
    const cuda_ops_conv2d_sizes s = conv2d_sizes_of(pass, type, sizes, channels_last, allow_tf32);
    const cuda_ops_device_facts facts = facts_of(device);
    (void)s, (void)forced, (void)facts;
#ifdef CUDA_OPS_WITH_CUDA
    return cuda_ops_conv2d_wants_channels_last_cuda(static_cast<cuda_ops_conv2d_pass>(pass), &s, path_dtype(type),
                                                    forced_number(cuda_ops_conv2d_path_name_cuda, forced),
                                                    device.empty() ? nullptr : &facts);
#else
    throw_no_tables();
#endif
}

// Dense operands, either of them transposed as a whole.
static PathRows gemm_paths(at::ScalarType type, int64_t m, int64_t n, int64_t k, int64_t batch, bool transpose_a,
                           bool transpose_b, bool allow_tf32, const std::string &forced, at::IntArrayRef device)
{
    check_path_sizes("gemm_paths", {m, n, k, batch});
    cuda_ops_gemm_problem p{};
    p.m = m, p.n = n, p.k = k, p.batch = batch;
    p.lda = transpose_a ? m : k, p.ldb = transpose_b ? k : n, p.ldd = n;
    p.stride_a = batch > 1 ? m * k : 0, p.stride_b = batch > 1 ? k * n : 0, p.stride_d = m * n;
    p.alpha = 1;
    p.transpose_a = transpose_a, p.transpose_b = transpose_b;
    p.dtype = p.output_dtype = p.bias_dtype = path_dtype(type);
    p.allow_tf32 = allow_tf32 && type == at::kFloat;
    (void)forced, (void)device;
    return CUDA_OPS_PATHS(device, cuda_ops_gemm_paths_cuda(reports, room, &p,
                                                           forced_number(cuda_ops_gemm_path_name_cuda, forced), facts));
}

static PathRows linear_relu_paths(bool backward, at::ScalarType type, at::ScalarType parameter_type, int64_t rows,
                                  int64_t in_features, int64_t out_features, bool allow_tf32, at::IntArrayRef device)
{
    check_path_sizes("linear_relu_paths", {rows, in_features, out_features});
    const cuda_ops_dtype dtype = path_dtype(type), parameter_dtype = path_dtype(parameter_type);
    (void)backward, (void)rows, (void)in_features, (void)out_features, (void)allow_tf32, (void)device, (void)dtype;
    (void)parameter_dtype;
    return CUDA_OPS_PATHS(device,
                          cuda_ops_linear_relu_paths_cuda(reports, room, backward, rows, in_features, out_features,
                                                          allow_tf32, dtype, parameter_dtype, facts));
}

static PathRows window_attention_paths(bool backward, at::ScalarType type, at::IntArrayRef sizes, bool grid,
                                       at::IntArrayRef device)
{
    TORCH_CHECK(sizes.size() == 9, "window_attention_paths: expected sizes to have 9 values, got ", sizes.size());
    for (const int64_t size : sizes)
        TORCH_CHECK(size >= 0, "window_attention_paths: expected sizes not to be negative, got ", sizes);
    TORCH_CHECK(sizes[5] > 0 && sizes[6] > 0, "window_attention_paths: expected windows to have pixels, got ", sizes);
    const cuda_ops_windows windows = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                                      sizes[6], sizes[7], sizes[8], grid,     1.0};
    (void)backward, (void)type, (void)device, (void)windows;
    return CUDA_OPS_PATHS(
        device, cuda_ops_window_attention_paths_cuda(reports, room, backward, &windows, path_dtype(type), facts));
}

static PathRows linear_gelu_paths(at::ScalarType type, int64_t rows, int64_t in_features, int64_t out_features,
                                  bool with_preactivation, bool allow_tf32, at::IntArrayRef device)
{
    check_path_sizes("linear_gelu_paths", {rows, in_features, out_features});
    (void)type, (void)rows, (void)in_features, (void)out_features, (void)with_preactivation, (void)allow_tf32;
    (void)device;
    return CUDA_OPS_PATHS(device,
                          cuda_ops_linear_gelu_paths_cuda(reports, room, rows, in_features, out_features,
                                                          with_preactivation, allow_tf32, path_dtype(type), facts));
}

static PathRows linear_cross_entropy_paths(at::ScalarType type, int64_t rows, int64_t in_features, int64_t classes,
                                           double label_smoothing, double z_loss, double logit_softcap,
                                           at::IntArrayRef device)
{
    check_path_sizes("linear_cross_entropy_paths", {rows, in_features, classes});
    (void)type, (void)rows, (void)in_features, (void)classes, (void)label_smoothing, (void)z_loss, (void)logit_softcap;
    (void)device;
    return CUDA_OPS_PATHS(device, cuda_ops_linear_cross_entropy_paths_cuda(reports, room, rows, in_features, classes,
                                                                           label_smoothing, z_loss, logit_softcap,
                                                                           path_dtype(type), facts));
}

static PathRows batch_norm_paths(int64_t pass, bool act, at::ScalarType type, int64_t outer, int64_t channels,
                                 int64_t inner, at::IntArrayRef device)
{
    check_path_sizes("batch_norm_paths", {outer, channels, inner});
    TORCH_CHECK(0 <= pass && pass < 4, "batch_norm_paths: expected pass to be 0 to 3, got ", pass);
    (void)act, (void)type, (void)outer, (void)channels, (void)inner, (void)device;
    return CUDA_OPS_PATHS(device,
                          cuda_ops_batch_norm_paths_cuda(reports, room, static_cast<cuda_ops_batch_norm_pass>(pass),
                                                         act, outer, channels, inner, path_dtype(type), facts));
}

static PathRows layer_norm_paths(bool backward, at::ScalarType type, int64_t rows, int64_t cols, at::IntArrayRef device)
{
    (void)backward, (void)type, (void)rows, (void)cols, (void)device;
    return CUDA_OPS_PATHS(device,
                          cuda_ops_layer_norm_paths_cuda(reports, room, backward, rows, cols, path_dtype(type), facts));
}

static PathRows group_norm_paths(at::ScalarType type, int64_t images, int64_t channels, int64_t inner, int64_t groups,
                                 bool channels_last, at::IntArrayRef device)
{
    check_path_sizes("group_norm_paths", {images, channels, inner});
    const cuda_ops_group_norm_sizes sizes = {images, channels, inner, groups, channels_last};
    (void)type, (void)sizes, (void)device;
    return CUDA_OPS_PATHS(device, cuda_ops_group_norm_paths_cuda(reports, room, sizes, path_dtype(type), facts));
}

static PathRows log_softmax_paths(bool backward, at::ScalarType type, int64_t outer, int64_t cols, int64_t inner,
                                  at::IntArrayRef device)
{
    check_path_sizes("log_softmax_paths", {outer, cols, inner});
    (void)backward, (void)type, (void)outer, (void)cols, (void)inner, (void)device;
    return CUDA_OPS_PATHS(
        device, cuda_ops_log_softmax_paths_cuda(reports, room, backward, outer, cols, inner, path_dtype(type), facts));
}

static PathRows softmax_paths(bool backward, at::ScalarType type, int64_t outer, int64_t cols, int64_t inner,
                              at::IntArrayRef device)
{
    (void)backward, (void)type, (void)outer, (void)cols, (void)inner, (void)device;
    return CUDA_OPS_PATHS(
        device, cuda_ops_softmax_paths_cuda(reports, room, backward, outer, cols, inner, path_dtype(type), facts));
}

static PathRows masked_softmax_paths(at::ScalarType type, int64_t rows, int64_t cols, at::IntArrayRef device)
{
    (void)type, (void)rows, (void)cols, (void)device;
    return CUDA_OPS_PATHS(device,
                          cuda_ops_masked_softmax_paths_cuda(reports, room, rows, cols, path_dtype(type), facts));
}

// sizes: batch, heads, key_heads, queries, keys, head_dim, value_dim; strides: of batch, head and row of query, key and
// value, those of the results being dense; window: left and right, -1 without a bound; mask: empty, or 1 for bool, 2 for
// additive and of the dtype, 3 for additive and of float32, and strides of batch, head, row and column; sequences: 0 all
// of the same lengths, 1 packed, whose rows of query and key are two more sizes, 2 those of a cache.
static PathRows attention_paths(bool backward, bool with_grad_mask, at::ScalarType type, at::IntArrayRef sizes,
                                at::IntArrayRef strides, double scale, at::IntArrayRef window, double softcap,
                                at::IntArrayRef mask, bool alibi, double dropout, int64_t sequences,
                                at::IntArrayRef device)
{
    const char *const op = "attention_paths";
    TORCH_CHECK(sizes.size() == (sequences == 1 ? 9 : 7) && strides.size() == 9 && window.size() == 2 &&
                    (mask.empty() || (mask.size() == 5 && 1 <= mask[0] && mask[0] <= 3)) && 0 <= sequences &&
                    sequences < 3,
                op,
                ": expected 7 sizes, or 9 of packed sequences, 9 strides, 2 numbers of a window, mask to be empty or 1 "
                "to 3 and 4 strides, and sequences to be 0 to 2");
    check_path_sizes(op, {sizes[0], sizes[1], sizes[3], sizes[4], std::max(sizes[5], sizes[6])});
    check_path_sizes(op, sizes.slice(5, 2));
    for (const int64_t rows : sizes.slice(7))
        check_path_sizes(op, {rows, sizes[1], std::max(sizes[5], sizes[6])});
    TORCH_CHECK(sizes[1] == 0 || (sizes[2] > 0 && sizes[1] % sizes[2] == 0), op,
                ": expected key_heads to divide heads, got ", sizes[2], " and ", sizes[1]);
    cuda_ops_attention p{};
    p.batch = sizes[0], p.heads = sizes[1], p.key_heads = sizes[2], p.queries = sizes[3], p.keys = sizes[4];
    p.head_dim = sizes[5], p.value_dim = sizes[6];
    p.query = {strides[0], strides[1], strides[2]}, p.key = {strides[3], strides[4], strides[5]};
    p.value = {strides[6], strides[7], strides[8]};
    const auto dense = [&](int64_t heads, int64_t rows, int64_t elements) {
        return cuda_ops_attention_strides{heads * rows * elements, rows * elements, elements};
    };
    p.output = p.grad_output = dense(p.heads, p.queries, p.value_dim);
    p.grad_query = dense(p.heads, p.queries, p.head_dim);
    p.grad_key = dense(p.key_heads, p.keys, p.head_dim), p.grad_value = dense(p.key_heads, p.keys, p.value_dim);
    p.scale = scale, p.softcap = softcap, p.dropout = dropout;
    TORCH_CHECK(std::max(window[0], window[1]) < INT64_C(1) << 60, op, ": expected window to be below 2^60, got ",
                window);
    p.window_left = window[0] < 0 ? CUDA_OPS_ATTENTION_UNBOUNDED : window[0];
    p.window_right = window[1] < 0 ? CUDA_OPS_ATTENTION_UNBOUNDED : window[1];
    if (!mask.empty()) {
        p.mask_kind = mask[0] == 1 ? CUDA_OPS_ATTENTION_MASK_BOOLEAN : CUDA_OPS_ATTENTION_MASK_ADDITIVE;
        p.mask_dtype = mask[0] == 2 ? path_dtype(type) : CUDA_OPS_FLOAT32;
        p.mask_batch = mask[1], p.mask_head = mask[2], p.mask_row = mask[3], p.mask_column = mask[4];
    }
    static const float slope = 0;
    p.alibi_slopes = alibi ? &slope : nullptr;
    static const int32_t length = 0;
    if (sequences == 1) {
        const auto packed = [](int64_t heads, int64_t elements) {
            return cuda_ops_attention_strides{0, elements, heads * elements};
        };
        p.sequences.query_starts = p.sequences.key_starts = &length;
        p.sequences.query_rows = sizes[7], p.sequences.key_rows = sizes[8];
        p.output = p.grad_output = packed(p.heads, p.value_dim), p.grad_query = packed(p.heads, p.head_dim);
        p.grad_key = packed(p.key_heads, p.head_dim), p.grad_value = packed(p.key_heads, p.value_dim);
    }
    if (sequences == 2)
        p.sequences.key_lengths = &length;
    (void)backward, (void)with_grad_mask, (void)type, (void)device;
    return CUDA_OPS_PATHS(
        device, cuda_ops_attention_paths_cuda(reports, room, backward, with_grad_mask, &p, path_dtype(type), facts));
}

static PathRows cross_entropy_paths(at::ScalarType type, int64_t outer, int64_t classes, int64_t inner,
                                    int64_t reduction, at::IntArrayRef device)
{
    check_path_sizes("cross_entropy_paths", {outer, classes, inner});
    (void)type, (void)outer, (void)classes, (void)inner, (void)reduction, (void)device;
    return CUDA_OPS_PATHS(device, cuda_ops_cross_entropy_paths_cuda(reports, room, outer, classes, inner,
                                                                    static_cast<cuda_ops_reduction>(reduction),
                                                                    path_dtype(type), facts));
}

static PathRows mnist_step_paths(int64_t batch, at::IntArrayRef device)
{
    check_path_sizes("mnist_step_paths", {batch});
    (void)batch, (void)device;
    return CUDA_OPS_PATHS(device, cuda_ops_mnist_step_paths_cuda(reports, room, batch, facts));
}

// CUDA_OPS_<OP>_PATH is read at an op's first call, and at the next one after this.
static void reload_paths()
{
#ifdef CUDA_OPS_WITH_CUDA
    cuda_ops_reload_paths_cuda();
#endif
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def(
        "conv2d_paths(int pass_, ScalarType dtype, int[] sizes, int[] channels_last, bool allow_tf32, str forced, "
        "int[] device)" CUDA_OPS_PATH_ROWS,
        cuda_ops::conv2d_paths);
    library.def("conv2d_wants_channels_last(int pass_, ScalarType dtype, int[] sizes, int[] channels_last, bool "
                "allow_tf32, str forced, int[] device) -> bool",
                cuda_ops::conv2d_wants_channels_last);
    library.def("gemm_paths(ScalarType dtype, int m, int n, int k, int batch, bool transpose_a, bool transpose_b, bool "
                "allow_tf32, str forced, int[] device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::gemm_paths);
    library.def("linear_relu_paths(bool backward, ScalarType dtype, ScalarType parameter_dtype, int rows, int "
                "in_features, int out_features, bool allow_tf32, int[] device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::linear_relu_paths);
    library.def("window_attention_paths(bool backward, ScalarType dtype, int[] sizes, bool grid, int[] "
                "device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::window_attention_paths);
    library.def("linear_gelu_paths(ScalarType dtype, int rows, int in_features, int out_features, bool "
                "with_preactivation, bool allow_tf32, int[] device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::linear_gelu_paths);
    library.def("linear_cross_entropy_paths(ScalarType dtype, int rows, int in_features, int classes, float "
                "label_smoothing, float z_loss, float logit_softcap, int[] device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::linear_cross_entropy_paths);
    library.def("batch_norm_paths(int pass_, bool act, ScalarType dtype, int outer, int channels, int inner, int[] "
                "device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::batch_norm_paths);
    library.def("layer_norm_paths(bool backward, ScalarType dtype, int rows, int cols, int[] "
                "device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::layer_norm_paths);
    library.def("group_norm_paths(ScalarType dtype, int images, int channels, int inner, int groups, "
                "bool channels_last, int[] device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::group_norm_paths);
    library.def("log_softmax_paths(bool backward, ScalarType dtype, int outer, int cols, int inner, int[] "
                "device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::log_softmax_paths);
    library.def("softmax_paths(bool backward, ScalarType dtype, int outer, int cols, int inner, int[] "
                "device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::softmax_paths);
    library.def("masked_softmax_paths(ScalarType dtype, int rows, int cols, int[] device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::masked_softmax_paths);
    library.def("attention_paths(bool backward, bool with_grad_mask, ScalarType dtype, int[] sizes, int[] strides, "
                "float scale, int[] window, float softcap, int[] mask, bool alibi, float dropout, int sequences, int[] "
                "device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::attention_paths);
    library.def("cross_entropy_paths(ScalarType dtype, int outer, int classes, int inner, int reduction, int[] "
                "device)" CUDA_OPS_PATH_ROWS,
                cuda_ops::cross_entropy_paths);
    library.def("mnist_step_paths(int batch, int[] device)" CUDA_OPS_PATH_ROWS, cuda_ops::mnist_step_paths);
    library.def("reload_paths() -> ()", cuda_ops::reload_paths);
}
