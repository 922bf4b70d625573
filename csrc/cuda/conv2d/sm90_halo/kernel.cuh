// The kernel of conv2d's sm90_halo path, to be instantiated a dtype a file; sm90_halo.cu tells what it computes.
#ifndef CUDA_OPS_CONV2D_SM90_HALO_KERNEL_CUH
#define CUDA_OPS_CONV2D_SM90_HALO_KERNEL_CUH

#include "common/activation.cuh"
#include "common/tensor_map.h"
#include "conv2d/relayout.h"
#include "gemm/sm90/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// PIXELS: of a tile, wgmma's n. ROW_BYTES: of a pixel's channels in a TMA copy, and their swizzle. BY_CHANNEL: the
// weight is [channel][tap][column]. COLUMNS: of the result, 64 or 32; wgmma's m is 64 of them either way, so that of 32
// the other half is multiplied too (by the next tap's weight, or what lies behind the last) and thrown away. What that
// saves is half of the weight's shared memory.
template <typename T_, int PIXELS_, int ROW_BYTES_, bool BY_CHANNEL_, int COLUMNS_ = 64>
struct HaloTile {
    typedef T_ T;
    static constexpr int PIXELS = PIXELS_, ROW_BYTES = ROW_BYTES_, ROW = ROW_BYTES / (int)sizeof(T);
    static constexpr bool BY_CHANNEL = BY_CHANNEL_;
    static constexpr int COLUMNS = COLUMNS_, TAP_BYTES = COLUMNS * ROW_BYTES;
    // The weight in shared memory: rows of a column's channels, or of a channel's columns.
    static constexpr int WEIGHT_ROW_BYTES = BY_CHANNEL ? COLUMNS * (int)sizeof(T) : ROW_BYTES;
    static constexpr int PASS_COLUMNS = 64;
    // Results of 16 bits are transposed through shared memory, half a tile at a time.
    static constexpr int PASS = PIXELS / 2, BUFFER_BYTES = sizeof(T) == 2 ? PASS * PASS_COLUMNS * 2 : 0;
    static constexpr int BARRIERS_BYTES = 256;
    static constexpr int MOST_STAGES = 6;
    static_assert(!BY_CHANNEL || sizeof(T) == 2, "TF32 is K-major");
    static_assert(COLUMNS == 64 || COLUMNS == 32, "half of wgmma's m at least");
};

struct HaloWork {
    void *result;
    const void *bias;
    int activation;                                        // of the sums with their bias
    int images, grid_height, grid_width, start_y, start_x; // pixels of the source with its padding
    int height, width;                                     // of the result
    int columns, column_tiles;
    int kernel_height, kernel_width, dilation_y, dilation_x, mirrored;
    int chunks, rows, stages, stage_bytes; // chunks of channels; pixels in a stage, the tile's and its halo's
    int tiles;
    Divider by_width, by_height; // of the grid
};

struct HaloProduct {
    HaloWork work;
    int tile_columns; // 64 or 32
    PixelGrid grid;
    const void *source, *weight;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

cuda_ops_status conv2d_sm90_halo_bfloat16(const HaloProduct &product, ConvDevice device, int row_bytes,
                                          bool by_channel);
cuda_ops_status conv2d_sm90_halo_float16(const HaloProduct &product, ConvDevice device, int row_bytes, bool by_channel);
cuda_ops_status conv2d_sm90_halo_tf32(const HaloProduct &product, ConvDevice device);

// Pixels of the tile that the files of instances have for a row of so many bytes.
static inline int conv2d_halo_tile_pixels(int element_size, int row_bytes)
{
    return element_size == 4 ? 128 : row_bytes == 64 ? 256 : 192;
}

#if defined(CUDA_OPS_HOPPER_CODE)

// The wgmma descriptor of a tile in a swizzle of ROW_BYTES. The swizzle permutes addresses, so that a tile may begin at
// any row. `leading`: MN-major, from one such column of rows to the next.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t describe_rows(uint32_t address, uint32_t leading = 16)
{
    static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "a swizzle");
    return wgmma_descriptor(address, ROW_BYTES == 64 ? WGMMA_SWIZZLE_64 : WGMMA_SWIZZLE_128, 8 * ROW_BYTES, leading);
}

// The offset in the result of a pixel of the grid; false: the pixel is padding.
__device__ __forceinline__ bool result_offset(const HaloWork &work, uint32_t pixel, int64_t &offset)
{
    const uint32_t line = work.by_width.of(pixel), x = pixel - line * work.grid_width;
    const uint32_t image = work.by_height.of(line), y = line - image * work.grid_height;
    const uint32_t result_pixel = (image * work.height + y) * work.width + x; // below 2^31, as the grid's pixels are
    offset = (int64_t)result_pixel * work.columns;
    return x < (uint32_t)work.width && y < (uint32_t)work.height && image < (uint32_t)work.images;
}

template <typename C>
__device__ __forceinline__ void store_halo_16bit(const float (&sum)[C::PIXELS / 2], const HaloWork &work, char *buffer,
                                                 int first_pixel, int first_column, int barrier, int thread)
{
    typedef typename C::T T;
    const int lane = thread % 32, warp = thread / 32, matrix = lane / 8, vector = thread % 8;
    const bool stores = 8 * vector < C::COLUMNS && first_column + 8 * vector < work.columns;
    const uint32_t to = shared_address(buffer);
    T *const result = (T *)work.result + first_column + 8 * vector;
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        bar_sync(barrier, WARPGROUP); // the previous pass has been read
#pragma unroll
        for (int i = 0; i < C::PASS / 8; i += 2) {
            const float *const s = sum + pass * C::PASS / 2 + 4 * i;
            const int pixel = 8 * (i + matrix / 2) + lane % 8;
            stmatrix_x4_trans(to + pixel * 128 + ((2 * warp + matrix % 2) ^ (pixel % 8)) * 16, pack<T>(s[0], s[1]),
                              pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
        }
        bar_sync(barrier, WARPGROUP);
#pragma unroll
        for (int i = 0; i < C::PASS / 16; i++) {
            const int pixel = thread / 8 + 16 * i;
            const uint4 values = *(const uint4 *)(buffer + pixel * 128 + (vector ^ (pixel % 8)) * 16);
            int64_t offset;
            if (result_offset(work, first_pixel + pass * C::PASS + pixel, offset) && stores)
                *(uint4 *)(result + offset) = values;
        }
    }
}

// float32 from registers: eight threads store 32 bytes of a pixel.
template <typename C>
__device__ __forceinline__ void store_halo_float(const float (&sum)[C::PIXELS / 2], const HaloWork &work,
                                                 int first_pixel, int first_column, int thread)
{
    const int in_tile = 16 * (thread / 32) + thread % 32 / 4, column = first_column + in_tile;
    float *const result = (float *)work.result + column;
    const bool low = in_tile < C::COLUMNS && column < work.columns, high = low && column + 8 < work.columns;
#pragma unroll
    for (int i = 0; i < C::PIXELS / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int64_t offset;
            const bool stored = result_offset(work, first_pixel + 8 * i + 2 * (thread % 4) + e, offset);
            if (stored && low)
                result[offset] = sum[4 * i + e];
            if (stored && high)
                result[offset + 8] = sum[4 * i + 2 + e];
        }
}

template <typename C>
__device__ __forceinline__ void consume_halo(const HaloWork &work, uint32_t weights, uint32_t stages, uint32_t full,
                                             char *buffers, int first_tile, int tile_step, int first_column)
{
    typedef typename C::T T;
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    const uint32_t empty = full + 8 * C::MOST_STAGES, order = empty + 8 * C::MOST_STAGES, ready = order + 16;
    const int column = first_column + 16 * (thread / 32) + thread % 32 / 4;
    float bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (work.bias && column + 8 * half < work.columns)
            bias[half] = load_as_accumulate(((const T *)work.bias)[column + 8 * half]);
    // Bytes from a tap to the next one in a row of the kernel, and more from the last one to the next row's first.
    const int sign = work.mirrored ? -C::ROW_BYTES : C::ROW_BYTES, taps = work.kernel_height * work.kernel_width;
    const int step = sign * work.dilation_x;
    const int row_step = sign * work.dilation_y * work.grid_width - work.kernel_width * step;
    const int last = work.mirrored ? ((work.kernel_height - 1) * work.dilation_y * work.grid_width +
                                      (work.kernel_width - 1) * work.dilation_x) *
                                         C::ROW_BYTES
                                   : 0;
    constexpr int A_STEP = C::BY_CHANNEL ? 16 * C::WEIGHT_ROW_BYTES : 32;
    mbarrier_wait(ready, 0);
    int stage = 0, phase = 0, taker = 0, taken = 0;
    float sum[C::PIXELS / 2];
    for (int tile = first_tile; tile < work.tiles; tile += tile_step, taker ^= 1) {
        if (taker != group) {
            stage += work.chunks;
            while (stage >= work.stages) {
                stage -= work.stages;
                phase ^= 1;
            }
            continue;
        }
        // Not before the other warpgroup's last stage is full: its products are issued first (gemm/sm90/kernel.cuh).
        mbarrier_wait(order + 8 * group, (taken & 1) ^ (group == 0));
        taken++;
        uint32_t tap = weights;
#pragma unroll
        for (int i = 0; i < C::PIXELS / 2; i++)
            sum[i] = 0; // here, not by the first wgmma's scale: ptxas would serialise the wgmmas (C7515)
        for (int chunk = 0; chunk < work.chunks; chunk++) {
            mbarrier_wait(full + 8 * stage, phase);
            if (chunk + 1 == work.chunks)
                order_arrive(order, group, thread);
            uint32_t pixels = stages + stage * work.stage_bytes + last;
            wgmma_fence();
            for (int t = 0, s = 0; t < taps; t++, tap += C::TAP_BYTES) {
                const uint64_t a = describe_rows<C::WEIGHT_ROW_BYTES>(tap, C::TAP_BYTES);
                const uint64_t b = describe_rows<C::ROW_BYTES>(pixels);
#pragma unroll
                for (int k = 0; k < C::ROW_BYTES / 32; k++)
                    wgmma<T, C::PIXELS, C::BY_CHANNEL, 0>(sum, wgmma_advance(a, k * A_STEP), wgmma_advance(b, k * 32),
                                                          1);
                pixels += step;
                if (++s == work.kernel_width) {
                    s = 0;
                    pixels += row_step;
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            if (thread == 0)
                mbarrier_arrive(empty + 8 * stage);
            if (++stage == work.stages) {
                stage = 0;
                phase ^= 1;
            }
        }
#pragma unroll
        for (int i = 0; i < C::PIXELS / 2; i++)
            sum[i] += bias[i / 2 % 2];
        activate_simply(sum, work.activation);
        if constexpr (sizeof(T) == 2)
            store_halo_16bit<C>(sum, work, buffers + group * C::BUFFER_BYTES, tile * C::PIXELS, first_column, 1 + group,
                                thread);
        else
            store_halo_float<C>(sum, work, tile * C::PIXELS, first_column, thread);
    }
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    conv2d_sm90_halo_kernel(const __grid_constant__ CUtensorMap source, const __grid_constant__ CUtensorMap weight,
                            const __grid_constant__ HaloWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    const int taps = work.kernel_height * work.kernel_width;
    const uint32_t weights = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t stages = weights + work.chunks * taps * C::TAP_BYTES;
    const uint32_t buffers = stages + work.stages * work.stage_bytes, full = buffers + 2 * C::BUFFER_BYTES;
    const uint32_t empty = full + 8 * C::MOST_STAGES, order = empty + 8 * C::MOST_STAGES, ready = order + 16;
    const int column_tile = blockIdx.x % work.column_tiles, first_column = column_tile * C::COLUMNS;
    const int first_tile = blockIdx.x / work.column_tiles, tile_step = gridDim.x / work.column_tiles;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&source);
        prefetch_tensormap(&weight);
        for (int stage = 0; stage < work.stages; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, 1);
        }
        mbarrier_init(order, ORDER_ARRIVALS);
        mbarrier_init(order + 8, ORDER_ARRIVALS);
        mbarrier_init(ready, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(ready, work.chunks * taps * C::TAP_BYTES);
            for (int chunk = 0; chunk < work.chunks; chunk++)
                for (int tap = 0; tap < taps; tap++) {
                    const uint32_t to = weights + (chunk * taps + tap) * C::TAP_BYTES;
                    if (C::BY_CHANNEL)
                        tma_load_3d(to, &weight, ready, first_column, chunk * C::ROW, tap);
                    else
                        tma_load_3d(to, &weight, ready, chunk * C::ROW, first_column, tap);
                }
            int stage = 0, phase = 0;
            for (int tile = first_tile; tile < work.tiles; tile += tile_step) {
                const uint32_t pixel = tile * C::PIXELS, line = work.by_width.of(pixel);
                const uint32_t image = work.by_height.of(line);
                const int x = work.start_x + (int)(pixel - line * work.grid_width);
                const int y = work.start_y + (int)(line - image * work.grid_height);
                for (int chunk = 0; chunk < work.chunks; chunk++) {
                    mbarrier_wait(empty + 8 * stage, phase ^ 1);
                    mbarrier_arrive_expect_tx(full + 8 * stage, work.rows * C::ROW_BYTES);
                    tma_load_im2col_4d(stages + stage * work.stage_bytes, &source, full + 8 * stage, chunk * C::ROW, x,
                                       y, (int)image, 0, 0);
                    if (++stage == work.stages) {
                        stage = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        setmaxnreg_inc<232>();
        consume_halo<C>(work, weights, stages, full, shared + (buffers - shared_address(shared)), first_tile, tile_step,
                        first_column);
    }
#endif
}

template <typename C>
static cuda_ops_status conv2d_launch_halo(const HaloProduct &p, ConvDevice device)
{
    typedef typename C::T T;
    const HaloWork &work = p.work;
    const int64_t taps = (int64_t)work.kernel_height * work.kernel_width, channels = p.grid.channels;
    CUtensorMap source, weight;
    const bool tf32 = sizeof(T) == 4;
    const bool mapped = make_pixel_map(&source, p.source, p.dtype, tf32, p.grid, C::ROW, work.rows) &&
                        (C::BY_CHANNEL ? make_map(&weight, p.weight, p.dtype, tf32, work.columns, channels, taps,
                                                  taps * work.columns, work.columns, C::COLUMNS, C::ROW)
                                       : make_map(&weight, p.weight, p.dtype, tf32, channels, work.columns, taps,
                                                  taps * channels, channels, C::ROW, C::COLUMNS));
    if (!mapped)
        return CUDA_OPS_INVALID_ARGUMENT;
    const int bytes = SWIZZLE_ATOM + work.chunks * (int)taps * C::TAP_BYTES + work.stages * work.stage_bytes +
                      2 * C::BUFFER_BYTES + C::BARRIERS_BYTES;
    const auto kernel = conv2d_sm90_halo_kernel<C>;
    allow_shared_memory(kernel, bytes);
    const int blocks = device.multiprocessors / work.column_tiles;
    const int grid = (work.tiles < blocks ? work.tiles : blocks) * work.column_tiles;
    launch_dependent(kernel, dim3((unsigned int)grid), 3 * WARPGROUP, (size_t)bytes, p.stream, source, weight, work);
    return launch_status();
}

// In 16 bits: an instance has a file of its own, so that they compile side by side.
template <typename T>
static cuda_ops_status conv2d_sm90_halo_16bit(const HaloProduct &product, ConvDevice device, int row_bytes,
                                              bool by_channel)
{
#if defined(CUDA_OPS_SM90A)
    if (row_bytes == 64)
        return by_channel ? conv2d_launch_halo<HaloTile<T, 256, 64, true>>(product, device)
                          : conv2d_launch_halo<HaloTile<T, 256, 64, false>>(product, device);
    if (product.tile_columns == 32)
        return by_channel ? conv2d_launch_halo<HaloTile<T, 192, 128, true, 32>>(product, device)
                          : conv2d_launch_halo<HaloTile<T, 192, 128, false, 32>>(product, device);
    return by_channel ? conv2d_launch_halo<HaloTile<T, 192, 128, true>>(product, device)
                      : conv2d_launch_halo<HaloTile<T, 192, 128, false>>(product, device);
#else
    (void)product, (void)device, (void)row_bytes, (void)by_channel;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}

#endif
