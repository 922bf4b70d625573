// adaptive_avg_pool2d, adaptive_max_pool2d: the mean or the largest element of windows that follow from the sizes
// (cuda_ops/adaptive_pool2d.h); backward gathers from the windows over each position, in a fixed order.
// Planes, forward: `lanes` neighbouring threads have a window and go down its rows, so that what a warp loads lies side
// by side; windows as wide as the plane are one run, of 16-byte vectors where these are whole or many. Of means of small
// planes, where they are many or no whole vectors (7x7, 15x15), a block has several in shared memory. channels_last: a
// thread has 16 bytes of channels of a window, or of its every `lanes`-th row. Backward: four columns of a plane, or 16
// bytes of channels, a thread. Means of few and large planes are the reduction's (reduction/), which cuts them. Bound by
// memory: one read of the larger of input and output, and one write.
#include "cuda_ops/adaptive_pool2d.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/device.h"
#include "common/group_sums.cuh"
#include "common/wide_division.cuh"
#include "cuda_ops/reduction.h"
#include "ptx/cp_async.cuh"

static constexpr int THREADS = 256;
static constexpr int COLUMNS = 4;   // of a thread in backward
static constexpr int IN_FLIGHT = 4; // loads of a thread that goes down a run
static constexpr int WARPS = THREADS / WARP_SIZE;
// Planes of a block that keeps them in shared memory: their number, a multiple of any dtype's vectors, and their bytes;
// and the bytes of one.
static constexpr int FEWEST_KEPT = 8;
static constexpr int KEPT_BYTES = 16 << 10;
static constexpr int64_t LARGEST_KEPT = 2 << 10;
static constexpr int64_t KEPT_BLOCKS = 132 * 2;            // of large GPUs
static constexpr int64_t MANY_KEPT_BYTES = 132 * 32 << 10; // of all planes: several rounds of large GPUs' blocks
static constexpr int64_t LARGE_PLANE = 1 << 14;
static constexpr int64_t LONG_RUN = 64; // vectors
static constexpr int MOST_LANES_OF_CHANNELS = 16;
static constexpr int SCATTERED_WINDOWS = 16;        // positions from which on maxima's gradients are scattered
static constexpr int64_t BACKWARD_BLOCKS = 132 * 8; // of large GPUs
static constexpr int MOST_TABLE_BYTES = 16 << 10;
static constexpr int64_t ENOUGH_THREADS = 1 << 18; // for all multiprocessors, about
// Windows of channels are shared by more, so that blocks come in many rounds: the last one leaves multiprocessors idle.
// Where there are fewer than a round or two, more than four threads a window would add up longer than they load.
static constexpr int64_t ENOUGH_THREADS_OF_CHANNELS = 1 << 20, MANY_WINDOWS = 1 << 16, THREADS_OF_A_ROUND = 80 << 10;
static constexpr int FEW_LANES = 4;

struct Axis {
    int input, output;
    Divider by_input, by_output;
};

static Axis axis_of(cuda_ops_adaptive_axis axis)
{
    return {axis.input, axis.output, divider_by((uint32_t)axis.input), divider_by((uint32_t)axis.output)};
}

// Windows and positions as in the header, without divisions. [begin, end) is the window's positions, or the windows over
// positions first ... last.
__device__ __forceinline__ void window_of(const Axis &axis, int window, int *begin, int *end)
{
    const int64_t at = (int64_t)window * axis.input;
    *begin = (int)divided(at, axis.output, axis.by_output);
    *end = (int)divided(at + axis.input + axis.output - 1, axis.output, axis.by_output);
}

__device__ __forceinline__ void windows_over(const Axis &axis, int first, int last, int *begin, int *end)
{
    *begin = (int)divided((int64_t)first * axis.output, axis.input, axis.by_input);
    *end = (int)divided(((int64_t)last + 1) * axis.output + axis.input - 1, axis.input, axis.by_input);
}

struct AdaptivePlan {
    Axis height, width;
    int64_t units; // windows, or vectors of channels of one; backward: groups of columns, or vectors of channels
    int lanes;     // threads of a unit, forward
    int column;    // vectors of channels in a pixel; groups of columns in a row
    Divider by_column;
    bool tables; // of backward, in shared memory
};

// What a window gives: its sum, or its largest element and where that is.
template <typename A, bool MAX>
struct Pooled {
    A value;
    int index;

    __device__ __forceinline__ explicit Pooled(int first = 0) : value(MAX ? A(-INFINITY) : A(0)), index(first)
    {
    }

    // Elements come in their order.
    __device__ __forceinline__ void add(A element, int at)
    {
        if (!MAX) {
            value += element;
        } else if (element > value || element != element) {
            value = element;
            index = at;
        }
    }

    __device__ __forceinline__ void merge(A other, int at)
    {
        if (!MAX) {
            value += other;
            return;
        }
        const bool nan = value != value, other_nan = other != other;
        if (nan || other_nan ? other_nan && (!nan || at > index) : other > value || (other == value && at < index)) {
            value = other;
            index = at;
        }
    }
};

// Calls add(run[k], k) for k = lane, lane + lanes, ... below `count`, in this order, IN_FLIGHT loads at a time: also the
// last ones, which are all that there are of a short run.
template <typename V, typename Add>
__device__ __forceinline__ void for_run(const V *run, int count, int lane, int lanes, int64_t pitch, Add add)
{
    for (uint32_t first = lane; first < (uint32_t)count; first += IN_FLIGHT * lanes) {
        V x[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + i * lanes < (uint32_t)count)
                x[i] = run[(first + i * lanes) * pitch];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++)
            if (first + i * lanes < (uint32_t)count)
                add(x[i], (int)(first + i * lanes));
    }
}

template <typename T, int COUNT, bool MAX>
__global__ void __launch_bounds__(THREADS) adaptive_forward_planes_kernel(T *output, int64_t *indices, const T *input,
                                                                          const __grid_constant__ AdaptivePlan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    __shared__ A values[WARPS];
    __shared__ int places[MAX ? WARPS : 1];
    const int lanes = plan.lanes, lane = threadIdx.x % lanes, slots = THREADS / lanes;
    const int pitch = plan.width.input;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < plan.units; first += (int64_t)gridDim.x * slots) {
        const int64_t unit = first + threadIdx.x / lanes;
        Pooled<A, MAX> pooled;
        int count = 1;
        if (unit < plan.units) {
            int64_t plane = unit;
            const int j = split(&plane, plan.width.output, plan.width.by_output);
            const int i = split(&plane, plan.height.output, plan.height.by_output);
            int h_begin, h_end, w_begin, w_end;
            window_of(plan.height, i, &h_begin, &h_end);
            window_of(plan.width, j, &w_begin, &w_end);
            const T *const in = input + plane * ((int64_t)plan.height.input * pitch);
            const int rows = h_end - h_begin, width = w_end - w_begin, at = h_begin * pitch + w_begin;
            count = rows * width;
            pooled = Pooled<A, MAX>(at);
            if (width == pitch) {
                // Up to the first vector, and behind the last one, by elements.
                const int past = (int)((uintptr_t)(in + at) % sizeof(V) / sizeof(T));
                const int before = past == 0 ? 0 : min(COUNT - past, count), vectors = (count - before) / COUNT;
                const int body = at + before, behind = body + vectors * COUNT;
                if (COUNT > 1)
                    for (int k = at + lane; k < body; k += lanes)
                        pooled.add(load_as_accumulate(in[k]), k);
                for_run(reinterpret_cast<const V *>(in + body), vectors, lane, lanes, 1, [&](const V &x, int k) {
#pragma unroll
                    for (int e = 0; e < COUNT; e++)
                        pooled.add(element_of(x, e), body + k * COUNT + e);
                });
                if (COUNT > 1)
                    for (int k = behind + lane; k < at + count; k += lanes)
                        pooled.add(load_as_accumulate(in[k]), k);
            } else if (width <= lanes) {
                if (lane < width)
#pragma unroll 4
                    for (int h = 0; h < rows; h++)
                        pooled.add(load_as_accumulate(in[at + h * pitch + lane]), at + h * pitch + lane);
            } else {
                for (int h = 0; h < rows; h++)
#pragma unroll 4
                    for (int w = lane; w < width; w += lanes)
                        pooled.add(load_as_accumulate(in[at + h * pitch + w]), at + h * pitch + w);
            }
        }
        for (int offset = (lanes < WARP_SIZE ? lanes : WARP_SIZE) / 2; offset > 0; offset /= 2) {
            const A other = __shfl_xor_sync(FULL_WARP, pooled.value, offset);
            pooled.merge(other, MAX ? __shfl_xor_sync(FULL_WARP, pooled.index, offset) : 0);
        }
        if (lanes > WARP_SIZE) {
            const int warp = threadIdx.x / WARP_SIZE;
            if (threadIdx.x % WARP_SIZE == 0) {
                values[warp] = pooled.value;
                if (MAX)
                    places[MAX ? warp : 0] = pooled.index;
            }
            __syncthreads();
            if (lane == 0)
                for (int other = warp + 1; other < warp + lanes / WARP_SIZE; other++)
                    pooled.merge(values[other], MAX ? places[MAX ? other : 0] : 0);
            __syncthreads(); // before the next windows overwrite these
        }
        if (lane == 0 && unit < plan.units) {
            output[unit] = store_from_accumulate<T>(MAX ? pooled.value : pooled.value / (A)count);
            if (MAX)
                indices[unit] = pooled.index;
        }
    }
}

template <typename T, int COUNT, bool MAX>
__global__ void __launch_bounds__(THREADS) adaptive_forward_channels_kernel(T *output, int64_t *indices, const T *input,
                                                                            const __grid_constant__ AdaptivePlan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    __shared__ A values[COUNT][THREADS];
    __shared__ int places[MAX ? COUNT : 1][THREADS];
    const int lanes = plan.lanes, slots = THREADS / lanes, lane = threadIdx.x / slots;
    const int pitch = plan.width.input;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < plan.units; first += (int64_t)gridDim.x * slots) {
        const int64_t unit = first + threadIdx.x % slots;
        Pooled<A, MAX> pooled[COUNT];
        int count = 1;
        if (unit < plan.units) {
            int64_t image = unit;
            const int c = split(&image, plan.column, plan.by_column);
            const int j = split(&image, plan.width.output, plan.width.by_output);
            const int i = split(&image, plan.height.output, plan.height.by_output);
            int h_begin, h_end, w_begin, w_end;
            window_of(plan.height, i, &h_begin, &h_end);
            window_of(plan.width, j, &w_begin, &w_end);
            const int rows = h_end - h_begin, width = w_end - w_begin, at = h_begin * pitch + w_begin;
            const V *const in =
                reinterpret_cast<const V *>(input) + (image * plan.height.input * pitch + at) * plan.column + c;
            count = rows * width;
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                pooled[e] = Pooled<A, MAX>(at);
            const auto add = [&](const V &x, int offset) {
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    pooled[e].add(element_of(x, e), at + offset);
            };
            if (width == pitch) {
                for_run(in, count, lane, lanes, plan.column, add);
            } else {
                for (int h = lane; h < rows; h += lanes)
#pragma unroll 4
                    for (int w = 0; w < width; w++)
                        add(in[(int64_t)(h * pitch + w) * plan.column], h * pitch + w);
            }
        }
        if (lanes > 1) {
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                values[e][threadIdx.x] = pooled[e].value;
                if (MAX)
                    places[MAX ? e : 0][threadIdx.x] = pooled[e].index;
            }
            add_groups(lane, lanes, [&](int half) {
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    const int from = threadIdx.x + half * slots;
                    pooled[e].merge(values[e][from], MAX ? places[MAX ? e : 0][from] : 0);
                    values[e][threadIdx.x] = pooled[e].value;
                    if (MAX)
                        places[MAX ? e : 0][threadIdx.x] = pooled[e].index;
                }
            });
            __syncthreads(); // before the next windows overwrite these
        }
        if (lane == 0 && unit < plan.units) {
            A results[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                results[e] = MAX ? pooled[e].value : pooled[e].value / (A)count;
                if (MAX)
                    indices[unit * COUNT + e] = pooled[e].index;
            }
            store_vector(reinterpret_cast<V *>(output) + unit, vector_of<T>(results));
        }
    }
}

// Means of whole planes of `plane` elements. A block has `count` of them at a time, whose elements are whole vectors
// together, in one of two buffers of `vectors` vectors: the next ones are on their way while THREADS / count threads
// add up each plane of these.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    adaptive_mean_kept_kernel(T *output, const T *input, int64_t planes, int plane, int count, int vectors)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    extern __shared__ __align__(16) unsigned char memory[];
    const int lanes = THREADS / count, lane = threadIdx.x % lanes, mine = threadIdx.x / lanes;
    const int64_t step = (int64_t)gridDim.x * count;
    wait_for_predecessor();
    release_successor();
    const auto here = [&](int64_t first) { return (int)(planes - first < count ? planes - first : count); };
    const auto fetch = [&](int64_t first, int buffer) {
        const int elements = here(first) * plane;
        const T *const in = input + first * plane;
        V *const kept = (V *)memory + buffer * vectors;
        for (int i = threadIdx.x; i < elements / V::size; i += THREADS) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
            cp_async_16(shared_address(kept + i), reinterpret_cast<const V *>(in) + i);
#else
            kept[i] = reinterpret_cast<const V *>(in)[i];
#endif
        }
        const int tail = elements / V::size * V::size + threadIdx.x;
        if (tail < elements)
            ((T *)kept)[tail] = in[tail];
    };
    int64_t first = (int64_t)blockIdx.x * count;
    if (first < planes)
        fetch(first, 0);
    cp_async_commit_group();
    for (int buffer = 0; first < planes; first += step, buffer ^= 1) {
        if (first + step < planes)
            fetch(first + step, buffer ^ 1);
        cp_async_commit_group();
        cp_async_wait_group<1>();
        __syncthreads();
        const T *const kept = (const T *)((const V *)memory + buffer * vectors) + mine * plane;
        const bool there = mine < here(first);
        A sum = 0;
        if (there)
#pragma unroll 4
            for (int e = lane; e < plane; e += lanes)
                sum += load_as_accumulate(kept[e]);
        for (int offset = lanes / 2; offset > 0; offset /= 2)
            sum += __shfl_xor_sync(FULL_WARP, sum, offset);
        if (lane == 0 && there)
            output[first + mine] = store_from_accumulate<T>(sum / (A)plane);
        __syncthreads(); // before the planes after the next overwrite these
    }
}

// What backward asks of an axis, in shared memory: the windows over each position, and each window's positions and the
// inverse of their number. Of axes that are too long for it, it is computed where it is asked for.
template <typename A>
struct AxisTable {
    A *inverses;
    unsigned int *over, *windows; // begin, and end in the upper half

    static int bytes(const Axis &axis)
    {
        return axis.output * (int)(sizeof(A) + sizeof(unsigned int)) + axis.input * (int)sizeof(unsigned int);
    }

    __device__ __forceinline__ void fill(const Axis &axis, unsigned char *&memory)
    {
        inverses = (A *)memory;
        windows = (unsigned int *)(inverses + axis.output);
        over = windows + axis.output;
        memory = (unsigned char *)(over + axis.input);
        int begin, end;
        for (int at = threadIdx.x; at < axis.output; at += THREADS) {
            window_of(axis, at, &begin, &end);
            windows[at] = (unsigned int)begin | (unsigned int)end << 16;
            inverses[at] = A(1) / (A)(end - begin);
        }
        for (int at = threadIdx.x; at < axis.input; at += THREADS) {
            windows_over(axis, at, at, &begin, &end);
            over[at] = (unsigned int)begin | (unsigned int)end << 16;
        }
    }
};

template <typename A>
struct Tables {
    AxisTable<A> height, width;
    bool is_filled;
    const AdaptivePlan &plan;

    // For a whole block.
    __device__ __forceinline__ Tables(const AdaptivePlan &plan, unsigned char *memory)
        : is_filled(plan.tables), plan(plan)
    {
        if (!is_filled)
            return;
        height.fill(plan.height, memory);
        memory += (sizeof(A) - (size_t)memory % sizeof(A)) % sizeof(A);
        width.fill(plan.width, memory);
        __syncthreads();
    }

    __device__ __forceinline__ void over(const Axis &axis, const AxisTable<A> &table, int first, int last, int *begin,
                                         int *end) const
    {
        if (is_filled) {
            *begin = (int)(table.over[first] & 0xffff);
            *end = (int)(table.over[last] >> 16);
        } else {
            windows_over(axis, first, last, begin, end);
        }
    }

    // The window's positions, and the inverse of their number.
    __device__ __forceinline__ A window(const Axis &axis, const AxisTable<A> &table, int at, int *begin, int *end) const
    {
        if (is_filled) {
            const unsigned int both = table.windows[at];
            *begin = (int)(both & 0xffff);
            *end = (int)(both >> 16);
            return table.inverses[at];
        }
        window_of(axis, at, begin, end);
        return A(1) / (A)(*end - *begin);
    }
};

// A group of neighbouring columns of a row each. whole_groups: rows are whole groups and so aligned, if the array is.
template <typename T, bool MAX>
__global__ void __launch_bounds__(THREADS)
    adaptive_backward_planes_kernel(T *grad_input, const T *grad_output, const int64_t *indices,
                                    const __grid_constant__ AdaptivePlan plan, bool whole_groups)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) unsigned char memory[];
    const Tables<A> tables(plan, memory);
    for (int64_t unit = global_thread_index(); unit < plan.units; unit += global_thread_count()) {
        int64_t plane = unit;
        const int w = split(&plane, plan.column, plan.by_column) * COLUMNS;
        const int h = split(&plane, plan.height.input, plan.height.by_input);
        const int left = plan.width.input - w, count = left < COLUMNS ? left : COLUMNS;
        const int64_t base = plane * ((int64_t)plan.height.output * plan.width.output);
        const int position = h * plan.width.input + w;
        int i, i_end, j_begin, j_end;
        tables.over(plan.height, tables.height, h, h, &i, &i_end);
        tables.over(plan.width, tables.width, w, w + count - 1, &j_begin, &j_end);
        A sum[COLUMNS] = {};
        for (; i < i_end; i++) {
            int begin, end;
            const A inverse = MAX ? A(0) : tables.window(plan.height, tables.height, i, &begin, &end);
            for (int j = j_begin; j < j_end; j++) {
                const int64_t window = base + i * plan.width.output + j;
                const A grad = load_as_accumulate(grad_output[window]);
                if (MAX) {
                    const int64_t column = indices[window] - position;
#pragma unroll
                    for (int e = 0; e < COLUMNS; e++)
                        if (column == e)
                            sum[e] += grad;
                } else {
                    const A share = grad * inverse * tables.window(plan.width, tables.width, j, &begin, &end);
#pragma unroll
                    for (int e = 0; e < COLUMNS; e++)
                        if (begin <= w + e && w + e < end)
                            sum[e] += share;
                }
            }
        }
        T *const out = grad_input + plane * ((int64_t)plan.height.input * plan.width.input) + position;
        if (whole_groups) {
            *reinterpret_cast<aligned_vector<T, COLUMNS> *>(out) = vector_of<T>(sum);
        } else {
#pragma unroll
            for (int e = 0; e < COLUMNS; e++)
                if (e < count)
                    out[e] = store_from_accumulate<T>(sum[e]);
        }
    }
}

template <typename T, int COUNT, bool MAX>
__global__ void __launch_bounds__(THREADS)
    adaptive_backward_channels_kernel(T *grad_input, const T *grad_output, const int64_t *indices,
                                      const __grid_constant__ AdaptivePlan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    extern __shared__ __align__(16) unsigned char memory[];
    const Tables<A> tables(plan, memory);
    for (int64_t unit = global_thread_index(); unit < plan.units; unit += global_thread_count()) {
        int64_t image = unit;
        const int c = split(&image, plan.column, plan.by_column);
        const int w = split(&image, plan.width.input, plan.width.by_input);
        const int h = split(&image, plan.height.input, plan.height.by_input);
        const int position = h * plan.width.input + w;
        int i, i_end, j_begin, j_end;
        tables.over(plan.height, tables.height, h, h, &i, &i_end);
        tables.over(plan.width, tables.width, w, w, &j_begin, &j_end);
        A sum[COUNT] = {};
        for (; i < i_end; i++) {
            int begin, end;
            const A inverse = MAX ? A(0) : tables.window(plan.height, tables.height, i, &begin, &end);
            for (int j = j_begin; j < j_end; j++) {
                const int64_t window = ((image * plan.height.output + i) * plan.width.output + j) * plan.column + c;
                const V grad = reinterpret_cast<const V *>(grad_output)[window];
                const A factor = MAX ? A(0) : inverse * tables.window(plan.width, tables.width, j, &begin, &end);
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    if (!MAX)
                        sum[e] += element_of(grad, e) * factor;
                    else if (indices[window * COUNT + e] == position)
                        sum[e] += element_of(grad, e);
            }
        }
        store_vector(reinterpret_cast<V *>(grad_input) + unit, vector_of<T>(sum));
    }
}

// The same of maxima where windows are large, and so few: the memory is zero but where an index points, and of the
// windows over that position, the first one with its index adds up all that have it. `channels`: of an image in
// channels_last, else 1.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    adaptive_scatter_kernel(T *grad_input, const T *grad_output, const int64_t *indices,
                            const __grid_constant__ AdaptivePlan plan, int channels)
{
    typedef accumulate_type<T> A;
    const int64_t inputs = (int64_t)plan.height.input * plan.width.input;
    const int64_t outputs = (int64_t)plan.height.output * plan.width.output;
    for (int64_t unit = global_thread_index(); unit < plan.units; unit += global_thread_count()) {
        const int64_t position = indices[unit];
        if (position < 0 || position >= inputs)
            continue;
        int64_t plane = unit;
        const int c = split(&plane, channels, plan.by_column);
        const int j = split(&plane, plan.width.output, plan.width.by_output);
        const int i = split(&plane, plan.height.output, plan.height.by_output);
        const int h = (int)divided(position, plan.width.input, plan.width.by_input);
        int i_begin, i_end, j_begin, j_end;
        windows_over(plan.height, h, h, &i_begin, &i_end);
        windows_over(plan.width, (int)position - h * plan.width.input, (int)position - h * plan.width.input, &j_begin,
                     &j_end);
        // An index that forward did not give may point out of its window.
        bool is_first = i_begin <= i && i < i_end && j_begin <= j && j < j_end;
        A sum = 0;
        for (int y = i_begin; is_first && y < i_end; y++)
            for (int x = j_begin; is_first && x < j_end; x++) {
                const int64_t other = (plane * outputs + y * plan.width.output + x) * channels + c;
                if (indices[other] != position)
                    continue;
                sum += load_as_accumulate(grad_output[other]);
                is_first = y > i || (y == i && x >= j);
            }
        if (is_first)
            grad_input[(plane * inputs + position) * channels + c] = store_from_accumulate<T>(sum);
    }
}

// The gradient of planes' means: every position of a plane gets the same. `plane`: positions of one.
template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS) adaptive_spread_kernel(T *grad_input, const T *grad_output, int64_t vectors,
                                                                  int64_t count, int plane, Divider by_plane)
{
    typedef accumulate_type<T> A;
    for (int64_t vector = global_thread_index(); vector < vectors; vector += global_thread_count()) {
        int64_t at = vector * COUNT;
        int position = split(&at, plane, by_plane);
        const A inverse = A(1) / (A)plane;
        A share = load_as_accumulate(grad_output[at]) * inverse, shares[COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            if (position == plane && at + 1 < count) {
                position = 0;
                at++;
                share = load_as_accumulate(grad_output[at]) * inverse;
            }
            shares[e] = share;
            position++;
        }
        if (vector * COUNT + COUNT <= count * plane) {
            store_vector(reinterpret_cast<aligned_vector<T, COUNT> *>(grad_input) + vector, vector_of<T>(shares));
        } else {
            for (int e = 0; e < COUNT; e++)
                if (vector * COUNT + e < count * plane)
                    grad_input[vector * COUNT + e] = store_from_accumulate<T>(shares[e]);
        }
    }
}

// ---- Launchers -----------------------------------------------------------------------------------------------------

static bool is_global(const cuda_ops_adaptive_pool2d *pool)
{
    return pool->height.output == 1 && pool->width.output == 1;
}

static bool is_identity(const cuda_ops_adaptive_pool2d *pool)
{
    return pool->height.output == pool->height.input && pool->width.output == pool->width.input;
}

static int64_t inputs_of(const cuda_ops_adaptive_pool2d *pool)
{
    return pool->batch * pool->channels * pool->height.input * pool->width.input;
}

static int64_t outputs_of(const cuda_ops_adaptive_pool2d *pool)
{
    return pool->batch * pool->channels * pool->height.output * pool->width.output;
}

// Global means of which there are too few for a block each, or, of large ones, for a warp.
static bool is_reduction(const cuda_ops_adaptive_pool2d *pool)
{
    const int64_t positions = (int64_t)pool->height.input * pool->width.input;
    const int lanes = pool->channels_last ? MOST_LANES_OF_CHANNELS / 4 : positions < LARGE_PLANE ? THREADS : WARP_SIZE;
    return is_global(pool) && positions >= 256 && pool->batch * pool->channels * lanes < ENOUGH_THREADS / 4;
}

// Global means of planes of which a block keeps several in shared memory: how many; 0 for none. Planes that are whole
// vectors, and so few that all are under way at once, take as long without.
template <typename T>
static int kept_planes(const cuda_ops_adaptive_pool2d *pool, const T *input)
{
    const int64_t plane = (int64_t)pool->height.input * pool->width.input, planes = pool->batch * pool->channels;
    if (!is_global(pool) || pool->channels_last || !is_aligned_16(input) || plane * (int64_t)sizeof(T) > LARGEST_KEPT ||
        (plane % vector16<T>::size == 0 && planes * plane * (int64_t)sizeof(T) < MANY_KEPT_BYTES))
        return 0;
    int count = FEWEST_KEPT;
    while (count < THREADS && count * 2 * plane * (int64_t)sizeof(T) <= KEPT_BYTES && planes >= count * 2 * KEPT_BLOCKS)
        count *= 2;
    return count;
}

static cuda_ops_reduction_sizes reduction_sizes(const cuda_ops_adaptive_pool2d *pool)
{
    const int64_t positions = (int64_t)pool->height.input * pool->width.input;
    if (pool->channels_last)
        return {1, pool->batch, positions, pool->channels};
    return {1, pool->batch * pool->channels, positions, 1};
}

static AdaptivePlan plan_of(const cuda_ops_adaptive_pool2d *pool, int64_t units, int64_t column)
{
    return {axis_of(pool->height), axis_of(pool->width), units, 1, (int)column, divider_by((uint32_t)column), false};
}

template <typename T, bool MAX>
static cuda_ops_status adaptive_forward(T *output, int64_t *indices, const T *input,
                                        const cuda_ops_adaptive_pool2d *pool, cudaStream_t stream)
{
    constexpr int SIZE = vector16<T>::size;
    const int64_t outputs = outputs_of(pool), plane = (int64_t)pool->height.input * pool->width.input;
    const bool aligned = is_aligned_16(output) && is_aligned_16(input);
    const int rows = (int)ceil_div(pool->height.input, pool->height.output);
    const int width = (int)ceil_div(pool->width.input, pool->width.output);
    if (pool->channels_last) {
        const int count = aligned && pool->channels % SIZE == 0 ? SIZE : 1;
        AdaptivePlan plan = plan_of(pool, outputs / count, pool->channels / count);
        const int64_t cut = pool->width.output == 1 ? (int64_t)rows * width : rows;
        const auto enough = [&](int lanes) {
            return lanes < FEW_LANES || plan.units >= MANY_WINDOWS ? ENOUGH_THREADS_OF_CHANNELS : THREADS_OF_A_ROUND;
        };
        while (plan.lanes < MOST_LANES_OF_CHANNELS && cut >= 8 * plan.lanes &&
               plan.units * plan.lanes < enough(plan.lanes))
            plan.lanes *= 2;
        const unsigned int grid = clamp_grid(ceil_div(plan.units, THREADS / plan.lanes));
        if (count > 1)
            launch_dependent(adaptive_forward_channels_kernel<T, SIZE, MAX>, grid, THREADS, 0, stream, output, indices,
                             input, plan);
        else
            launch_dependent(adaptive_forward_channels_kernel<T, 1, MAX>, grid, THREADS, 0, stream, output, indices,
                             input, plan);
        return launch_status();
    }
    if constexpr (!MAX) {
        const int count = kept_planes(pool, input);
        if (count > 0) {
            const auto kernel = adaptive_mean_kept_kernel<T>;
            const int vectors = (int)(count * plane / SIZE);
            const size_t bytes = 2 * (size_t)vectors * sizeof(vector16<T>);
            const int64_t blocks = ceil_div(outputs, count);
            const int64_t resident = (int64_t)current_device().multiprocessors * active_blocks(kernel, THREADS, bytes);
            launch_dependent(kernel, dim3((unsigned int)(blocks < resident ? blocks : resident)), THREADS, bytes,
                             stream, output, input, outputs, (int)plane, count, vectors);
            return launch_status();
        }
    }
    AdaptivePlan plan = plan_of(pool, outputs, 1);
    // Runs are whole vectors if planes are, and the rows that windows begin at; of others long ones are for the most part.
    const bool runs = pool->width.output == 1;
    const bool whole = aligned && plane % SIZE == 0 && (pool->height.output == 1 || pool->width.input % SIZE == 0);
    const bool vectors = runs && (whole || (int64_t)rows * width >= LONG_RUN * SIZE);
    const int64_t share = runs ? ceil_div((int64_t)rows * width, vectors ? SIZE * 4 : 4) : width <= 4 ? 1 : width;
    while (plan.lanes < share &&
           (plan.lanes < WARP_SIZE || (runs && plan.lanes < THREADS && plan.units * plan.lanes * 2 <= ENOUGH_THREADS)))
        plan.lanes *= 2;
    const unsigned int grid = clamp_grid(ceil_div(plan.units, THREADS / plan.lanes));
    if (vectors)
        launch_dependent(adaptive_forward_planes_kernel<T, SIZE, MAX>, grid, THREADS, 0, stream, output, indices, input,
                         plan);
    else
        launch_dependent(adaptive_forward_planes_kernel<T, 1, MAX>, grid, THREADS, 0, stream, output, indices, input,
                         plan);
    return launch_status();
}

// Backward's tables, where they are small: their bytes.
template <typename A>
static int plan_tables(AdaptivePlan *plan)
{
    const int most = 0xffff;
    const bool short_axes = plan->height.input <= most && plan->height.output <= most && plan->width.input <= most &&
                            plan->width.output <= most;
    const int64_t bytes = short_axes ? AxisTable<A>::bytes(plan->height) + AxisTable<A>::bytes(plan->width) + 8 : 0;
    plan->tables = short_axes && bytes <= MOST_TABLE_BYTES;
    return plan->tables ? (int)bytes : 0;
}

template <typename T, bool MAX>
static cuda_ops_status adaptive_backward(T *grad_input, const T *grad_output, const int64_t *indices,
                                         const cuda_ops_adaptive_pool2d *pool, cudaStream_t stream)
{
    constexpr int SIZE = vector16<T>::size;
    const int64_t inputs = inputs_of(pool), outputs = outputs_of(pool);
    const bool aligned = is_aligned_16(grad_input) && is_aligned_16(grad_output);
    if (MAX && inputs >= SCATTERED_WINDOWS * outputs) {
        const int channels = pool->channels_last ? (int)pool->channels : 1;
        const AdaptivePlan plan = plan_of(pool, outputs, channels);
        if (cudaMemsetAsync(grad_input, 0, (size_t)inputs * sizeof(T), stream) == cudaSuccess)
            adaptive_scatter_kernel<<<clamp_grid(ceil_div(outputs, THREADS)), THREADS, 0, stream>>>(
                grad_input, grad_output, indices, plan, channels);
        return launch_status();
    }
    if (!pool->channels_last && !MAX && is_global(pool)) {
        const int64_t planes = pool->batch * pool->channels, plane = inputs / planes;
        const int count = is_aligned_16(grad_input) ? SIZE : 1;
        const int64_t vectors = ceil_div(inputs, count);
        const unsigned int grid = clamp_grid(ceil_div(vectors, THREADS));
        const Divider by_plane = divider_by((uint32_t)plane);
        if (count > 1)
            adaptive_spread_kernel<T, SIZE>
                <<<grid, THREADS, 0, stream>>>(grad_input, grad_output, vectors, planes, (int)plane, by_plane);
        else
            adaptive_spread_kernel<T, 1>
                <<<grid, THREADS, 0, stream>>>(grad_input, grad_output, vectors, planes, (int)plane, by_plane);
        return launch_status();
    }
    const int64_t groups = ceil_div(pool->width.input, COLUMNS);
    const int count = !pool->channels_last ? COLUMNS : aligned && pool->channels % SIZE == 0 ? SIZE : 1;
    AdaptivePlan plan = pool->channels_last ? plan_of(pool, inputs / count, pool->channels / count)
                                            : plan_of(pool, inputs / pool->width.input * groups, groups);
    const int bytes = plan_tables<accumulate_type<T>>(&plan);
    // Blocks that fill their tables once, and use them for long.
    const int64_t blocks = ceil_div(plan.units, THREADS);
    const unsigned int grid = (unsigned int)(blocks < BACKWARD_BLOCKS ? blocks : BACKWARD_BLOCKS);
    if (!pool->channels_last)
        adaptive_backward_planes_kernel<T, MAX><<<grid, THREADS, bytes, stream>>>(
            grad_input, grad_output, indices, plan, aligned && pool->width.input % COLUMNS == 0);
    else if (count > 1)
        adaptive_backward_channels_kernel<T, SIZE, MAX>
            <<<grid, THREADS, bytes, stream>>>(grad_input, grad_output, indices, plan);
    else
        adaptive_backward_channels_kernel<T, 1, MAX>
            <<<grid, THREADS, bytes, stream>>>(grad_input, grad_output, indices, plan);
    return launch_status();
}

static cuda_ops_status copy(void *to, const void *from, int64_t count, cuda_ops_dtype dtype, cudaStream_t stream)
{
    cudaMemcpyAsync(to, from, (size_t)(count * dtype_size(dtype)), cudaMemcpyDeviceToDevice, stream);
    return launch_status();
}

extern "C" int64_t cuda_ops_adaptive_avg_pool2d_workspace_cuda(const cuda_ops_adaptive_pool2d *pool,
                                                               cuda_ops_dtype dtype)
{
    return is_reduction(pool) ? cuda_ops_reduction_workspace_cuda(reduction_sizes(pool), dtype) : 0;
}

extern "C" cuda_ops_status cuda_ops_adaptive_avg_pool2d_forward_cuda(void *output, void *workspace, const void *input,
                                                                     const cuda_ops_adaptive_pool2d *pool,
                                                                     cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!cuda_ops_adaptive_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (outputs_of(pool) == 0)
        return CUDA_OPS_SUCCESS;
    if (is_identity(pool))
        return copy(output, input, outputs_of(pool), dtype, stream);
    if (is_reduction(pool))
        return cuda_ops_reduction_cuda(output, workspace, input, reduction_sizes(pool), CUDA_OPS_MEAN, 0, dtype, dtype,
                                       stream);
    CUDA_OPS_DISPATCH(dtype, T,
                      return adaptive_forward<T, false>((T *)output, nullptr, (const T *)input, pool, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_adaptive_avg_pool2d_backward_cuda(void *grad_input, const void *grad_output,
                                                                      const cuda_ops_adaptive_pool2d *pool,
                                                                      cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!cuda_ops_adaptive_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (inputs_of(pool) == 0)
        return CUDA_OPS_SUCCESS;
    if (is_identity(pool))
        return copy(grad_input, grad_output, inputs_of(pool), dtype, stream);
    CUDA_OPS_DISPATCH(
        dtype, T, return adaptive_backward<T, false>((T *)grad_input, (const T *)grad_output, nullptr, pool, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_adaptive_max_pool2d_forward_cuda(void *output, int64_t *indices, const void *input,
                                                                     const cuda_ops_adaptive_pool2d *pool,
                                                                     cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!cuda_ops_adaptive_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (outputs_of(pool) == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, return adaptive_forward<T, true>((T *)output, indices, (const T *)input, pool, stream));
    return CUDA_OPS_SUCCESS;
}

extern "C" cuda_ops_status cuda_ops_adaptive_max_pool2d_backward_cuda(void *grad_input, const void *grad_output,
                                                                      const int64_t *indices,
                                                                      const cuda_ops_adaptive_pool2d *pool,
                                                                      cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!cuda_ops_adaptive_pool2d_valid(pool))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (inputs_of(pool) == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(
        dtype, T, return adaptive_backward<T, true>((T *)grad_input, (const T *)grad_output, indices, pool, stream));
    return CUDA_OPS_SUCCESS;
}
