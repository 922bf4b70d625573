// softmax and log_softmax of rows that are read once and kept in registers, wherever they start: by 16-byte vectors,
// and the elements before a row's first whole vector and after its last one, of which a thread has one at most.
//     output = exp(input - max) / sum(exp(input - max)), and so on, as common/softmax.cuh has it
// Eight threads have a row of up to 16 vectors, half a warp of up to 32, a warp of up to 256, a block of up to 4096,
// and on Hopper a cluster of two to eight blocks one of up to 32768. Each warp makes its sum of exponentials for its
// own largest element, so that one exchange of pairs is enough: through shared memory, and between blocks by st.async,
// which waits for nothing but the pairs. Bound by memory: one read, one write forward; two reads, one write backward.
// Rows of 50257 float32 go at 86 % of a copy's speed on an H200.
#include <string.h>

#include "common/aligned_vector.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "softmax/arithmetic.cuh"
#include "softmax/paths.h"

static constexpr int ROW_BLOCK = 128;       // threads of a block at the least: several rows, or one
static constexpr int MOST_WARPS = 32;       // of a block
static constexpr int CLUSTER_THREADS = 512; // a block of a cluster has at the least

// What a row's warps and blocks exchange. Two of each, used alternately: nobody writes one again before a barrier that
// all come to after they have read it.
template <typename V>
struct RowExchange {
    alignas(16) V warps[2][MOST_WARPS];
    alignas(16) V blocks[2][MOST_CLUSTER]; // the blocks of the cluster send them here
    uint64_t arrived[2];                   // mbarriers: all of them have
};

// Once, before the first exchange between blocks.
template <typename V>
__device__ __forceinline__ void prepare_exchange(RowExchange<V> &exchange)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&exchange.arrived[0]), 1);
        mbarrier_init(shared_address(&exchange.arrived[1]), 1);
        fence_mbarrier_init();
    }
    cluster_sync_relaxed();
#endif
}

// Sends a value of 4, 8 or 16 bytes to where block `rank` of the cluster has `to`.
template <typename V>
__device__ __forceinline__ void send(const V *to, const V &value, uint32_t barrier, int rank)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const uint32_t there = mapa(shared_address(to), rank), counts = mapa(barrier, rank);
    if constexpr (sizeof(V) == 4) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        st_async(there, bits, counts);
    } else if constexpr (sizeof(V) == 8) {
        uint2 bits;
        memcpy(&bits, &value, sizeof bits);
        st_async(there, bits, counts);
    } else {
        uint4 bits;
        memcpy(&bits, &value, sizeof bits);
        st_async(there, bits, counts);
    }
#endif
}

// Of the values of a row's warps, in which all lanes have their warp's, those of all together; every thread gets the
// same bits. `turn` is 0 at first.
template <int THREADS, typename V>
__device__ __forceinline__ V combine_row(V value, V none, int cluster, RowExchange<V> &exchange, int &turn)
{
    if constexpr (THREADS > WARP_SIZE) {
        constexpr int WARPS = THREADS / WARP_SIZE;
        const int lane = threadIdx.x % WARP_SIZE, buffer = turn & 1;
        if (lane == 0)
            exchange.warps[buffer][threadIdx.x / WARP_SIZE] = value;
        __syncthreads();
        value = lanes_combine<WARPS>(exchange.warps[buffer][lane % WARPS]);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (THREADS >= CLUSTER_THREADS && cluster > 1) {
            const uint32_t arrived = shared_address(&exchange.arrived[buffer]);
            if (threadIdx.x < WARP_SIZE) {
                if (lane == 0)
                    mbarrier_arrive_expect_tx(arrived, cluster * (uint32_t)sizeof(V));
                if (lane < cluster)
                    send(&exchange.blocks[buffer][cluster_ctarank()], value, arrived, lane);
            }
            mbarrier_wait_cluster(arrived, turn >> 1);
            value = lanes_combine<MOST_CLUSTER>(
                lane % MOST_CLUSTER < cluster ? exchange.blocks[buffer][lane % MOST_CLUSTER] : none);
        }
#endif
        turn = (turn + 1) & 3; // the buffer, and the parity of its mbarrier
    }
    return value;
}

// A thread's share of a row: vectors rank, rank + stride, ... of those between the ends, and an element of an end, or
// of each where threads are too few for both; -1 for none.
template <int ENDS>
struct RowShare {
    int head, vectors, end[ENDS];
};

// How many ends' elements a thread may have.
template <typename T, int THREADS>
static constexpr int ROW_ENDS = THREADS < 2 * vector16<T>::size ? 2 : 1;

template <int ENDS, typename T>
__device__ __forceinline__ RowShare<ENDS> share_of_row(const T *row, int cols, int rank)
{
    constexpr int SIZE = vector16<T>::size;
    const row_split split = split_row(row, cols);
    RowShare<ENDS> share = {split.head, (int)split.vectors, {}};
    share.end[0] = rank < split.head ? rank : -1;
    const int behind = (int)split.tail + (ENDS == 1 ? rank - SIZE : rank);
    if (behind < cols && (ENDS == 2 || rank >= SIZE))
        share.end[ENDS - 1] = behind;
    else if (ENDS == 2)
        share.end[ENDS - 1] = -1;
    return share;
}

// Blocks that a multiprocessor is to have registers for. Left to itself the compiler takes twice as many as it needs,
// to compute more at once; of 16 bits or float64 it would spill.
template <typename T, int THREADS, int PIECES, bool BACKWARD>
static constexpr int LEAST_BLOCKS = THREADS == 512 ? 2
                                    : PIECES < 8   ? 1
                                    : BACKWARD     ? (sizeof(T) == sizeof(double) ? 1 : 5)
                                                   : (sizeof(T) == sizeof(float) ? 8 : 4);

// Rows of at most THREADS * PIECES * cluster vectors; a cluster of several blocks, of CLUSTER_THREADS at the least, has
// one. Whole warps go through the loop together, with rows past the end as rows without elements.
template <bool LOG, typename T, int THREADS, int PIECES>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS, LEAST_BLOCKS<T, THREADS, PIECES, false>)
    softmax_forward_any_row_kernel(T *output, const T *input, int64_t rows, int cols, int cluster)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> P;
    constexpr int ENDS = ROW_ENDS<T, THREADS>;
    __shared__ RowExchange<log_sum_exp<A>> exchange;
    const int blocks = THREADS < CLUSTER_THREADS ? 1 : cluster; // of a row; known to the compiler where there is one
    const int rank = threadIdx.x % THREADS + (int)(blockIdx.x % blocks) * THREADS, stride = THREADS * blocks;
    const int rows_a_block = blockDim.x / THREADS;
    const P none = vector_of_equal<T, P::size>(-A(CUDART_INF));
    const aligned_vector<T, 1> no_element = vector_of_equal<T, 1>(-A(CUDART_INF));
    int turn = 0;
    if (THREADS >= CLUSTER_THREADS && cluster > 1)
        prepare_exchange(exchange);
    wait_for_predecessor();
    release_successor();
    const int64_t step = (int64_t)(gridDim.x / blocks) * rows_a_block;
    for (int64_t first = (int64_t)(blockIdx.x / blocks) * rows_a_block; first < rows; first += step) {
        const int64_t row = first + threadIdx.x / THREADS, start = row * cols;
        const RowShare<ENDS> share = share_of_row<ENDS>(input + start, row < rows ? cols : 0, rank);
        const P *const from = reinterpret_cast<const P *>(input + start + share.head);
        P x[PIECES];
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            x[v] = load_vector_or(from + rank + v * stride, rank + v * stride < share.vectors, none);
        aligned_vector<T, 1> ends[ENDS];
#pragma unroll
        for (int i = 0; i < ENDS; i++)
            ends[i] = load_vector_or(reinterpret_cast<const aligned_vector<T, 1> *>(input + start + share.end[i]),
                                     share.end[i] >= 0, no_element);
        A maximum = -A(CUDART_INF); // passes over NaN, which the sum takes up
#pragma unroll
        for (int i = 0; i < ENDS; i++)
            maximum = fmax(maximum, element_of(ends[i], 0));
#pragma unroll
        for (int v = 0; v < PIECES; v++)
#pragma unroll
            for (int e = 0; e < P::size; e++)
                maximum = fmax(maximum, element_of(x[v], e));
#pragma unroll
        for (int offset = (THREADS < WARP_SIZE ? THREADS : WARP_SIZE) / 2; offset > 0; offset /= 2)
            maximum = fmax(maximum, __shfl_xor_sync(FULL_WARP, maximum, offset));
        const A shift = maximum == -A(CUDART_INF) ? A(0) : maximum; // all -inf: NaN comes of the subtraction below
        A sum = 0;
#pragma unroll
        for (int i = 0; i < ENDS; i++)
            sum += exp_for<T>(element_of(ends[i], 0) - shift);
#pragma unroll
        for (int v = 0; v < PIECES; v++) {
            A part = 0;
#pragma unroll
            for (int e = 0; e < P::size; e++)
                part += exp_for<T>(element_of(x[v], e) - shift);
            sum += part;
        }
        sum = lanes_combine<(THREADS < WARP_SIZE ? THREADS : WARP_SIZE)>(sum);
        const log_sum_exp<A> state =
            combine_row<THREADS>(log_sum_exp<A>{maximum, sum}, log_sum_exp_of_none<A>(), cluster, exchange, turn);
        const A divisor = softmax_divisor<LOG>(state);
        P *const to = reinterpret_cast<P *>(output + start + share.head);
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * stride < share.vectors) {
                A result[P::size];
#pragma unroll
                for (int e = 0; e < P::size; e++)
                    result[e] = softmax_of<LOG, T>(element_of(x[v], e), state.maximum, divisor);
                store_vector(to + rank + v * stride, vector_of<T>(result));
            }
#pragma unroll
        for (int i = 0; i < ENDS; i++)
            if (share.end[i] >= 0)
                output[start + share.end[i]] =
                    store_from_accumulate<T>(softmax_of<LOG, T>(element_of(ends[i], 0), state.maximum, divisor));
    }
}

template <bool LOG, typename T, int THREADS, int PIECES>
__global__ void __launch_bounds__(THREADS < ROW_BLOCK ? ROW_BLOCK : THREADS, LEAST_BLOCKS<T, THREADS, PIECES, true>)
    softmax_backward_any_row_kernel(T *grad_input, const T *grad_output, const T *output, int64_t rows, int cols,
                                    int cluster, accumulate_type<T> scale)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> P;
    constexpr int ENDS = ROW_ENDS<T, THREADS>;
    __shared__ RowExchange<A> exchange;
    const int blocks = THREADS < CLUSTER_THREADS ? 1 : cluster; // of a row; known to the compiler where there is one
    const int rank = threadIdx.x % THREADS + (int)(blockIdx.x % blocks) * THREADS, stride = THREADS * blocks;
    const int rows_a_block = blockDim.x / THREADS;
    int turn = 0;
    if (THREADS >= CLUSTER_THREADS && cluster > 1)
        prepare_exchange(exchange);
    wait_for_predecessor();
    release_successor();
    const int64_t step = (int64_t)(gridDim.x / blocks) * rows_a_block;
    for (int64_t first = (int64_t)(blockIdx.x / blocks) * rows_a_block; first < rows; first += step) {
        const int64_t row = first + threadIdx.x / THREADS, start = row * cols;
        const RowShare<ENDS> share = share_of_row<ENDS>(grad_output + start, row < rows ? cols : 0, rank);
        const P *const grads = reinterpret_cast<const P *>(grad_output + start + share.head);
        const P *const outputs = reinterpret_cast<const P *>(output + start + share.head);
        P g[PIECES], y[PIECES]; // both loaded before the sum, so that all loads of a row are under way together
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * stride < share.vectors) {
                g[v] = grads[rank + v * stride];
                y[v] = outputs[rank + v * stride];
            }
        A g_ends[ENDS], y_ends[ENDS];
#pragma unroll
        for (int i = 0; i < ENDS; i++) {
            g_ends[i] = share.end[i] >= 0 ? load_as_accumulate(grad_output[start + share.end[i]]) : A(0);
            y_ends[i] = share.end[i] >= 0 ? load_as_accumulate(output[start + share.end[i]]) : A(0);
        }
        A sum = 0;
#pragma unroll
        for (int i = 0; i < ENDS; i++)
            sum += softmax_summand<LOG>(g_ends[i], y_ends[i]);
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * stride < share.vectors) {
                A part = 0;
#pragma unroll
                for (int e = 0; e < P::size; e++)
                    part += softmax_summand<LOG>(element_of(g[v], e), element_of(y[v], e));
                sum += part;
            }
        sum = lanes_combine<(THREADS < WARP_SIZE ? THREADS : WARP_SIZE)>(sum);
        sum = combine_row<THREADS>(sum, A(0), cluster, exchange, turn);
        P *const to = reinterpret_cast<P *>(grad_input + start + share.head);
#pragma unroll
        for (int v = 0; v < PIECES; v++)
            if (rank + v * stride < share.vectors) {
                A result[P::size];
#pragma unroll
                for (int e = 0; e < P::size; e++)
                    result[e] = softmax_gradient<LOG, T>(element_of(g[v], e), element_of(y[v], e), sum, scale);
                store_vector(to + rank + v * stride, vector_of<T>(result));
            }
#pragma unroll
        for (int i = 0; i < ENDS; i++)
            if (share.end[i] >= 0)
                grad_input[start + share.end[i]] =
                    store_from_accumulate<T>(softmax_gradient<LOG, T>(g_ends[i], y_ends[i], sum, scale));
    }
}

// --- launchers ------------------------------------------------------------------------------------------------------

// How many threads of each of `cluster` blocks share a row, and how many vectors a thread has; 0 threads: no row fits.
struct RowShape {
    int threads, pieces, cluster;
};

// Eight vectors of a thread are as many as two blocks of 512 find registers for, in float32: backward has two arrays'
// vectors, elements of 16 bits become twice as many numbers, and exponentials of float64 are long. 1024 threads then.
static bool takes_eight(const SoftmaxCall &call)
{
    return !call.backward && call.dtype == CUDA_OPS_FLOAT32;
}

static RowShape shape_of_block(const SoftmaxCall &call, int cluster)
{
    const int64_t vectors = row_vectors(call);
    static constexpr RowShape shapes[] = {{8, 2, 1}, {16, 2, 1}, {32, 2, 1}, {32, 4, 1}, {32, 8, 1}, {128, 8, 1}};
    if (cluster == 1)
        for (const RowShape &shape : shapes)
            if (vectors <= shape.threads * shape.pieces)
                return shape;
    if (vectors <= MOST_OF_BLOCK / 2 * cluster)
        return {512, 4, cluster};
    if (vectors <= MOST_OF_BLOCK * cluster)
        return takes_eight(call) ? RowShape{512, 8, cluster} : RowShape{1024, 4, cluster};
    return {0, 0, 0};
}

static bool lie_alike(const SoftmaxCall &call)
{
    return same_alignment(call.a, call.b) && (!call.backward || same_alignment(call.a, call.c));
}

static bool are_whole_vectors(const SoftmaxCall &call)
{
    return call.cols * dtype_size(call.dtype) % 16 == 0 && is_aligned_16(call.a) && is_aligned_16(call.b) &&
           (!call.backward || is_aligned_16(call.c));
}

static Answer fits_registers(const SoftmaxCall &call, int cluster)
{
    if (call.inner != 1)
        return no("rows do not lie in one piece: dim is not the last");
    if (!lie_alike(call))
        return no("the tensors are not aligned alike within 16 bytes");
    return row_vectors(call) <= MOST_OF_BLOCK * cluster
               ? YES
               : no(cluster == 1 ? "rows are too long for a block's registers" : "rows are too long for a cluster's");
}

Answer softmax_unaligned_row_supports(const SoftmaxCall &call, const Device &)
{
    return fits_registers(call, 1);
}

Answer softmax_unaligned_row_is_fast(const SoftmaxCall &call, const Device &)
{
    if (call.cols <= WARP_SIZE)
        return no("rows of up to 32 elements take eight threads");
    return are_whole_vectors(call) ? no("rows are whole vectors, aligned to 16 bytes") : YES;
}

Answer softmax_cluster_supports(const SoftmaxCall &call, const Device &device)
{
    return device.capability < 90 ? NEEDS_90 : fits_registers(call, MOST_CLUSTER);
}

// A cluster makes up for its exchange where rows nearly fill a block, and are so few that clusters of four all run at
// once.
Answer softmax_cluster_is_fast(const SoftmaxCall &call, const Device &device)
{
    const int64_t vectors = row_vectors(call);
    if (vectors > MOST_OF_BLOCK)
        return YES;
    return vectors > MOST_OF_BLOCK / 2 && call.columns * 4 <= device.multiprocessors
               ? YES
               : no("rows are short enough for a block's registers, and many or short");
}

// The fewest blocks that hold a row, and more where rows are so few that all of them run at once.
static RowShape shape_of_cluster(const SoftmaxCall &call, const Device &device)
{
    const int64_t vectors = row_vectors(call), most = takes_eight(call) ? MOST_OF_BLOCK : MOST_OF_BLOCK / 2;
    int cluster = 2;
    while (cluster < MOST_CLUSTER && (vectors > most * cluster || call.columns * cluster * 2 <= device.multiprocessors))
        cluster *= 2;
    return shape_of_block(call, cluster);
}

template <bool LOG, typename T, int THREADS, int PIECES>
static void forward_rows(const SoftmaxCall &call, const RowShape &shape, int64_t blocks, int threads)
{
    if (shape.threads == THREADS && shape.pieces == PIECES)
        launch_dependent_clusters(softmax_forward_any_row_kernel<LOG, T, THREADS, PIECES>, blocks, threads,
                                  shape.cluster, 0, call.stream, (T *)call.a, (const T *)call.b, call.columns,
                                  (int)call.cols, shape.cluster);
}

template <bool LOG, typename T, int THREADS, int PIECES>
static void backward_rows(const SoftmaxCall &call, const RowShape &shape, int64_t blocks, int threads)
{
    if (shape.threads == THREADS && shape.pieces == PIECES)
        launch_dependent_clusters(softmax_backward_any_row_kernel<LOG, T, THREADS, PIECES>, blocks, threads,
                                  shape.cluster, 0, call.stream, (T *)call.a, (const T *)call.b, (const T *)call.c,
                                  call.columns, (int)call.cols, shape.cluster, (accumulate_type<T>)call.scale);
}

template <bool LOG, typename T>
static cuda_ops_status launch_rows(const SoftmaxCall &call, const RowShape &shape)
{
    const int threads = shape.threads < ROW_BLOCK ? ROW_BLOCK : shape.threads;
    const int64_t groups = ceil_div(call.columns, threads / shape.threads), most = MAX_GRID / shape.cluster;
    const int64_t blocks = (groups < most ? groups : most) * shape.cluster;
    if (call.backward) {
        backward_rows<LOG, T, 8, 2>(call, shape, blocks, threads);
        backward_rows<LOG, T, 16, 2>(call, shape, blocks, threads);
        backward_rows<LOG, T, 32, 2>(call, shape, blocks, threads);
        backward_rows<LOG, T, 32, 4>(call, shape, blocks, threads);
        backward_rows<LOG, T, 32, 8>(call, shape, blocks, threads);
        backward_rows<LOG, T, 128, 8>(call, shape, blocks, threads);
        backward_rows<LOG, T, 512, 4>(call, shape, blocks, threads);
        backward_rows<LOG, T, 1024, 4>(call, shape, blocks, threads);
    } else {
        forward_rows<LOG, T, 8, 2>(call, shape, blocks, threads);
        forward_rows<LOG, T, 16, 2>(call, shape, blocks, threads);
        forward_rows<LOG, T, 32, 2>(call, shape, blocks, threads);
        forward_rows<LOG, T, 32, 4>(call, shape, blocks, threads);
        forward_rows<LOG, T, 32, 8>(call, shape, blocks, threads);
        forward_rows<LOG, T, 128, 8>(call, shape, blocks, threads);
        forward_rows<LOG, T, 512, 4>(call, shape, blocks, threads);
        if constexpr (sizeof(T) == sizeof(float))
            forward_rows<LOG, T, 512, 8>(call, shape, blocks, threads);
        else
            forward_rows<LOG, T, 1024, 4>(call, shape, blocks, threads);
    }
    return launch_status();
}

static cuda_ops_status launch(const SoftmaxCall &call, const RowShape &shape)
{
    CUDA_OPS_DISPATCH(call.dtype, T,
                      return call.log ? launch_rows<true, T>(call, shape) : launch_rows<false, T>(call, shape));
    return CUDA_OPS_INVALID_ARGUMENT;
}

cuda_ops_status softmax_unaligned_row(const SoftmaxCall &call, const Device &)
{
    return launch(call, shape_of_block(call, 1));
}

cuda_ops_status softmax_cluster(const SoftmaxCall &call, const Device &device)
{
    return launch(call, shape_of_cluster(call, device));
}
