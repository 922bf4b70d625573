// The kernels of conv2d's sm90 path; sm90.cu tells what they compute. They are gemm/sm90/kernel.cuh's persistent,
// warp-specialised kernel with another producer thread, which lets TMA gather one operand by im2col.
#ifndef CUDA_OPS_CONV2D_SM90_KERNEL_CUH
#define CUDA_OPS_CONV2D_SM90_KERNEL_CUH

#include <type_traits>

#include "common/tensor_map.h"
#include "conv2d/sm90/problem.h"
#include "gemm/sm90/kernel.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// Rows of B (channels of a tap) that one TMA copy of backward_weight_stride1 brings.
static constexpr int SHIFTED_CHUNK = 32;

// Products of all groups of channels. Those of a group have n columns, and tiles of them group_width, a multiple of a
// cluster's; tiles are numbered as if the groups were side by side.
struct GroupedGemmWork : GemmWork {
    int groups, group_width;
};

// A product whose row m is pixel (v, u) of the grid and is stored to row result_y + v * stride_y of the result, column
// alike. by_vectors: a group's columns are whole 16-byte vectors; in TF32, of 8 bytes.
struct StridedGemmWork : GroupedGemmWork {
    int by_vectors;
    Divider by_width, by_height;
    int grid_width, grid_height;
    int result_height, result_width, result_y, result_x, stride_y, stride_x;
};

struct ConvWork {
    StridedGemmWork gemm; // what the consumers of gemm/sm90/kernel.cuh read
    int grid_height, grid_width, start_y, start_x, step_y, step_x;
    Divider by_height, by_width; // the grid's
    int kernel_width, taps, dilation_y, dilation_x;
    int first_tap, next_tap_y, next_tap_x, next_group; // matrices of the weight's map
    int chunks;                                        // of channels: tiles' columns (backward_weight) or stages' depth
    int last_offset_y, last_offset_x;                  // mirrored: the offsets of tap 0
    int mirrored;
    int line, first_shift;                 // CONV_SHIFTED: pixels of a row of the grid; shift of the first row of taps
    int first_map, next_map, next_channel; // of the gathered operand: a group further on are other maps, or channels
};

// Maps of the operand A: one, or those of groups and stride phases, as many as there are.
struct ConvMaps {
    CUtensorMap a[MOST_MAPS];
};

// backward_input with a stride: the products of several stride phases in one launch, one after the other in the order
// of tiles. Those with the most taps come first, so that no long tile is left to the end.
struct StridePhasesWork {
    ConvWork phases[MOST_PHASES_TOGETHER];
    int first[MOST_PHASES_TOGETHER]; // tile of each phase; INT32_MAX past the last
    int total, batch;                // batch: 1, which consume reads
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The product that tile `index` belongs to; `index` becomes the tile's number in it, `which` the product's.
__device__ __forceinline__ const ConvWork &product_of(const ConvWork &work, int &, int &which)
{
    which = 0;
    return work;
}
__device__ __forceinline__ const ConvWork &product_of(const StridePhasesWork &work, int &index, int &which)
{
    which = 0;
#pragma unroll
    for (int i = 1; i < MOST_PHASES_TOGETHER; i++)
        which += index >= work.first[i];
    index -= work.first[which];
    return work.phases[which];
}
__device__ __forceinline__ int tiles_of(const ConvWork &work)
{
    return work.gemm.total;
}
__device__ __forceinline__ int tiles_of(const StridePhasesWork &work)
{
    return work.total;
}

// Overloads that of gemm/sm90/kernel.cuh; the index of the phase stands for that of the split.
template <typename C>
__device__ __forceinline__ TileCoordinates tile_coordinates(const StridePhasesWork &work, int index, int rank_m,
                                                            int rank_n)
{
    int which;
    const GemmWork &gemm = product_of(work, index, which).gemm;
    TileCoordinates at = tile_coordinates<C>(gemm, index, rank_m, rank_n);
    at.split = which;
    return at;
}

// The group that a column of tiles belongs to.
__device__ __forceinline__ int group_of_column(const GroupedGemmWork &work, int column)
{
    return work.groups == 1 ? 0 : column / work.group_width;
}

struct PixelCoordinate {
    int x, y, image;
};

// The pixel of the source that is the grid's pixel `index`.
__device__ __forceinline__ PixelCoordinate pixel_coordinate(const ConvWork &work, int index)
{
    const int line = (int)work.by_width.of((uint32_t)index), column = index - line * work.grid_width;
    PixelCoordinate pixel;
    pixel.image = (int)work.by_height.of((uint32_t)line);
    pixel.y = work.start_y + (line - pixel.image * work.grid_height) * work.step_y;
    pixel.x = work.start_x + column * work.step_x;
    return pixel;
}

struct TapCoordinate {
    int tap, channel, offset_x, offset_y;
};

// Chunk `index` of the axis (tap, channel), in chunks of `width` channels. Past the last tap: channels out of bounds.
__device__ __forceinline__ TapCoordinate tap_coordinate(const ConvWork &work, int index, int width)
{
    TapCoordinate at;
    at.tap = index / work.chunks;
    at.channel = (index - at.tap * work.chunks) * width;
    if (at.tap >= work.taps) {
        at.tap = 0;
        at.channel = work.chunks * width;
    }
    const int row = at.tap / work.kernel_width, column = at.tap - row * work.kernel_width;
    at.tap = work.first_tap + row * work.next_tap_y + column * work.next_tap_x;
    at.offset_y = work.mirrored ? work.last_offset_y - row * work.dilation_y : row * work.dilation_y;
    at.offset_x = work.mirrored ? work.last_offset_x - column * work.dilation_x : column * work.dilation_x;
    return at;
}

// The chunk after `at`, by counting: the producer is one thread, which has no time to divide while a stage is
// multiplied. chunk, column: the index of `at` among the channels' chunks, and among the taps of a row.
__device__ __forceinline__ void next_chunk(const ConvWork &work, int width, TapCoordinate &at, int &chunk, int &column)
{
    at.channel += width;
    if (++chunk < work.chunks)
        return;
    const int x = work.mirrored ? -work.dilation_x : work.dilation_x;
    chunk = at.channel = 0;
    at.tap += work.next_tap_x;
    at.offset_x += x;
    if (++column < work.kernel_width)
        return;
    column = 0;
    at.tap += work.next_tap_y - work.kernel_width * work.next_tap_x;
    at.offset_x -= work.kernel_width * x;
    at.offset_y += work.mirrored ? -work.dilation_y : work.dilation_y;
}

// The producer thread, as `produce` of gemm/sm90/kernel.cuh, but that TMA gathers one operand by im2col: A where its
// rows are pixels (K-major) or where it goes through registers (backward_weight in TF32), else B. works: a ConvWork, or
// a StridePhasesWork with a tensor map of A for each phase.
template <typename C, typename Works>
__device__ __forceinline__ void conv2d_produce(const Works &works, const CUtensorMap *maps_a, const CUtensorMap *map_b,
                                               uint32_t stages, uint32_t full, uint32_t empty, int rank_m, int rank_n,
                                               int first, int stride)
{
    constexpr bool GATHERS_A = !C::A_MN_MAJOR || C::IN_REGISTERS;
    constexpr int COLUMNS = GATHERS_A ? C::A_COLUMNS : C::B_COLUMNS;
    uint16_t blocks_a = 0, blocks_b = 0;
    for (int i = 0; i < C::CLUSTER_N; i++)
        blocks_a |= 1 << (rank_m + i * C::CLUSTER_M);
    for (int i = 0; i < C::CLUSTER_M; i++)
        blocks_b |= 1 << (i + rank_n * C::CLUSTER_M);
    const auto gather = [&](uint32_t to, const CUtensorMap *map, uint32_t arrived, const TapCoordinate &tap,
                            int first_channel, const PixelCoordinate &pixel, bool several, uint16_t blocks) {
        const int channel = first_channel + tap.channel;
        if (several)
            tma_load_im2col_4d_multicast(to, map, arrived, channel, pixel.x, pixel.y, pixel.image, tap.offset_x,
                                         tap.offset_y, blocks);
        else
            tma_load_im2col_4d(to, map, arrived, channel, pixel.x, pixel.y, pixel.image, tap.offset_x, tap.offset_y);
    };
    const auto fetch = [&](uint32_t to, const CUtensorMap *map, uint32_t arrived, int inner, int outer, int batch,
                           bool several, uint16_t blocks) {
        if (several)
            tma_load_3d_multicast(to, map, arrived, inner, outer, batch, blocks);
        else
            tma_load_3d(to, map, arrived, inner, outer, batch);
    };
    int stage = 0, phase = 0;
    for (int tile = first; tile < tiles_of(works); tile += stride) {
        int index = tile, which;
        const ConvWork &work = product_of(works, index, which);
        TileCoordinates at = tile_coordinates<C>(work.gemm, index, rank_m, rank_n);
        const int group = group_of_column(work.gemm, at.n);
        at.n -= group * work.gemm.group_width;
        const CUtensorMap *const map_a = maps_a + work.first_map + group * work.next_map;
        const int first_channel = group * work.next_channel;
        constexpr int rows_a = (C::A_MN_MAJOR ? C::K : C::M) / C::CLUSTER_N;
        constexpr int rows_b = (C::B_MN_MAJOR ? C::K : C::N) / C::CLUSTER_M;
        PixelCoordinate pixel = {};
        TapCoordinate taps[COLUMNS];
        [[maybe_unused]] int chunk = 0, tap_column = 0;
        if constexpr (!C::A_MN_MAJOR) {
            pixel = pixel_coordinate(work, at.m + rank_n * rows_a);
            const int index = at.k_begin / C::K, tap = index / work.chunks;
            taps[0] = tap_coordinate(work, index, C::K);
            taps[0].tap += group * work.next_group;
            chunk = index - tap * work.chunks;
            tap_column = tap % work.kernel_width;
        } else {
#pragma unroll
            for (int column = 0; column < COLUMNS; column++)
                taps[column] = tap_coordinate(work, (GATHERS_A ? at.m : at.n) / C::ROW + column, C::ROW);
        }
        int k = at.k_begin;
        for (int step = 0; step < at.steps; step++, k += C::K) {
            if constexpr (C::A_MN_MAJOR)
                pixel = pixel_coordinate(work, k + (GATHERS_A ? rank_n * rows_a : rank_m * rows_b));
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
            mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
            const uint32_t to_a = a + rank_n * rows_a * SWIZZLE_ROW, to_b = b + rank_m * rows_b * SWIZZLE_ROW;
            if constexpr (!C::A_MN_MAJOR) {
                gather(to_a, map_a, arrived, taps[0], first_channel, pixel, C::CLUSTER_N > 1, blocks_a);
            } else {
#pragma unroll
                for (int column = 0; column < C::A_COLUMNS; column++)
                    if constexpr (GATHERS_A)
                        gather(to_a + column * C::COLUMN_BYTES, map_a, arrived, taps[column], first_channel, pixel,
                               C::CLUSTER_N > 1, blocks_a);
                    else
                        fetch(to_a + column * C::COLUMN_BYTES, map_a, arrived, at.m + column * C::ROW,
                              k + rank_n * rows_a, group, C::CLUSTER_N > 1, blocks_a);
            }
            if constexpr (!GATHERS_A) {
#pragma unroll
                for (int column = 0; column < C::B_COLUMNS; column++)
                    gather(to_b + column * C::COLUMN_BYTES, map_b, arrived, taps[column], first_channel, pixel,
                           C::CLUSTER_M > 1, blocks_b);
            } else if constexpr (C::B_MN_MAJOR) {
#pragma unroll
                for (int column = 0; column < C::B_COLUMNS; column++)
                    fetch(to_b + column * C::COLUMN_BYTES, map_b, arrived, at.n + column * C::ROW,
                          taps[0].channel + rank_m * rows_b, taps[0].tap, C::CLUSTER_M > 1, blocks_b);
            } else if constexpr (C::A_MN_MAJOR) {
                fetch(to_b, map_b, arrived, k, at.n + rank_m * rows_b, group, C::CLUSTER_M > 1, blocks_b);
            } else {
                fetch(to_b, map_b, arrived, taps[0].channel, at.n + rank_m * rows_b, taps[0].tap, C::CLUSTER_M > 1,
                      blocks_b);
            }
            if constexpr (!C::A_MN_MAJOR)
                next_chunk(work, C::K, taps[0], chunk, tap_column);
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

// The producer thread of CONV_SHIFTED, TF32's backward_weight of stride 1. A is grad_output as [o][pixel], B the input
// as [s][c][pixel], a copy for each column s of the kernel that is shifted by its dilation. Both have the same zeros
// between rows and images, so that a tap is one of the copies and a start some rows further on.
template <typename C>
__device__ __forceinline__ void conv2d_produce_shifted(const ConvWork &work, const CUtensorMap *map_a,
                                                       const CUtensorMap *map_b, uint32_t stages, uint32_t full,
                                                       uint32_t empty, int rank_m, int rank_n)
{
    static_assert(C::CLUSTER_N == 1, "A is not shared");
    constexpr int COPIES = C::N / C::CLUSTER_M / SHIFTED_CHUNK;
    uint16_t blocks_b = 0;
    for (int i = 0; i < C::CLUSTER_M; i++)
        blocks_b |= 1 << i;
    int stage = 0, phase = 0;
    for (int index = blockIdx.x / C::CLUSTER; index < work.gemm.total; index += gridDim.x / C::CLUSTER) {
        TileCoordinates at = tile_coordinates<C>(work.gemm, index, rank_m, rank_n);
        const int group = group_of_column(work.gemm, at.n);
        at.n -= group * work.gemm.group_width;
        int channels[COPIES], shifts[COPIES], columns[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const TapCoordinate tap = tap_coordinate(work, at.n / SHIFTED_CHUNK + rank_m * COPIES + i, SHIFTED_CHUNK);
            channels[i] = group * work.next_channel + tap.channel;
            const int row = tap.tap / work.kernel_width; // taps are numbered row by row
            shifts[i] = work.first_shift + row * work.dilation_y * work.line;
            columns[i] = tap.tap - row * work.kernel_width;
        }
        int k = at.k_begin;
        for (int step = 0; step < at.steps; step++, k += C::K) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES;
            const uint32_t b = a + C::A_BYTES + rank_m * COPIES * SHIFTED_CHUNK * SWIZZLE_ROW;
            mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
            tma_load_3d(a, map_a, arrived, k, at.m, group);
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const uint32_t to = b + i * SHIFTED_CHUNK * SWIZZLE_ROW;
                if constexpr (C::CLUSTER_M > 1)
                    tma_load_3d_multicast(to, map_b, arrived, k + shifts[i], channels[i], columns[i], blocks_b);
                else
                    tma_load_3d(to, map_b, arrived, k + shifts[i], channels[i], columns[i]);
            }
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    }
}

// The offset of a row's first element in the result.
__device__ __forceinline__ int64_t strided_row_offset(const StridedGemmWork &work, int row)
{
    const int line = (int)work.by_width.of((uint32_t)row), image = (int)work.by_height.of((uint32_t)line);
    const int64_t y = work.result_y + (int64_t)(line - image * work.grid_height) * work.stride_y;
    const int64_t x = work.result_x + (int64_t)(row - line * work.grid_width) * work.stride_x;
    return (((int64_t)image * work.result_height + y) * work.result_width + x) * work.ldd;
}

// Overloads those of gemm/sm90/store.cuh, which see a group's columns only.
template <typename C>
__device__ __forceinline__ Bias<C> load_bias(const GroupedGemmWork &work, int first_column, int thread)
{
    const int group = group_of_column(work, first_column);
    GemmWork of_group = work;
    if (work.bias)
        of_group.bias = (const char *)work.bias +
                        (int64_t)group * work.n * (work.bias_is_float ? sizeof(float) : sizeof(typename C::T));
    return load_bias<C>(of_group, first_column - group * work.group_width, thread);
}
// The matrices of D are those of the groups, of each split.
template <typename C>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], const Bias<C> &bias,
                                           const GroupedGemmWork &work, const CUtensorMap *map_d, char *buffers,
                                           int &buffer, int64_t split, int first_row, int first_column, int warpgroup,
                                           int thread)
{
    const int group = group_of_column(work, first_column);
    const GemmWork &of_group = work;
    store_tile<C>(sum, bias, of_group, map_d, buffers, buffer, split * work.groups + group, first_row,
                  first_column - group * work.group_width, warpgroup, thread);
}

// Overloads that of gemm/sm90/store.cuh: products of stride phases have no bias.
struct NoBias {
};
template <typename C>
__device__ __forceinline__ NoBias load_bias(const StridePhasesWork &, int, int)
{
    return {};
}

// Overloads that of gemm/sm90/store.cuh: rows are not contiguous in the result, so that threads store them, not TMA.
// fp16 and bf16 go through shared memory all the same, to be stored as 16-byte vectors, 128 bytes of a row.
template <typename C>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], NoBias, const StridedGemmWork &work,
                                           const CUtensorMap *, char *buffers, int &buffer, int64_t, int first_row,
                                           int first_column, int group, int thread)
{
    typedef typename C::T T;
    const int of = group_of_column(work, first_column);
    first_column -= of * work.group_width;
    T *const d = (T *)work.d + (int64_t)of * work.n;
    if constexpr (sizeof(T) == 4) {
        const int column = first_column + 2 * (thread % 4);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first_row + row_of<C>(thread, block, half);
                if (row >= work.m)
                    continue;
                float *const line = d + strided_row_offset(work, row);
#pragma unroll
                for (int i = 0; i < C::N / 8; i++) {
                    const float x = sum[block][4 * i + 2 * half], y = sum[block][4 * i + 2 * half + 1];
                    if (work.by_vectors && column + 8 * i < work.n) {
                        *(float2 *)(line + column + 8 * i) = make_float2(x, y);
                    } else {
                        if (column + 8 * i < work.n)
                            line[column + 8 * i] = x;
                        if (column + 8 * i + 1 < work.n)
                            line[column + 8 * i + 1] = y;
                    }
                }
            }
    } else {
        const int lane = thread % 32, warp = thread / 32;
#pragma unroll
        for (int chunk = 0; chunk < C::N / C::CHUNK; chunk++, buffer ^= 1) {
            char *const to = buffers + buffer * C::BUFFER_BYTES;
#pragma unroll
            for (int block = 0; block < C::BLOCKS; block++) {
                const int row = 64 * block + 16 * warp + lane % 16; // as in store_halves
#pragma unroll
                for (int i = 0; i < C::CHUNK / 16; i++) {
                    const float *const s = sum[block] + C::CHUNK / 2 * chunk + 8 * i;
                    stmatrix_x4(shared_address(to) + swizzled_offset<C>(row, 2 * i + lane / 16), pack<T>(s[0], s[1]),
                                pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
                }
            }
            // One barrier per chunk: past it, all threads have read the other buffer, which is written next.
            bar_sync(1 + group, WARPGROUP);
            if (!work.by_vectors) { // two elements a lane, a row a warp
                const int column = first_column + C::CHUNK * chunk + 2 * lane;
                for (int r = warp; r < C::GROUP_M && first_row + r < work.m; r += WARPGROUP / 32) {
                    T *const line = d + strided_row_offset(work, first_row + r);
                    const T *const pair = (const T *)(to + swizzled_offset<C>(r, lane / 4) + lane % 4 * 4);
                    if (column < work.n)
                        line[column] = pair[0];
                    if (column + 1 < work.n)
                        line[column + 1] = pair[1];
                }
                continue;
            }
            constexpr int VECTORS = C::CHUNK / 8;
            const int column = first_column + C::CHUNK * chunk + thread % VECTORS * 8;
#pragma unroll
            for (int r = thread / VECTORS; r < C::GROUP_M; r += WARPGROUP / VECTORS)
                if (first_row + r < work.m && column < work.n)
                    *(uint4 *)(d + strided_row_offset(work, first_row + r) + column) =
                        *(const uint4 *)(to + swizzled_offset<C>(r, thread % VECTORS));
        }
    }
}
template <typename C>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], NoBias none, const StridePhasesWork &work,
                                           const CUtensorMap *map_d, char *buffers, int &buffer, int64_t phase,
                                           int first_row, int first_column, int group, int thread)
{
    store_tile<C>(sum, none, work.phases[phase].gemm, map_d, buffers, buffer, 0, first_row, first_column, group,
                  thread);
}
#endif // CUDA_OPS_HOPPER_CODE

enum ConvKind { CONV_IM2COL, CONV_SHIFTED };

// The block of gemm/sm90/kernel.cuh with another producer.
#if defined(CUDA_OPS_HOPPER_CODE)
template <typename C, ConvKind KIND, typename Works, typename Sums>
__device__ __forceinline__ void conv2d_block(const Works &works, const Sums &sums, const CUtensorMap *maps_a,
                                             const CUtensorMap *map_b, const CUtensorMap *map_d)
{
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t buffers = stages + C::STAGES * C::STAGE_BYTES;
    const uint32_t full = buffers + 2 * C::BUFFERS * C::BUFFER_BYTES, empty = full + 8 * C::STAGES;
    const uint32_t rank = C::CLUSTER > 1 ? cluster_ctarank() : 0;
    const int rank_m = rank % C::CLUSTER_M, rank_n = rank / C::CLUSTER_M;
    if (threadIdx.x == 0) {
        prefetch_tensormap(maps_a);
        prefetch_tensormap(map_b);
        prefetch_tensormap(map_d);
        constexpr int arrivals = (C::PINGPONG ? 1 : 2) * (C::IN_REGISTERS ? 4 : 1) * (C::CLUSTER_M + C::CLUSTER_N - 1);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, arrivals);
        }
        for (int group = 0; group < 2; group++)
            mbarrier_init(empty + 8 * (C::STAGES + group), ORDER_ARRIVALS);
        fence_mbarrier_init();
    }
    if constexpr (C::CLUSTER > 1)
        cluster_sync();
    else
        __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) {
            if constexpr (KIND == CONV_SHIFTED)
                conv2d_produce_shifted<C>(works, maps_a, map_b, stages, full, empty, rank_m, rank_n);
            else
                conv2d_produce<C>(works, maps_a, map_b, stages, full, empty, rank_m, rank_n, blockIdx.x / C::CLUSTER,
                                  gridDim.x / C::CLUSTER);
        }
        __syncwarp(); // cluster_sync wants whole warps
    } else {
        setmaxnreg_inc<232>();
        consume<C>(sums, map_d, stages, full, empty, shared + (buffers - shared_address(shared)), rank_m, rank_n);
    }
    if constexpr (C::CLUSTER > 1)
        cluster_sync();
}
#endif

template <typename C, ConvKind KIND>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    conv2d_sm90_kernel(const __grid_constant__ ConvMaps maps, const __grid_constant__ CUtensorMap map_b,
                       const __grid_constant__ CUtensorMap map_d, const __grid_constant__ ConvWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    const GroupedGemmWork &gemm = work.gemm;
    conv2d_block<C, KIND>(work, gemm, maps.a, &map_b, &map_d);
#endif
}

// backward_input with a stride: some stride phases.
template <typename C>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    conv2d_sm90_backward_input_strided_kernel(const __grid_constant__ ConvMaps maps,
                                              const __grid_constant__ CUtensorMap map_b,
                                              const __grid_constant__ StridePhasesWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    conv2d_block<C, CONV_IM2COL>(work, work, maps.a, &map_b, &map_b);
#endif
}

#endif
