// The kernels of conv2d's mma path, to be instantiated a product a file; mma.cu tells what they compute.
#ifndef CUDA_OPS_CONV2D_MMA_KERNEL_CUH
#define CUDA_OPS_CONV2D_MMA_KERNEL_CUH

#include <limits.h>

#include "common/activation.cuh"
#include "conv2d/relayout.h"
#include "conv2d/stride_phase.h"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int MMA_THREADS = 256, MMA_STAGES = 4;
// Padding of backward_weight's rows in shared memory, in elements: as many as one instruction reads of a row, so that
// the rows that it reads have no bank conflict.
static constexpr int MMA_PAD = 8;

// The pixels of a product and their taps: pixel (v, u) starts at row start_y + v * step_y of the source, tap (j, i) is
// j * tap_y rows further on, and its weight is row first_y + j * next_y of the kernel. Columns alike.
struct MmaGrid {
    int grid_height, grid_width, start_y, start_x, step_y, step_x;
    int taps_y, taps_x, tap_y, tap_x;
    int first_y, first_x, next_y, next_x;
    int result_y, result_x, result_step_y, result_step_x; // pixels of the result
};

// forward, and backward_input with the weight as [c][tap][o].
struct MmaForward {
    const void *source, *weight, *bias;
    void *result;
    int64_t source_pixel, result_pixel;           // channels of all groups
    int64_t weight_row, weight_tap, weight_group; // strides
    int images, height, width;                    // of the source
    int result_height, result_width;
    int channels, columns; // of a group: summed over, and of the result
    int kernel_width, tiles_n;
    int activation; // forward: of the sums with their bias
    bool by_phases; // one grid for each stride phase; else `grid`
    int phases_x;
    stride_phase_axis phase_axes[2];
    MmaGrid grid;
};

struct MmaBackwardWeight {
    const void *grad_output, *source;
    void *result; // [group][o][tap][c]; is_float: [split][group][o][tap][c]
    int64_t grad_pixel, source_pixel;
    int height, width, start_y, start_x, step_y, step_x, dilation_y, dilation_x;
    int outs, channels, taps, kernel_width; // of a group
    int pixels, chunk;                      // of k, and of a split
    Divider by_width, by_height;
    int grid_height, grid_width;
    int tiles_n;
    bool is_float;
};

cuda_ops_status conv2d_mma_forward(const MmaForward &work, int tile, dim3 grid, cuda_ops_dtype dtype,
                                   cudaStream_t stream);
cuda_ops_status conv2d_mma_backward_weight(const MmaBackwardWeight &work, int tile, dim3 grid, cuda_ops_dtype dtype,
                                           cudaStream_t stream);

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// The row of pixels past the last: outside of the source whatever tap is added.
static constexpr int MMA_OUT_OF_BOUNDS = INT_MIN / 2;

// Copies 16 bytes, or zeros if not `inside`.
__device__ __forceinline__ void copy_vector(uint32_t to, const void *from, bool inside)
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

// float's bits rounded to TF32; 16-bit elements as they are.
template <typename T>
__device__ __forceinline__ uint32_t mma_operand(uint32_t bits)
{
    if constexpr (sizeof(T) == 4)
        return cvt_rna_tf32(__uint_as_float(bits));
    return bits;
}

// d (16 x 8) += a * b, of 32 bytes of k.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t *b)
{
    mma_sync<T>(d, a, b[0], b[1]);
}

// Stores two neighbours of a row of the result, of which the second may be out of bounds.
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

// The warps' arrangement in a tile of M x N: each takes 64 x 32 or 32 x 32 of it.
template <int M, int N>
struct MmaWarps {
    static constexpr int ACROSS = N / 32, WARP_M = M / (MMA_THREADS / 32 / ACROSS);
    static constexpr int ROWS = WARP_M / 16, COLUMNS = 4; // instructions
    static_assert(WARP_M == 32 || WARP_M == 64, "accumulators that registers can hold");
};

__device__ __forceinline__ MmaGrid grid_of_stride_phase(const MmaForward &work, int phase)
{
    const int64_t y = phase / work.phases_x, x = phase % work.phases_x;
    const stride_phase_axis &rows = work.phase_axes[0], &columns = work.phase_axes[1];
    const stride_phase_taps taps_y = taps_of_stride_phase(rows, y), taps_x = taps_of_stride_phase(columns, x);
    MmaGrid grid;
    grid.grid_height = (int)ceil_div(rows.extent - y, rows.stride);
    grid.grid_width = (int)ceil_div(columns.extent - x, columns.stride);
    grid.start_y = (int)taps_y.start, grid.start_x = (int)taps_x.start;
    grid.step_y = grid.step_x = 1;
    grid.taps_y = taps_x.count > 0 ? (int)taps_y.count : 0, grid.taps_x = (int)taps_x.count;
    grid.tap_y = -(int)taps_y.back, grid.tap_x = -(int)taps_x.back;
    grid.first_y = (int)taps_y.first, grid.first_x = (int)taps_x.first;
    grid.next_y = (int)taps_y.step, grid.next_x = (int)taps_x.step;
    grid.result_y = (int)y, grid.result_x = (int)x;
    grid.result_step_y = (int)rows.stride, grid.result_step_x = (int)columns.stride;
    return grid;
}
#endif

// Rows are pixels, columns the result's channels. blockIdx: tile, stride phase, group. One long function: the loads of
// a stage, the products and the epilogue share the thread's rows and coordinates, which are registers.
template <typename T, int N>
__global__ void __launch_bounds__(MMA_THREADS, 2) conv2d_mma_forward_kernel(const __grid_constant__ MmaForward work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int M = 128, ROW_BYTES = 64, VECTORS = ROW_BYTES / 16; // of a row of an operand's stage
    constexpr int VECTOR = 16 / (int)sizeof(T), K = VECTORS * VECTOR, ROWS_AT_ONCE = MMA_THREADS / VECTORS;
    constexpr int A_BYTES = M * ROW_BYTES, STAGE_BYTES = A_BYTES + N * ROW_BYTES;
    typedef MmaWarps<M, N> Warps;
    extern __shared__ __align__(128) char shared[];
    __shared__ MmaGrid shared_grid;
    if (threadIdx.x == 0)
        shared_grid = work.by_phases ? grid_of_stride_phase(work, blockIdx.y) : work.grid;
    __syncthreads();
    const MmaGrid grid = shared_grid;
    const int tile_m = blockIdx.x / work.tiles_n, tile_n = blockIdx.x - tile_m * work.tiles_n, group = blockIdx.z;
    const int first_pixel = tile_m * M, first_column = tile_n * N;
    const int image_pixels = grid.grid_height * grid.grid_width, pixels = work.images * image_pixels;
    wait_for_predecessor();
    if (first_pixel >= pixels)
        return; // the whole block: a phase with fewer pixels than the largest

    // A thread copies one 16-byte vector of every ROWS_AT_ONCE-th row.
    const int vector = threadIdx.x % VECTORS, line = threadIdx.x / VECTORS;
    const T *const source = (const T *)work.source + (int64_t)group * work.channels;
    const T *const weight = (const T *)work.weight + group * work.weight_group;
    int64_t from[M / ROWS_AT_ONCE];
    int row_y[M / ROWS_AT_ONCE], row_x[M / ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < M / ROWS_AT_ONCE; i++) {
        const int pixel = first_pixel + line + i * ROWS_AT_ONCE, image = pixel / image_pixels;
        const int v = (pixel - image * image_pixels) / grid.grid_width;
        const int u = pixel - image * image_pixels - v * grid.grid_width;
        row_y[i] = pixel < pixels ? grid.start_y + v * grid.step_y : MMA_OUT_OF_BOUNDS;
        row_x[i] = grid.start_x + u * grid.step_x;
        from[i] = (((int64_t)image * work.height + grid.start_y + v * grid.step_y) * work.width + row_x[i]) *
                  work.source_pixel;
    }
    const uint32_t ring = shared_address(shared);
    // Vectors are swizzled within two rows, 128 bytes, so that the vectors of one column of 8 rows are in different
    // banks.
    const uint32_t to = ring + line * ROW_BYTES + (vector ^ (line / 2 % VECTORS)) * 16;
    const int steps = (int)ceil_div((int64_t)grid.taps_y * grid.taps_x * work.channels, K);
    // (tap, channel) is counted, so that any whole number of vectors of channels fills the stages without gaps.
    int channel = vector * VECTOR, j = 0, i_x = 0;
    const auto settle = [&]() {
        while (channel >= work.channels) {
            channel -= work.channels;
            if (++i_x >= grid.taps_x) {
                i_x = 0;
                j++;
            }
        }
    };
    settle();
    const auto load = [&](int step) {
        if (step < steps) {
            const uint32_t stage = to + step % MMA_STAGES * STAGE_BYTES;
            const bool is_tap = j < grid.taps_y;
            const int y = j * grid.tap_y, x = i_x * grid.tap_x;
            const int64_t tap = ((int64_t)y * work.width + x) * work.source_pixel + channel;
            const int64_t of_weight =
                ((grid.first_y + (int64_t)j * grid.next_y) * work.kernel_width + grid.first_x + i_x * grid.next_x) *
                    work.weight_tap +
                channel;
#pragma unroll
            for (int i = 0; i < M / ROWS_AT_ONCE; i++) {
                // Compared as unsigned: a negative row is too large as well.
                const bool inside = is_tap && (unsigned int)(row_y[i] + y) < (unsigned int)work.height &&
                                    (unsigned int)(row_x[i] + x) < (unsigned int)work.width;
                copy_vector(stage + i * ROWS_AT_ONCE * ROW_BYTES, inside ? source + (from[i] + tap) : source, inside);
            }
#pragma unroll
            for (int i = 0; i < N / ROWS_AT_ONCE; i++) {
                const int column = first_column + line + i * ROWS_AT_ONCE;
                const bool inside = is_tap && column < work.columns;
                copy_vector(stage + A_BYTES + i * ROWS_AT_ONCE * ROW_BYTES,
                            inside ? weight + (column * work.weight_row + of_weight) : weight, inside);
            }
            channel += K;
            settle();
        }
        // A group per step even where there is nothing to load: the count of groups tells the step.
        cp_async_commit_group();
    };
#pragma unroll
    for (int step = 0; step < MMA_STAGES - 1; step++)
        load(step);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int my_row = warp / Warps::ACROSS * Warps::WARP_M, my_column = warp % Warps::ACROSS * 32;
    // The lanes' addresses for ldmatrix: of A rows 0-15 of one vector, then of the next; of B 8 rows of one vector, of
    // the next, then of 8 rows more. They start at multiples of 8 rows, so that all have the same swizzle.
    const int a_row = my_row + lane % 16, a_vector = lane / 16;
    const int b_row = my_column + lane % 8 + lane / 16 * 8, b_vector = lane / 8 % 2;
    const uint32_t a_line = ring + a_row * ROW_BYTES, b_line = ring + A_BYTES + b_row * ROW_BYTES;
    const int a_swizzle = a_row / 2 % VECTORS, b_swizzle = b_row / 2 % VECTORS;
    float sum[Warps::ROWS][Warps::COLUMNS][4] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait_group<MMA_STAGES - 2>();
        // All threads' copies of this stage have arrived, and all have read the stage that is loaded next.
        __syncthreads();
        load(step + MMA_STAGES - 1);
        const uint32_t stage = step % MMA_STAGES * STAGE_BYTES;
#pragma unroll
        for (int k = 0; k < VECTORS; k += 2) {
            uint32_t left[Warps::ROWS][4], right[Warps::COLUMNS / 2][4];
#pragma unroll
            for (int i = 0; i < Warps::ROWS; i++)
                load_matrices<false>(left[i], a_line + stage + i * 16 * ROW_BYTES + ((k + a_vector) ^ a_swizzle) * 16);
#pragma unroll
            for (int c = 0; c < Warps::COLUMNS / 2; c++)
                load_matrices<false>(right[c], b_line + stage + c * 16 * ROW_BYTES + ((k + b_vector) ^ b_swizzle) * 16);
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

    // A thread holds two neighbours of each 8 columns, of rows lane / 4 and lane / 4 + 8.
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
            const int pixel = first_pixel + my_row + 16 * i + lane / 4 + 8 * half, image = pixel / image_pixels;
            if (pixel >= pixels)
                continue;
            const int v = (pixel - image * image_pixels) / grid.grid_width;
            const int u = pixel - image * image_pixels - v * grid.grid_width;
            const int64_t y = (int64_t)grid.result_y + (int64_t)v * grid.result_step_y;
            const int64_t x = (int64_t)grid.result_x + (int64_t)u * grid.result_step_x;
            T *const to =
                result + ((image * (int64_t)work.result_height + y) * work.result_width + x) * work.result_pixel;
#pragma unroll
            for (int c = 0; c < Warps::COLUMNS; c++) {
                const int column = first_column + my_column + 8 * c + lane % 4 * 2;
                float value[] = {sum[i][c][2 * half] + added[c][0], sum[i][c][2 * half + 1] + added[c][1]};
                activate_simply(value, work.activation);
                store_two(to + column, value[0], value[1], column < work.columns, column + 1 < work.columns, paired);
            }
        }
#endif
}

// Rows are grad_output's channels, columns (tap, channel) of the input. Both operands are contiguous along them, not
// along k, and are transposed on the way to registers: 16-bit ones by ldmatrix, TF32 element by element. blockIdx:
// tile, split, group. One long function for the same reason as forward's.
template <typename T, int M>
__global__ void __launch_bounds__(MMA_THREADS, 2)
    conv2d_mma_backward_weight_kernel(const __grid_constant__ MmaBackwardWeight work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int N = 128, VECTOR = 16 / (int)sizeof(T), K = 4 * VECTOR; // pixels of a stage
    // A row of shared memory is a pixel.
    constexpr int A_PITCH = M + MMA_PAD, B_PITCH = N + MMA_PAD;
    constexpr int A_SIZE = K * A_PITCH, STAGE_SIZE = A_SIZE + K * B_PITCH;
    constexpr int A_VECTORS = M / VECTOR, B_VECTORS = N / VECTOR, A_ROWS_AT_ONCE = MMA_THREADS / A_VECTORS;
    constexpr int B_ROWS_AT_ONCE = MMA_THREADS / B_VECTORS;
    static_assert(K % A_ROWS_AT_ONCE == 0 && K % B_ROWS_AT_ONCE == 0, "whole passes");
    typedef MmaWarps<M, N> Warps;
    extern __shared__ __align__(128) char shared[];
    const int tile_m = blockIdx.x / work.tiles_n, tile_n = blockIdx.x - tile_m * work.tiles_n, group = blockIdx.z;
    const int first_row = tile_m * M, first_column = tile_n * N, columns = work.taps * work.channels;
    const int begin = blockIdx.y * work.chunk;
    const int end = work.pixels - begin < work.chunk ? work.pixels : begin + work.chunk;
    const int steps = (int)ceil_div(end - begin, K);
    wait_for_predecessor();

    // A thread copies the same 16 bytes of some pixels: channels of A, channels of one tap of B.
    const int a_line = threadIdx.x / A_VECTORS, a_row = threadIdx.x % A_VECTORS * VECTOR;
    const int b_line = threadIdx.x / B_VECTORS, b_column = threadIdx.x % B_VECTORS * VECTOR;
    const bool has_row = first_row + a_row < work.outs, has_column = first_column + b_column < columns;
    const T *const grad = (const T *)work.grad_output + (int64_t)group * work.outs + first_row + a_row;
    const int tap = (first_column + b_column) / work.channels, tap_y = tap / work.kernel_width;
    const int channel = first_column + b_column - tap * work.channels;
    const int offset_y = work.start_y + tap_y * work.dilation_y;
    const int offset_x = work.start_x + (tap - tap_y * work.kernel_width) * work.dilation_x;
    const T *const source = (const T *)work.source + (int64_t)group * work.channels + channel;
    const uint32_t ring = shared_address(shared);
    const uint32_t a_to = ring + (a_line * A_PITCH + a_row) * (int)sizeof(T);
    const uint32_t b_to = ring + (A_SIZE + b_line * B_PITCH + b_column) * (int)sizeof(T);
    const auto load = [&](int step) {
        if (step < steps) {
            const uint32_t stage = step % MMA_STAGES * (STAGE_SIZE * (int)sizeof(T));
            const int first = begin + step * K;
#pragma unroll
            for (int i = 0; i < K / A_ROWS_AT_ONCE; i++) {
                const int pixel = first + a_line + i * A_ROWS_AT_ONCE;
                const bool inside = has_row && pixel < end;
                copy_vector(a_to + stage + i * A_ROWS_AT_ONCE * A_PITCH * (int)sizeof(T),
                            inside ? grad + pixel * work.grad_pixel : (const T *)work.grad_output, inside);
            }
#pragma unroll
            for (int i = 0; i < K / B_ROWS_AT_ONCE; i++) {
                const int pixel = first + b_line + i * B_ROWS_AT_ONCE, row = (int)work.by_width.of((uint32_t)pixel);
                const int image = (int)work.by_height.of((uint32_t)row);
                const int y = (row - image * work.grid_height) * work.step_y + offset_y;
                const int x = (pixel - row * work.grid_width) * work.step_x + offset_x;
                const bool inside = has_column && pixel < end && (unsigned int)y < (unsigned int)work.height &&
                                    (unsigned int)x < (unsigned int)work.width;
                const int64_t source_index = ((int64_t)image * work.height + y) * work.width + x;
                copy_vector(b_to + stage + i * B_ROWS_AT_ONCE * B_PITCH * (int)sizeof(T),
                            inside ? source + source_index * work.source_pixel : (const T *)work.source, inside);
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
        for (int k = 0; k < K; k += 2 * VECTOR) {
            uint32_t left[Warps::ROWS][4], right[Warps::COLUMNS / 2][4];
            if constexpr (sizeof(T) == 2) {
                // Four 8 x 8 matrices in the instruction's order. A: rows 0-7, 8-15, then the same of the next 8
                // pixels. B: columns 0-7, the same of the next 8 pixels, then both of columns 8-15.
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

    const int64_t group_size = (int64_t)work.outs * columns, split_size = group_size * gridDim.z;
    const int64_t at = work.is_float ? blockIdx.y * split_size + group * group_size : group * group_size;
    // The result's rows are whole 16-byte vectors.
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
