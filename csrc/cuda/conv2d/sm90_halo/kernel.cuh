// The kernel of conv2d's window path, to be instantiated a dtype a file; conv2d/sm90_halo/sm90_halo.cu tells what it
// does.
#ifndef CUDA_OPS_CONV2D_SM90_HALO_KERNEL_CUH
#define CUDA_OPS_CONV2D_SM90_HALO_KERNEL_CUH

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

// PLACES: of a tile, wgmma's n. ROW_BYTES: channels of a place that one copy brings, and their swizzle. BY_CHANNEL: the
// weight lies as [channel][tap][column].
template <typename T_, int PLACES_, int ROW_BYTES_, bool BY_CHANNEL_>
struct Window {
    typedef T_ T;
    static constexpr int PLACES = PLACES_, ROW_BYTES = ROW_BYTES_, ROW = ROW_BYTES / (int)sizeof(T);
    static constexpr bool BY_CHANNEL = BY_CHANNEL_;
    static constexpr int COLUMNS = 64; // of the result, wgmma's m
    static constexpr int TAP_BYTES = COLUMNS * ROW_BYTES;
    // Results of 16 bits are turned around in shared memory, half a tile at a time.
    static constexpr int PASS = PLACES / 2, BUFFER_BYTES = sizeof(T) == 2 ? PASS * COLUMNS * 2 : 0;
    static constexpr int BARRIERS_BYTES = 256;
    static constexpr int MOST_SLOTS = 6;
    static_assert(!BY_CHANNEL || sizeof(T) == 2, "TF32 is K-major");
};

struct WindowWork {
    void *result;
    const void *bias;
    int images, grid_height, grid_width, start_y, start_x; // the walk over the source with its padding
    int height, width;                                     // of the result
    int columns, column_tiles;
    int kernel_height, kernel_width, dilation_y, dilation_x, mirrored;
    int chunks, rows, slots, slot_bytes; // chunks of channels; places in a slot
    int tiles;                           // of places
    Divider by_width, by_height;         // of the walk
};

struct WindowProduct {
    WindowWork work;
    PixelGrid grid;
    const void *picture, *weight;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

cuda_ops_status conv2d_window_bfloat16(const WindowProduct &product, ConvDevice device, int row_bytes, bool by_channel);
cuda_ops_status conv2d_window_float16(const WindowProduct &product, ConvDevice device, int row_bytes, bool by_channel);
cuda_ops_status conv2d_window_tf32(const WindowProduct &product, ConvDevice device);

// The tile that the three files have for a row of so many bytes.
static inline int conv2d_window_places(int element_size, int row_bytes)
{
    return element_size == 4 ? 128 : row_bytes == 64 ? 256 : 192;
}

#if defined(CUDA_OPS_HOPPER_CODE)

// A tile in a swizzle of ROW_BYTES whose rows lie one after the other. The pattern is one of addresses, so that a tile
// may begin at any row.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t describe_rows(uint32_t address)
{
    static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "a swizzle");
    return wgmma_descriptor(address, ROW_BYTES == 64 ? WGMMA_SWIZZLE_64 : WGMMA_SWIZZLE_128, 8 * ROW_BYTES);
}

// Where a place of the walk goes in the result; false: nowhere.
__device__ __forceinline__ bool result_pixel(const WindowWork &work, uint32_t place, int64_t &offset)
{
    const uint32_t line = work.by_width.of(place), x = place - line * work.grid_width;
    const uint32_t image = work.by_height.of(line), y = line - image * work.grid_height;
    const uint32_t pixel = (image * work.height + y) * work.width + x; // below 2^31, as places are
    offset = (int64_t)pixel * work.columns;
    return x < (uint32_t)work.width && y < (uint32_t)work.height && image < (uint32_t)work.images;
}

template <typename C>
__device__ __forceinline__ void store_window_halves(const float (&sum)[C::PLACES / 2], const WindowWork &work,
                                                    char *buffer, int first_place, int first_column, int barrier,
                                                    int thread)
{
    typedef typename C::T T;
    const int lane = thread % 32, warp = thread / 32, matrix = lane / 8, piece = thread % 8;
    const uint32_t to = shared_address(buffer);
    T *const result = (T *)work.result + first_column + 8 * piece;
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
        bar_sync(barrier, WARPGROUP); // the pass before has been read
#pragma unroll
        for (int i = 0; i < C::PASS / 8; i += 2) {
            const float *const s = sum + pass * C::PASS / 2 + 4 * i;
            const int place = 8 * (i + matrix / 2) + lane % 8;
            stmatrix_x4_trans(to + place * 128 + ((2 * warp + matrix % 2) ^ (place % 8)) * 16, pack<T>(s[0], s[1]),
                              pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7]));
        }
        bar_sync(barrier, WARPGROUP);
#pragma unroll
        for (int i = 0; i < C::PASS / 16; i++) {
            const int place = thread / 8 + 16 * i;
            const uint4 values = *(const uint4 *)(buffer + place * 128 + (piece ^ (place % 8)) * 16);
            int64_t offset;
            if (result_pixel(work, first_place + pass * C::PASS + place, offset) &&
                first_column + 8 * piece < work.columns)
                *(uint4 *)(result + offset) = values;
        }
    }
}

// float32 from registers: eight threads write 32 bytes of a place.
template <typename C>
__device__ __forceinline__ void store_window_floats(const float (&sum)[C::PLACES / 2], const WindowWork &work,
                                                    int first_place, int first_column, int thread)
{
    const int column = first_column + 16 * (thread / 32) + thread % 32 / 4;
    float *const result = (float *)work.result + column;
    const bool low = column < work.columns, high = column + 8 < work.columns;
#pragma unroll
    for (int i = 0; i < C::PLACES / 8; i++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int64_t offset;
            const bool stored = result_pixel(work, first_place + 8 * i + 2 * (thread % 4) + e, offset);
            if (stored && low)
                result[offset] = sum[4 * i + e];
            if (stored && high)
                result[offset + 8] = sum[4 * i + 2 + e];
        }
}

template <typename C>
__device__ __forceinline__ void consume_window(const WindowWork &work, uint32_t weights, uint32_t slots, uint32_t full,
                                               char *buffers, int first_tile, int tile_step, int first_column)
{
    typedef typename C::T T;
    const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
    const uint32_t empty = full + 8 * C::MOST_SLOTS, order = empty + 8 * C::MOST_SLOTS, ready = order + 16;
    const int column = first_column + 16 * (thread / 32) + thread % 32 / 4;
    float bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (work.bias && column + 8 * half < work.columns)
            bias[half] = load_as_accumulate(((const T *)work.bias)[column + 8 * half]);
    // From tap to tap along a line of the kernel, and in addition from its last to the first of the next.
    const int sign = work.mirrored ? -C::ROW_BYTES : C::ROW_BYTES, taps = work.kernel_height * work.kernel_width;
    const int step = sign * work.dilation_x;
    const int line = sign * work.dilation_y * work.grid_width - work.kernel_width * step;
    const int last = work.mirrored ? ((work.kernel_height - 1) * work.dilation_y * work.grid_width +
                                      (work.kernel_width - 1) * work.dilation_x) *
                                         C::ROW_BYTES
                                   : 0;
    constexpr int A_STEP = C::BY_CHANNEL ? 2 * SWIZZLE_ATOM : 32;
    mbarrier_wait(ready, 0);
    int slot = 0, phase = 0, turn = 0, mine = 0;
    float sum[C::PLACES / 2];
    for (int tile = first_tile; tile < work.tiles; tile += tile_step, turn ^= 1) {
        if (turn != group) {
            slot += work.chunks;
            if (slot >= work.slots) {
                slot -= work.slots;
                phase ^= 1;
            }
            continue;
        }
        // Not before the other warpgroup has seen its last slot full (see rung 13).
        mbarrier_wait(order + 8 * group, (mine & 1) ^ (group == 0));
        mine++;
        uint32_t tap = weights;
#pragma unroll
        for (int i = 0; i < C::PLACES / 2; i++)
            sum[i] = 0; // before the first product: defined in between, they would make wgmma wait for each other
        for (int chunk = 0; chunk < work.chunks; chunk++) {
            mbarrier_wait(full + 8 * slot, phase);
            if (chunk + 1 == work.chunks)
                hand_over(order, group, thread);
            uint32_t places = slots + slot * work.slot_bytes + last;
            wgmma_fence();
            for (int t = 0, s = 0; t < taps; t++, tap += C::TAP_BYTES) {
                const uint64_t a = C::BY_CHANNEL ? describe_rows<SWIZZLE_ROW>(tap) : describe_rows<C::ROW_BYTES>(tap);
                const uint64_t b = describe_rows<C::ROW_BYTES>(places);
#pragma unroll
                for (int k = 0; k < C::ROW_BYTES / 32; k++)
                    wgmma<T, C::PLACES, C::BY_CHANNEL, 0>(sum, wgmma_advance(a, k * A_STEP), wgmma_advance(b, k * 32),
                                                          1);
                places += step;
                if (++s == work.kernel_width) {
                    s = 0;
                    places += line;
                }
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
            if (thread == 0)
                mbarrier_arrive(empty + 8 * slot);
            if (++slot == work.slots) {
                slot = 0;
                phase ^= 1;
            }
        }
#pragma unroll
        for (int i = 0; i < C::PLACES / 2; i++)
            sum[i] += bias[i / 2 % 2];
        if constexpr (sizeof(T) == 2)
            store_window_halves<C>(sum, work, buffers + group * C::BUFFER_BYTES, tile * C::PLACES, first_column,
                                   1 + group, thread);
        else
            store_window_floats<C>(sum, work, tile * C::PLACES, first_column, thread);
    }
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    conv2d_window_kernel(const __grid_constant__ CUtensorMap picture, const __grid_constant__ CUtensorMap weight,
                         const __grid_constant__ WindowWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    extern __shared__ char shared[];
    const int taps = work.kernel_height * work.kernel_width;
    const uint32_t weights = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t slots = weights + work.chunks * taps * C::TAP_BYTES;
    const uint32_t buffers = slots + work.slots * work.slot_bytes, full = buffers + 2 * C::BUFFER_BYTES;
    const uint32_t empty = full + 8 * C::MOST_SLOTS, order = empty + 8 * C::MOST_SLOTS, ready = order + 16;
    const int column_tile = blockIdx.x % work.column_tiles, first_column = column_tile * C::COLUMNS;
    const int first_tile = blockIdx.x / work.column_tiles, tile_step = gridDim.x / work.column_tiles;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&picture);
        prefetch_tensormap(&weight);
        for (int slot = 0; slot < work.slots; slot++) {
            mbarrier_init(full + 8 * slot, 1);
            mbarrier_init(empty + 8 * slot, 1);
        }
        mbarrier_init(order, TURN_ARRIVALS);
        mbarrier_init(order + 8, TURN_ARRIVALS);
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
            int slot = 0, phase = 0;
            for (int tile = first_tile; tile < work.tiles; tile += tile_step) {
                const uint32_t place = tile * C::PLACES, line = work.by_width.of(place);
                const uint32_t image = work.by_height.of(line);
                const int x = work.start_x + (int)(place - line * work.grid_width);
                const int y = work.start_y + (int)(line - image * work.grid_height);
                for (int chunk = 0; chunk < work.chunks; chunk++) {
                    mbarrier_wait(empty + 8 * slot, phase ^ 1);
                    mbarrier_arrive_expect_tx(full + 8 * slot, work.rows * C::ROW_BYTES);
                    tma_load_im2col_4d(slots + slot * work.slot_bytes, &picture, full + 8 * slot, chunk * C::ROW, x, y,
                                       (int)image, 0, 0);
                    if (++slot == work.slots) {
                        slot = 0;
                        phase ^= 1;
                    }
                }
            }
        }
    } else {
        setmaxnreg_inc<232>();
        consume_window<C>(work, weights, slots, full, shared + (buffers - shared_address(shared)), first_tile,
                          tile_step, first_column);
    }
#endif
}

template <typename C>
static cuda_ops_status conv2d_launch_window(const WindowProduct &p, ConvDevice device)
{
    typedef typename C::T T;
    const WindowWork &work = p.work;
    const int64_t taps = (int64_t)work.kernel_height * work.kernel_width, channels = p.grid.channels;
    CUtensorMap picture, weight;
    const bool tf32 = sizeof(T) == 4;
    const bool mapped = make_pixel_map(&picture, p.picture, p.dtype, tf32, p.grid, C::ROW, work.rows) &&
                        (C::BY_CHANNEL ? make_map(&weight, p.weight, p.dtype, tf32, work.columns, channels, taps,
                                                  taps * work.columns, work.columns, C::COLUMNS, C::ROW)
                                       : make_map(&weight, p.weight, p.dtype, tf32, channels, work.columns, taps,
                                                  taps * channels, channels, C::ROW, C::COLUMNS));
    if (!mapped)
        return CUDA_OPS_INVALID_ARGUMENT;
    const int bytes = SWIZZLE_ATOM + work.chunks * (int)taps * C::TAP_BYTES + work.slots * work.slot_bytes +
                      2 * C::BUFFER_BYTES + C::BARRIERS_BYTES;
    const auto kernel = conv2d_window_kernel<C>;
    allow_shared_memory(kernel, bytes);
    const int blocks = device.multiprocessors / work.column_tiles;
    const int grid = (work.tiles < blocks ? work.tiles : blocks) * work.column_tiles;
    launch_dependent(kernel, dim3((unsigned int)grid), 3 * WARPGROUP, (size_t)bytes, p.stream, picture, weight, work);
    return launch_status();
}

#endif
