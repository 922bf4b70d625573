// The kernel of conv2d's tensor path and its launchers, to be instantiated a dtype and product a file;
// conv2d/sm90/sm90.cu tells what they are.
#ifndef CUDA_OPS_CONV2D_SM90_KERNEL_CUH
#define CUDA_OPS_CONV2D_SM90_KERNEL_CUH

#include <type_traits>

#include "common/tensor_map.h"
#include "conv2d/relayout.h"
#include "conv2d/stride_phase.h"
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

// A product as the kernel sees it. Pictures: sums of (tap, channel) over the places of `grid` in `picture`, of which
// the taps lie (0 .. kernel - 1) * dilation further on; the matrix product has a row a place, or a column of channels a
// tap.
struct ConvProduct {
    PixelGrid grid;
    const void *picture;
    int64_t kernel_height, kernel_width, dilation_height, dilation_width;
    int mirrored; // tap 0 of the weight is the last of the walk (backward_input)

    // Pictures: weight is [columns][taps][channels], or, where `weight_by_channel`, [channels][taps][columns]; result
    // is [places][columns]. Weight gradient: `other` (grad_output, of 16 bits [places][columns], of TF32
    // [columns][pitch]), result [columns][taps][channels] or float pieces of it, channels padded to whole columns of a
    // tile.
    const void *other;
    int64_t columns, other_pitch;
    int weight_by_channel;
    void *result;
    int result_is_float; // the weight gradient in pieces, or with channels filled up
    const void *bias;
    cuda_ops_dtype dtype;
    cudaStream_t stream;

    // backward_input with a stride: the walk is over one residue (of rows, of columns; see conv2d/stride_phase.h),
    // whose places are every stride-th of the result.
    bool strided;
    residue_taps taps_y, taps_x;
    int64_t result_height, result_width, result_y, result_x, stride_y, stride_x;
};

// A row of the table of tiles, the pieces that the sum is cut in, and the tiles that are walked as one band.
struct ConvPlan {
    int tile, pieces, group;
    double time; // expected, in microseconds
};

// One a dtype and kind: a file each.
cuda_ops_status conv2d_pixels_bfloat16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_pixels_bfloat16_by_channel(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
// Residues, MOST_TOGETHER at most, with the longest sums first.
static constexpr int MOST_TOGETHER = 4;
cuda_ops_status conv2d_strided_bfloat16(const ConvProduct *products, int count, ConvDevice device,
                                        const ConvPlan &plan);
cuda_ops_status conv2d_strided_float16(const ConvProduct *products, int count, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_strided_tf32(const ConvProduct *products, int count, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_weight_bfloat16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_pixels_float16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_pixels_float16_by_channel(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_weight_float16(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_pixels_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_weight_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);
cuda_ops_status conv2d_shifted_tf32(const ConvProduct &product, ConvDevice device, const ConvPlan &plan);

// Rows of B (channels of a tap) that one copy of the shifted weight gradient brings.
static constexpr int SHIFTED_CHUNK = 32;

// A product whose row m is place (v, u) of an image, and lies in row result_y + v * stride_y of the result's, column
// alike. Columns are whole pieces of 16 bytes.
struct StridedWork : GemmWork {
    Divider by_width, by_height;
    int grid_width, grid_height;
    int result_height, result_width, result_y, result_x, stride_y, stride_x;
};

struct ConvWork {
    StridedWork gemm; // as rung 13's consumers see it
    int grid_height, grid_width, start_y, start_x, step_y, step_x;
    Divider by_height, by_width; // the grid's
    int kernel_width, taps, dilation_y, dilation_x;
    int first_tap, next_tap_y, next_tap_x; // the walk's taps in the weight
    int chunks;                            // of a tile's columns (or depth) that the channels fill
    int last_offset_y, last_offset_x;      // mirrored: the offsets of tap 0, else of no meaning
    int mirrored;
    int line, first_shift; // shifted: places of a line, and the shift of the first row of taps
};

// backward_input with a stride: the products of several residues, one after the other in the order of tiles. Those
// with the most taps come first, so that none is left to the end that takes long.
struct ResiduesWork {
    ConvWork residues[MOST_TOGETHER];
    int first[MOST_TOGETHER]; // tile of each; past the last residue: INT32_MAX
    int total, batch;         // batch: 1, for consume
};
struct ResiduesMaps {
    CUtensorMap a[MOST_TOGETHER];
};

#if defined(CUDA_OPS_HOPPER_CODE)

// The product that tile `index` belongs to; `index` becomes the tile's number in it, `which` the product's.
__device__ __forceinline__ const ConvWork &product_of(const ConvWork &work, int &, int &which)
{
    which = 0;
    return work;
}
__device__ __forceinline__ const ConvWork &product_of(const ResiduesWork &work, int &index, int &which)
{
    which = 0;
#pragma unroll
    for (int i = 1; i < MOST_TOGETHER; i++)
        which += index >= work.first[i];
    index -= work.first[which];
    return work.residues[which];
}
__device__ __forceinline__ int tiles_of(const ConvWork &work)
{
    return work.gemm.total;
}
__device__ __forceinline__ int tiles_of(const ResiduesWork &work)
{
    return work.total;
}

// Found in place of rung 13's for a ResiduesWork; the residue stands for the split.
template <typename C>
__device__ __forceinline__ Place place_of(const ResiduesWork &work, int index, int rank_m, int rank_n)
{
    int which;
    const GemmWork &gemm = product_of(work, index, which).gemm;
    Place place = place_of<C>(gemm, index, rank_m, rank_n);
    place.split = which;
    return place;
}

struct PixelPlace {
    int x, y, image;
};

// Where the walk's place `index` lies in the picture.
__device__ __forceinline__ PixelPlace pixel_place(const ConvWork &work, int index)
{
    const int line = (int)work.by_width.of((uint32_t)index), column = index - line * work.grid_width;
    PixelPlace place;
    place.image = (int)work.by_height.of((uint32_t)line);
    place.y = work.start_y + (line - place.image * work.grid_height) * work.step_y;
    place.x = work.start_x + column * work.step_x;
    return place;
}

struct TapPlace {
    int tap, channel, offset_x, offset_y;
};

// Chunk `index` of the axis (tap, channel), chunks of `width` channels. Past the last tap: channels that are not there.
__device__ __forceinline__ TapPlace tap_place(const ConvWork &work, int index, int width)
{
    TapPlace place;
    place.tap = index / work.chunks;
    place.channel = (index - place.tap * work.chunks) * width;
    if (place.tap >= work.taps) {
        place.tap = 0;
        place.channel = work.chunks * width;
    }
    const int row = place.tap / work.kernel_width, column = place.tap - row * work.kernel_width;
    place.tap = work.first_tap + row * work.next_tap_y + column * work.next_tap_x;
    place.offset_y = work.mirrored ? work.last_offset_y - row * work.dilation_y : row * work.dilation_y;
    place.offset_x = work.mirrored ? work.last_offset_x - column * work.dilation_x : column * work.dilation_x;
    return place;
}

// The chunk after `at`, without the divisions, which one thread does not get done while a stage is multiplied. chunk,
// column: where `at` is among the channels' chunks, and among the taps of a row.
__device__ __forceinline__ void next_chunk(const ConvWork &work, int width, TapPlace &at, int &chunk, int &column)
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

// One thread's life, as rung 13's `produce`, but that one operand is the picture, gathered by the copy engine: A where
// its rows are places (K-major) or where it goes through registers (TF32's weight gradient), else B.
// works: a ConvWork, or a ResiduesWork with a map of A for each residue.
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
    const auto gather = [&](uint32_t to, const CUtensorMap *map, uint32_t arrived, const TapPlace &tap,
                            const PixelPlace &pixel, bool several, uint16_t blocks) {
        if (several)
            tma_load_im2col_4d_multicast(to, map, arrived, tap.channel, pixel.x, pixel.y, pixel.image, tap.offset_x,
                                         tap.offset_y, blocks);
        else
            tma_load_im2col_4d(to, map, arrived, tap.channel, pixel.x, pixel.y, pixel.image, tap.offset_x,
                               tap.offset_y);
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
        const CUtensorMap *const map_a = maps_a + which;
        const GemmWork &gemm = work.gemm;
        const Place place = place_of<C>(gemm, index, rank_m, rank_n);
        constexpr int part_a = (C::A_MN_MAJOR ? C::K : C::M) / C::CLUSTER_N;
        constexpr int part_b = (C::B_MN_MAJOR ? C::K : C::N) / C::CLUSTER_M;
        PixelPlace pixel = {};
        TapPlace taps[COLUMNS];
        [[maybe_unused]] int chunk = 0, tap_column = 0;
        if constexpr (!C::A_MN_MAJOR) {
            pixel = pixel_place(work, place.m + rank_n * part_a);
            const int index = place.k_begin / C::K, tap = index / work.chunks;
            taps[0] = tap_place(work, index, C::K);
            chunk = index - tap * work.chunks;
            tap_column = tap % work.kernel_width;
        } else {
#pragma unroll
            for (int column = 0; column < COLUMNS; column++)
                taps[column] = tap_place(work, (GATHERS_A ? place.m : place.n) / C::ROW + column, C::ROW);
        }
        int k = place.k_begin;
        for (int step = 0; step < place.steps; step++, k += C::K) {
            if constexpr (C::A_MN_MAJOR)
                pixel = pixel_place(work, k + (GATHERS_A ? rank_n * part_a : rank_m * part_b));
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES, b = a + C::A_BYTES;
            mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
            const uint32_t to_a = a + rank_n * part_a * SWIZZLE_ROW, to_b = b + rank_m * part_b * SWIZZLE_ROW;
            if constexpr (!C::A_MN_MAJOR) {
                gather(to_a, map_a, arrived, taps[0], pixel, C::CLUSTER_N > 1, blocks_a);
            } else {
#pragma unroll
                for (int column = 0; column < C::A_COLUMNS; column++)
                    if constexpr (GATHERS_A)
                        gather(to_a + column * C::COLUMN_BYTES, map_a, arrived, taps[column], pixel, C::CLUSTER_N > 1,
                               blocks_a);
                    else
                        fetch(to_a + column * C::COLUMN_BYTES, map_a, arrived, place.m + column * C::ROW,
                              k + rank_n * part_a, 0, C::CLUSTER_N > 1, blocks_a);
            }
            if constexpr (!GATHERS_A) {
#pragma unroll
                for (int column = 0; column < C::B_COLUMNS; column++)
                    gather(to_b + column * C::COLUMN_BYTES, map_b, arrived, taps[column], pixel, C::CLUSTER_M > 1,
                           blocks_b);
            } else if constexpr (C::B_MN_MAJOR) {
#pragma unroll
                for (int column = 0; column < C::B_COLUMNS; column++)
                    fetch(to_b + column * C::COLUMN_BYTES, map_b, arrived, place.n + column * C::ROW,
                          taps[0].channel + rank_m * part_b, taps[0].tap, C::CLUSTER_M > 1, blocks_b);
            } else if constexpr (C::A_MN_MAJOR) {
                fetch(to_b, map_b, arrived, k, place.n + rank_m * part_b, 0, C::CLUSTER_M > 1, blocks_b);
            } else {
                fetch(to_b, map_b, arrived, taps[0].channel, place.n + rank_m * part_b, taps[0].tap, C::CLUSTER_M > 1,
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

// The shifted weight gradient: A is grad_output as [o][place], B the picture as [s][c][place] for each column s of the
// kernel, both with the same zeros between lines and images, so that a tap is a copy and another place to begin at.
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
        const Place place = place_of<C>(work.gemm, index, rank_m, rank_n);
        int channels[COPIES], shifts[COPIES], columns[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const TapPlace tap = tap_place(work, place.n / SHIFTED_CHUNK + rank_m * COPIES + i, SHIFTED_CHUNK);
            channels[i] = tap.channel;
            const int row = tap.tap / work.kernel_width; // all taps, in order
            shifts[i] = work.first_shift + row * work.dilation_y * work.line;
            columns[i] = tap.tap - row * work.kernel_width;
        }
        int k = place.k_begin;
        for (int step = 0; step < place.steps; step++, k += C::K) {
            mbarrier_wait(empty + 8 * stage, phase ^ 1);
            const uint32_t arrived = full + 8 * stage, a = stages + stage * C::STAGE_BYTES;
            const uint32_t b = a + C::A_BYTES + rank_m * COPIES * SHIFTED_CHUNK * SWIZZLE_ROW;
            mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
            tma_load_3d(a, map_a, arrived, k, place.m, 0);
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

// Where the row's first element lies in the result.
__device__ __forceinline__ int64_t strided_row(const StridedWork &work, int row)
{
    const int line = (int)work.by_width.of((uint32_t)row), image = (int)work.by_height.of((uint32_t)line);
    const int64_t y = work.result_y + (int64_t)(line - image * work.grid_height) * work.stride_y;
    const int64_t x = work.result_x + (int64_t)(row - line * work.grid_width) * work.stride_x;
    return (((int64_t)image * work.result_height + y) * work.result_width + x) * work.ldd;
}

// Found in place of gemm/sm90/tile.cuh's for works of residues, which have no bias.
struct NoBias {
};
template <typename C>
__device__ __forceinline__ NoBias load_bias(const ResiduesWork &, int, int)
{
    return {};
}

// Found in place of gemm/sm90/tile.cuh's for a StridedWork: rows are not one after the other, so that the copy engine
// cannot write them. Halves go through the buffers all the same, to leave as pieces of 16 bytes, 128 bytes of a row.
template <typename C>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], NoBias, const StridedWork &work,
                                           const CUtensorMap *, char *buffers, int &buffer, int64_t, int first_row,
                                           int first_column, int group, int thread)
{
    typedef typename C::T T;
    if constexpr (sizeof(T) == 4) {
        const int column = first_column + 2 * (thread % 4);
#pragma unroll
        for (int block = 0; block < C::BLOCKS; block++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first_row + row_of<C>(thread, block, half);
                if (row >= work.m)
                    continue;
                float *const line = (float *)work.d + strided_row(work, row);
#pragma unroll
                for (int i = 0; i < C::N / 8; i++)
                    if (column + 8 * i < work.n)
                        *(float2 *)(line + column + 8 * i) =
                            make_float2(sum[block][4 * i + 2 * half], sum[block][4 * i + 2 * half + 1]);
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
                    stmatrix_x4(shared_address(to) + piece_offset<C>(row, 2 * i + lane / 16), pack<T>(s[0], s[1]),
                                pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
                }
            }
            // One barrier a chunk: who is past this one has read the buffer before, which is written next.
            bar_sync(1 + group, WARPGROUP);
            constexpr int PIECES = C::CHUNK / 8;
            const int column = first_column + C::CHUNK * chunk + thread % PIECES * 8;
#pragma unroll
            for (int r = thread / PIECES; r < C::GROUP_M; r += WARPGROUP / PIECES)
                if (first_row + r < work.m && column < work.n)
                    *(uint4 *)((T *)work.d + strided_row(work, first_row + r) + column) =
                        *(const uint4 *)(to + piece_offset<C>(r, thread % PIECES));
        }
    }
}
template <typename C>
__device__ __forceinline__ void store_tile(float (&sum)[C::BLOCKS][C::N / 2], NoBias none, const ResiduesWork &work,
                                           const CUtensorMap *map_d, char *buffers, int &buffer, int64_t residue,
                                           int first_row, int first_column, int group, int thread)
{
    store_tile<C>(sum, none, work.residues[residue].gemm, map_d, buffers, buffer, 0, first_row, first_column, group,
                  thread);
}
#endif // CUDA_OPS_HOPPER_CODE

enum ConvKind { CONV_PLAIN, CONV_SHIFTED, CONV_HALVED };

// Rung 13's kernel but for the producer, and for where results go.
#if defined(CUDA_OPS_HOPPER_CODE)
template <typename C, ConvKind KIND, typename Works, typename Sums>
__device__ __forceinline__ void conv2d_multiply(const Works &works, const Sums &sums, const CUtensorMap *maps_a,
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
            mbarrier_init(empty + 8 * (C::STAGES + group), TURN_ARRIVALS);
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
    conv2d_tensor_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                         const __grid_constant__ CUtensorMap map_d, const __grid_constant__ ConvWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    const GemmWork &gemm = work.gemm;
    conv2d_multiply<C, KIND>(work, gemm, &map_a, &map_b, &map_d);
#endif
}

// backward_input with a stride, whose results the threads store.
template <typename C>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    conv2d_strided_kernel(const __grid_constant__ ResiduesMaps maps, const __grid_constant__ CUtensorMap map_b,
                          const __grid_constant__ ResiduesWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    conv2d_multiply<C, CONV_PLAIN>(work, work, maps.a, &map_b, &map_b);
#endif
}

// Tiles of which there are less than half as many as multiprocessors: two blocks, a cluster, share one, each with half
// of the summed axis. At the end each gives the other half of its sums, through the shared memory that the ring was in,
// and stores the rest. One tile a cluster; not persistent.
#if defined(CUDA_OPS_HOPPER_CODE)
// MINE: which half of the columns this block keeps.
template <typename C, int MINE>
__device__ __forceinline__ void share_and_store(float (&sum)[C::BLOCKS][C::N / 2], const GemmWork &work,
                                                const CUtensorMap *map_d, char *exchange, char *buffers,
                                                const Place &place, int group, int thread)
{
    typedef Tile<typename C::T, C::M, C::N / 2, 1, 1, false, 4, false, false> Half;
    constexpr int COUNT = C::N / 4; // sums of half a tile a thread
    static_assert(C::BLOCKS == 1 && Half::CHUNK == C::CHUNK, "a warpgroup's rows are one block of wgmma's");
    char *const area = exchange + group * WARPGROUP * COUNT * 4;
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
        const float *const theirs = sum[0] + (MINE ^ 1) * COUNT + 4 * i;
        st_shared_cluster_v4_f32(mapa(shared_address(area) + (i * WARPGROUP + thread) * 16, MINE ^ 1),
                                 make_float4(theirs[0], theirs[1], theirs[2], theirs[3]));
    }
    cluster_sync();
    float half[1][COUNT];
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
        const float4 other = *(const float4 *)(area + (i * WARPGROUP + thread) * 16);
        half[0][4 * i] = sum[0][MINE * COUNT + 4 * i] + other.x;
        half[0][4 * i + 1] = sum[0][MINE * COUNT + 4 * i + 1] + other.y;
        half[0][4 * i + 2] = sum[0][MINE * COUNT + 4 * i + 2] + other.z;
        half[0][4 * i + 3] = sum[0][MINE * COUNT + 4 * i + 3] + other.w;
    }
    int buffer = 0;
    store_tile<Half>(half, load_bias<Half>(work, place.n + MINE * C::N / 2, thread), work, map_d,
                     buffers + group * C::BUFFERS * C::BUFFER_BYTES, buffer, 0, place.m + group * C::GROUP_M,
                     place.n + MINE * C::N / 2, group, thread);
    if (C::BUFFERS > 0 && thread == 0)
        bulk_wait_group_read<0>();
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    conv2d_halved_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                         const __grid_constant__ CUtensorMap map_d, const __grid_constant__ ConvWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    static_assert(C::CLUSTER == 1 && !C::PINGPONG && !C::IN_REGISTERS, "the cluster is the two halves");
    typedef typename C::T T;
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t buffers = stages + C::STAGES * C::STAGE_BYTES;
    const uint32_t full = buffers + 2 * C::BUFFERS * C::BUFFER_BYTES, empty = full + 8 * C::STAGES;
    const uint32_t rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        prefetch_tensormap(&map_d);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, 2);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    // The halves are pieces, counted after the tiles.
    const int index = rank * (work.gemm.clusters_m * work.gemm.clusters_n) + blockIdx.x / 2;
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            conv2d_produce<C>(work, &map_a, &map_b, stages, full, empty, 0, 0, index, work.gemm.total);
        __syncwarp(); // cluster_sync wants whole warps
        cluster_sync();
        cluster_sync();
    } else {
        setmaxnreg_inc<232>();
        const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
        const Place place = place_of<C>(work.gemm, index, 0, 0);
        const uint64_t a_tile = wgmma_descriptor(stages + group * C::GROUP_M * SWIZZLE_ROW, WGMMA_SWIZZLE_128,
                                                 SWIZZLE_ATOM, C::COLUMN_BYTES);
        const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        constexpr int B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        float sum[C::BLOCKS][C::N / 2];
        int stage = 0, phase = 0, before = 0;
        for (int step = 0; step < place.steps; step++) {
            mbarrier_wait(full + 8 * stage, phase);
            const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                           b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma<T, C::N, 0, C::B_MN_MAJOR>(sum[0], wgmma_advance(a, i * 32), wgmma_advance(b, i * B_STEP),
                                                 step > 0 || i > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            if (step > 0 && thread == 0)
                mbarrier_arrive(empty + 8 * before);
            before = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait_group<0>();
        // Both rings have been read to the end: the other block may write here.
        cluster_sync();
        char *const exchange = shared + (stages - shared_address(shared));
        char *const to = shared + (buffers - shared_address(shared));
        if (rank == 0)
            share_and_store<C, 0>(sum, work.gemm, &map_d, exchange, to, place, group, thread);
        else
            share_and_store<C, 1>(sum, work.gemm, &map_d, exchange, to, place, group, thread);
    }
#endif
}

static inline int64_t conv2d_taps(const ConvProduct &p)
{
    return p.kernel_height * p.kernel_width;
}

static inline int64_t conv2d_places(const PixelGrid &g)
{
    return g.images * g.grid_height * g.grid_width;
}

// What the kernel is told of the walk. `width`: channels of a chunk.
static inline ConvWork conv2d_work(const ConvProduct &p, int width)
{
    const PixelGrid &g = p.grid;
    ConvWork work = {};
    work.grid_height = (int)g.grid_height, work.grid_width = (int)g.grid_width;
    work.by_height = divider_by((uint32_t)g.grid_height), work.by_width = divider_by((uint32_t)g.grid_width);
    work.start_y = (int)g.start_y, work.start_x = (int)g.start_x;
    work.step_y = (int)g.step_y, work.step_x = (int)g.step_x;
    work.kernel_width = (int)p.kernel_width, work.taps = (int)conv2d_taps(p);
    work.dilation_y = (int)p.dilation_height, work.dilation_x = (int)p.dilation_width;
    work.last_offset_y = (int)((p.kernel_height - 1) * p.dilation_height);
    work.last_offset_x = (int)((p.kernel_width - 1) * p.dilation_width);
    work.next_tap_y = (int)p.kernel_width, work.next_tap_x = 1;
    work.mirrored = p.mirrored;
    work.chunks = (int)ceil_div(g.channels, width);
    work.gemm.batch = work.gemm.splits = 1;
    work.gemm.a_shared = work.gemm.b_shared = 1;
    work.gemm.alpha = 1;
    return work;
}

// Tiles and their order.
template <typename C>
static bool conv2d_set_tiles(GemmWork &gemm, const ConvPlan &plan)
{
    gemm.clusters_m = (int)ceil_div(gemm.m, C::M * C::CLUSTER_M);
    gemm.clusters_n = (int)ceil_div(gemm.n, C::N * C::CLUSTER_N);
    gemm.group = plan.group;
    const int64_t total = (int64_t)gemm.clusters_m * gemm.clusters_n * gemm.splits;
    gemm.total = (int)total;
    return total <= INT32_MAX / 8;
}

// `clusters` of `size` blocks, or as many as the GPU holds.
template <typename C, typename... Parameters>
static cuda_ops_status conv2d_start_kernel(void (*kernel)(Parameters...), int64_t clusters, int size,
                                           cudaStream_t stream, const Parameters &...arguments)
{
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED_BYTES);
    start_clusters(kernel, clusters * size, 3 * WARPGROUP, size, C::SHARED_BYTES, 90, stream, arguments...);
    return launch_status();
}

template <typename C, ConvKind KIND = CONV_PLAIN>
static cuda_ops_status conv2d_start(const CUtensorMap &map_a, const CUtensorMap &map_b, const CUtensorMap &map_d,
                                    ConvWork work, ConvDevice device, const ConvPlan &plan, cudaStream_t stream)
{
    if (!conv2d_set_tiles<C>(work.gemm, plan))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t total = work.gemm.total, room = device.multiprocessors / C::CLUSTER;
    if constexpr (KIND == CONV_HALVED) // each cluster has both pieces of a tile
        return conv2d_start_kernel<C>(conv2d_halved_kernel<C>, total / 2, 2, stream, map_a, map_b, map_d, work);
    else
        return conv2d_start_kernel<C>(conv2d_tensor_kernel<C, KIND>, total < room ? total : room, C::CLUSTER, stream,
                                      map_a, map_b, map_d, work);
}

// The taps of the product's residue, and where its places lie in the result.
static inline void conv2d_set_residue(ConvWork &work, const ConvProduct &p)
{
    work.taps = (int)(p.taps_y.count * p.taps_x.count);
    work.kernel_width = (int)p.taps_x.count;
    work.dilation_y = (int)p.taps_y.back, work.dilation_x = (int)p.taps_x.back;
    work.last_offset_y = (int)((p.taps_y.count - 1) * p.taps_y.back);
    work.last_offset_x = (int)((p.taps_x.count - 1) * p.taps_x.back);
    work.first_tap = (int)(p.taps_y.first * p.kernel_width + p.taps_x.first);
    work.next_tap_y = (int)(p.taps_y.step * p.kernel_width), work.next_tap_x = (int)p.taps_x.step;
    StridedWork &gemm = work.gemm;
    gemm.grid_height = (int)p.grid.grid_height, gemm.grid_width = (int)p.grid.grid_width;
    gemm.by_height = divider_by((uint32_t)p.grid.grid_height), gemm.by_width = divider_by((uint32_t)p.grid.grid_width);
    gemm.result_height = (int)p.result_height, gemm.result_width = (int)p.result_width;
    gemm.result_y = (int)p.result_y, gemm.result_x = (int)p.result_x;
    gemm.stride_y = (int)p.stride_y, gemm.stride_x = (int)p.stride_x;
}

// The weight's map, where rows are places.
template <typename C>
static bool conv2d_map_weight(CUtensorMap *map, const ConvProduct &p)
{
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    const int64_t taps = conv2d_taps(p), channels = p.grid.channels;
    return C::B_MN_MAJOR ? make_map(map, p.other, p.dtype, tf32, p.columns, channels, taps, taps * p.columns, p.columns,
                                    C::ROW, C::K / C::CLUSTER_M)
                         : make_map(map, p.other, p.dtype, tf32, channels, p.columns, taps, taps * channels, channels,
                                    C::ROW, C::N / C::CLUSTER_M);
}

// backward_input with a stride: the products of some residues, in one go.
template <typename C>
static cuda_ops_status conv2d_launch_strided(const ConvProduct *products, int count, ConvDevice device,
                                             const ConvPlan &plan)
{
    static_assert(!C::A_MN_MAJOR && C::CLUSTER_N == 1, "rows are places");
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    ResiduesWork work = {};
    ResiduesMaps maps = {};
    CUtensorMap map_b;
    bool mapped = conv2d_map_weight<C>(&map_b, products[0]);
    work.batch = 1;
    for (int i = 0; i < MOST_TOGETHER; i++) {
        if (i >= count) {
            work.first[i] = INT32_MAX;
            continue;
        }
        const ConvProduct &p = products[i];
        ConvWork &residue = work.residues[i] = conv2d_work(p, C::K);
        conv2d_set_residue(residue, p);
        GemmWork &gemm = residue.gemm;
        gemm.m = (int)conv2d_places(p.grid), gemm.n = (int)p.columns;
        gemm.k = gemm.chunk = residue.taps * residue.chunks * C::K;
        gemm.d = p.result;
        gemm.ldd = p.columns;
        mapped = mapped && conv2d_set_tiles<C>(gemm, plan) &&
                 make_pixel_map(&maps.a[i], p.picture, p.dtype, tf32, p.grid, C::ROW, C::M);
        work.first[i] = work.total;
        work.total += gemm.total;
    }
    const int64_t room = device.multiprocessors / C::CLUSTER;
    return mapped ? conv2d_start_kernel<C>(conv2d_strided_kernel<C>, work.total < room ? work.total : room, C::CLUSTER,
                                           products[0].stream, maps, map_b, work)
                  : CUDA_OPS_INVALID_ARGUMENT;
}

// forward, and backward_input: rows are places, columns the other picture's channels.
template <typename C, ConvKind KIND = CONV_PLAIN>
static cuda_ops_status conv2d_launch_pixels(const ConvProduct &p, ConvDevice device, const ConvPlan &plan)
{
    static_assert(!C::A_MN_MAJOR, "rows are places");
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    const int64_t places = conv2d_places(p.grid);
    ConvWork work = conv2d_work(p, C::K);
    GemmWork &gemm = work.gemm;
    gemm.m = (int)places, gemm.n = (int)p.columns, gemm.k = gemm.chunk = work.taps * work.chunks * C::K;
    if (KIND == CONV_HALVED) {
        if (gemm.k < 2 * C::K)
            return CUDA_OPS_INVALID_ARGUMENT;
        gemm.splits = 2;
        gemm.chunk = (int)(ceil_div(gemm.k / C::K, 2) * C::K);
    }
    gemm.d = p.result;
    gemm.ldd = p.columns;
    gemm.bias = p.bias;
    gemm.bias_is_float = gemm.output_is_float = tf32;
    CUtensorMap map_a, map_b, map_d;
    bool mapped = make_pixel_map(&map_a, p.picture, p.dtype, tf32, p.grid, C::ROW, C::M / C::CLUSTER_N);
    mapped = mapped && conv2d_map_weight<C>(&map_b, p);
    map_d = map_a;
    if (C::BUFFERS > 0 && map_possible(p.result, sizeof(typename C::T), p.columns, places, 1, p.columns, 0)) {
        gemm.copies_out = 1;
        mapped = mapped &&
                 make_map(&map_d, p.result, p.dtype, false, p.columns, places, 1, p.columns, 0, C::CHUNK, C::GROUP_M);
    }
    return mapped ? conv2d_start<C, KIND>(map_a, map_b, map_d, work, device, plan, p.stream)
                  : CUDA_OPS_INVALID_ARGUMENT;
}

// The weight gradient: one side is grad_output's channels, the other the columns of the taps, and places are summed
// over. More than one piece, or channels that do not fill whole columns: result is float.
template <typename C>
static cuda_ops_status conv2d_launch_weight(const ConvProduct &p, ConvDevice device, const ConvPlan &plan)
{
    static_assert(C::A_MN_MAJOR, "places are summed over");
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    const int64_t taps = conv2d_taps(p), places = conv2d_places(p.grid);
    ConvWork work = conv2d_work(p, C::ROW);
    GemmWork &gemm = work.gemm;
    const int64_t width = taps * work.chunks * C::ROW;
    gemm.m = (int)(tf32 ? width : p.columns), gemm.n = (int)(tf32 ? p.columns : width), gemm.k = (int)places;
    const int64_t chunk = ceil_div(ceil_div(places, plan.pieces), C::K) * C::K;
    gemm.chunk = (int)chunk;
    gemm.splits = (int)ceil_div(places, chunk);
    gemm.d = p.result;
    gemm.ldd = width;
    gemm.stride_d = p.columns * width;
    gemm.output_is_float = p.result_is_float;
    gemm.swapped = tf32;
    CUtensorMap map_a, map_b, map_d;
    bool mapped;
    if (tf32) {
        mapped = make_pixel_map(&map_a, p.picture, p.dtype, true, p.grid, C::ROW, C::K / C::CLUSTER_N) &&
                 make_map(&map_b, p.other, p.dtype, true, places, p.columns, 1, p.other_pitch, 0, C::ROW,
                          C::N / C::CLUSTER_M);
    } else {
        mapped = make_map(&map_a, p.other, p.dtype, false, p.columns, places, 1, p.columns, 0, C::ROW,
                          C::K / C::CLUSTER_N) &&
                 make_pixel_map(&map_b, p.picture, p.dtype, false, p.grid, C::ROW, C::K / C::CLUSTER_M);
    }
    map_d = map_a;
    if (!p.result_is_float) {
        gemm.copies_out = 1;
        mapped =
            mapped && make_map(&map_d, p.result, p.dtype, false, width, p.columns, 1, width, 0, C::CHUNK, C::GROUP_M);
    }
    return mapped ? conv2d_start<C>(map_a, map_b, map_d, work, device, plan, p.stream) : CUDA_OPS_INVALID_ARGUMENT;
}

// The shifted weight gradient, of TF32. picture is [kernel_width][channel][pitch], other [channel][pitch];
// grid.grid_height and grid_width are those of lines with their zeros.
template <typename C>
static cuda_ops_status conv2d_launch_shifted(const ConvProduct &p, ConvDevice device, const ConvPlan &plan)
{
    static_assert(sizeof(typename C::T) == 4 && !C::A_MN_MAJOR && !C::B_MN_MAJOR, "TF32 is K-major");
    const int64_t places = conv2d_places(p.grid);
    ConvWork work = conv2d_work(p, SHIFTED_CHUNK);
    work.line = (int)p.grid.grid_width;
    work.first_shift = (int)(p.grid.start_y * p.grid.grid_width);
    GemmWork &gemm = work.gemm;
    const int64_t width = conv2d_taps(p) * work.chunks * SHIFTED_CHUNK;
    gemm.m = (int)p.columns, gemm.n = (int)width, gemm.k = (int)places;
    const int64_t chunk = ceil_div(ceil_div(places, plan.pieces), C::K) * C::K;
    gemm.chunk = (int)chunk;
    gemm.splits = (int)ceil_div(places, chunk);
    gemm.d = p.result;
    gemm.ldd = width;
    gemm.stride_d = p.columns * width;
    gemm.output_is_float = 1;
    CUtensorMap map_a, map_b;
    const bool mapped =
        make_map(&map_a, p.other, p.dtype, true, places, p.columns, 1, p.other_pitch, 0, C::ROW, C::M) &&
        make_map(&map_b, p.picture, p.dtype, true, places, p.grid.channels, p.kernel_width, p.other_pitch,
                 p.grid.channels * p.other_pitch, C::ROW, SHIFTED_CHUNK);
    return mapped ? conv2d_start<C, CONV_SHIFTED>(map_a, map_b, map_a, work, device, plan, p.stream)
                  : CUDA_OPS_INVALID_ARGUMENT;
}

#endif
