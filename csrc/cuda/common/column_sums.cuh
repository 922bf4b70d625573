// Sums over the rows of an array [rows, columns]: the gradient of what was added to every row.
//
// Loads are 16-byte vectors. Where a row is no whole number of them (ten columns in fp16), `fold` rows are taken for
// one wider row, whose sums are added up `fold` by `fold` in the end, so that rows of any length are read alike. A
// block has `tile` vectors across and as many wide rows down as its threads then cover, with eight loads in flight in
// each; its threads' sums are added in shared memory. Rows are split where that makes more blocks: each leaves its sums
// in the workspace, and a second kernel adds those. The order is fixed, so that results repeat bitwise. A misaligned
// array goes element by element, and so does one whose rows lie apart and are no whole vectors.
//
// Bound by memory: one read.
#ifndef CUDA_OPS_COMMON_COLUMN_SUMS_CUH
#define CUDA_OPS_COMMON_COLUMN_SUMS_CUH

#include "common/aligned_vector.cuh"

static constexpr int COLUMN_THREADS = 256;
static constexpr int ROWS_IN_FLIGHT = 8;
// About two blocks for each multiprocessor of a large GPU; a constant, so that rows are split alike on every device.
static constexpr int64_t WANTED_COLUMN_BLOCKS = 264;
static constexpr int FEWEST_SPLITS = 4; // with fewer, one block is as fast as two kernels
static constexpr int MAX_FOLDED_TILE = 128;

// How an array is divided. `width`: vectors of a wide row; `wide_rows`: whole ones, `pitch` elements apart. `folds`:
// whether a block has whole wide rows, so that it adds up their `fold` rows itself.
struct column_plan {
    int fold, tile;
    int64_t width, wide_rows, pitch, tiles, splits, split_rows;
    bool folds;

    // Rows of sums that the first kernel leaves for the second one; 1: they are the result.
    __host__ __device__ int64_t sums() const
    {
        return folds ? splits : splits * fold;
    }
};

// `count`: elements of a vector. `pitch`: from row to row; rows that are apart are whole vectors.
static inline column_plan plan_columns(int64_t rows, int64_t columns, int count, int64_t pitch)
{
    column_plan plan = {};
    for (plan.fold = 1; plan.fold * columns % count != 0;)
        plan.fold *= 2;
    plan.width = plan.fold * columns / count;
    plan.wide_rows = rows / plan.fold;
    plan.pitch = plan.fold * pitch;
    const bool one_tile = plan.fold > 1 && plan.width <= MAX_FOLDED_TILE;
    plan.tiles = one_tile ? 1 : ceil_div(plan.width, count > 1 ? WARP_SIZE : COLUMN_THREADS / 2);
    plan.tile = (int)ceil_div(plan.width, plan.tiles);
    plan.folds = plan.fold == 1 || plan.tiles == 1;
    const int64_t height = COLUMN_THREADS / plan.tile;
    const int64_t useful = plan.wide_rows / (height * ROWS_IN_FLIGHT), wanted = WANTED_COLUMN_BLOCKS / plan.tiles;
    plan.splits = useful < wanted ? useful : wanted;
    if (useful < FEWEST_SPLITS || plan.splits < 1)
        plan.splits = 1;
    plan.split_rows = ceil_div(ceil_div(plan.wide_rows, plan.splits), height) * height;
    if (plan.split_rows > 0)
        plan.splits = ceil_div(plan.wide_rows, plan.split_rows);
    return plan;
}

// COUNT elements a vector: 16 bytes, or one. Writes `sums` if plan.sums() is 1, else `partials`. S: T, or float where
// the sums of halves are not to be rounded.
template <typename T, int COUNT, typename S>
__global__ void __launch_bounds__(COLUMN_THREADS)
    column_sums_kernel(S *sums, accumulate_type<T> *partials, const T *input, int64_t rows, int64_t columns,
                       column_plan plan)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    constexpr int MOST_PHASES = 32;
    __shared__ __align__(16) A shared[COLUMN_THREADS * COUNT];
    __shared__ A phase_sums[COLUMN_THREADS];
    const int height = COLUMN_THREADS / plan.tile, across = threadIdx.x % plan.tile, down = threadIdx.x / plan.tile;
    const int64_t wide = plan.width * COUNT;
    wait_for_predecessor();
    release_successor();
    for (int64_t work = blockIdx.x; work < plan.tiles * plan.splits; work += gridDim.x) {
        const int64_t split = work / plan.tiles, first = work % plan.tiles * plan.tile, at = (first + across) * COUNT;
        const int64_t begin = split * plan.split_rows;
        const int64_t end = begin + plan.split_rows < plan.wide_rows ? begin + plan.split_rows : plan.wide_rows;
        A sum[COUNT] = {};
        if (down < height && first + across < plan.width) {
            for (int64_t row = begin + down; row < end; row += ROWS_IN_FLIGHT * height) {
                P vectors[ROWS_IN_FLIGHT];
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; i++)
                    if (row + i * height < end)
                        vectors[i] = *reinterpret_cast<const P *>(input + (row + i * height) * plan.pitch + at);
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; i++)
                    if (row + i * height < end)
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            sum[e] += element_of(vectors[i], e);
            }
            if (split == plan.splits - 1 && down == 0) // the rows left over from whole wide ones
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    if (plan.wide_rows * wide + at + e < rows * columns)
                        sum[e] += load_as_accumulate(input[plan.wide_rows * wide + at + e]);
        }
        // The threads' sums, in thread order, are a matrix of `down_count` rows of the block's columns.
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            shared[threadIdx.x * COUNT + e] = sum[e];
        __syncthreads();
        const bool whole = plan.tiles == 1;
        const int block_columns = whole ? (int)columns : plan.tile * COUNT;
        const int down_count = height * (whole ? plan.fold : 1);
        const int most = COLUMN_THREADS / block_columns, phases = most < 1             ? 1
                                                                  : most < MOST_PHASES ? most
                                                                                       : MOST_PHASES;
        for (int i = threadIdx.x; i < block_columns * phases; i += COLUMN_THREADS) {
            A total = 0;
#pragma unroll 4
            for (int r = i / block_columns; r < down_count; r += phases)
                total += shared[r * block_columns + i % block_columns];
            if (phases > 1) { // this loop then has one round
                phase_sums[i] = total;
                continue;
            }
            const int64_t to = first * COUNT + i;
            if (to >= wide)
                break;
            if (plan.sums() > 1)
                partials[split * (whole ? columns : wide) + to] = total;
            else
                sums[to] = store_from_accumulate<S>(total);
        }
        __syncthreads();
        const int64_t to = first * COUNT + threadIdx.x;
        if (phases > 1 && threadIdx.x < block_columns && to < wide) {
            A total = 0;
#pragma unroll 8
            for (int phase = 0; phase < phases; phase++)
                total += phase_sums[phase * block_columns + threadIdx.x];
            if (plan.sums() > 1)
                partials[split * (whole ? columns : wide) + to] = total;
            else
                sums[to] = store_from_accumulate<S>(total);
        }
        // The next round's barrier separates these reads from its writes of phase_sums.
    }
}

static constexpr int ADD_THREADS = 512;

// sums[j] = sum over i of partials[i][j]. `across` adjacent threads, a power of two and a warp at most, take the
// columns; the other threads take the rows below.
template <typename T>
__global__ void __launch_bounds__(ADD_THREADS)
    add_column_sums_kernel(T *sums, const accumulate_type<T> *partials, int64_t count, int64_t columns, int across)
{
    typedef accumulate_type<T> A;
    constexpr int WARPS = ADD_THREADS / WARP_SIZE;
    __shared__ A shared[WARPS][WARP_SIZE];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, height = ADD_THREADS / across;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * across; first < columns; first += (int64_t)gridDim.x * across) {
        const int64_t column = first + threadIdx.x % across;
        A sum = 0;
        if (column < columns)
            for (int64_t i = threadIdx.x / across; i < count; i += ROWS_IN_FLIGHT * height) {
                A row[ROWS_IN_FLIGHT]; // not an unrolled loop, whose remainder would be loaded row by row
#pragma unroll
                for (int r = 0; r < ROWS_IN_FLIGHT; r++)
                    row[r] = i + r * height < count ? partials[(i + r * height) * columns + column] : A(0);
#pragma unroll
                for (int r = 0; r < ROWS_IN_FLIGHT; r++)
                    sum += row[r];
            }
        for (int apart = across; apart < WARP_SIZE; apart *= 2)
            sum += __shfl_xor_sync(FULL_WARP, sum, apart);
        shared[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && lane < across && column < columns) {
            A total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                total += shared[w][lane];
            sums[column] = store_from_accumulate<T>(total);
        }
        __syncthreads();
    }
}

// Adds `count` rows of sums, in the kernel right after the one that leaves them.
template <typename T>
static inline cuda_ops_status add_column_sums(T *sums, const accumulate_type<T> *partials, int64_t count,
                                              int64_t columns, cudaStream_t stream)
{
    int across = 1;
    while (across < WARP_SIZE && across < columns)
        across *= 2;
    launch_dependent(add_column_sums_kernel<T>, clamp_grid(ceil_div(columns, across)), ADD_THREADS, 0, stream, sums,
                     partials, count, columns, across);
    return launch_status();
}

// Bytes of workspace, enough for aligned and for misaligned arrays.
static inline int64_t column_sums_workspace(int64_t rows, int64_t columns, cuda_ops_dtype dtype)
{
    int64_t most = 1;
    for (int count : {(int)(16 / dtype_size(dtype)), 1}) {
        const int64_t sums = columns > 0 ? plan_columns(rows, columns, count, columns).sums() : 1;
        most = sums > most ? sums : most;
    }
    return most > 1 ? most * columns * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

struct nothing_between {
    void operator()() const
    {
    }
};

template <typename T, int COUNT, typename S, typename Between>
static inline cuda_ops_status column_sums_of_vectors(S *sums, void *workspace, const T *input, int64_t rows,
                                                     int64_t columns, int64_t pitch, cudaStream_t stream,
                                                     const Between &between)
{
    accumulate_type<T> *const partials = (accumulate_type<T> *)workspace;
    const column_plan plan = plan_columns(rows, columns, COUNT, pitch);
    launch_dependent(column_sums_kernel<T, COUNT, S>, clamp_grid(plan.tiles * plan.splits), COLUMN_THREADS, 0, stream,
                     sums, partials, input, rows, columns, plan);
    between();
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || plan.sums() == 1)
        return status;
    return add_column_sums(sums, partials, plan.sums(), columns, stream);
}

// sums[j] = sum over i of input[i][j]; zeros without rows. pitch: from row to row, in elements; 0: columns. between:
// called behind the first kernel's launch, to launch what may run beside it.
template <typename T, typename S, typename Between = nothing_between>
static inline cuda_ops_status column_sums(S *sums, void *workspace, const T *input, int64_t rows, int64_t columns,
                                          cudaStream_t stream, int64_t pitch = 0, const Between &between = Between())
{
    constexpr int COUNT = vector16<T>::size;
    const int64_t apart = pitch > 0 ? pitch : columns;
    if (columns == 0)
        return CUDA_OPS_SUCCESS;
    if (is_aligned_16(input) && (apart == columns || (apart % COUNT == 0 && columns % COUNT == 0)))
        return column_sums_of_vectors<T, COUNT, S>(sums, workspace, input, rows, columns, apart, stream, between);
    return column_sums_of_vectors<T, 1, S>(sums, workspace, input, rows, columns, apart, stream, between);
}

#endif
