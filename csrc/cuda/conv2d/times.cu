// The times that paths of conv2d are expected to take where they have no model of their own: by what they move and
// multiply, with costs fitted by least squares to 2,800 calls of one group on an H100 (benchmarks/notes/conv2d.md has how,
// and how far off they are). conv2d.cu compares them.
#include <float.h>

#include <algorithm>
#include <initializer_list>

#include "common/common.cuh"
#include "conv2d/choice.h"
#include "conv2d/patches/patches.cuh"
#include "conv2d/relayout.h"
#include "conv2d/stride_phase.h"
#include "gemm/paths.h"

static constexpr double MEGA = 1e6, GIGA = 1e9;

// A product of matrices as far as its time is concerned; `element` and `result` in bytes.
struct Product {
    int64_t m, n, k, batch, lda, ldb, ldd, element, result;
    bool shares_a; // among the products of the batch
};

// Microseconds: to start; for 1024 of k in each wave of tiles of 128 x 128, where few tiles are split; for a megabyte of
// the operands and the result, and one more for one whose rows are no whole vectors of 16 bytes; to add splits up.
struct ProductCosts {
    double start, depth, bytes, odd, splits;
};

static double microseconds_of(const Product &p, const ProductCosts &costs, ConvDevice device)
{
    const int64_t blocks = device.multiprocessors > 0 ? device.multiprocessors : 1;
    const int64_t tiles = p.batch * ceil_div(p.m, 128) * ceil_div(p.n, 128);
    const int64_t room = blocks / tiles, whole = p.k / 256, splits = room < whole ? room : whole;
    const int64_t parts = splits > 1 ? splits : 1, waves = ceil_div(tiles * parts, blocks);
    const double a = (double)(p.shares_a ? 1 : p.batch) * (double)(p.m * p.k) * (double)p.element;
    const double b = (double)p.batch * (double)(p.n * p.k) * (double)p.element;
    const double d = (double)p.batch * (double)(p.m * p.n) * (double)p.result;
    const double odd =
        (p.lda * p.element % 16 ? a : 0) + (p.ldb * p.element % 16 ? b : 0) + (p.ldd * p.result % 16 ? d : 0);
    return costs.start + costs.depth * (double)(waves * ceil_div(p.k, parts)) / 1024 +
           costs.bytes * (a + b + d) / MEGA + costs.odd * odd / MEGA + (parts > 1 ? costs.splits : 0);
}

static Product product_of(const cuda_ops_gemm_problem &p)
{
    return {p.m,
            p.n,
            p.k,
            p.batch,
            p.lda,
            p.ldb,
            p.ldd,
            dtype_size(p.dtype),
            dtype_size(p.output_dtype),
            p.batch > 1 && p.stride_a == 0};
}

// Rows of the tables by dtype: float16 and bfloat16, TF32, float32.
static int dtype_row(const ConvCall &call)
{
    return call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16 ? 0 : call.sizes.allow_tf32 ? 1 : 2;
}

static int64_t output_pixels(const cuda_ops_conv2d_sizes &s)
{
    return s.batch * s.out_height * s.out_width;
}

static double input_elements(const cuda_ops_conv2d_sizes &s)
{
    return (double)s.batch * (double)(s.in_channels * s.in_height * s.in_width);
}

double conv2d_gemm_1x1_microseconds(const ConvCall &call, ConvDevice device)
{
    static constexpr ProductCosts LAST[] = {
        {2.0, 4.5, 0.42, 0.4, 0.5}, {1.7, 9, 0.6, 0.3, 0.3}, {1.75, 1.5, 0.5, 0.3, 0.5}};
    // Of contiguous images; grad_weight has a megabyte of the images' sums besides.
    static constexpr ProductCosts INPUT[] = {{2.2, 4.6, 0.48, 0.9, 0}, {2.1, 10, 0.48, 1, 0}, {1.9, 3.5, 0.8, 0, 0.9}};
    static constexpr ProductCosts WEIGHT[] = {
        {4, 2, 0.37, 0.66, 0}, {2.3, 2.3, 0.35, 0.78, 1.6}, {2.5, 0.5, 0.66, 0.5, 0.4}};
    static constexpr double SUMS = 1.7, CUDA_CORES = 45; // thousand millions of multiply-adds
    const int row = dtype_row(call);
    const bool by_image = conv2d_gemm_1x1_is_by_image(call.sizes);
    const bool weight = call.pass == CUDA_OPS_CONV2D_BACKWARD_WEIGHT;
    const Product product = product_of(conv2d_gemm_1x1_problem(call));
    const double results = (double)product.batch * (double)(product.m * product.n);
    double time = microseconds_of(product, by_image ? (weight ? WEIGHT : INPUT)[row] : LAST[row], device);
    if (by_image && weight && product.batch > 1)
        time += SUMS * results * (double)product.result / MEGA;
    return row == 2 ? time + CUDA_CORES * results * (double)product.k / GIGA : time;
}

// Copies, and a product by gemm. Of the gradient of input where patches share pixels, rectangles.cu has the time.
double conv2d_patches_microseconds(const ConvCall &call, ConvDevice device)
{
    if (conv2d_patches_share_pixels(call))
        return conv2d_rectangles_microseconds(call, device);
    struct Costs {
        ProductCosts product;
        double copied; // a megabyte of the input, and of patches, where runs of one element are copied
    };
    // By pass, and whether images are contiguous.
    static constexpr Costs COSTS[3][2] = {
        {{{3.56, 4.39, 0.68, 0.47, 0.04}, 0.19}, {{4.89, 3.20, 0.24, 1.10, 0.97}, 1.27}},
        {{{4.49, 0.51, 0.38, 0.09, 0.81}, 0.45}, {{5.50, 3.69, 0.00, 1.21, 1.07}, 2.68}},
        {{{4.31, 0.61, 0.82, 0.29, 0.97}, 0.33}, {{6.17, 5.42, 1.08, 0.74, 1.84}, 0.55}},
    };
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const Patches p = conv2d_patches_of(call);
    const Costs &costs = COSTS[call.pass][p.output_last ? 0 : 1];
    const double patches = 2 * (double)output_pixels(s) * p.pitch / conv2d_patches_run(p, nullptr);
    return microseconds_of(product_of(conv2d_patches_problem(call)), costs.product, device) +
           costs.copied * (patches + 2 * input_elements(s)) / MEGA;
}

// Copies, and a product on CUDA cores but for 16 bits.
double conv2d_im2col_microseconds(const ConvCall &call, ConvDevice device)
{
    struct Costs {
        ProductCosts product;
        double read, columns, products; // megabytes; thousand millions of multiply-adds
    };
    static constexpr Costs HALVES = {{3.92, 0.00, 0.78, 1.00, 0.14}, 0.13, 0.54, 0.4};
    static constexpr Costs FLOAT32[3] = {{{3.18, 2.19, 0.47, 1.10, 0.54}, 0.11, 0.47, 43.6},
                                         {{3.28, 1.40, 0.38, 0.64, 0.00}, 0.11, 0.38, 55.9},
                                         {{2.99, 1.52, 0.55, 1.18, 1.13}, 0.10, 0.43, 44.5}};
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const Costs &costs = dtype_row(call) == 0 ? HALVES : FLOAT32[call.pass];
    const double taps = (double)(s.kernel_height * s.kernel_width);
    const double columns = (double)output_pixels(s) * taps * (double)s.in_channels;
    // A thread of grad_input goes through all taps.
    const double read = input_elements(s) * (call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT ? taps : 1);
    return microseconds_of(product_of(conv2d_im2col_problem(call)), costs.product, device) +
           4 * (costs.read * read + costs.columns * columns) / MEGA +
           costs.products * columns * (double)s.out_channels / GIGA;
}

// The costs of conv2d_few_channels_terms, in microseconds, by pass and dtype.
static constexpr double LEAST_FEW = 1.5;
// clang-format off
static constexpr double FEW_COSTS[3][3][CONV_FEW_TERMS] = {
    {{5.084, 0, 0.1992, 0.4076, 0, 4.504, 3.486},
     {2.306, 1.242, 0.3479, 0, 0, 15.89, 2.175},
     {5.101, 0.3356, 1.739, 0, 0, 19.74, 1.942}},
    {{3.695, 0.7443, 0, 0, 0.7607, 7.234, 17.98},
     {2.476, 1.929, 0, 0, 0.59, 13.22, 40.63},
     {13.25, 0, 0, 0, 0.9723, 26.22, 253.1}},
    {{6.797, 1.837, 1.091, 1.656, 0, 0, 4.483},
     {2.675, 3.199, 0.7061, 7.915, 0, 0, 6.405},
     {5.028, 4.205, 1.338, 8.037, 0, 40.09, 1.7}},
};
// clang-format on

void conv2d_few_channels_terms(double (&terms)[CONV_FEW_TERMS], const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const int64_t size = dtype_size(call.dtype), step = size == 2 ? 16 : 8, blocks = device.multiprocessors;
    const int64_t c = s.in_channels, o = s.out_channels, filter = c * s.kernel_height * s.kernel_width;
    const int64_t in_plane = s.in_height * s.in_width, out_plane = s.out_height * s.out_width;
    const double in_bytes = (double)(s.batch * in_plane * c * size) / MEGA;
    const double out_bytes = (double)(s.batch * out_plane * o * size) / MEGA;
    const auto set = [&](std::initializer_list<double> values) { std::copy(values.begin(), values.end(), terms); };
    if (call.pass == CUDA_OPS_CONV2D_FORWARD) {
        const int64_t k = ceil_div(filter, step) * step, slices = ceil_div(o, 32);
        const double waves = (double)ceil_div(s.batch * ceil_div(out_plane, 256) * slices, 2 * blocks);
        set({1, waves, waves * (double)k / 16, out_bytes, (double)(s.batch * out_plane * slices * 32 * k) / GIGA,
             (double)(o * filter) / 1e4, in_bytes});
    } else if (call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT) {
        const int64_t outs = ceil_div(o, 16) * 16, taps = s.kernel_height * s.kernel_width;
        const double waves = (double)ceil_div(s.batch * ceil_div(in_plane, 256), blocks);
        set({1, waves, waves * (double)outs / 64, waves * (double)(outs * taps) / 1e3, out_bytes,
             (double)(s.batch * in_plane * outs * filter) / GIGA, (double)(o * filter) / 1e4});
    } else {
        const bool small = filter <= 64;
        const int64_t tiles = s.batch * ceil_div(out_plane, 256), room = small ? 2 * blocks : blocks;
        const int64_t parts = ceil_div(filter, small ? 64 : 160), across = ceil_div(o, small ? 32 : 64) * parts;
        const int64_t resident = ceil_div(room, across), splits = tiles < resident ? tiles : resident;
        const double each = (double)(ceil_div(tiles, splits) * ceil_div(splits * across, room));
        set({1, each, each * (double)ceil_div(filter, 32), (double)(splits * o * filter) * 4 / MEGA,
             out_bytes * (double)parts, (double)(s.batch * out_plane * o * filter) / GIGA, (double)(o * filter) / 1e4});
    }
}

// Of the gradient of input with strides of 2.
static double few_channels_stride2_microseconds(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    // To start; a megabyte of grad_output, and one more where that is contiguous; thousand millions of multiply-adds of
    // whole instructions, and more where it is contiguous; a tap.
    struct Costs {
        double start, bytes, contiguous_bytes, products, contiguous_products, tap;
    };
    static constexpr Costs COSTS[] = {
        {5.3, 1.4, 3.1, 12.2, 0, 0.16}, {5.8, 1.2, 1.9, 27, 0, 0.34}, {2, 1.4, 0, 77, 5, 0.43}};
    const Costs &costs = COSTS[dtype_row(call)];
    const bool contiguous = !conv2d_is_channels_last(s.output_channels_last, s.out_channels, s.out_height, s.out_width);
    const double pixels = (double)output_pixels(s);
    const int64_t taken = s.in_channels * s.kernel_height * ceil_div(s.kernel_width, 2) * 2;
    const double products = pixels * (double)(ceil_div(taken, 16) * 16) * (double)(ceil_div(s.out_channels, 32) * 32);
    const double bytes = pixels * (double)(s.out_channels * dtype_size(call.dtype));
    return costs.start + (costs.bytes + (contiguous ? costs.contiguous_bytes : 0)) * bytes / MEGA +
           (costs.products + (contiguous ? costs.contiguous_products : 0)) * products / GIGA +
           costs.tap * (double)(s.kernel_height * s.kernel_width);
}

// Tiles of 256 pixels, and what each goes through: of forward and the gradient of input output channels in slices, of the
// gradient of the weight so many pixels a block, of whose sums another kernel makes one. The gradient of input under
// strides of 2 has a model of its own, and of others none.
double conv2d_few_channels_microseconds(const ConvCall &call, ConvDevice device)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool input = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT, is_strided = s.stride_height * s.stride_width > 1;
    if (input && is_strided)
        return s.stride_height == 2 && s.stride_width == 2 ? few_channels_stride2_microseconds(call) : DBL_MAX;
    double terms[CONV_FEW_TERMS], time = 0;
    conv2d_few_channels_terms(terms, call, device);
    for (int i = 0; i < CONV_FEW_TERMS; i++)
        time += FEW_COSTS[call.pass][dtype_row(call)][i] * terms[i];
    return time > LEAST_FEW ? time : LEAST_FEW;
}

// simt's own model is of its products; what it moves shows beside them, the more where stride phases are of different
// lengths.
double conv2d_simt_expected_microseconds(const ConvCall &call, ConvDevice device)
{
    static constexpr double SLOWER = 1.1, PHASES_SLOWER = 1.54, BYTES = 0.3;
    const cuda_ops_conv2d_sizes &s = call.sizes;
    const bool phases = call.pass == CUDA_OPS_CONV2D_BACKWARD_INPUT && s.stride_height * s.stride_width > 1;
    const double elements = input_elements(s) + (double)output_pixels(s) * (double)s.out_channels;
    return (phases ? PHASES_SLOWER : SLOWER) * conv2d_simt_microseconds(call, device) +
           BYTES * elements * (double)dtype_size(call.dtype) / MEGA;
}

// Of what its own model says, which is of an H100.
double conv2d_winograd_expected_microseconds(const ConvCall &call, ConvDevice device)
{
    static constexpr double SHARE[3] = {0.9, 0.95, 0.75};
    return SHARE[call.pass] * conv2d_winograd_microseconds(call, device);
}
