// group_norm forward in three kernels, for groups of any size in either format: (1) moments of parts of groups, which are
// as many as fill the device; (2) a few threads a group merge these in a fixed order, in double, and write what (3)
// multiplies with and adds: output = (input - center) * scale + offset, where center is the mean rounded to float, and
// offset corrects for that. Bound by memory: two reads, the second of them from the L2 where it holds the tensor, and one
// write.
#include "common/elementwise.cuh"
#include "common/group_sums.cuh"
#include "common/moments.cuh"
#include "common/rows.cuh"
#include "common/value.cuh"
#include "group_norm/geometry.cuh"

static constexpr int64_t ROW_SEGMENT = 8192; // elements, 32 a thread
static constexpr int COEFFICIENTS = 3;       // of each channel of each image, in arrays behind each other

// The workspace: of each part mean and sum of squares, in double; then the coefficients, with room for doubles.
static double *coefficients_behind(void *workspace, int64_t partials)
{
    return (double *)workspace + 2 * partials;
}

// Mean and squares of each segment of each row: [image][segment][group].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    group_norm_moments_of_rows_kernel(double *partials, const T *input, int64_t rows, int64_t cols, int64_t segments,
                                      int64_t groups)
{
    typedef accumulate_type<T> A;
    __shared__ double scratch[WARP_SIZE];
    wait_for_predecessor();
    release_successor();
    for (int64_t unit = blockIdx.x; unit < rows * segments; unit += gridDim.x) {
        const int64_t row = unit / segments, segment = unit % segments, begin = segment * ROW_SEGMENT;
        const int64_t count = cols - begin < ROW_SEGMENT ? cols - begin : ROW_SEGMENT;
        const T *const from[1] = {input + row * cols + begin};
        const A inverse = A(1) / (A)count;
        A sum = 0, rest = 0, squares = 0;
        for_row((T *)nullptr, from, count, threadIdx.x, THREADS, [&](int64_t, const auto &x) {
#pragma unroll
            for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++)
                sum += x[0][e] * inverse;
        });
        const A mean = (A)block_sum((double)sum, scratch);
        for_row((T *)nullptr, from, count, threadIdx.x, THREADS, [&](int64_t, const auto &x) {
#pragma unroll
            for (int e = 0; e < (int)(sizeof(x[0]) / sizeof(A)); e++) {
                const A difference = x[0][e] - mean;
                rest += difference * inverse;
                squares += difference * difference;
            }
        });
        const double off = block_sum((double)rest, scratch), square = block_sum((double)squares, scratch);
        if (threadIdx.x == 0) {
            double *const to = partials + 2 * ((row / groups * segments + segment) * groups + row % groups);
            const double least = square - off * off * (double)count;
            to[0] = (double)mean + off;
            to[1] = least < 0 ? 0 : least;
        }
    }
}

// Mean and squares of each channel of each part of an image: [image][split][channel]. Values are taken relative to one of
// their channel, so that a mean far larger than the deviation loses no digits.
template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    group_norm_moments_of_columns_kernel(double *partials, const T *input, const Columns c)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    __shared__ A means[THREADS][COUNT], squares[THREADS][COUNT], counts[THREADS];
    wait_for_predecessor();
    release_successor();
    for (int64_t block = blockIdx.x; block < c.blocks(); block += gridDim.x) {
        const ColumnPart part = column_part<COUNT>(c, block);
        const T *const from = input + part.image * c.inner * c.channels + part.channel;
        A origin[COUNT] = {}, mean[COUNT] = {}, square[COUNT] = {};
        A count = 0;
        if (part.inside) {
            const P first = *reinterpret_cast<const P *>(from);
            const P middle = *reinterpret_cast<const P *>(from + c.inner / 2 * c.channels);
            const P last = *reinterpret_cast<const P *>(from + (c.inner - 1) * c.channels);
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                origin[e] = middle_of(element_of(first, e), element_of(middle, e), element_of(last, e));
            for (int64_t pixel = part.begin + part.down; pixel < part.end; pixel += IN_FLIGHT * c.height) {
                P x[IN_FLIGHT];
#pragma unroll
                for (int i = 0; i < IN_FLIGHT; i++)
                    if (pixel + i * c.height < part.end)
                        x[i] = *reinterpret_cast<const P *>(from + (pixel + i * c.height) * c.channels);
#pragma unroll
                for (int i = 0; i < IN_FLIGHT; i++)
                    if (pixel + i * c.height < part.end) {
                        count += A(1);
                        const A share = A(1) / count;
#pragma unroll
                        for (int e = 0; e < COUNT; e++) {
                            const A value = element_of(x[i], e) - origin[e], difference = value - mean[e];
                            mean[e] += difference * share;
                            square[e] += difference * (value - mean[e]);
                        }
                    }
            }
        }
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            means[threadIdx.x][e] = mean[e], squares[threadIdx.x][e] = square[e];
        counts[threadIdx.x] = count;
        add_groups(part.down, c.height, [&](int half) {
            const int other = threadIdx.x + half * c.tile;
            const A mine = counts[threadIdx.x], theirs = counts[other], both = mine + theirs;
            const A share = both > A(0) ? theirs / both : A(0);
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                const A difference = means[other][e] - means[threadIdx.x][e];
                means[threadIdx.x][e] += difference * share;
                squares[threadIdx.x][e] += squares[other][e] + difference * difference * mine * share;
            }
            counts[threadIdx.x] = both;
        });
        if (part.down == 0 && part.inside) {
            double *const to = partials + 2 * ((part.image * c.splits + part.split) * c.channels + part.channel);
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                to[2 * e] = (double)origin[e] + (double)means[threadIdx.x][e];
                to[2 * e + 1] = (double)squares[threadIdx.x][e];
            }
        }
        __syncthreads(); // before the next part's sums overwrite these
    }
}

// How a group's moments lie: of each image `parts` parts of `group_items` each for every group. A part has `step` of
// `length` values, the last one what is left.
struct Partials {
    int64_t parts, group_items, length, step;
};

// `lanes` threads merge a group's moments, and write mean, variance and its channels' coefficients.
template <typename A>
__global__ void __launch_bounds__(THREADS)
    group_norm_prepare_kernel(double *mean, double *variance, A *coefficients, const double *partials,
                              const void *weight, const void *bias, int64_t rows, int64_t groups,
                              int64_t group_channels, const Partials p, int lanes, double eps,
                              cuda_ops_dtype parameter_dtype)
{
    __shared__ moments<double> scratch[THREADS / WARP_SIZE];
    const int lane = threadIdx.x % lanes, slots = THREADS / lanes;
    const int64_t items = p.parts * p.group_items, planes = rows * group_channels;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < rows; first += (int64_t)gridDim.x * slots) {
        const int64_t row = first + threadIdx.x / lanes, image = row / groups, group = row % groups;
        moments<double> all = {0, 0, 0};
        for (int64_t item = lane; row < rows && item < items; item += lanes) {
            const int64_t part = item / p.group_items, within = item % p.group_items;
            const int64_t left = p.length - part * p.step;
            const double *const from =
                partials + 2 * ((image * p.parts + part) * groups * p.group_items + group * p.group_items + within);
            const moments<double> one = {(double)(left < p.step ? left : p.step), from[0], from[1]};
            all = merge(all, one);
        }
        for (int offset = (lanes < WARP_SIZE ? lanes : WARP_SIZE) / 2; offset > 0; offset /= 2) {
            moments<double> other;
            other.count = __shfl_down_sync(FULL_WARP, all.count, offset);
            other.mean = __shfl_down_sync(FULL_WARP, all.mean, offset);
            other.squares = __shfl_down_sync(FULL_WARP, all.squares, offset);
            all = merge(all, other);
        }
        if (lanes > WARP_SIZE) {
            const int warp = threadIdx.x / WARP_SIZE;
            if (threadIdx.x % WARP_SIZE == 0)
                scratch[warp] = all;
            __syncthreads();
            all = scratch[0];
            for (int w = 1; w < THREADS / WARP_SIZE; w++)
                all = merge(all, scratch[w]);
            __syncthreads();
        } else { // the first lane's are the group's
            const int from = threadIdx.x % WARP_SIZE / lanes * lanes;
            all.count = __shfl_sync(FULL_WARP, all.count, from);
            all.mean = __shfl_sync(FULL_WARP, all.mean, from);
            all.squares = __shfl_sync(FULL_WARP, all.squares, from);
        }
        if (row >= rows)
            continue;
        const double biased = all.squares / all.count, rstd = 1 / sqrt(biased + eps);
        if (lane == 0) {
            mean[row] = all.mean;
            variance[row] = biased;
        }
        const A center = (A)all.mean;
        for (int64_t d = lane; d < group_channels; d += lanes) {
            const int64_t channel = group * group_channels + d, plane = row * group_channels + d;
            const double scale = (weight ? load_value(weight, parameter_dtype, channel) : 1.0) * rstd;
            const double shift = bias ? load_value(bias, parameter_dtype, channel) : 0.0;
            coefficients[plane] = center;
            coefficients[planes + plane] = (A)scale;
            coefficients[2 * planes + plane] = (A)(shift - (all.mean - (double)center) * scale);
        }
    }
}

// Contiguous: a vector may span channels.
template <typename T>
__global__ void __launch_bounds__(ELEMENTWISE_THREADS)
    group_norm_normalize_rows_kernel(T *output, const T *input, const accumulate_type<T> *coefficients, int64_t count,
                                     int64_t vectors, int64_t planes, const PlaneDivider by)
{
    typedef accumulate_type<T> A;
    const T *const inputs[1] = {input};
    wait_for_predecessor();
    release_successor();
    for_elements(output, inputs, count, vectors, [&](int64_t first, const auto &x, auto &y) {
        constexpr int SIZE = std::remove_reference_t<decltype(y)>::size;
        int64_t plane = by.of(first), next = (plane + 1) * by.length - first; // next: where the next channel begins
        A center = 0, scale = 0, offset = 0, result[SIZE];
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            if (e == 0 || e == next) {
                if (e > 0)
                    plane++, next += by.length;
                center = coefficients[plane], scale = coefficients[planes + plane];
                offset = coefficients[2 * planes + plane];
            }
            result[e] = (element_of(x[0], e) - center) * scale + offset;
        }
        y = vector_of<T>(result);
    });
}

template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    group_norm_normalize_columns_kernel(T *output, const T *input, const accumulate_type<T> *coefficients,
                                        const Columns c)
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
        A center[COUNT], scale[COUNT], offset[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            center[e] = coefficients[plane + e], scale[e] = coefficients[planes + plane + e];
            offset[e] = coefficients[2 * planes + plane + e];
        }
        for (int64_t pixel = part.begin + part.down; pixel < part.end; pixel += IN_FLIGHT * c.height) {
            P x[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (pixel + i * c.height < part.end)
                    x[i] = *reinterpret_cast<const P *>(input + start + (pixel + i * c.height) * c.channels);
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (pixel + i * c.height < part.end) {
                    A result[COUNT];
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        result[e] = (element_of(x[i], e) - center[e]) * scale[e] + offset[e];
                    store_vector(reinterpret_cast<P *>(output + start + (pixel + i * c.height) * c.channels),
                                 vector_of<T>(result));
                }
        }
    }
}

static Partials partials_of_rows(const GroupNormCall &call)
{
    return {ceil_div(call.cols(), ROW_SEGMENT), 1, call.cols(), ROW_SEGMENT};
}

static Partials partials_of_columns(const GroupNormCall &call, const Columns &c)
{
    return {c.splits, call.group_channels(), c.inner, c.step};
}

int64_t group_norm_split_workspace(const GroupNormCall &call, const Device &)
{
    int64_t most = call.rows() * partials_of_rows(call).parts;
    if (call.sizes.channels_last) {
        // Tensors that turn out not to be aligned are cut differently.
        most = 0;
        for (int count : {(int)(16 / dtype_size(call.dtype)), 1}) {
            const int64_t partials = call.sizes.images * columns_of(call.sizes, count).splits * call.sizes.channels;
            most = partials > most ? partials : most;
        }
    }
    return (2 * most + COEFFICIENTS * call.sizes.images * call.sizes.channels) * (int64_t)sizeof(double);
}

template <typename T>
static cuda_ops_status prepare(const GroupNormCall &call, accumulate_type<T> *coefficients, const Partials &p)
{
    const int64_t items = p.parts * p.group_items;
    const int lanes = lanes_for(items > call.group_channels() ? items : call.group_channels());
    launch_dependent(group_norm_prepare_kernel<accumulate_type<T>>,
                     dim3(clamp_grid(ceil_div(call.rows(), THREADS / lanes))), dim3(THREADS), 0, call.stream,
                     call.new_mean, call.new_variance, coefficients, (const double *)call.workspace, call.weight,
                     call.bias, call.rows(), call.sizes.groups, call.group_channels(), p, lanes, call.eps,
                     call.parameter_dtype);
    return launch_status();
}

template <typename T>
static cuda_ops_status by_rows(const GroupNormCall &call)
{
    typedef accumulate_type<T> A;
    const Partials p = partials_of_rows(call);
    A *const coefficients = (A *)coefficients_behind(call.workspace, call.rows() * p.parts);
    launch_dependent(group_norm_moments_of_rows_kernel<T>, dim3(clamp_grid(call.rows() * p.parts)), dim3(THREADS), 0,
                     call.stream, (double *)call.workspace, (const T *)call.input, call.rows(), call.cols(), p.parts,
                     call.sizes.groups);
    cuda_ops_status status = launch_status();
    if (status == CUDA_OPS_SUCCESS)
        status = prepare<T>(call, coefficients, p);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const int64_t count = call.rows() * call.cols();
    const int64_t vectors = vectors_of(count, (const T *)call.output, (const T *)call.input);
    launch_dependent(group_norm_normalize_rows_kernel<T>, dim3(elementwise_grid(count, vectors)),
                     dim3(ELEMENTWISE_THREADS), 0, call.stream, (T *)call.output, (const T *)call.input,
                     (const A *)coefficients, count, vectors, call.sizes.images * call.sizes.channels,
                     plane_divider(count, call.sizes.inner));
    return launch_status();
}

template <typename T, int COUNT>
static cuda_ops_status by_columns(const GroupNormCall &call)
{
    typedef accumulate_type<T> A;
    const Columns c = columns_of(call.sizes, COUNT);
    A *const coefficients = (A *)coefficients_behind(call.workspace, c.images * c.splits * c.channels);
    const dim3 grid(clamp_grid(c.blocks())), threads((unsigned int)(c.tile * c.height));
    launch_dependent(group_norm_moments_of_columns_kernel<T, COUNT>, grid, threads, 0, call.stream,
                     (double *)call.workspace, (const T *)call.input, c);
    cuda_ops_status status = launch_status();
    if (status == CUDA_OPS_SUCCESS)
        status = prepare<T>(call, coefficients, partials_of_columns(call, c));
    if (status != CUDA_OPS_SUCCESS)
        return status;
    launch_dependent(group_norm_normalize_columns_kernel<T, COUNT>, grid, threads, 0, call.stream, (T *)call.output,
                     (const T *)call.input, (const A *)coefficients, c);
    return launch_status();
}

template <typename T>
static cuda_ops_status forward(const GroupNormCall &call)
{
    if (!call.sizes.channels_last)
        return by_rows<T>(call);
    return columns_of_vectors<T>(call.sizes, call.input, call.output) ? by_columns<T, vector16<T>::size>(call)
                                                                      : by_columns<T, 1>(call);
}

cuda_ops_status group_norm_split(const GroupNormCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return forward<T>(call));
    return CUDA_OPS_INVALID_ARGUMENT;
}
