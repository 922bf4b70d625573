// The convolution of conv_bn_relu_pool's tiled path, forward (with the batch's statistics) and as the gradient of
// input:
//     forward    y[pixel][out]  = sum over taps and in  of input[pixel + tap][in] * weight[out][in][tap]
//     backward   dx[pixel][in]  = sum over taps and out of dy[pixel - tap][out]   * weight[out][in][tap]
// One kernel does both; backward makes dy while it loads, and reverses the taps. A block has one or two slots of four
// warps, each with a tile of 14 x 16 pixels in two stages of DEPTH channels; a slot synchronises with itself only, so
// that one multiplies while the other rounds. The block's weights stay in shared memory where all chunks of DEPTH fit.
//   TF32  mma.sync m16n8k8. A warp has seven rows of 16 pixels and half of the columns; a row's fragment is multiplied
//         with three taps' weights, one for each row of results that it is part of: 15 ldmatrix for 84 products.
//   else  float multiply-adds. A thread has a column of seven pixels and up to 16 channels: 112 multiply-adds for four
//         16-byte loads.
// Bound by arithmetic: on an H200 175 TFLOP/s with TF32, 35 in float32 (cuBLAS: 51); benchmarks/notes/mnist.md.
#include "conv_bn_relu_pool/tiled_sm80/tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int ROWS = CONVOLVE_ROWS, WARP_ROWS = ROWS / 2, RASTER_ROWS = ROWS + 2;
static constexpr int RASTER_BYTES = RASTER_ROWS * RASTER_ROW_BYTES;
static constexpr int TAPS = 9;
static constexpr int MOST_COLUMNS = 64;
static constexpr int WEIGHT_BYTES = TAPS * MOST_COLUMNS * PIXEL_BYTES;

int tiled_convolve_shared_bytes(int slots)
{
    return WEIGHT_BYTES + slots * 2 * RASTER_BYTES;
}

struct convolve_arguments {
    tiled_problem problem;
    tiling tiles;
    int depth, columns; // channels of the source and of the result
    int chunks;         // of DEPTH
    int kinds;          // groups of COLUMNS channels
    bool resident;      // all chunks' weights fit
    const float *source, *weight;
    gradient_source gradient; // what backward has as its source
    float *result;
    batch_moments moments; // forward
};

typedef gradient_loader<1, RASTER_ROWS, RASTER_COLUMNS, 8, false> convolve_gradient;
static_assert(convolve_gradient::RASTER_BYTES == RASTER_BYTES, "one layout");

// The offset of a chunk's weight: [tap column][tap row], then for TF32 [column][depth], its 16-byte vectors swizzled by
// the column and each 16 columns permuted such that a thread's sums are four neighbouring channels; else
// [depth][column].
template <bool TF32, int COLUMNS>
__device__ __forceinline__ int weight_offset(int tap, int column, int depth)
{
    if constexpr (TF32) {
        const int row = column / 16 * 16 + (column & 2) * 4 + (column / 4 & 3) * 2 + (column & 1);
        return (tap * COLUMNS + row) * DEPTH + (((depth >> 2) ^ (row & 7)) << 2) + (depth & 3);
    }
    return (tap * DEPTH + depth) * COLUMNS + column;
}

template <bool TF32, bool BACKWARD, int COLUMNS>
__device__ __forceinline__ void stage_weight(float *staged, const convolve_arguments &a, int first_column, int chunk)
{
    // weight is [out][in][9]: a line is one index of the first dimension and contiguous along the other two.
    constexpr int LINES = BACKWARD ? DEPTH : COLUMNS, LENGTH = (BACKWARD ? COLUMNS : DEPTH) * TAPS;
    const int first_out = BACKWARD ? chunk * DEPTH : first_column, first_in = BACKWARD ? first_column : chunk * DEPTH;
    const int lines = a.problem.out_channels - first_out, length = (a.problem.in_channels - first_in) * TAPS;
    const float *from = a.weight + ((int64_t)first_out * a.problem.in_channels + first_in) * TAPS;
#pragma unroll 9
    for (int i = threadIdx.x; i < LINES * LENGTH / 4; i += blockDim.x) {
        const int line = i / (LENGTH / 4), at = i % (LENGTH / 4) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (line < lines && at < length)
            v = *reinterpret_cast<const float4 *>(from + (int64_t)line * a.problem.in_channels * TAPS + at);
        v = rounded<TF32>(v);
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int other = (at + e) / TAPS, number = (at + e) % TAPS;
            const int row = BACKWARD ? 2 - number / 3 : number / 3, column = BACKWARD ? 2 - number % 3 : number % 3;
            staged[weight_offset<TF32, COLUMNS>(column * 3 + row, BACKWARD ? other : line, BACKWARD ? line : other)] =
                values[e];
        }
    }
}

// A thread's sums: [row][its columns of pixels][channels]; each four channels are neighbours in memory.
template <bool TF32, int COLUMNS>
struct thread_sums {
    static constexpr int PIXELS = TF32 ? 2 : 1, CHANNELS = COLUMNS / (TF32 ? 8 : 4);
    float value[WARP_ROWS][PIXELS][CHANNELS];

    // The tile's column of pixel 0; pixel 1 is 8 columns further on.
    static __device__ __forceinline__ int column(int lane)
    {
        return TF32 ? lane / 4 : lane % 16;
    }
    // The first of each four channels, counted from the block's first.
    static constexpr int STEP = TF32 ? 16 : 4;
    static __device__ __forceinline__ int channel(int warp, int lane, int four)
    {
        return warp % 2 * (COLUMNS / 2) + (TF32 ? lane % 4 * 4 : lane / 16 * CHANNELS) + four * STEP;
    }
};

template <int COLUMNS>
__device__ __forceinline__ void multiply_chunk(thread_sums<true, COLUMNS> &sums, uint32_t raster, uint32_t weight,
                                               int warp, int lane)
{
    constexpr int FRAGMENTS = COLUMNS / 16; // of 8 columns, in this warp's half
    const int pixel = lane % 8 + (lane / 8 & 1) * 8, line = warp % 2 * (COLUMNS / 2) + lane % 8 + lane / 16 * 8;
    const uint32_t rows = raster + warp / 2 * (WARP_ROWS * RASTER_ROW_BYTES);
#pragma unroll 1
    for (int shift = 0; shift < 3; shift++) {
        const uint32_t left = rows + (pixel + shift) * PIXEL_BYTES;
        const uint32_t right = weight + (shift * 3 * COLUMNS + line) * PIXEL_BYTES;
#pragma unroll 2
        for (int k = 0; k < DEPTH / 8; k++) {
            const uint32_t from = left + (((2 * k + lane / 16) ^ ((pixel + shift) & 7)) << 4);
            const uint32_t by = right + (((2 * k + (lane / 8 & 1)) ^ (lane & 7)) << 4);
            uint32_t b[3][FRAGMENTS][2];
#pragma unroll
            for (int tap = 0; tap < 3; tap++)
#pragma unroll
                for (int j = 0; j < FRAGMENTS; j += 2) {
                    uint32_t m[4];
                    ldmatrix_x4(m, by + (tap * COLUMNS + j * 8) * PIXEL_BYTES);
                    b[tap][j][0] = m[0], b[tap][j][1] = m[1], b[tap][j + 1][0] = m[2], b[tap][j + 1][1] = m[3];
                }
#pragma unroll
            for (int row = 0; row < WARP_ROWS + 2; row++) {
                uint32_t a[4];
                ldmatrix_x4(a, from + row * RASTER_ROW_BYTES);
#pragma unroll
                for (int tap = 0; tap < 3; tap++) {
                    const int to = row - tap;
                    if (to < 0 || to >= WARP_ROWS)
                        continue;
#pragma unroll
                    for (int j = 0; j < FRAGMENTS; j++)
                        mma_sync<float>(sums.value[to][0][2 * j], sums.value[to][0][2 * j + 1],
                                        sums.value[to][1][2 * j], sums.value[to][1][2 * j + 1], a, b[tap][j][0],
                                        b[tap][j][1]);
                }
            }
        }
    }
}

template <int COLUMNS>
__device__ __forceinline__ void multiply_chunk(thread_sums<false, COLUMNS> &sums, uint32_t raster, uint32_t weight,
                                               int warp, int lane)
{
    typedef thread_sums<false, COLUMNS> Sums;
    const int pixel = lane % 16;
    const uint32_t rows = raster + warp / 2 * (WARP_ROWS * RASTER_ROW_BYTES);
    const uint32_t own = weight + Sums::channel(warp, lane, 0) * 4;
#pragma unroll 1
    for (int shift = 0; shift < 3; shift++) {
        const uint32_t left = rows + (pixel + shift) * PIXEL_BYTES;
        uint32_t right = own + shift * 3 * DEPTH * COLUMNS * 4;
#pragma unroll 1
        for (int chunk = 0; chunk < 8; chunk++, right += 4 * COLUMNS * 4) {
            const uint32_t from = left + ((chunk ^ ((pixel + shift) & 7)) << 4);
            float4 x[WARP_ROWS + 2];
#pragma unroll
            for (int row = 0; row < WARP_ROWS + 2; row++)
                x[row] = ld_shared_v4_f32(from + row * RASTER_ROW_BYTES);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int tap = 0; tap < 3; tap++) {
                    float w[Sums::CHANNELS];
#pragma unroll
                    for (int i = 0; i < Sums::CHANNELS; i += 4) {
                        const float4 v = ld_shared_v4_f32(right + ((tap * DEPTH + k) * COLUMNS + i) * 4);
                        w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
                    }
#pragma unroll
                    for (int to = 0; to < WARP_ROWS; to++) {
                        const float4 v = x[to + tap];
                        const float value = k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
#pragma unroll
                        for (int i = 0; i < Sums::CHANNELS; i++)
                            sums.value[to][0][i] = fmaf(value, w[i], sums.value[to][0][i]);
                    }
                }
        }
    }
}

// Merges a tile's values into the thread's moments: `more` values of each channel, a `share` of the new count.
template <bool ALL_ROWS, bool TF32, int COLUMNS, int CHANNELS>
__device__ __forceinline__ void add_moments(float (&mean)[CHANNELS], float (&square)[CHANNELS],
                                            const thread_sums<TF32, COLUMNS> &sums, const bool (&inside)[2], int rows,
                                            float count, float more, float share)
{
    const float reciprocal = more > 0.0f ? 1.0f / more : 0.0f;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        float sum = 0.0f, differences = 0.0f;
#pragma unroll
        for (int x = 0; x < thread_sums<TF32, COLUMNS>::PIXELS; x++) {
            float of_column = 0.0f;
#pragma unroll
            for (int row = 0; row < WARP_ROWS; row++)
                of_column += ALL_ROWS || row < rows ? sums.value[row][x][i] : 0.0f;
            sum += inside[x] ? of_column : 0.0f;
        }
        const float here = sum * reciprocal;
#pragma unroll
        for (int x = 0; x < thread_sums<TF32, COLUMNS>::PIXELS; x++) {
            float of_column = 0.0f;
#pragma unroll
            for (int row = 0; row < WARP_ROWS; row++) {
                const float difference = ALL_ROWS || row < rows ? sums.value[row][x][i] - here : 0.0f;
                of_column = fmaf(difference, difference, of_column);
            }
            differences += inside[x] ? of_column : 0.0f;
        }
        const float delta = here - mean[i];
        mean[i] += delta * share;
        square[i] += differences + delta * delta * (count * share);
    }
}

// One long function: the pipeline of tiles and chunks, whose accumulators the epilogue stores and takes moments of.
template <bool TF32, bool BACKWARD, int COLUMNS>
__global__ void __launch_bounds__(2 * SLOT_THREADS, 1) convolve_kernel(const __grid_constant__ convolve_arguments a)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 // Turing has too little shared memory
    typedef thread_sums<TF32, COLUMNS> Sums;
    extern __shared__ __align__(1024) unsigned char shared[];
    const int slot = __shfl_sync(FULL_WARP, threadIdx.x / SLOT_THREADS, 0), thread = threadIdx.x % SLOT_THREADS;
    const int warp = thread / 32, lane = thread % 32, slots = blockDim.x / SLOT_THREADS;
    const tiled_problem &p = a.problem;
    float *const staged = reinterpret_cast<float *>(shared);
    const uint32_t weights = shared_address(shared), rasters = weights + WEIGHT_BYTES + slot * 2 * RASTER_BYTES;
    const int kind = blockIdx.x % a.kinds;
    const int64_t block = blockIdx.x / a.kinds, blocks = gridDim.x / a.kinds;
    zero_shared(shared + WEIGHT_BYTES, slots * 2 * RASTER_BYTES);
    // Backward is launched behind the gradient of weight and reads nothing of it: what both read was complete before
    // that kernel released this one. So the two overlap where there is room. Backward waits for it at its end, since
    // kernels that wait for backward rely on both.
    if constexpr (!BACKWARD)
        wait_for_predecessor();
    release_successor();
    __syncthreads();

    // The first slot has as many tiles as the second, or one more; both make the same number of rounds, because of the
    // barriers around the weights.
    const int64_t rounds = a.tiles.count > block ? (a.tiles.count - block - 1) / (blocks * slots) + 1 : 0;
    const auto tile_of = [&](int64_t round) { return block + (round * slots + slot) * blocks; };
    convolve_gradient gradient;
    const auto start = [&](int64_t round, int chunk, int stage) {
        const int64_t tile = tile_of(round);
        if (round < rounds && tile < a.tiles.count) {
            const uint32_t raster = rasters + stage * RASTER_BYTES;
            const tile_coordinate origin = coordinate_of(a.tiles, tile);
            if constexpr (BACKWARD)
                gradient.start(raster, a.gradient, p, a.tiles, origin, chunk * DEPTH, thread);
            else
                start_raster<RASTER_ROWS>(raster, a.source, p, a.tiles, origin, a.depth, chunk * DEPTH, thread);
        }
        cp_async_commit_group();
    };
    start(0, 0, 0);
    if (a.resident) {
        for (int chunk = 0; chunk < a.chunks; chunk++)
            stage_weight<TF32, BACKWARD, COLUMNS>(staged + chunk * TAPS * COLUMNS * DEPTH, a, kind * COLUMNS, chunk);
        __syncthreads();
    }

    // Forward: the moments of each of the thread's channels over its pixels so far.
    constexpr int KEPT = BACKWARD ? 1 : Sums::CHANNELS;
    float count = 0.0f, mean[KEPT], square[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; i++)
        mean[i] = square[i] = 0.0f;
    int64_t pixels = 0;
    int stage = 0;
    for (int64_t round = 0; round < rounds; round++) {
        const int64_t tile = tile_of(round);
        const bool active = tile < a.tiles.count;
        Sums sums;
#pragma unroll
        for (int row = 0; row < WARP_ROWS; row++)
#pragma unroll
            for (int x = 0; x < Sums::PIXELS; x++)
#pragma unroll
                for (int i = 0; i < Sums::CHANNELS; i++)
                    sums.value[row][x][i] = 0.0f;
        for (int chunk = 0; chunk < a.chunks; chunk++, stage ^= 1) {
            const uint32_t raster = rasters + stage * RASTER_BYTES;
            if (active) {
                if constexpr (BACKWARD)
                    gradient.template finish<TF32>(raster, a.gradient, p, a.tiles, thread);
                else
                    finish_raster<RASTER_ROWS, TF32>(raster, p, a.tiles, thread);
            }
            // This stage is ready, and every warp of the slot has finished with the other.
            slot_barrier(slot);
            const bool last = chunk + 1 == a.chunks;
            start(last ? round + 1 : round, last ? 0 : chunk + 1, stage ^ 1);
            if (!a.resident) {
                __syncthreads();
                stage_weight<TF32, BACKWARD, COLUMNS>(staged, a, kind * COLUMNS, chunk);
                __syncthreads();
            }
            if (active)
                multiply_chunk<COLUMNS>(sums, raster, weights + (a.resident ? chunk * TAPS * COLUMNS * PIXEL_BYTES : 0),
                                        warp, lane);
        }
        if (!active)
            continue;
        const tile_coordinate origin = coordinate_of(a.tiles, tile);
        const int first_row = origin.y + warp / 2 * WARP_ROWS, column = origin.x + Sums::column(lane);
        const int rows = min(max(p.height - first_row, 0), WARP_ROWS);
        const int channel = kind * COLUMNS + Sums::channel(warp, lane, 0);
        const bool inside[2] = {column < p.width, Sums::PIXELS == 2 && column + 8 < p.width};
        float *to = a.result + ((origin.image * p.height + first_row) * p.width + column) * a.columns + channel;
        const int64_t row_step = (int64_t)p.width * a.columns;
#pragma unroll
        for (int row = 0; row < WARP_ROWS; row++, to += row_step)
#pragma unroll
            for (int x = 0; x < Sums::PIXELS; x++)
                if (inside[x] && row < rows)
#pragma unroll
                    for (int i = 0; i < Sums::CHANNELS; i += 4) {
                        const float *v = &sums.value[row][x][i];
                        if (channel + i / 4 * Sums::STEP < a.columns)
                            *reinterpret_cast<float4 *>(to + 8 * x * a.columns + i / 4 * Sums::STEP) =
                                make_float4(v[0], v[1], v[2], v[3]);
                    }
        if constexpr (!BACKWARD) {
            const float more = (float)(rows * ((int)inside[0] + (int)inside[1]));
            const float share = more > 0.0f ? more / (count + more) : 0.0f;
            // Most tiles have all their rows, and need no comparisons.
            if (rows == WARP_ROWS)
                add_moments<true>(mean, square, sums, inside, rows, count, more, share);
            else
                add_moments<false>(mean, square, sums, inside, rows, count, more, share);
            count += more;
            if (thread == 0)
                pixels += (int64_t)min(p.height - origin.y, ROWS) * min(p.width - origin.x, TILE_COLUMNS);
        }
    }
    if constexpr (BACKWARD)
        wait_for_predecessor();
    if constexpr (!BACKWARD) {
        // Merges the lanes of a channel, then the warps by rows and slots, in a fixed order.
        __shared__ moments of_warps[4][COLUMNS];
        __shared__ int64_t of_slots[2];
#pragma unroll
        for (int i = 0; i < KEPT; i++) {
            moments m = {count, mean[i], square[i]};
#pragma unroll
            for (int step = TF32 ? 16 : 8; step >= (TF32 ? 4 : 1); step /= 2) {
                const moments other = {__shfl_xor_sync(FULL_WARP, m.count, step),
                                       __shfl_xor_sync(FULL_WARP, m.mean, step),
                                       __shfl_xor_sync(FULL_WARP, m.square, step)};
                m = merge(m, other);
            }
            if (Sums::column(lane) == 0)
                of_warps[slot * 2 + warp / 2][Sums::channel(warp, lane, i / 4) + i % 4] = m;
        }
        if (thread == 0)
            of_slots[slot] = pixels;
        __syncthreads();
        const int channel = kind * COLUMNS + threadIdx.x;
        if (threadIdx.x < COLUMNS && channel < a.columns) {
            moments m = of_warps[0][threadIdx.x];
            for (int i = 1; i < 2 * slots; i++)
                m = merge(m, of_warps[i][threadIdx.x]);
            a.moments.partial[block * a.columns + channel] = make_float2(m.mean, m.square);
        }
        if (threadIdx.x == 0 && kind == 0)
            a.moments.pixels[block] = (double)(of_slots[0] + (slots == 2 ? of_slots[1] : 0));
    }
#endif
}

// Columns of a block: 64; 32 where there are no more, or too few tiles to occupy half of the multiprocessors.
static int columns_of(const tiled_problem &p, int channels)
{
    const int64_t work = tiling_of(p, ROWS).count * ceil_div(channels, MOST_COLUMNS);
    return channels <= 32 || tiled_blocks(2 * work, 1) == 2 * work ? 32 : MOST_COLUMNS;
}

int64_t tiled_convolve_blocks(const tiled_problem &p, bool backward)
{
    if (p.winograd)
        return winograd_convolve_blocks(p, backward);
    if (p.wgmma && !backward)
        return wgmma_convolve_blocks(p);
    const int channels = backward ? p.in_channels : p.out_channels;
    return tiled_blocks(tiling_of(p, ROWS).count, ceil_div(channels, columns_of(p, channels)));
}

template <bool TF32, bool BACKWARD, int COLUMNS>
static cuda_ops_status launch(convolve_arguments &a, cudaStream_t stream)
{
    const int slots = current_device().shared_bytes >= tiled_convolve_shared_bytes(2) + 4096 ? 2 : 1;
    const int bytes = tiled_convolve_shared_bytes(slots);
    const int64_t grid = tiled_convolve_blocks(a.problem, BACKWARD) * a.kinds;
    if (grid > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    allow_shared_memory(convolve_kernel<TF32, BACKWARD, COLUMNS>, bytes);
    launch_dependent(convolve_kernel<TF32, BACKWARD, COLUMNS>, (unsigned int)grid, slots * SLOT_THREADS, bytes, stream,
                     a);
    return launch_status();
}

template <bool BACKWARD>
static cuda_ops_status convolve(convolve_arguments &a, cudaStream_t stream)
{
    const tiled_problem &p = a.problem;
    a.tiles = tiling_of(p, ROWS);
    a.depth = BACKWARD ? p.out_channels : p.in_channels;
    a.columns = BACKWARD ? p.in_channels : p.out_channels;
    const int columns = columns_of(p, a.columns);
    a.chunks = (int)ceil_div(a.depth, DEPTH);
    a.kinds = (int)ceil_div(a.columns, columns);
    a.resident = a.chunks * columns <= MOST_COLUMNS;
    if (columns == MOST_COLUMNS)
        return p.tf32 ? launch<true, BACKWARD, 64>(a, stream) : launch<false, BACKWARD, 64>(a, stream);
    return p.tf32 ? launch<true, BACKWARD, 32>(a, stream) : launch<false, BACKWARD, 32>(a, stream);
}

cuda_ops_status tiled_convolve_forward(float *conv_output, batch_moments moments, const window_maxima &maxima,
                                       const float *input, const float *weight, const tiled_problem &p,
                                       cudaStream_t stream)
{
    if (p.winograd)
        return winograd_convolve_forward(conv_output, moments, input, weight, p, stream);
    if (p.wgmma)
        return wgmma_convolve_forward(conv_output, moments, maxima, input, weight, p, stream);
    convolve_arguments a = {};
    a.problem = p;
    a.source = input;
    a.weight = weight;
    a.result = conv_output;
    a.moments = moments;
    return convolve<false>(a, stream);
}

cuda_ops_status tiled_convolve_backward(float *grad_input, const gradient_source &source, const float *weight,
                                        const tiled_problem &p, cudaStream_t stream)
{
    if (p.winograd)
        return winograd_convolve_backward(grad_input, source.made, weight, p, stream);
    if (p.wgmma_backward)
        return CUDA_OPS_SUCCESS;
    if (p.wgmma_gradient)
        return wgmma_convolve_backward(grad_input, source.made, weight, p, stream);
    convolve_arguments a = {};
    a.problem = p;
    a.gradient = source;
    a.weight = weight;
    a.result = grad_input;
    return convolve<true>(a, stream);
}
