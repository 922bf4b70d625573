// window_attention's mma path, for one dtype: see mma.cu.
#ifndef CUDA_OPS_WINDOW_ATTENTION_MMA_KERNEL_CUH
#define CUDA_OPS_WINDOW_ATTENTION_MMA_KERNEL_CUH

#include <math_constants.h>

#include "common/aligned_vector.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "window_attention/mma/mma.h"

static constexpr int WINDOW_ROWS = 64; // positions that a tile has room for
static constexpr int WINDOW_WARPS = WINDOW_ROWS / 16;
static constexpr int WINDOW_THREADS = WINDOW_WARPS * WARP_SIZE;
static constexpr int WINDOW_PAIRS = WINDOW_ROWS / 16; // of eight columns each
static constexpr float LOG2_E = 1.4426950408889634f;

// Shared memory, in elements of 16 bits. Eight more in a row keep ldmatrix free of bank conflicts.
template <int HEAD>
struct WindowTile {
    static constexpr int PITCH = HEAD + 8, SIZE = WINDOW_ROWS * PITCH;
    static constexpr int SCORE_PITCH = WINDOW_ROWS + 8, SCORES = WINDOW_ROWS * SCORE_PITCH;
    static constexpr int FORWARD_BYTES = 2 * 3 * SIZE * 2, BACKWARD_BYTES = (2 * 4 * SIZE + 2 * SCORES) * 2;
};

// Which of the scores of a thread's two rows are apart: bit 8 n + e, of column 8 n + 2 t + e.
struct ApartColumns {
    uint64_t of[2];
    __device__ bool has(int half, int n, int e) const
    {
        return of[half] >> (8 * n + e) & 1;
    }
};

// What a block knows of windows: where positions lie, and which are beyond an edge.
struct WindowPlaces {
    int2 place[WINDOW_ROWS]; // rows and columns of pixels from the window's first
    uint32_t beyond_y[2], beyond_x[2];
};

// Of a window: its image's first pixel, its first row and column with the shift added, and whether it is the last.
struct WindowStart {
    int64_t image;
    int y, x;
    bool last_y, last_x;
};

template <typename T>
__device__ __forceinline__ uint32_t pack_scores(float low, float high)
{
    const float values[2] = {low, high};
    const aligned_vector<T, 2> pair = vector_of<T>(values);
    return reinterpret_cast<const uint32_t &>(pair);
}

__device__ __forceinline__ void find_places(WindowPlaces &places, const WindowWork &w)
{
    if (threadIdx.x < WINDOW_ROWS) {
        const int i = (int)threadIdx.x, y = i / w.window_width, x = i - y * w.window_width;
        places.place[i] = make_int2(y * w.step_y, x * w.step_x);
        const unsigned int beyond_y = __ballot_sync(FULL_WARP, y >= w.edge_y);
        const unsigned int beyond_x = __ballot_sync(FULL_WARP, x >= w.edge_x);
        if (i % WARP_SIZE == 0)
            places.beyond_y[i / WARP_SIZE] = beyond_y, places.beyond_x[i / WARP_SIZE] = beyond_x;
    }
}

__device__ __forceinline__ WindowStart start_of(const WindowWork &w, uint32_t window)
{
    const uint32_t row = window / (uint32_t)w.across, x = window - row * (uint32_t)w.across;
    const uint32_t n = row / (uint32_t)w.down, y = row - n * (uint32_t)w.down;
    WindowStart start;
    start.image = (int64_t)n * w.height * w.width;
    start.y = (int)y * w.between_y + w.shift_y, start.x = (int)x * w.between_x + w.shift_x;
    start.last_y = (int)y == w.down - 1, start.last_x = (int)x == w.across - 1;
    return start;
}

__device__ __forceinline__ int64_t pixel_at(const WindowWork &w, const WindowStart &start, int2 place)
{
    int y = start.y + place.x, x = start.x + place.y;
    y -= y >= w.height ? w.height : 0;
    x -= x >= w.width ? w.width : 0;
    return start.image + (int64_t)y * w.width + x;
}

// Asks for a window's queries, keys and values, and grad_output, in tiles behind each other from `to` on.
template <typename T, int HEAD, bool BACKWARD>
__device__ __forceinline__ void load_window(uint32_t to, const WindowWork &w, const WindowPlaces &places,
                                            uint32_t window, int head)
{
    constexpr int VECTORS = HEAD / 8, TILE_BYTES = WindowTile<HEAD>::SIZE * 2;
    const WindowStart start = start_of(w, window);
    for (int v = (int)threadIdx.x; v < w.positions * VECTORS; v += WINDOW_THREADS) {
        const int row = v / VECTORS, vector = v % VECTORS;
        if (8 * vector >= w.head_dim)
            continue;
        const int64_t pixel = pixel_at(w, start, places.place[row]);
        const int channel = head * w.head_dim + 8 * vector;
        const T *const from = (const T *)w.qkv + pixel * 3 * w.channels + channel;
        const uint32_t at = to + (row * WindowTile<HEAD>::PITCH + 8 * vector) * 2;
        cp_async_16(at, from);
        cp_async_16(at + TILE_BYTES, from + w.channels);
        cp_async_16(at + 2 * TILE_BYTES, from + 2 * w.channels);
        if (BACKWARD)
            cp_async_16(at + 3 * TILE_BYTES, (const T *)w.grad_output + pixel * w.channels + channel);
    }
}

// The addresses that ldmatrix_x4 takes from a lane for 16 x 16 of a tile at (row, column): as they are multiplied from
// the left, and as keys of which scores are made (`.col` operands without .trans).
__device__ __forceinline__ uint32_t left_address(uint32_t tile, int pitch, int row, int column)
{
    const int lane = (int)threadIdx.x % WARP_SIZE;
    return tile + ((row + lane % 16) * pitch + column + lane / 16 * 8) * 2;
}
__device__ __forceinline__ uint32_t right_address(uint32_t tile, int pitch, int row, int column)
{
    const int lane = (int)threadIdx.x % WARP_SIZE;
    return tile + ((row + lane / 16 * 8 + lane % 8) * pitch + column + lane / 8 % 2 * 8) * 2;
}

// scores += rows [row, row + 16) of `left` times the transpose of `right`.
template <typename T, int HEAD>
__device__ __forceinline__ void multiply_rows(float (&scores)[2 * WINDOW_PAIRS][4], uint32_t left, uint32_t right,
                                              int row, int pairs)
{
    constexpr int PITCH = WindowTile<HEAD>::PITCH;
#pragma unroll
    for (int k = 0; k < HEAD; k += 16) {
        uint32_t a[4];
        ldmatrix_x4(a, left_address(left, PITCH, row, k));
#pragma unroll
        for (int n = 0; n < WINDOW_PAIRS; n++)
            if (n < pairs) {
                uint32_t b[4];
                ldmatrix_x4(b, right_address(right, PITCH, 16 * n, k));
                mma_sync<T>(scores[2 * n], a, b[0], b[1]);
                mma_sync<T>(scores[2 * n + 1], a, b[2], b[3]);
            }
    }
}

// sum += a * rows [row, row + 16) of `right`.
template <typename T, int HEAD>
__device__ __forceinline__ void multiply_columns(float (&sum)[HEAD / 8][4], const uint32_t (&a)[4], uint32_t right,
                                                 int row)
{
#pragma unroll
    for (int n = 0; n < HEAD / 16; n++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, left_address(right, WindowTile<HEAD>::PITCH, row, 16 * n));
        mma_sync<T>(sum[2 * n], a, b[0], b[1]);
        mma_sync<T>(sum[2 * n + 1], a, b[2], b[3]);
    }
}

// Two neighbouring tiles of scores as the left operand of a product.
template <typename T>
__device__ __forceinline__ void left_operand(uint32_t (&a)[4], const float (&first)[4], const float (&second)[4])
{
    a[0] = pack_scores<T>(first[0], first[1]);
    a[1] = pack_scores<T>(first[2], first[3]);
    a[2] = pack_scores<T>(second[0], second[1]);
    a[3] = pack_scores<T>(second[2], second[3]);
}

// bias * log2(e) of this thread's scores; -inf in columns that are none.
__device__ __forceinline__ void load_bias(float (&bias)[2 * WINDOW_PAIRS][4], const WindowWork &w, int head)
{
    const int lane = (int)threadIdx.x % WARP_SIZE, row = (int)threadIdx.x / WARP_SIZE * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < 2 * WINDOW_PAIRS; n++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
            const int i = row + f / 2 * 8, j = 8 * n + lane % 4 * 2 + f % 2;
            bias[n][f] = j >= w.positions ? -CUDART_INF_F : 0.0f;
            if (w.bias && i < w.positions && j < w.positions)
                bias[n][f] = w.bias[((int64_t)head * w.positions + i) * w.positions + j] * LOG2_E;
        }
}

__device__ __forceinline__ ApartColumns apart_columns(const WindowPlaces &places, const WindowStart &start)
{
    const int lane = (int)threadIdx.x % WARP_SIZE, row = (int)threadIdx.x / WARP_SIZE * 16 + lane / 4;
    const uint64_t beyond_y = (uint64_t)places.beyond_y[1] << 32 | places.beyond_y[0];
    const uint64_t beyond_x = (uint64_t)places.beyond_x[1] << 32 | places.beyond_x[0];
    ApartColumns apart;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + 8 * half;
        uint64_t columns = 0;
        if (start.last_y)
            columns |= beyond_y >> i & 1 ? ~beyond_y : beyond_y;
        if (start.last_x)
            columns |= beyond_x >> i & 1 ? ~beyond_x : beyond_x;
        apart.of[half] = columns >> (lane % 4 * 2);
    }
    return apart;
}

// exp2 of scores less the largest of the row, and factors[half] = 1 / their sum.
__device__ __forceinline__ void exponentials(float (&scores)[2 * WINDOW_PAIRS][4], float (&factors)[2],
                                             const float (&bias)[2 * WINDOW_PAIRS][4], const WindowWork &w,
                                             const WindowPlaces &places, uint32_t window)
{
#pragma unroll
    for (int n = 0; n < 2 * WINDOW_PAIRS; n++)
#pragma unroll
        for (int f = 0; f < 4; f++)
            scores[n][f] = fmaf(scores[n][f], w.scale_log2, bias[n][f]);
    if (w.shift_y > 0 || w.shift_x > 0) {
        const WindowStart start = start_of(w, window);
        if (start.last_y || start.last_x) {
            const ApartColumns apart = apart_columns(places, start);
#pragma unroll
            for (int n = 0; n < 2 * WINDOW_PAIRS; n++)
#pragma unroll
                for (int f = 0; f < 4; f++)
                    scores[n][f] += apart.has(f / 2, n, f % 2) ? CUDA_OPS_WINDOW_APART * LOG2_E : 0.0f;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = -CUDART_INF_F, total = 0;
#pragma unroll
        for (int n = 0; n < 2 * WINDOW_PAIRS; n++)
            largest = fmaxf(largest, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
#pragma unroll
        for (int n = 0; n < 2 * WINDOW_PAIRS; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &score = scores[n][2 * half + e];
                score = ex2_approx_ftz(score - largest);
                total += score;
            }
        total += __shfl_xor_sync(FULL_WARP, total, 1);
        total += __shfl_xor_sync(FULL_WARP, total, 2);
        factors[half] = 1.0f / total;
    }
}

// Writes a warp's 16 rows, by way of those of a tile that nobody else reads, to where they lie among pixels of
// `pixel_size` elements.
template <typename T, int HEAD>
__device__ __forceinline__ void store_rows(T *to, int64_t pixel_size, const float (&sum)[HEAD / 8][4],
                                           float factor_near, float factor_far, T *tile, const WindowWork &w,
                                           const WindowPlaces &places, const WindowStart &start)
{
    constexpr int PITCH = WindowTile<HEAD>::PITCH, VECTORS = HEAD / 8;
    const int lane = (int)threadIdx.x % WARP_SIZE, first = (int)threadIdx.x / WARP_SIZE * 16;
    __syncwarp();
    // Nothing is written where tiles have to be zeros.
    const int row = first + lane / 4;
    T *const near = tile + row * PITCH + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++) {
        if (8 * n < w.head_dim && row < w.positions)
            *reinterpret_cast<uint32_t *>(near + 8 * n) =
                pack_scores<T>(sum[n][0] * factor_near, sum[n][1] * factor_near);
        if (8 * n < w.head_dim && row + 8 < w.positions)
            *reinterpret_cast<uint32_t *>(near + 8 * PITCH + 8 * n) =
                pack_scores<T>(sum[n][2] * factor_far, sum[n][3] * factor_far);
    }
    __syncwarp();
#pragma unroll
    for (int v = lane; v < 16 * VECTORS; v += WARP_SIZE) {
        const int at = first + v / VECTORS, column = 8 * (v % VECTORS);
        if (at < w.positions && column < w.head_dim)
            *reinterpret_cast<uint4 *>(to + pixel_at(w, start, places.place[at]) * pixel_size + column) =
                *reinterpret_cast<const uint4 *>(tile + at * PITCH + column);
    }
}

// Rows and columns beyond those that are loaded are zeros: what they are multiplied by is 0 too, and must not be NaN.
__device__ __forceinline__ void clear_tiles(void *tiles, int bytes)
{
    for (int i = (int)threadIdx.x; i < bytes / 16; i += WINDOW_THREADS)
        reinterpret_cast<uint4 *>(tiles)[i] = make_uint4(0, 0, 0, 0);
}

// What a block begins with: zeros, places, its head's bias, and its first window, of which it returns the number.
template <typename T, int HEAD, bool BACKWARD>
__device__ __forceinline__ uint32_t begin_windows(float (&bias)[2 * WINDOW_PAIRS][4], T *shared, WindowPlaces &places,
                                                  const WindowWork &w, int head)
{
    clear_tiles(shared, BACKWARD ? WindowTile<HEAD>::BACKWARD_BYTES : WindowTile<HEAD>::FORWARD_BYTES);
    find_places(places, w);
    wait_for_predecessor();
    release_successor();
    load_bias(bias, w, head);
    __syncthreads();
    const uint32_t window = blockIdx.x / (unsigned int)w.heads;
    if (window < w.count)
        load_window<T, HEAD, BACKWARD>(shared_address(shared), w, places, window, head);
    cp_async_commit_group();
    return window;
}

// Asks for the block's next window, for the stage that is not this one's, and waits for this one.
template <typename T, int HEAD, bool BACKWARD>
__device__ __forceinline__ void wait_for_window(T *shared, int stage, const WindowPlaces &places, const WindowWork &w,
                                                uint32_t window, uint32_t slots, int head)
{
    constexpr int STAGE = (BACKWARD ? 4 : 3) * WindowTile<HEAD>::SIZE;
    if (w.count - window > slots)
        load_window<T, HEAD, BACKWARD>(shared_address(shared + (stage ^ 1) * STAGE), w, places, window + slots, head);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    __syncthreads();
}

template <typename T, int HEAD>
__global__ void __launch_bounds__(WINDOW_THREADS, HEAD <= 32 ? 4 : 1)
    window_attention_mma_forward_kernel(const WindowWork w)
{
    typedef WindowTile<HEAD> Tile;
    extern __shared__ uint4 window_shared[];
    __shared__ WindowPlaces places;
    const int head = (int)(blockIdx.x % (unsigned int)w.heads), row = (int)threadIdx.x / WARP_SIZE * 16;
    const uint32_t slots = gridDim.x / (unsigned int)w.heads;
    const int pairs = (w.positions + 15) / 16;
    T *const shared = reinterpret_cast<T *>(window_shared);
    float bias[2 * WINDOW_PAIRS][4];
    uint32_t window = begin_windows<T, HEAD, false>(bias, shared, places, w, head);
    for (int stage = 0; window < w.count; window += slots, stage ^= 1) {
        wait_for_window<T, HEAD, false>(shared, stage, places, w, window, slots, head);
        if (row < w.positions) {
            T *const tile = shared + stage * 3 * Tile::SIZE;
            const uint32_t query = shared_address(tile);
            const uint32_t key = query + Tile::SIZE * 2, value = key + Tile::SIZE * 2;
            float scores[2 * WINDOW_PAIRS][4] = {}, sum[HEAD / 8][4] = {}, factors[2];
            multiply_rows<T, HEAD>(scores, query, key, row, pairs);
            exponentials(scores, factors, bias, w, places, window);
#pragma unroll
            for (int n = 0; n < WINDOW_PAIRS; n++)
                if (n < pairs) {
                    uint32_t a[4];
                    left_operand<T>(a, scores[2 * n], scores[2 * n + 1]);
                    multiply_columns<T, HEAD>(sum, a, value, 16 * n);
                }
            store_rows<T, HEAD>((T *)w.result + head * w.head_dim, w.channels, sum, factors[0], factors[1], tile, w,
                                places, start_of(w, window));
        }
        __syncthreads();
    }
}

template <typename T, int HEAD>
__global__ void __launch_bounds__(WINDOW_THREADS, HEAD <= 32 ? 3 : 2)
    window_attention_mma_backward_kernel(const WindowWork w)
{
    typedef WindowTile<HEAD> Tile;
    extern __shared__ uint4 window_shared[];
    __shared__ WindowPlaces places;
    const int head = (int)(blockIdx.x % (unsigned int)w.heads), row = (int)threadIdx.x / WARP_SIZE * 16;
    const int lane = (int)threadIdx.x % WARP_SIZE, slot = (int)(blockIdx.x / (unsigned int)w.heads);
    const uint32_t slots = gridDim.x / (unsigned int)w.heads;
    const int pairs = (w.positions + 15) / 16;
    T *const shared = reinterpret_cast<T *>(window_shared);
    T *const weights = shared + 2 * 4 * Tile::SIZE, *const grads = weights + Tile::SCORES;
    float bias[2 * WINDOW_PAIRS][4], grad_bias[2 * WINDOW_PAIRS][4] = {};
    uint32_t window = begin_windows<T, HEAD, true>(bias, shared, places, w, head);
    for (int stage = 0; window < w.count; window += slots, stage ^= 1) {
        wait_for_window<T, HEAD, true>(shared, stage, places, w, window, slots, head);
        T *const tile = shared + stage * 4 * Tile::SIZE;
        const uint32_t query = shared_address(tile);
        const uint32_t key = query + Tile::SIZE * 2, value = key + Tile::SIZE * 2, grad = value + Tile::SIZE * 2;
        T *const result = (T *)w.result + head * w.head_dim;
        const WindowStart start = start_of(w, window);
        float sum[HEAD / 8][4] = {};
        if (row < w.positions) {
            float scores[2 * WINDOW_PAIRS][4] = {}, products[2 * WINDOW_PAIRS][4] = {}, factors[2], delta[2];
            multiply_rows<T, HEAD>(scores, query, key, row, pairs);
            multiply_rows<T, HEAD>(products, grad, value, row, pairs);
            exponentials(scores, factors, bias, w, places, window);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool there = row + lane / 4 + 8 * half < w.positions;
                delta[half] = 0;
#pragma unroll
                for (int n = 0; n < 2 * WINDOW_PAIRS; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &weight = scores[n][2 * half + e];
                        weight = there ? weight * factors[half] : 0.0f;
                        delta[half] = fmaf(weight, products[n][2 * half + e], delta[half]);
                    }
                delta[half] += __shfl_xor_sync(FULL_WARP, delta[half], 1);
                delta[half] += __shfl_xor_sync(FULL_WARP, delta[half], 2);
                // Rows that are none must stay zeros, whatever the keys and values are.
                T *const at = weights + (row + lane / 4 + 8 * half) * Tile::SCORE_PITCH + lane % 4 * 2;
#pragma unroll
                for (int n = 0; n < 2 * WINDOW_PAIRS; n++) {
                    float slopes[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int f = 2 * half + e;
                        slopes[e] = there ? scores[n][f] * (products[n][f] - delta[half]) : 0.0f;
                        grad_bias[n][f] += slopes[e];
                        products[n][f] = slopes[e];
                    }
                    *reinterpret_cast<uint32_t *>(at + 8 * n) =
                        pack_scores<T>(scores[n][2 * half], scores[n][2 * half + 1]);
                    *reinterpret_cast<uint32_t *>(at + Tile::SCORES + 8 * n) = pack_scores<T>(slopes[0], slopes[1]);
                }
            }
#pragma unroll
            for (int n = 0; n < WINDOW_PAIRS; n++)
                if (n < pairs) {
                    uint32_t a[4];
                    left_operand<T>(a, products[2 * n], products[2 * n + 1]);
                    multiply_columns<T, HEAD>(sum, a, key, 16 * n);
                }
        }
        __syncthreads();
        // Now keys and values are read no more: results leave by way of their tiles.
        if (row < w.positions) {
            const int64_t pixel = 3 * w.channels;
            store_rows<T, HEAD>(result, pixel, sum, w.scale, w.scale, tile + Tile::SIZE, w, places, start);
            float of_key[HEAD / 8][4] = {}, of_value[HEAD / 8][4] = {};
#pragma unroll
            for (int n = 0; n < WINDOW_PAIRS; n++)
                if (n < pairs) {
                    uint32_t a[4];
                    ldmatrix_x4_trans(a, right_address(shared_address(grads), Tile::SCORE_PITCH, 16 * n, row));
                    multiply_columns<T, HEAD>(of_key, a, query, 16 * n);
                    ldmatrix_x4_trans(a, right_address(shared_address(weights), Tile::SCORE_PITCH, 16 * n, row));
                    multiply_columns<T, HEAD>(of_value, a, grad, 16 * n);
                }
            store_rows<T, HEAD>(result + w.channels, pixel, of_key, w.scale, w.scale, tile + Tile::SIZE, w, places,
                                start);
            store_rows<T, HEAD>(result + 2 * w.channels, pixel, of_value, 1.0f, 1.0f, tile + 2 * Tile::SIZE, w, places,
                                start);
        }
        __syncthreads();
    }
    if (!w.partials)
        return;
    float *const partial = w.partials + ((int64_t)slot * w.heads + head) * w.positions * w.positions;
#pragma unroll
    for (int n = 0; n < 2 * WINDOW_PAIRS; n++)
#pragma unroll
        for (int f = 0; f < 4; f++) {
            const int i = row + lane / 4 + f / 2 * 8, j = 8 * n + lane % 4 * 2 + f % 2;
            if (i < w.positions && j < w.positions)
                partial[i * w.positions + j] = grad_bias[n][f];
        }
}

template <typename T, int HEAD>
static cuda_ops_status launch_window_product(const WindowWork &work, bool backward, int64_t slots, cudaStream_t stream)
{
    const auto kernel =
        backward ? window_attention_mma_backward_kernel<T, HEAD> : window_attention_mma_forward_kernel<T, HEAD>;
    const size_t bytes = backward ? WindowTile<HEAD>::BACKWARD_BYTES : WindowTile<HEAD>::FORWARD_BYTES;
    if (bytes > 48 << 10)
        allow_shared_memory(kernel, bytes);
    if (!backward) {
        const int64_t blocks = (int64_t)active_blocks(reinterpret_cast<const void *>(kernel), WINDOW_THREADS, bytes) *
                               current_device().multiprocessors;
        slots = ceil_div(blocks, work.heads);
        slots = slots < work.count ? slots : work.count;
    }
    launch_dependent(kernel, dim3((unsigned int)(slots * work.heads)), dim3(WINDOW_THREADS), bytes, stream, work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_window_attention(const WindowWork &work, bool backward, int64_t slots,
                                               cudaStream_t stream)
{
    return work.head_dim <= 32 ? launch_window_product<T, 32>(work, backward, slots, stream)
                               : launch_window_product<T, 64>(work, backward, slots, stream);
}

#endif
