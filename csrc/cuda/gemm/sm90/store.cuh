// The epilogue of a tile of the sm90 path and of ladder/12, from the accumulators to device memory.
#ifndef CUDA_OPS_GEMM_SM90_STORE_CUH
#define CUDA_OPS_GEMM_SM90_STORE_CUH

#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "gemm/sm90/tile.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

#if defined(CUDA_OPS_HOPPER_CODE)

// The row, in its warpgroup's part of the tile, of a thread's accumulators in the given block of 64 rows; half: the
// first or second of its two rows there, 8 apart. Where A came through registers, rows are assigned so that a thread's
// two or four are contiguous (see load_left).
template <typename C>
__device__ __forceinline__ int row_of(int thread, int block, int half)
{
    const int warp = thread / 32, quad = thread % 32 / 4;
    if (C::IN_REGISTERS && C::BLOCKS == 2)
        return 32 * warp + 4 * (quad / 2 + quad % 2 * 4) + 2 * block + half;
    if (C::IN_REGISTERS)
        return 32 * (warp / 2) + 4 * (warp % 2 * 2 + quad / 4 + quad / 2 % 2 * 4) + quad % 2 * 2 + half;
    return 64 * block + 16 * warp + quad + 8 * half;
}

template <typename C>
__device__ __forceinline__ float bias_at(const GemmWork &work, int column, int columns)
{
    typedef typename C::T T;
    if (column >= columns)
        return 0.0f;
    return work.bias_is_float ? ((const float *)work.bias)[column] : load_as_accumulate(((const T *)work.bias)[column]);
}

// The bias of a tile's columns, distributed over the lanes of a warp: lane l has columns l, 32 + l, ... of the tile.
// Loaded before the products, which hide its latency: afterwards every warp would wait for the L2, which is busiest
// then.
template <typename C>
struct Bias {
    float part[(C::N + 31) / 32];
};

template <typename C>
__device__ __forceinline__ Bias<C> load_bias(const GemmWork &work, int first_column, int thread)
{
    typedef typename C::T T;
    Bias<C> bias = {};
    if (work.bias && !work.swapped)
#pragma unroll
        for (int i = 0; i < (C::N + 31) / 32; i++) {
            // Out of bounds: any value will do, since the results are not stored.
            const int column = min(first_column + 32 * i + thread % 32, work.n - 1);
            bias.part[i] = sizeof(T) == 4 || work.bias_is_float ? ((const float *)work.bias)[column]
                                                                : load_as_accumulate(((const T *)work.bias)[column]);
        }
    return bias;
}

// All but gelu, as exact as the sums are.
template <typename C>
__device__ __forceinline__ void activate_sums(float (&sum)[C::N / 2], int activation)
{
    if (!C::ACTIVATES_QUICKLY && activation == CUDA_OPS_GEMM_SILU) {
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            sum[i] = silu(sum[i]);
    } else if (!C::ACTIVATES_QUICKLY && activation == CUDA_OPS_GEMM_HARDSWISH) {
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            sum[i] = hardswish(sum[i]);
    } else {
        activate_simply(sum, activation);
    }
}

// alpha, bias and activations but gelu on the accumulators. Of each 8 columns a thread holds two, of rows g and g + 8.
template <typename C>
__device__ __forceinline__ void finish(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &bias, const GemmWork &work,
                                       int first_row, int thread)
{
    if (work.alpha != 1.0f)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::N / 2; i++)
                sum[block][i] *= work.alpha;
    if ((C::IN_LINES || C::IN_REGISTERS || C::MAKES_EITHER) && work.bias && work.swapped) { // no other makes D^T
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float of_row = bias_at<C>(work, first_row + row_of<C>(thread, block, half), work.m);
#pragma unroll
                for (int i = 0; i < C::N / 8; i++) {
                    sum[block][4 * i + 2 * half] += of_row;
                    sum[block][4 * i + 2 * half + 1] += of_row;
                }
            }
    } else if (work.bias) {
#pragma unroll
        for (int i = 0; i < C::N / 8; i++) {
            const int from = i % 4 * 8 + 2 * (thread % 4);
            const float x = __shfl_sync(FULL_WARP, bias.part[i / 4], from);
            const float y = __shfl_sync(FULL_WARP, bias.part[i / 4], from + 1);
#pragma unroll
            for (int block = 0; block < C::BLOCKS; block++) {
                sum[block][4 * i] += x;
                sum[block][4 * i + 1] += y;
                sum[block][4 * i + 2] += x;
                sum[block][4 * i + 3] += y;
            }
        }
    }
    if (work.activation != CUDA_OPS_GEMM_NONE && !work.preactivation)
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
            activate_sums<C>(sum[block], work.activation);
}

// float32 results straight from registers: a quad of threads writes 32 bytes of a row, a whole sector.
template <typename C>
__device__ __forceinline__ void store_floats(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                             int64_t matrix, int first_row, int column, int thread)
{
    float *const d = (float *)work.d + matrix * work.stride_d;
    const bool pairs = (work.ldd % 2 == 0) && (work.stride_d % 2 == 0) && ((uintptr_t)work.d % 8 == 0);
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = first_row + row_of<C>(thread, block, half);
            if (r >= work.m)
                continue;
            float *const line = d + r * work.ldd;
#pragma unroll
            for (int i = 0; i < C::N / 8; i++) {
                const int c = column + 8 * i;
                const float x = sum[block][4 * i + 2 * half], y = sum[block][4 * i + 2 * half + 1];
                if (pairs && c + 1 < work.n) {
                    *(float2 *)(line + c) = make_float2(x, y);
                } else {
                    if (c < work.n)
                        line[c] = x;
                    if (c + 1 < work.n)
                        line[c + 1] = y;
                }
            }
        }
}

// The same for D^T where A came through registers: a thread's two or four rows are 8 or 16 bytes of a row of D, and
// eight adjacent threads write whole sectors.
template <typename C>
__device__ __forceinline__ void store_floats_swapped(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                                     int64_t matrix, int first_row, int column, int thread)
{
    constexpr int ROWS = 2 * C::BLOCKS;
    typedef aligned_vector<float, ROWS> Rows;
    float *const d = (float *)work.d + matrix * work.stride_d;
    const bool together = work.ldd % ROWS == 0 && work.stride_d % ROWS == 0 && (uintptr_t)work.d % sizeof(Rows) == 0;
    const int row = first_row + row_of<C>(thread, 0, 0);
#pragma unroll
    for (int i = 0; i < C::N / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int c = column + 8 * i + e;
            if (c >= work.n)
                continue;
            Rows values;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                values.element[r] = sum[r / 2][4 * i + r % 2 * 2 + e];
            float *const to = d + c * work.ldd + row;
            if (together && row + ROWS <= work.m) {
                *(Rows *)to = values;
            } else {
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    if (row + r < work.m)
                        to[r] = values.element[r];
            }
        }
}

// The offset of a 16-byte vector of a row in a buffer: TMA's swizzle of 128 or 64 bytes, which also avoids bank
// conflicts between 8 rows. Not by common/swizzle.cuh, whose `&` makes different machine code here.
template <typename C>
__device__ __forceinline__ int swizzled_offset(int row, int vector)
{
    return row * C::CHUNK_ROW + (C::CHUNK_ROW == 128 ? vector ^ (row % 8) : vector ^ (row / 2 % 4)) * 16;
}

// A buffer of store_halves to rows of D that TMA cannot write, since they do not begin at multiples of 16 bytes: two
// elements a lane, a row or two by each warp at a time. Where a row begins at an odd element, its pairs are those one
// element further, half of them from the next lane, and the last lane has the first and the last element.
template <typename C>
__device__ __forceinline__ void store_pairs(const char *buffer, const GemmWork &work, int64_t matrix, int first_row,
                                            int first_column, int thread)
{
    constexpr int PAIRS = C::CHUNK / 2, ROWS = WARPGROUP / PAIRS; // of a row, and rows at once
    static_assert(32 % PAIRS == 0 && C::GROUP_M % ROWS == 0, "whole rows a warp, and whole rounds");
    const int pair = thread % PAIRS, left = work.n - first_column; // columns from here on
    const int next = thread % 32 / PAIRS * PAIRS + (pair + 1) % PAIRS;
    uint16_t *const d = (uint16_t *)work.d + matrix * work.stride_d + first_column;
    // Loads in flight, as far as registers go.
    constexpr int AT_ONCE = C::BLOCKS * C::N > 256 ? 2 : 8;
#pragma unroll AT_ONCE
    for (int row = thread / PAIRS; row < C::GROUP_M; row += ROWS) {
        const uint32_t mine =
            *(const uint32_t *)(buffer + swizzled_offset<C>(row, pair / 4) + pair % 4 * (int)sizeof(uint32_t));
        const uint32_t after = __shfl_sync(FULL_WARP, mine, next);
        uint16_t *const line = d + (first_row + row) * work.ldd;
        const int odd = (int)((uintptr_t)line / sizeof(uint16_t) % 2), column = 2 * pair + odd;
        const uint32_t both = odd ? __byte_perm(mine, after, 0x5432) : mine;
        if (first_row + row >= work.m)
            continue;
        if (column + 1 < left && column + 1 < C::CHUNK)
            *(uint32_t *)(line + column) = both;
        else if (column < left)
            line[column] = (uint16_t)both;
        if (column + 1 == C::CHUNK && left > 0) // odd, and the last lane of the row
            line[0] = (uint16_t)(both >> 16);
    }
}

// 16-bit results, CHUNK columns at a time: by stmatrix into a buffer in shared memory, and from there by TMA, during
// the next columns or the next tile's products.
template <typename C>
__device__ __forceinline__ void store_halves(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                             const CUtensorMap *map_d, char *buffers, int &buffer, int64_t matrix,
                                             int first_row, int first_column, int group, int thread)
{
    typedef typename C::T T;
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++, buffer ^= 1) {
        char *const to = buffers + buffer * C::BUFFER_BYTES;
        const uint32_t to_shared = shared_address(to);
        // The buffer's previous TMA store must have read it.
        if (thread == 0)
            bulk_wait_group_read<1>();
        bar_sync(1 + group, WARPGROUP);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++) {
            // Row addresses of stmatrix: lanes 0-15 the rows, lanes 16-31 the same rows 8 columns on.
            const int row = 64 * block + 16 * warp + lane % 16;
#pragma unroll
            for (int i = 0; i < C::CHUNK / 16; i++) {
                const float *const s = sum[block] + C::CHUNK / 2 * chunk + 8 * i;
                stmatrix_x4(to_shared + swizzled_offset<C>(row, 2 * i + lane / 16), pack<T>(s[0], s[1]),
                            pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
            }
        }
        const int column = first_column + C::CHUNK * chunk;
        if (work.copies_out) {
            fence_proxy_async();
            bar_sync(1 + group, WARPGROUP);
            if (thread == 0) {
                tma_store_3d(map_d, to_shared, column, first_row, (int)matrix);
                bulk_commit_group();
            }
        } else {
            bar_sync(1 + group, WARPGROUP);
            store_pairs<C>(to, work, matrix, first_row, column, thread);
        }
    }
}

// The same for a tile of D^T: CHUNK rows of D at a time, transposed on their way into the buffer, as boxes of 64
// columns.
template <typename C>
__device__ __forceinline__ void
store_halves_transposed(const float (&sum)[C::BLOCKS][C::N / 2], const CUtensorMap *map_d, char *buffers, int &buffer,
                        int64_t matrix, int first_row, int first_column, int group, int thread)
{
    typedef typename C::T T;
    constexpr int BOX = C::CHUNK * SWIZZLE_ROW;
    const int lane = thread % 32, warp = thread / 32;
    // Of 16 rows of D, and of 16 of a box's columns a warp: stmatrix has two by two matrices of eight, which lanes 0 to
    // 7, 8 to 15 and so on give the rows of.
    const int row = lane / 16 * 8 + lane % 8, vector = (2 * warp + lane / 8 % 2) ^ (lane % 8);
#pragma unroll
    for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++, buffer ^= 1) {
        const uint32_t to = shared_address(buffers + buffer * C::BUFFER_BYTES);
        if (thread == 0)
            bulk_wait_group_read<1>();
        bar_sync(1 + group, WARPGROUP);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int i = 0; i < C::CHUNK / 16; i++) {
                const float *const s = sum[block] + C::CHUNK / 2 * chunk + 8 * i;
                stmatrix_x4_trans(to + block * BOX + (16 * i + row) * SWIZZLE_ROW + vector * 16, pack<T>(s[0], s[1]),
                                  pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
            }
        fence_proxy_async();
        bar_sync(1 + group, WARPGROUP);
        if (thread == 0) {
#pragma unroll
            for (int block = 0; block < C::BLOCKS; block++)
                tma_store_3d(map_d, to + block * BOX, first_row + 64 * block, first_column + C::CHUNK * chunk,
                             (int)matrix);
            bulk_commit_group();
        }
    }
}

// fp32 results by TMA, CHUNK columns at a time as above.
template <typename C>
__device__ __forceinline__ void store_floats_tma(const float (&sum)[C::BLOCKS][C::N / 2], const CUtensorMap *map_d,
                                                 char *buffers, int &buffer, int64_t matrix, int first_row,
                                                 int first_column, int group, int thread)
{
    const int quad_lane = thread % 4;
#pragma unroll
    for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++, buffer ^= 1) {
        char *const to = buffers + buffer * C::BUFFER_BYTES;
        if (thread == 0)
            bulk_wait_group_read<1>();
        bar_sync(1 + group, WARPGROUP);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < C::CHUNK / 8; i++) {
                    const float *const s = sum[block] + C::CHUNK / 2 * chunk + 4 * i + 2 * half;
                    *(float2 *)(to + swizzled_offset<C>(row_of<C>(thread, block, half), 2 * i + quad_lane / 2) +
                                quad_lane % 2 * 8) = make_float2(s[0], s[1]);
                }
        fence_proxy_async();
        bar_sync(1 + group, WARPGROUP);
        if (thread == 0) {
            tma_store_3d(map_d, shared_address(to), first_column + C::CHUNK * chunk, first_row, (int)matrix);
            bulk_commit_group();
        }
    }
}

// 16-bit results as rows of D, transposed on the way where A and B are exchanged: by stmatrix into shared memory, and
// from there by all threads, 16 bytes each.
template <typename C>
__device__ __forceinline__ void store_lines(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work, char *buffer,
                                            int64_t matrix, int first_row, int first_column, int group, int thread)
{
    typedef typename C::T T;
    static_assert(C::BLOCKS == 1 && C::N % 16 == 0, "a warpgroup's 64 rows");
    const int lane = thread % 32, warp = thread / 32;
    // The pitch is an odd multiple of 16 bytes, so that the eight rows of a matrix meet all banks.
    const int lines = work.swapped ? C::N : 64, columns = work.swapped ? 64 : C::N, pitch = columns + 8;
    const uint32_t to = shared_address(buffer);
    bar_sync(1 + group, WARPGROUP); // the previous tile's have been read
#pragma unroll
    for (int i = 0; i < C::N / 16; i++) {
        const float *const s = sum[0] + 8 * i;
        const uint32_t a = pack<T>(s[0], s[1]), b = pack<T>(s[2], s[3]), c = pack<T>(s[4], s[5]),
                       d = pack<T>(s[6], s[7]);
        if (work.swapped)
            stmatrix_x4_trans(to + ((16 * i + lane / 16 * 8 + lane % 8) * pitch + 16 * warp + lane / 8 % 2 * 8) * 2, a,
                              b, c, d);
        else
            stmatrix_x4(to + ((16 * warp + lane % 16) * pitch + 16 * i + lane / 16 * 8) * 2, a, b, c, d);
    }
    bar_sync(1 + group, WARPGROUP);
    const int line = work.swapped ? first_column : first_row, column = work.swapped ? first_row : first_column;
    const int all_lines = work.swapped ? work.n : work.m, all_columns = work.swapped ? work.m : work.n;
    T *const d = (T *)work.d + matrix * work.stride_d;
#pragma unroll 1
    for (int i = thread; i < lines * columns / 8; i += WARPGROUP) {
        const int l = i / (columns / 8), c = i % (columns / 8) * 8;
        const vector16<T> vector = *(const vector16<T> *)(buffer + (l * pitch + c) * 2);
        T *const at = d + (line + l) * work.ldd + column + c;
        if (line + l >= all_lines)
            break;
        if (work.copies_out && column + c + 8 <= all_columns)
            *(vector16<T> *)at = vector;
        else
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (column + c + e < all_columns)
                    at[e] = vector.element[e];
    }
}

// fp32 results of such tiles (partial sums, or an fp32 D), straight from registers to D, which is the transposed tile.
template <typename C>
__device__ __forceinline__ void store_floats_transposed(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                                        int64_t matrix, int first_row, int column, int thread)
{
    float *const d = (float *)work.d + matrix * work.stride_d;
#pragma unroll
    for (int i = 0; i < C::N / 2; i++) {
        const int r = first_row + row_of<C>(thread, 0, i / 2 % 2), c = column + 8 * (i / 4) + i % 2;
        if (r < work.m && c < work.n)
            d[c * work.ldd + r] = sum[0][i];
    }
}

// The offset of column `column` in a row of GELU_COLUMNS sums in float32, swizzled so that neither the stores of eight
// rows' pairs nor the loads of 16 or 32 bytes conflict.
template <typename C>
__device__ __forceinline__ int sum_offset(int row, int column)
{
    const int vector = column / 4;
    return row * C::GELU_COLUMNS * 4 + (vector ^ (row % 8) ^ (vector / 8)) * 16 + column % 4 * 4;
}

// Loads adjacent sums of a row, 16 bytes at a time, or of a column; `moved` bytes are added to each address of `from`.
template <int COUNT, int READS>
__device__ __forceinline__ void read_sums(float (&x)[COUNT], const char *const (&from)[READS], int moved,
                                          bool of_column)
{
    if (READS == COUNT && of_column) {
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            x[e] = *(const float *)(from[e % READS] + moved);
    } else {
#pragma unroll
        for (int e = 0; e < COUNT; e += 4) {
            const float4 four = *(const float4 *)(from[e / 4] + moved);
            x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
        }
    }
}

// The epilogue with gelu, or with the preactivation stored: through shared memory in float32, GELU_COLUMNS at a time,
// and from there in rolled loops. Unrolled, gelu is some thousand instructions, which a kernel of one or two tiles a
// block waits for as it does for its operands. The recursion over FIRST, the first column, makes it a constant from the
// beginning: in a loop over column blocks all sums would stay live to its end, and gelu would have too few registers.
template <typename C, int FIRST>
__device__ __forceinline__ void store_gelu(const float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work, char *buffer,
                                           int64_t matrix, int first_row, int first_column, int group, int thread)
{
    typedef typename C::T T;
    constexpr int MANY = 16 / sizeof(T), GELU_COLUMNS = C::GELU_COLUMNS,
                  COLUMNS = C::N - FIRST < GELU_COLUMNS ? C::N - FIRST : GELU_COLUMNS;
    bar_sync(1 + group, WARPGROUP); // the previous columns have been read
#pragma unroll
    for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++) {
                const float *const s = sum[block] + FIRST / 2 + 4 * i + 2 * half;
                *(float2 *)(buffer + sum_offset<C>(row_of<C>(thread, block, half), 8 * i + 2 * (thread % 4))) =
                    make_float2(s[0], s[1]);
            }
    bar_sync(1 + group, WARPGROUP);
    // A thread takes adjacent elements of D: of a row of the tile, or of a column if `swapped`.
    constexpr bool EITHER = C::IN_LINES || C::IN_REGISTERS;
    const bool swapped = EITHER && work.swapped;
    const int row = swapped ? thread / GELU_COLUMNS * MANY : thread / (GELU_COLUMNS / MANY);
    const int column = swapped ? thread % GELU_COLUMNS : thread % (GELU_COLUMNS / MANY) * MANY;
    const int step = swapped ? WARPGROUP / GELU_COLUMNS * MANY : WARPGROUP / (GELU_COLUMNS / MANY);
    const int64_t along_rows = swapped ? 1 : work.ldd, along_columns = swapped ? work.ldd : 1;
    const int c = first_column + FIRST + column, rows = min(C::GROUP_M, work.m - first_row);
    int64_t at = matrix * work.stride_d + (first_row + row) * along_rows + c * along_columns;
    // A step is a multiple of eight rows, which leaves the swizzle the same.
    static_assert(WARPGROUP / (GELU_COLUMNS / MANY) % 8 == 0 && WARPGROUP / GELU_COLUMNS * MANY % 8 == 0,
                  "one swizzle a thread");
    constexpr int READS = EITHER ? MANY : MANY / 4;
    const char *from[READS];
#pragma unroll
    for (int i = 0; i < READS; i++)
        from[i] = buffer + (swapped ? sum_offset<C>(row + i, column) : sum_offset<C>(row, column + i % (MANY / 4) * 4));
    if (c < work.n && column < COLUMNS) {
        int moved = 0;
#pragma unroll 1
        for (int r = row; r < rows; r += step, at += step * along_rows, moved += step * GELU_COLUMNS * 4) {
            float x[MANY];
            read_sums(x, from, moved, swapped);
            const int left = swapped ? rows - r : work.n - c; // of the row of D
            const bool whole = opaque(work.whole) && left >= MANY;
            if (opaque(work.preactivation != nullptr))
                store_some<T>(work.preactivation, at, x, work.output_is_float, whole, left);
            if constexpr (C::ACTIVATES_QUICKLY) {
                activate_quickly(x, opaque(work.activation));
            } else {
                const int activation = opaque(work.activation);
#pragma unroll
                for (int e = 0; e < MANY; e++)
                    x[e] = activate(x[e], activation);
            }
            store_some<T>(work.d, at, x, work.output_is_float, whole, left);
        }
    }
    if constexpr (FIRST + GELU_COLUMNS < C::N)
        store_gelu<C, FIRST + GELU_COLUMNS>(sum, work, buffer, matrix, first_row, first_column, group, thread);
}

// The epilogue of a tile, from the accumulators to D.
template <typename C>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &bias, const GemmWork &work,
                                           const CUtensorMap *map_d, char *buffers, int &buffer, int64_t matrix,
                                           int first_row, int first_column, int group, int thread)
{
    const int column = first_column + 2 * (thread % 4);
    finish<C>(sum, bias, work, first_row, thread);
    if constexpr (C::HAS_GELU) {
        if (work.preactivation || is_gelu(work.activation)) {
            store_gelu<C, 0>(sum, work, buffers, matrix, first_row, first_column, group, thread);
            return;
        }
    }
    if constexpr (C::IN_LINES) {
        if (!work.output_is_float)
            store_lines<C>(sum, work, buffers, matrix, first_row, first_column, group, thread);
        else if (work.swapped)
            store_floats_transposed<C>(sum, work, matrix, first_row, column, thread);
        else
            store_floats<C>(sum, work, matrix, first_row, column, thread);
    } else if constexpr (sizeof(typename C::T) == 2) {
        if constexpr (C::MAKES_EITHER) {
            if (work.swapped) {
                store_halves_transposed<C>(sum, map_d, buffers, buffer, matrix, first_row, first_column, group, thread);
                return;
            }
        }
        if (work.output_is_float)
            store_floats<C>(sum, work, matrix, first_row, column, thread);
        else
            store_halves<C>(sum, work, map_d, buffers, buffer, matrix, first_row, first_column, group, thread);
    } else if (C::FLOATS_BY_TMA && work.copies_out) {
        if constexpr (C::FLOATS_BY_TMA)
            store_floats_tma<C>(sum, map_d, buffers, buffer, matrix, first_row, first_column, group, thread);
    } else if constexpr (C::IN_REGISTERS) {
        if (work.swapped)
            store_floats_swapped<C>(sum, work, matrix, first_row, column, thread);
        else
            store_floats<C>(sum, work, matrix, first_row, column, thread);
    } else {
        store_floats<C>(sum, work, matrix, first_row, column, thread);
    }
}

#endif // CUDA_OPS_HOPPER_CODE

#endif
