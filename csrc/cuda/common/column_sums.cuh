// Sums over the rows of a dense [rows, columns] array: the gradient of whatever was added to every row.
//
// Read in pieces of 16 bytes. Where a row is no whole number of them (ten columns of a half), `fold` rows are, and are
// taken for one wider row, whose sums are added up `fold` by `fold` in the end: so rows of any length are read alike. A
// block has `tile` pieces side by side and as many wide rows at a time as its threads then make, eight loads under way
// in each of them; its threads' sums are added in shared memory. Rows are cut into parts where that makes more blocks,
// each of which leaves its sums in the workspace; a second kernel adds those. All in a fixed order, so that results
// repeat bit by bit. An array that is not aligned goes element by element.
//
// Bound by memory: one read.
#ifndef CUDA_OPS_COMMON_COLUMN_SUMS_CUH
#define CUDA_OPS_COMMON_COLUMN_SUMS_CUH

#include "common/aligned_vector.cuh"

static constexpr int COLUMN_THREADS = 256;
static constexpr int ROWS_UNDER_WAY = 8;
// About two blocks for each multiprocessor of a large GPU; a constant, so that sums are cut alike everywhere.
static constexpr int64_t WANTED_COLUMN_BLOCKS = 264;
static constexpr int FEWEST_PARTS = 4; // fewer are as soon summed by one block as by a second kernel
static constexpr int MAX_FOLDED_TILE = 128;

// How an array is cut. `width`: pieces of a wide row; `wide_rows`: whole ones. `folds`: whether a block has whole wide
// rows, so that it adds up their `fold` rows itself.
struct column_cut {
    int fold, tile;
    int64_t width, wide_rows, tiles, parts, part_rows;
    bool folds;

    // Rows of sums that the first kernel leaves for the second one; 1: it has the result.
    __host__ __device__ int64_t sums() const
    {
        return folds ? parts : parts * fold;
    }
};

// `count`: elements of a piece.
static inline column_cut cut_columns(int64_t rows, int64_t columns, int count)
{
    column_cut cut = {};
    for (cut.fold = 1; cut.fold * columns % count != 0;)
        cut.fold *= 2;
    cut.width = cut.fold * columns / count;
    cut.wide_rows = rows / cut.fold;
    const bool one_tile = cut.fold > 1 && cut.width <= MAX_FOLDED_TILE;
    cut.tiles = one_tile ? 1 : ceil_div(cut.width, count > 1 ? WARP_SIZE : COLUMN_THREADS / 2);
    cut.tile = (int)ceil_div(cut.width, cut.tiles);
    cut.folds = cut.fold == 1 || cut.tiles == 1;
    const int64_t height = COLUMN_THREADS / cut.tile;
    const int64_t useful = cut.wide_rows / (height * ROWS_UNDER_WAY), wanted = WANTED_COLUMN_BLOCKS / cut.tiles;
    cut.parts = useful < wanted ? useful : wanted;
    if (useful < FEWEST_PARTS || cut.parts < 1)
        cut.parts = 1;
    cut.part_rows = ceil_div(ceil_div(cut.wide_rows, cut.parts), height) * height;
    if (cut.part_rows > 0)
        cut.parts = ceil_div(cut.wide_rows, cut.part_rows);
    return cut;
}

// COUNT elements a piece: 16 bytes, or one. `sums` has the result if cut.sums() is 1, else it is `partials`.
template <typename T, int COUNT>
__global__ void __launch_bounds__(COLUMN_THREADS)
    column_sums_kernel(T *sums, accumulate_type<T> *partials, const T *input, int64_t rows, int64_t columns,
                       column_cut cut)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> P;
    constexpr int MOST_PHASES = 32;
    __shared__ __align__(16) A shared[COLUMN_THREADS * COUNT];
    __shared__ A phase_sums[COLUMN_THREADS];
    const int height = COLUMN_THREADS / cut.tile, across = threadIdx.x % cut.tile, down = threadIdx.x / cut.tile;
    const int64_t pitch = cut.width * COUNT;
    wait_for_predecessor();
    release_successor();
    for (int64_t work = blockIdx.x; work < cut.tiles * cut.parts; work += gridDim.x) {
        const int64_t part = work / cut.tiles, first = work % cut.tiles * cut.tile, at = (first + across) * COUNT;
        const int64_t begin = part * cut.part_rows;
        const int64_t end = begin + cut.part_rows < cut.wide_rows ? begin + cut.part_rows : cut.wide_rows;
        A sum[COUNT] = {};
        if (down < height && first + across < cut.width) {
            for (int64_t row = begin + down; row < end; row += ROWS_UNDER_WAY * height) {
                P pieces[ROWS_UNDER_WAY];
#pragma unroll
                for (int i = 0; i < ROWS_UNDER_WAY; i++)
                    if (row + i * height < end)
                        pieces[i] = *reinterpret_cast<const P *>(input + (row + i * height) * pitch + at);
#pragma unroll
                for (int i = 0; i < ROWS_UNDER_WAY; i++)
                    if (row + i * height < end)
#pragma unroll
                        for (int e = 0; e < COUNT; e++)
                            sum[e] += element_of(pieces[i], e);
            }
            if (part == cut.parts - 1 && down == 0) // the rows that make no whole wide one
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    if (cut.wide_rows * pitch + at + e < rows * columns)
                        sum[e] += load_as_accumulate(input[cut.wide_rows * pitch + at + e]);
        }
        // What the threads have is, in their order, a matrix of `down_count` rows of the columns that the block has.
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            shared[threadIdx.x * COUNT + e] = sum[e];
        __syncthreads();
        const bool whole = cut.tiles == 1;
        const int block_columns = whole ? (int)columns : cut.tile * COUNT;
        const int down_count = height * (whole ? cut.fold : 1);
        const int most = COLUMN_THREADS / block_columns, phases = most < 1             ? 1
                                                                  : most < MOST_PHASES ? most
                                                                                       : MOST_PHASES;
        for (int i = threadIdx.x; i < block_columns * phases; i += COLUMN_THREADS) {
            A total = 0;
#pragma unroll 4
            for (int r = i / block_columns; r < down_count; r += phases)
                total += shared[r * block_columns + i % block_columns];
            if (phases > 1) { // and then this loop has one round
                phase_sums[i] = total;
                continue;
            }
            const int64_t to = first * COUNT + i;
            if (to >= pitch)
                break;
            if (cut.sums() > 1)
                partials[part * (whole ? columns : pitch) + to] = total;
            else
                sums[to] = store_from_accumulate<T>(total);
        }
        __syncthreads();
        const int64_t to = first * COUNT + threadIdx.x;
        if (phases > 1 && threadIdx.x < block_columns && to < pitch) {
            A total = 0;
#pragma unroll 8
            for (int phase = 0; phase < phases; phase++)
                total += phase_sums[phase * block_columns + threadIdx.x];
            if (cut.sums() > 1)
                partials[part * (whole ? columns : pitch) + to] = total;
            else
                sums[to] = store_from_accumulate<T>(total);
        }
        // The next round's barrier is between these reads and the writes of phase_sums.
    }
}

static constexpr int ADD_THREADS = 512;

// sums[j] = sum over i of partials[i][j]. `across` threads side by side, a power of two and a warp at most, take the
// columns; the block's others, and with them each warp's, those of the rows below.
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
            for (int64_t i = threadIdx.x / across; i < count; i += ROWS_UNDER_WAY * height) {
                A row[ROWS_UNDER_WAY]; // as above: a loop that is unrolled loads what is left over one by one
#pragma unroll
                for (int r = 0; r < ROWS_UNDER_WAY; r++)
                    row[r] = i + r * height < count ? partials[(i + r * height) * columns + column] : A(0);
#pragma unroll
                for (int r = 0; r < ROWS_UNDER_WAY; r++)
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

// The sums of `count` rows of sums, for the kernel that is next on the stream after the one that leaves them.
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

// Bytes of workspace, for arrays that are aligned and for those that are not.
static inline int64_t column_sums_workspace(int64_t rows, int64_t columns, cuda_ops_dtype dtype)
{
    int64_t most = 1;
    for (int count : {(int)(16 / dtype_size(dtype)), 1}) {
        const int64_t sums = columns > 0 ? cut_columns(rows, columns, count).sums() : 1;
        most = sums > most ? sums : most;
    }
    return most > 1 ? most * columns * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

template <typename T, int COUNT>
static inline cuda_ops_status column_sums_of_pieces(T *sums, void *workspace, const T *input, int64_t rows,
                                                    int64_t columns, cudaStream_t stream)
{
    accumulate_type<T> *const partials = (accumulate_type<T> *)workspace;
    const column_cut cut = cut_columns(rows, columns, COUNT);
    launch_dependent(column_sums_kernel<T, COUNT>, clamp_grid(cut.tiles * cut.parts), COLUMN_THREADS, 0, stream, sums,
                     partials, input, rows, columns, cut);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || cut.sums() == 1)
        return status;
    return add_column_sums(sums, partials, cut.sums(), columns, stream);
}

// sums[j] = sum over i of input[i][j]; zeros without rows.
template <typename T>
static inline cuda_ops_status column_sums(T *sums, void *workspace, const T *input, int64_t rows, int64_t columns,
                                          cudaStream_t stream)
{
    if (columns == 0)
        return CUDA_OPS_SUCCESS;
    if (is_aligned_16(input))
        return column_sums_of_pieces<T, vector16<T>::size>(sums, workspace, input, rows, columns, stream);
    return column_sums_of_pieces<T, 1>(sums, workspace, input, rows, columns, stream);
}

#endif
