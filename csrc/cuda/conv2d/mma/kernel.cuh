// The kernels of conv2d's mma path, to be instantiated a product a file; conv2d/mma/mma.cu tells what they do.
#ifndef CUDA_OPS_CONV2D_MMA_KERNEL_CUH
#define CUDA_OPS_CONV2D_MMA_KERNEL_CUH

#include <limits.h>

#include "conv2d/relayout.h"
#include "conv2d/stride_phase.h"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int MMA_THREADS = 256, MMA_STAGES = 4;
// Elements by which backward_weight's lines in shared memory are longer than a multiple of all banks, as many as one
// instruction reads of a line: so no two of the lines that it reads meet on a bank.
static constexpr int MMA_PAD = 8;

// Places of the result, and what their taps are: place (v, u) of an image begins at row start_y + v * step_y of the
// picture, tap (j, i) lies j * tap_y rows further on, and its weight is that of row first_y + j * next_y of the kernel.
struct MmaWalk {
    int grid_height, grid_width, start_y, start_x, step_y, step_x;
    int taps_y, taps_x, tap_y, tap_x;
    int first_y, first_x, next_y, next_x;
    int result_y, result_x, result_step_y, result_step_x; // where the places lie in the result
};

// forward, and backward_input with the weight as [c][tap][o].
struct MmaPixels {
    const void *picture, *weight, *bias;
    void *result;
    int64_t picture_pixel, result_pixel;          // channels of all groups
    int64_t weight_row, weight_tap, weight_group; // distances
    int images, height, width;                    // of the picture
    int result_height, result_width;
    int channels, columns; // of a group: summed over, and of the result
    int kernel_width, tiles_n;
    bool in_residues; // a walk for each residue, else the one that is given
    int residues_x;
    stride_phase_axis lines[2];
    MmaWalk walk;
};

struct MmaWeight {
    const void *grad_output, *picture;
    void *result; // [group][o][tap][c]; where is_float: that of each piece, one after the other
    int64_t grad_pixel, picture_pixel;
    int height, width, start_y, start_x, step_y, step_x, dilation_y, dilation_x;
    int outs, channels, taps, kernel_width; // of a group
    int places, chunk;                      // that are summed over; of a piece
    Divider by_width, by_height;
    int grid_height, grid_width;
    int tiles_n;
    bool is_float;
};

cuda_ops_status conv2d_mma_pixels(const MmaPixels &work, int tile, dim3 grid, cuda_ops_dtype dtype,
                                  cudaStream_t stream);
cuda_ops_status conv2d_mma_weight(const MmaWeight &work, int tile, dim3 grid, cuda_ops_dtype dtype,
                                  cudaStream_t stream);

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// Added to whatever tap, it is a row of no picture.
static constexpr int MMA_NOWHERE = INT_MIN / 2;

// 16 bytes, zeros if not `inside`.
__device__ __forceinline__ void copy_piece(uint32_t to, const void *from, bool inside)
{
    cp_async<16>(to, from, inside ? 16 : 0);
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t from)
{
    if constexpr (TRANSPOSED)
        ldmatrix_x4_trans(d, from);
    else
        ldmatrix_x4(d, from);
}

// float's bits rounded to TF32; halves as they are.
template <typename T>
__device__ __forceinline__ uint32_t mma_operand(uint32_t bits)
{
    if constexpr (sizeof(T) == 4)
        return cvt_rna_tf32(__uint_as_float(bits));
    return bits;
}

// d (16 x 8) += a * b, of 32 bytes of the summed axis.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t *b)
{
    mma_sync<T>(d, a, b[0], b[1]);
}

// Two neighbours of a row of the result, of which there may be but one.
template <typename R>
__device__ __forceinline__ void store_two(R *to, float x, float y, bool first, bool second, bool paired)
{
    if (second && paired) {
        if constexpr (sizeof(R) == 4) {
            *(float2 *)to = make_float2(x, y);
        } else {
            const R pair[2] = {store_from_accumulate<R>(x), store_from_accumulate<R>(y)};
            *(uint32_t *)to = (uint32_t)__builtin_bit_cast(unsigned short, pair[0]) |
                              (uint32_t)__builtin_bit_cast(unsigned short, pair[1]) << 16;
        }
    } else {
        if (first)
            to[0] = store_from_accumulate<R>(x);
        if (second)
            to[1] = store_from_accumulate<R>(y);
    }
}

// How the warps share a tile of M x N: each takes 64 x 32 or 32 x 32 of it.
template <int M, int N>
struct MmaWarps {
    static constexpr int ACROSS = N / 32, WARP_M = M / (MMA_THREADS / 32 / ACROSS);
    static constexpr int ROWS = WARP_M / 16, COLUMNS = 4; // instructions
    static_assert(WARP_M == 32 || WARP_M == 64, "accumulators that registers can hold");
};

__device__ __forceinline__ MmaWalk walk_of_residue(const MmaPixels &work, int residue)
{
    const int64_t y = residue / work.residues_x, x = residue % work.residues_x;
    const stride_phase_axis &rows = work.lines[0], &columns = work.lines[1];
    const stride_phase_taps taps_y = taps_of_stride_phase(rows, y), taps_x = taps_of_stride_phase(columns, x);
    MmaWalk walk;
    walk.grid_height = (int)ceil_div(rows.extent - y, rows.stride);
    walk.grid_width = (int)ceil_div(columns.extent - x, columns.stride);
    walk.start_y = (int)taps_y.start, walk.start_x = (int)taps_x.start;
    walk.step_y = walk.step_x = 1;
    walk.taps_y = taps_x.count > 0 ? (int)taps_y.count : 0, walk.taps_x = (int)taps_x.count;
    walk.tap_y = -(int)taps_y.back, walk.tap_x = -(int)taps_x.back;
    walk.first_y = (int)taps_y.first, walk.first_x = (int)taps_x.first;
    walk.next_y = (int)taps_y.step, walk.next_x = (int)taps_x.step;
    walk.result_y = (int)y, walk.result_x = (int)x;
    walk.result_step_y = (int)rows.stride, walk.result_step_x = (int)columns.stride;
    return walk;
}
#endif

// Rows are places, columns the result's channels. blockIdx: tile, residue, group.
template <typename T, int N>
__global__ void __launch_bounds__(MMA_THREADS, 2) conv2d_mma_pixels_kernel(const __grid_constant__ MmaPixels work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int M = 128, ROW_BYTES = 64, PIECES = ROW_BYTES / 16; // a row is one line of one operand's slice
    constexpr int PIECE = 16 / (int)sizeof(T), K = PIECES * PIECE, LINES = MMA_THREADS / PIECES;
    constexpr int A_BYTES = M * ROW_BYTES, STAGE_BYTES = A_BYTES + N * ROW_BYTES;
    typedef MmaWarps<M, N> Warps;
    extern __shared__ __align__(128) char shared[];
    __shared__ MmaWalk shared_walk;
    if (threadIdx.x == 0)
        shared_walk = work.in_residues ? walk_of_residue(work, blockIdx.y) : work.walk;
    __syncthreads();
    const MmaWalk walk = shared_walk;
    const int tile_m = blockIdx.x / work.tiles_n, tile_n = blockIdx.x - tile_m * work.tiles_n, group = blockIdx.z;
    const int first_place = tile_m * M, first_column = tile_n * N;
    const int image_places = walk.grid_height * walk.grid_width, places = work.images * image_places;
    wait_for_predecessor();
    if (first_place >= places)
        return; // the whole block: a residue smaller than the largest

    // A thread copies one piece of 16 bytes of every LINES-th row.
    const int piece = threadIdx.x % PIECES, line = threadIdx.x / PIECES;
    const T *const picture = (const T *)work.picture + (int64_t)group * work.channels;
    const T *const weight = (const T *)work.weight + group * work.weight_group;
    int64_t from[M / LINES];
    int row_y[M / LINES], row_x[M / LINES];
#pragma unroll
    for (int i = 0; i < M / LINES; i++) {
        const int place = first_place + line + i * LINES, image = place / image_places;
        const int v = (place - image * image_places) / walk.grid_width;
        const int u = place - image * image_places - v * walk.grid_width;
        row_y[i] = place < places ? walk.start_y + v * walk.step_y : MMA_NOWHERE;
        row_x[i] = walk.start_x + u * walk.step_x;
        from[i] = (((int64_t)image * work.height + walk.start_y + v * walk.step_y) * work.width + row_x[i]) *
                  work.picture_pixel;
    }
    const uint32_t ring = shared_address(shared);
    // Pieces are permuted within two rows of 128 bytes, so that 8 rows' pieces of one column are on different banks.
    const uint32_t to = ring + line * ROW_BYTES + (piece ^ (line / 2 % PIECES)) * 16;
    const int steps = (int)ceil_div((int64_t)walk.taps_y * walk.taps_x * work.channels, K);
    // (tap, channel) counted on, so that channels of any whole number of pieces fill the slices without gaps.
    int channel = piece * PIECE, j = 0, i_x = 0;
    const auto settle = [&]() {
        while (channel >= work.channels) {
            channel -= work.channels;
            if (++i_x >= walk.taps_x) {
                i_x = 0;
                j++;
            }
        }
    };
    settle();
    const auto load = [&](int step) {
        if (step < steps) {
            const uint32_t stage = to + step % MMA_STAGES * STAGE_BYTES;
            const bool is_tap = j < walk.taps_y;
            const int y = j * walk.tap_y, x = i_x * walk.tap_x;
            const int64_t tap = ((int64_t)y * work.width + x) * work.picture_pixel + channel;
            const int64_t of_weight =
                ((walk.first_y + (int64_t)j * walk.next_y) * work.kernel_width + walk.first_x + i_x * walk.next_x) *
                    work.weight_tap +
                channel;
#pragma unroll
            for (int i = 0; i < M / LINES; i++) {
                // As unsigned numbers, what is negative is too large as well.
                const bool inside = is_tap && (unsigned int)(row_y[i] + y) < (unsigned int)work.height &&
                                    (unsigned int)(row_x[i] + x) < (unsigned int)work.width;
                copy_piece(stage + i * LINES * ROW_BYTES, inside ? picture + (from[i] + tap) : picture, inside);
            }
#pragma unroll
            for (int i = 0; i < N / LINES; i++) {
                const int column = first_column + line + i * LINES;
                const bool inside = is_tap && column < work.columns;
                copy_piece(stage + A_BYTES + i * LINES * ROW_BYTES,
                           inside ? weight + (column * work.weight_row + of_weight) : weight, inside);
            }
            channel += K;
            settle();
        }
        // A group a step even where there is nothing to load, so that the count of groups tells the step.
        cp_async_commit_group();
    };
#pragma unroll
    for (int step = 0; step < MMA_STAGES - 1; step++)
        load(step);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int my_row = warp / Warps::ACROSS * Warps::WARP_M, my_column = warp % Warps::ACROSS * 32;
    // ldmatrix takes the rows' addresses from the lanes: of A rows 0-15 of one piece, then of the next; of B 8 rows of
    // one piece, of the next, then the same of 8 rows more. All of these are multiples of 8 rows, and so begin alike.
    const int a_row = my_row + lane % 16, a_piece = lane / 16;
    const int b_row = my_column + lane % 8 + lane / 16 * 8, b_piece = lane / 8 % 2;
    const uint32_t a_line = ring + a_row * ROW_BYTES, b_line = ring + A_BYTES + b_row * ROW_BYTES;
    const int a_swizzle = a_row / 2 % PIECES, b_swizzle = b_row / 2 % PIECES;
    float sum[Warps::ROWS][Warps::COLUMNS][4] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait_group<MMA_STAGES - 2>();
        // This step's slices are there for all, and the stage that is loaded next has been read by all.
        __syncthreads();
        load(step + MMA_STAGES - 1);
        const uint32_t stage = step % MMA_STAGES * STAGE_BYTES;
#pragma unroll
        for (int k = 0; k < PIECES; k += 2) {
            uint32_t left[Warps::ROWS][4], right[Warps::COLUMNS / 2][4];
#pragma unroll
            for (int i = 0; i < Warps::ROWS; i++)
                load_matrices<false>(left[i], a_line + stage + i * 16 * ROW_BYTES + ((k + a_piece) ^ a_swizzle) * 16);
#pragma unroll
            for (int c = 0; c < Warps::COLUMNS / 2; c++)
                load_matrices<false>(right[c], b_line + stage + c * 16 * ROW_BYTES + ((k + b_piece) ^ b_swizzle) * 16);
#pragma unroll
            for (int e = 0; e < 4; e++) {
#pragma unroll
                for (int i = 0; i < Warps::ROWS; i++)
                    left[i][e] = mma_operand<T>(left[i][e]);
#pragma unroll
                for (int c = 0; c < Warps::COLUMNS / 2; c++)
                    right[c][e] = mma_operand<T>(right[c][e]);
            }
#pragma unroll
            for (int i = 0; i < Warps::ROWS; i++)
#pragma unroll
                for (int c = 0; c < Warps::COLUMNS; c++)
                    mma<T>(sum[i][c], left[i], right[c / 2] + c % 2 * 2);
        }
    }
    release_successor();

    // A thread holds, of each 8 columns, two neighbours: of rows lane / 4 and that + 8.
    T *const result = (T *)work.result + (int64_t)group * work.columns;
    const bool paired = work.result_pixel % 2 == 0 && (int64_t)group * work.columns % 2 == 0 &&
                        (uintptr_t)work.result % (2 * sizeof(T)) == 0;
    const T *const bias = work.bias ? (const T *)work.bias + (int64_t)group * work.columns : nullptr;
    float added[Warps::COLUMNS][2];
#pragma unroll
    for (int c = 0; c < Warps::COLUMNS; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int column = first_column + my_column + 8 * c + lane % 4 * 2 + e;
            added[c][e] = bias && column < work.columns ? load_as_accumulate(bias[column]) : 0.0f;
        }
#pragma unroll
    for (int i = 0; i < Warps::ROWS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int place = first_place + my_row + 16 * i + lane / 4 + 8 * half, image = place / image_places;
            if (place >= places)
                continue;
            const int v = (place - image * image_places) / walk.grid_width;
            const int u = place - image * image_places - v * walk.grid_width;
            const int64_t y = (int64_t)walk.result_y + (int64_t)v * walk.result_step_y;
            const int64_t x = (int64_t)walk.result_x + (int64_t)u * walk.result_step_x;
            T *const to =
                result + ((image * (int64_t)work.result_height + y) * work.result_width + x) * work.result_pixel;
#pragma unroll
            for (int c = 0; c < Warps::COLUMNS; c++) {
                const int column = first_column + my_column + 8 * c + lane % 4 * 2;
                store_two(to + column, sum[i][c][2 * half] + added[c][0], sum[i][c][2 * half + 1] + added[c][1],
                          column < work.columns, column + 1 < work.columns, paired);
            }
        }
#endif
}

// Rows are grad_output's channels, columns (tap, channel) of the input; both operands lie along them, and are turned
// around on the way to registers: halves by ldmatrix, TF32 element by element. blockIdx: tile, piece, group.
template <typename T, int M>
__global__ void __launch_bounds__(MMA_THREADS, 2) conv2d_mma_weight_kernel(const __grid_constant__ MmaWeight work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int N = 128, PIECE = 16 / (int)sizeof(T), K = 4 * PIECE; // places of a slice
    // A line is a place.
    constexpr int A_PITCH = M + MMA_PAD, B_PITCH = N + MMA_PAD;
    constexpr int A_SIZE = K * A_PITCH, STAGE_SIZE = A_SIZE + K * B_PITCH;
    constexpr int A_PIECES = M / PIECE, B_PIECES = N / PIECE, A_LINES = MMA_THREADS / A_PIECES;
    constexpr int B_LINES = MMA_THREADS / B_PIECES;
    static_assert(K % A_LINES == 0 && K % B_LINES == 0, "whole passes");
    typedef MmaWarps<M, N> Warps;
    extern __shared__ __align__(128) char shared[];
    const int tile_m = blockIdx.x / work.tiles_n, tile_n = blockIdx.x - tile_m * work.tiles_n, group = blockIdx.z;
    const int first_row = tile_m * M, first_column = tile_n * N, columns = work.taps * work.channels;
    const int begin = blockIdx.y * work.chunk;
    const int end = work.places - begin < work.chunk ? work.places : begin + work.chunk;
    const int steps = (int)ceil_div(end - begin, K);
    wait_for_predecessor();

    // A thread copies the same 16 bytes of every so many places: of A some channels, of B some of one tap's.
    const int a_line = threadIdx.x / A_PIECES, a_row = threadIdx.x % A_PIECES * PIECE;
    const int b_line = threadIdx.x / B_PIECES, b_column = threadIdx.x % B_PIECES * PIECE;
    const bool has_row = first_row + a_row < work.outs, has_column = first_column + b_column < columns;
    const T *const grad = (const T *)work.grad_output + (int64_t)group * work.outs + first_row + a_row;
    const int tap = (first_column + b_column) / work.channels, tap_y = tap / work.kernel_width;
    const int channel = first_column + b_column - tap * work.channels;
    const int offset_y = work.start_y + tap_y * work.dilation_y;
    const int offset_x = work.start_x + (tap - tap_y * work.kernel_width) * work.dilation_x;
    const T *const picture = (const T *)work.picture + (int64_t)group * work.channels + channel;
    const uint32_t ring = shared_address(shared);
    const uint32_t a_to = ring + (a_line * A_PITCH + a_row) * (int)sizeof(T);
    const uint32_t b_to = ring + (A_SIZE + b_line * B_PITCH + b_column) * (int)sizeof(T);
    const auto load = [&](int step) {
        if (step < steps) {
            const uint32_t stage = step % MMA_STAGES * (STAGE_SIZE * (int)sizeof(T));
            const int first = begin + step * K;
#pragma unroll
            for (int i = 0; i < K / A_LINES; i++) {
                const int place = first + a_line + i * A_LINES;
                const bool inside = has_row && place < end;
                copy_piece(a_to + stage + i * A_LINES * A_PITCH * (int)sizeof(T),
                           inside ? grad + place * work.grad_pixel : (const T *)work.grad_output, inside);
            }
#pragma unroll
            for (int i = 0; i < K / B_LINES; i++) {
                const int place = first + b_line + i * B_LINES, row = (int)work.by_width.of((uint32_t)place);
                const int image = (int)work.by_height.of((uint32_t)row);
                const int y = (row - image * work.grid_height) * work.step_y + offset_y;
                const int x = (place - row * work.grid_width) * work.step_x + offset_x;
                const bool inside = has_column && place < end && (unsigned int)y < (unsigned int)work.height &&
                                    (unsigned int)x < (unsigned int)work.width;
                const int64_t pixel = ((int64_t)image * work.height + y) * work.width + x;
                copy_piece(b_to + stage + i * B_LINES * B_PITCH * (int)sizeof(T),
                           inside ? picture + pixel * work.picture_pixel : (const T *)work.picture, inside);
            }
        }
        cp_async_commit_group();
    };
#pragma unroll
    for (int step = 0; step < MMA_STAGES - 1; step++)
        load(step);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int my_row = warp / Warps::ACROSS * Warps::WARP_M, my_column = warp % Warps::ACROSS * 32;
    float sum[Warps::ROWS][Warps::COLUMNS][4] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait_group<MMA_STAGES - 2>();
        __syncthreads();
        load(step + MMA_STAGES - 1);
        const int stage = step % MMA_STAGES * STAGE_SIZE;
#pragma unroll
        for (int k = 0; k < K; k += 2 * PIECE) {
            uint32_t left[Warps::ROWS][4], right[Warps::COLUMNS / 2][4];
            if constexpr (sizeof(T) == 2) {
                // Four 8 x 8 matrices in the instruction's order. Of A: rows 0-7, 8-15, then the same 8 places on; of B
                // columns 0-7, the same 8 places on, then both of columns 8-15.
                const uint32_t a =
                    ring + 2 * (stage + (k + lane % 8 + lane / 16 * 8) * A_PITCH + my_row + lane / 8 % 2 * 8);
                const uint32_t b = ring + 2 * (stage + A_SIZE + (k + lane % 16) * B_PITCH + my_column + lane / 16 * 8);
#pragma unroll
                for (int i = 0; i < Warps::ROWS; i++)
                    load_matrices<true>(left[i], a + 2 * 16 * i);
#pragma unroll
                for (int c = 0; c < Warps::COLUMNS / 2; c++)
                    load_matrices<true>(right[c], b + 2 * 16 * c);
            } else {
                const uint32_t *const a =
                    (const uint32_t *)shared + stage + (k + lane % 4) * A_PITCH + my_row + lane / 4;
                const uint32_t *const b =
                    (const uint32_t *)shared + stage + A_SIZE + (k + lane % 4) * B_PITCH + my_column + lane / 4;
#pragma unroll
                for (int e = 0; e < 4; e++) {
#pragma unroll
                    for (int i = 0; i < Warps::ROWS; i++)
                        left[i][e] = mma_operand<T>(a[e / 2 * 4 * A_PITCH + 16 * i + e % 2 * 8]);
#pragma unroll
                    for (int c = 0; c < Warps::COLUMNS / 2; c++)
                        right[c][e] = mma_operand<T>(b[e % 2 * 4 * B_PITCH + 16 * c + e / 2 * 8]);
                }
            }
#pragma unroll
            for (int i = 0; i < Warps::ROWS; i++)
#pragma unroll
                for (int c = 0; c < Warps::COLUMNS; c++)
                    mma<T>(sum[i][c], left[i], right[c / 2] + c % 2 * 2);
        }
    }
    release_successor();

    const int64_t group_size = (int64_t)work.outs * columns, piece_size = group_size * gridDim.z;
    const int64_t at = work.is_float ? blockIdx.y * piece_size + group * group_size : group * group_size;
    // Columns are whole pieces of 16 bytes, and so is every row of the result.
#pragma unroll
    for (int i = 0; i < Warps::ROWS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + my_row + 16 * i + lane / 4 + 8 * half;
            if (row >= work.outs)
                continue;
#pragma unroll
            for (int c = 0; c < Warps::COLUMNS; c++) {
                const int column = first_column + my_column + 8 * c + lane % 4 * 2;
                const int64_t to = at + (int64_t)row * columns + column;
                const float x = sum[i][c][2 * half], y = sum[i][c][2 * half + 1];
                if (work.is_float)
                    store_two((float *)work.result + to, x, y, column < columns, column + 1 < columns, true);
                else
                    store_two((T *)work.result + to, x, y, column < columns, column + 1 < columns, true);
            }
        }
#endif
}

#endif
