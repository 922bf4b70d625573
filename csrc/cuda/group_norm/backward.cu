// group_norm backward in either format. With xhat = (input - mean) * rstd and h = grad_output * weight:
//
//     grad_bias = sum of grad_output,  grad_weight = sum of grad_output * xhat
//     grad_input = rstd * (h - mean(h) - xhat * mean(h * xhat)),  means over the group
//
// (1) Both sums of each channel of each image, in parts that fill the device; (2) the parts added up in a fixed order, in
// double; (3) a few threads a group make of its channels' sums what (4) multiplies with: grad_input = grad_output * scale +
// (input - center) * slope + rest. grad_weight and grad_bias are sums over images of what (2) leaves. Bound by memory: two
// reads each of input and grad_output, the second from the L2 where it holds them, and one write.
#include "common/elementwise.cuh"
#include "common/group_sums.cuh"
#include "common/rows.cuh"
#include "common/value.cuh"
#include "group_norm/geometry.cuh"
#include "layer_norm/paths.h"

static constexpr int64_t SEGMENT = 2048; // elements of a channel, 64 a thread
static constexpr int COEFFICIENTS = 4;   // of each channel of each image, in arrays behind each other

// The workspace, of which every value has room for a double: [image][weight, bias][channel] totals, coefficients, and of
// each part of each channel the sums of grad_output and of grad_output * (input - center).
struct Workspace {
    void *totals, *coefficients;
    double *partials;
};

static Workspace workspace_of(const GroupNormCall &call)
{
    const int64_t planes = call.sizes.images * call.sizes.channels;
    double *const start = (double *)call.workspace;
    return {start, start + 2 * planes, start + (2 + COEFFICIENTS) * planes};
}

// Of each segment of each channel, by `lanes` threads: [image][channel][segment].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    group_norm_sums_of_rows_kernel(double *partials, const T *grad_output, const T *input, const double *mean,
                                   int64_t planes, int64_t inner, int64_t segments, int64_t group_channels, int lanes,
                                   bool vectorised)
{
    typedef accumulate_type<T> A;
    const int lane = threadIdx.x % lanes, slots = THREADS / lanes;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < planes * segments; first += (int64_t)gridDim.x * slots) {
        const int64_t unit = first + threadIdx.x / lanes;
        A sum = 0, products = 0;
        if (unit < planes * segments) {
            const int64_t plane = unit / segments, begin = unit % segments * SEGMENT;
            const int64_t count = inner - begin < SEGMENT ? inner - begin : SEGMENT;
            const T *const both[2] = {grad_output + plane * inner + begin, input + plane * inner + begin};
            const A center = (A)mean[plane / group_channels];
            if (vectorised) {
                for_row((T *)nullptr, both, count, lane, lanes, [&](int64_t, const auto &x) {
#pragma unroll
                    for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++) {
                        sum += x[0][e];
                        products += x[0][e] * (x[1][e] - center);
                    }
                });
            } else {
#pragma unroll 4
                for (int64_t i = lane; i < count; i += lanes) {
                    const A g = load_as_accumulate(both[0][i]);
                    sum += g;
                    products += g * (load_as_accumulate(both[1][i]) - center);
                }
            }
        }
        for (int offset = lanes / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
            products += __shfl_xor_sync(FULL_WARP, products, offset);
        }
        if (lane == 0 && unit < planes * segments) {
            partials[2 * unit] = (double)sum;
            partials[2 * unit + 1] = (double)products;
        }
    }
}

// Of each channel of each part of an image: [image][split][channel].
template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    group_norm_sums_of_columns_kernel(double *partials, const T *grad_output, const T *input, const double *mean,
                                      int64_t groups, int64_t group_channels, const Columns c)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    __shared__ A sums[THREADS][2 * COUNT];
    wait_for_predecessor();
    release_successor();
    for (int64_t block = blockIdx.x; block < c.blocks(); block += gridDim.x) {
        const ColumnPart part = column_part<COUNT>(c, block);
        const int64_t start = part.image * c.inner * c.channels + part.channel;
        A sum[COUNT] = {}, products[COUNT] = {};
        if (part.inside) {
            A center[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                center[e] = (A)mean[part.image * groups + (part.channel + e) / group_channels];
            for (int64_t pixel = part.begin + part.down; pixel < part.end; pixel += IN_FLIGHT * c.height) {
                P x[IN_FLIGHT], g[IN_FLIGHT];
#pragma unroll
                for (int i = 0; i < IN_FLIGHT; i++)
                    if (pixel + i * c.height < part.end) {
                        const int64_t at = start + (pixel + i * c.height) * c.channels;
                        x[i] = *reinterpret_cast<const P *>(input + at);
                        g[i] = *reinterpret_cast<const P *>(grad_output + at);
                    }
#pragma unroll
                for (int i = 0; i < IN_FLIGHT; i++)
                    if (pixel + i * c.height < part.end)
#pragma unroll
                        for (int e = 0; e < COUNT; e++) {
                            const A grad = element_of(g[i], e);
                            sum[e] += grad;
                            products[e] += grad * (element_of(x[i], e) - center[e]);
                        }
            }
        }
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            sums[threadIdx.x][2 * e] = sum[e], sums[threadIdx.x][2 * e + 1] = products[e];
        add_groups(part.down, c.height, [&](int half) {
#pragma unroll
            for (int k = 0; k < 2 * COUNT; k++)
                sums[threadIdx.x][k] += sums[threadIdx.x + half * c.tile][k];
        });
        if (part.down == 0 && part.inside) {
            double *const to = partials + 2 * ((part.image * c.splits + part.split) * c.channels + part.channel);
#pragma unroll
            for (int k = 0; k < 2 * COUNT; k++)
                to[k] = (double)sums[threadIdx.x][k];
        }
        __syncthreads(); // before the next part's sums overwrite these
    }
}

// What a channel of an image adds to grad_weight and grad_bias, of its `parts` parts, which lie `apart`; `lanes`
// threads a channel.
template <typename A>
__global__ void __launch_bounds__(THREADS)
    group_norm_channel_totals_kernel(A *totals, const double *partials, const double *mean, const double *variance,
                                     int64_t planes, int64_t channels, int64_t group_channels, int64_t parts,
                                     bool columns, int lanes, double eps)
{
    const int lane = threadIdx.x % lanes, slots = THREADS / lanes;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < planes; first += (int64_t)gridDim.x * slots) {
        const int64_t plane = first + threadIdx.x / lanes, image = plane / channels, channel = plane % channels;
        const double *const from = partials + 2 * (columns ? image * parts * channels + channel : plane * parts);
        const int64_t apart = columns ? 2 * channels : 2;
        double sum = 0, products = 0;
        for (int64_t i = lane; plane < planes && i < parts; i += lanes) {
            sum += from[i * apart];
            products += from[i * apart + 1];
        }
        for (int offset = lanes / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
            products += __shfl_xor_sync(FULL_WARP, products, offset);
        }
        if (lane == 0 && plane < planes) {
            // center is the mean rounded to float; the product is corrected for the difference.
            const int64_t row = plane / group_channels;
            const double m = mean[row], rounding = m - (double)(A)m;
            totals[2 * image * channels + channel] = (A)((products - rounding * sum) / sqrt(variance[row] + eps));
            totals[(2 * image + 1) * channels + channel] = (A)sum;
        }
    }
}

// `lanes` threads a group.
template <typename A>
__global__ void __launch_bounds__(THREADS)
    group_norm_prepare_backward_kernel(A *coefficients, const A *totals, const void *weight, const double *mean,
                                       const double *variance, int64_t rows, int64_t groups, int64_t group_channels,
                                       double count, int lanes, double eps, cuda_ops_dtype parameter_dtype)
{
    __shared__ double scratch[WARP_SIZE];
    const int lane = threadIdx.x % lanes, slots = THREADS / lanes;
    const int64_t planes = rows * group_channels, channels = groups * group_channels;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < rows; first += (int64_t)gridDim.x * slots) {
        const int64_t row = first + threadIdx.x / lanes, image = row / groups, group = row % groups;
        double sum = 0, products = 0; // of h and of h * xhat
        for (int64_t d = lane; row < rows && d < group_channels; d += lanes) {
            const int64_t channel = group * group_channels + d;
            const double w = weight ? load_value(weight, parameter_dtype, channel) : 1.0;
            products += w * (double)totals[2 * image * channels + channel];
            sum += w * (double)totals[(2 * image + 1) * channels + channel];
        }
        if (lanes > WARP_SIZE) {
            sum = block_sum(sum, scratch);
            products = block_sum(products, scratch);
        } else {
            for (int offset = lanes / 2; offset > 0; offset /= 2) {
                sum += __shfl_xor_sync(FULL_WARP, sum, offset);
                products += __shfl_xor_sync(FULL_WARP, products, offset);
            }
        }
        if (row >= rows)
            continue;
        const double m = mean[row], rstd = 1 / sqrt(variance[row] + eps);
        const A center = (A)m;
        const double tilt = -rstd * rstd * products / count;
        const A slope = (A)tilt, rest = (A)(-rstd * sum / count - tilt * (m - (double)center));
        for (int64_t d = lane; d < group_channels; d += lanes) {
            const int64_t channel = group * group_channels + d, plane = row * group_channels + d;
            const double w = weight ? load_value(weight, parameter_dtype, channel) : 1.0;
            coefficients[plane] = (A)(w * rstd);
            coefficients[planes + plane] = center;
            coefficients[2 * planes + plane] = slope;
            coefficients[3 * planes + plane] = rest;
        }
    }
}

template <typename A>
struct GradCoefficients {
    A scale, center, slope, rest;
};

template <typename A>
__device__ __forceinline__ GradCoefficients<A> load_coefficients(const A *coefficients, int64_t plane, int64_t planes)
{
    return {coefficients[plane], coefficients[planes + plane], coefficients[2 * planes + plane],
            coefficients[3 * planes + plane]};
}

// Contiguous: a vector may span channels.
template <typename T>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    group_norm_grad_input_rows_kernel(T *grad_input, const T *grad_output, const T *input,
                                      const accumulate_type<T> *coefficients, int64_t count, int64_t vectors,
                                      int64_t planes, const PlaneDivider by)
{
    typedef accumulate_type<T> A;
    const T *const inputs[2] = {grad_output, input};
    wait_for_predecessor();
    release_successor();
    for_elements(grad_input, inputs, count, vectors, [&](int64_t first, const auto &x, auto &y) {
        constexpr int SIZE = std::remove_reference_t<decltype(y)>::size;
        int64_t plane = by.of(first), next = (plane + 1) * by.length - first; // next: where the next channel begins
        GradCoefficients<A> k = load_coefficients(coefficients, plane, planes);
        A result[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            if (e == next) {
                plane++, next += by.length;
                k = load_coefficients(coefficients, plane, planes);
            }
            result[e] = element_of(x[0], e) * k.scale + (element_of(x[1], e) - k.center) * k.slope + k.rest;
        }
        y = vector_of<T>(result);
    });
}

template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    group_norm_grad_input_columns_kernel(T *grad_input, const T *grad_output, const T *input,
                                         const accumulate_type<T> *coefficients, const Columns c)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    const int64_t planes = c.images * c.channels;
    wait_for_predecessor();
    release_successor();
    for (int64_t block = blockIdx.x; block < c.blocks(); block += gridDim.x) {
        const ColumnPart part = column_part<COUNT>(c, block);
        if (!part.inside)
            continue;
        const int64_t plane = part.image * c.channels + part.channel;
        const int64_t start = part.image * c.inner * c.channels + part.channel;
        GradCoefficients<A> k[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            k[e] = load_coefficients(coefficients, plane + e, planes);
        for (int64_t pixel = part.begin + part.down; pixel < part.end; pixel += IN_FLIGHT * c.height) {
            P x[IN_FLIGHT], g[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (pixel + i * c.height < part.end) {
                    const int64_t at = start + (pixel + i * c.height) * c.channels;
                    x[i] = *reinterpret_cast<const P *>(input + at);
                    g[i] = *reinterpret_cast<const P *>(grad_output + at);
                }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (pixel + i * c.height < part.end) {
                    A result[COUNT];
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        result[e] = element_of(g[i], e) * k[e].scale +
                                    (element_of(x[i], e) - k[e].center) * k[e].slope + k[e].rest;
                    store_vector(reinterpret_cast<P *>(grad_input + start + (pixel + i * c.height) * c.channels),
                                 vector_of<T>(result));
                }
        }
    }
}

// Parts of each channel, whatever the alignment.
static int64_t most_parts(const GroupNormCall &call)
{
    if (!call.sizes.channels_last)
        return ceil_div(call.sizes.inner, SEGMENT);
    const int64_t vectors = columns_of(call.sizes, (int)(16 / dtype_size(call.dtype))).splits;
    const int64_t elements = columns_of(call.sizes, 1).splits;
    return vectors > elements ? vectors : elements;
}

int64_t group_norm_backward_workspace(const GroupNormCall &call)
{
    const int64_t planes = call.sizes.images * call.sizes.channels;
    return (2 + COEFFICIENTS + 2 * most_parts(call)) * planes * (int64_t)sizeof(double);
}

// From the parts' sums to grad_input's coefficients.
template <typename A>
static cuda_ops_status prepare(const GroupNormCall &call, const Workspace &to, int64_t parts)
{
    const int64_t planes = call.sizes.images * call.sizes.channels;
    int lanes = lanes_for(parts);
    lanes = lanes < WARP_SIZE ? lanes : WARP_SIZE;
    launch_dependent(group_norm_channel_totals_kernel<A>, dim3(clamp_grid(ceil_div(planes, THREADS / lanes))),
                     dim3(THREADS), 0, call.stream, (A *)to.totals, (const double *)to.partials, call.mean,
                     call.variance, planes, call.sizes.channels, call.group_channels(), parts,
                     call.sizes.channels_last != 0, lanes, call.eps);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !call.grad_input)
        return status;
    lanes = lanes_for(call.group_channels());
    launch_dependent(group_norm_prepare_backward_kernel<A>, dim3(clamp_grid(ceil_div(call.rows(), THREADS / lanes))),
                     dim3(THREADS), 0, call.stream, (A *)to.coefficients, (const A *)to.totals, call.weight, call.mean,
                     call.variance, call.rows(), call.sizes.groups, call.group_channels(), (double)call.cols(), lanes,
                     call.eps, call.parameter_dtype);
    return launch_status();
}

template <typename T>
static cuda_ops_status by_rows(const GroupNormCall &call, const Workspace &to)
{
    typedef accumulate_type<T> A;
    const T *const g = (const T *)call.grad_output, *const x = (const T *)call.input;
    const int64_t planes = call.sizes.images * call.sizes.channels, parts = most_parts(call);
    const int64_t longest = call.sizes.inner < SEGMENT ? call.sizes.inner : SEGMENT;
    int lanes = 1; // with eight elements each, where a channel has as many
    while (lanes < WARP_SIZE && 8 * lanes < longest)
        lanes *= 2;
    // A group of for_row has eight threads at least, for the ends of a row.
    const bool vectorised = lanes >= 8 && same_alignment(g, x);
    launch_dependent(group_norm_sums_of_rows_kernel<T>, dim3(clamp_grid(ceil_div(planes * parts, THREADS / lanes))),
                     dim3(THREADS), 0, call.stream, to.partials, g, x, call.mean, planes, call.sizes.inner, parts,
                     call.group_channels(), lanes, vectorised);
    cuda_ops_status status = launch_status();
    if (status == CUDA_OPS_SUCCESS)
        status = prepare<A>(call, to, parts);
    if (status != CUDA_OPS_SUCCESS || !call.grad_input)
        return status;
    const int64_t count = planes * call.sizes.inner, vectors = vectors_of(count, (const T *)call.grad_input, g, x);
    launch_dependent(group_norm_grad_input_rows_kernel<T>, dim3(elementwise_grid(count, vectors)),
                     dim3(ELEMENTWISE_THREADS), 0, call.stream, (T *)call.grad_input, g, x, (const A *)to.coefficients,
                     count, vectors, planes, plane_divider(count, call.sizes.inner));
    return launch_status();
}

template <typename T, int COUNT>
static cuda_ops_status by_columns(const GroupNormCall &call, const Workspace &to)
{
    typedef accumulate_type<T> A;
    const T *const g = (const T *)call.grad_output, *const x = (const T *)call.input;
    const Columns c = columns_of(call.sizes, COUNT);
    const dim3 grid(clamp_grid(c.blocks())), threads((unsigned int)(c.tile * c.height));
    launch_dependent(group_norm_sums_of_columns_kernel<T, COUNT>, grid, threads, 0, call.stream, to.partials, g, x,
                     call.mean, call.sizes.groups, call.group_channels(), c);
    cuda_ops_status status = launch_status();
    if (status == CUDA_OPS_SUCCESS)
        status = prepare<A>(call, to, c.splits);
    if (status != CUDA_OPS_SUCCESS || !call.grad_input)
        return status;
    launch_dependent(group_norm_grad_input_columns_kernel<T, COUNT>, grid, threads, 0, call.stream,
                     (T *)call.grad_input, g, x, (const A *)to.coefficients, c);
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(const GroupNormCall &call, const Workspace &to)
{
    if (!call.sizes.channels_last)
        return by_rows<T>(call, to);
    return columns_of_vectors<T>(call.sizes, call.input, call.grad_output, call.grad_input)
               ? by_columns<T, vector16<T>::size>(call, to)
               : by_columns<T, 1>(call, to);
}

cuda_ops_status group_norm_backward(const GroupNormCall &call)
{
    cuda_ops_status status = CUDA_OPS_UNSUPPORTED_DTYPE;
    CUDA_OPS_DISPATCH(call.dtype, T, status = backward<T>(call, workspace_of(call)));
    if (status != CUDA_OPS_SUCCESS || (!call.grad_weight && !call.grad_bias))
        return status;
    // An image's totals lie as layer_norm's sums of a block do, and are added up alike.
    LayerNormCall sums = {};
    sums.grad_weight = call.grad_weight, sums.grad_bias = call.grad_bias, sums.workspace = call.workspace;
    sums.cols = call.sizes.channels, sums.dtype = call.dtype, sums.parameter_dtype = call.parameter_dtype;
    sums.stream = call.stream;
    return layer_norm_sum_partials(sums, call.sizes.images, false);
}
