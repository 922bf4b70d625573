// The gradient of weight in conv_bn_relu_pool's tiled path:
//     dw[out][in][tap] = sum over images and pixels of dy[pixel][out] * input[pixel + tap][in]
// A block makes 64 out x 32 in channels of all nine taps, from tiles of 7 x 16 pixels. It has one or two slots of four
// warps, each with two stages of tiles of its own, whose sums are added at the end; a second kernel adds the blocks'
// sums in order. No atomics.
//   TF32  mma.sync m16n8k8 with pixels as k: pixels 2 t and 2 t + 1 are k = t and t + 4, so that a 16-byte load has
//         two channels of dy for both; input rows stay in registers for the next rows' taps: 10 loads for 36 products.
//   else  float multiply-adds: a thread has 4 x 4 channels of all taps and walks down a column with the nine neighbours
//         in registers: 144 multiply-adds for 4 loads.
// Bound by arithmetic and the instructions around it; tiled.cu has the times.
#include "conv_bn_relu_pool/tiled_sm80/tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int ROWS = WEIGHT_ROWS, RASTER_ROWS = ROWS + 2, TAPS = 9;
static constexpr int OUT = WEIGHT_OUT, IN = WEIGHT_IN; // channels of a block
static constexpr int INPUT_BYTES = RASTER_ROWS * RASTER_ROW_BYTES;
template <bool TF32>
using weight_gradient = gradient_loader<0, ROWS, TILE_COLUMNS, OUT / 4, TF32>;
static constexpr int HALF_BYTES = weight_gradient<true>::RASTER_BYTES; // 32 out channels
static constexpr int STAGE_BYTES = INPUT_BYTES + 2 * HALF_BYTES;
static constexpr int THREAD_SUMS = TAPS * OUT * IN / SLOT_THREADS;
static_assert(THREAD_SUMS / 4 * SLOT_THREADS == WEIGHT_VECTORS, "a slot has all sums of a block");
static_assert(THREAD_SUMS * SLOT_THREADS * 4 <= 2 * STAGE_BYTES, "a slot's sums fit into its tiles");

struct weight_arguments {
    tiled_problem problem;
    tiling tiles;
    int out_kinds, in_kinds; // groups of OUT and IN channels
    gradient_source gradient;
    const float *input;
    float4 *partial; // [blocks][kinds][THREAD_SUMS / 4][SLOT_THREADS]
};

// sums[tap][fragment of 16 out channels][4]. Row g of fragment f is the out channel f / 2 * 32 + 4 g + f % 2 * 2, row
// g + 8 the next one; the columns are the warp's 8 in channels.
__device__ __forceinline__ void multiply_tile_tf32(float (&sums)[THREAD_SUMS], uint32_t input, uint32_t gradient,
                                                   int warp, int lane)
{
    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const int column = half * 8 + 2 * t;
        uint32_t own[4], left[2];
#pragma unroll
        for (int s = 0; s < 4; s++)
            own[s] = input + (column + s) * PIXEL_BYTES + (((2 * warp + g / 4) ^ ((column + s) & 7)) << 4) + g % 4 * 4;
#pragma unroll
        for (int s = 0; s < 2; s++)
            left[s] = gradient + (column + s) * PIXEL_BYTES + ((g ^ ((column + s) & 7)) << 4);
        // The two k of each tap, side by side in registers as mma.sync wants them: pixels that two taps share are
        // loaded twice rather than copied for every product.
        uint32_t x[3][3][2];
        const auto load_row = [&](uint32_t(&of_row)[3][2], int row) {
#pragma unroll
            for (int s = 0; s < 6; s++)
                ld_shared(of_row[s / 2][s % 2], own[s / 2 + s % 2] + row * RASTER_ROW_BYTES);
        };
        load_row(x[0], 0);
        load_row(x[1], 1);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            load_row(x[(row + 2) % 3], row + 2);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t at = h * HALF_BYTES + row * TILE_COLUMNS * PIXEL_BYTES;
                uint32_t a[2][4];
                ld_shared_v4(a[0][0], a[0][1], a[0][2], a[0][3], left[0] + at);
                ld_shared_v4(a[1][0], a[1][1], a[1][2], a[1][3], left[1] + at);
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) {
                    const uint32_t(&of_tap)[2] = x[(row + tap / 3) % 3][tap % 3];
#pragma unroll
                    for (int f = 0; f < 2; f++) {
                        float *s = &sums[(tap * 4 + h * 2 + f) * 4];
                        mma_sync<float>(s[0], s[1], s[2], s[3], a[f], of_tap[0], of_tap[1]);
                    }
                }
            }
        }
    }
}

// sums[tap][out][in], 4 x 4 channels: out 4 * (thread / 8), in 4 * (thread % 8).
__device__ __forceinline__ void multiply_tile_float(float (&sums)[THREAD_SUMS], uint32_t input, uint32_t gradient,
                                                    int columns, int thread)
{
    const int in = thread % 8, out = thread / 8;
#pragma unroll 1
    for (int column = 0; column < columns; column++) {
        uint32_t own[3];
#pragma unroll
        for (int s = 0; s < 3; s++)
            own[s] = input + (column + s) * PIXEL_BYTES + ((in ^ ((column + s) & 7)) << 4);
        const uint32_t left = gradient + out / 8 * HALF_BYTES + column * PIXEL_BYTES + ((out % 8 ^ (column & 7)) << 4);
        float4 x[3][3];
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int s = 0; s < 3; s++)
                x[row][s] = ld_shared_v4_f32(own[s] + row * RASTER_ROW_BYTES);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
#pragma unroll
            for (int s = 0; s < 3; s++)
                x[(row + 2) % 3][s] = ld_shared_v4_f32(own[s] + (row + 2) * RASTER_ROW_BYTES);
            const float4 v = ld_shared_v4_f32(left + row * TILE_COLUMNS * PIXEL_BYTES);
            const float dy[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) {
                const float4 w = x[(row + tap / 3) % 3][tap % 3];
                const float values[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                for (int o = 0; o < 4; o++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sums[(tap * 4 + o) * 4 + i] = fmaf(dy[o], values[i], sums[(tap * 4 + o) * 4 + i]);
            }
        }
    }
}

template <bool TF32>
__global__ void __launch_bounds__(2 * SLOT_THREADS, 1) weight_kernel(const __grid_constant__ weight_arguments a)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800 // Turing has too little shared memory
    extern __shared__ __align__(1024) unsigned char shared[];
    const int slot = __shfl_sync(FULL_WARP, threadIdx.x / SLOT_THREADS, 0), thread = threadIdx.x % SLOT_THREADS;
    const int slots = blockDim.x / SLOT_THREADS;
    const tiled_problem &p = a.problem;
    const uint32_t tiles = shared_address(shared) + slot * 2 * STAGE_BYTES;
    const int kinds = a.out_kinds * a.in_kinds, kind = blockIdx.x % kinds;
    const int first_out = kind / a.in_kinds * OUT, first_in = kind % a.in_kinds * IN;
    const int64_t block = blockIdx.x / kinds, blocks = gridDim.x / kinds, step = blocks * slots;
    zero_shared(shared, slots * 2 * STAGE_BYTES);
    wait_for_predecessor();
    release_successor();
    __syncthreads();

    weight_gradient<TF32> gradient;
    const auto start = [&](int64_t tile, int stage) {
        if (tile < a.tiles.count) {
            const uint32_t input = tiles + stage * STAGE_BYTES;
            const tile_coordinate origin = coordinate_of(a.tiles, tile);
            start_raster<RASTER_ROWS>(input, a.input, p, a.tiles, origin, p.in_channels, first_in, thread);
            gradient.start(input + INPUT_BYTES, a.gradient, p, a.tiles, origin, first_out, thread);
        }
        cp_async_commit_group();
    };
    float sums[THREAD_SUMS];
#pragma unroll
    for (int i = 0; i < THREAD_SUMS; i++)
        sums[i] = 0.0f;
    int64_t tile = block + slot * blocks;
    start(tile, 0);
    for (int stage = 0; tile < a.tiles.count; tile += step, stage ^= 1) {
        const uint32_t input = tiles + stage * STAGE_BYTES;
        gradient.template finish<TF32>(input + INPUT_BYTES, a.gradient, p, a.tiles, thread);
        finish_raster<RASTER_ROWS, TF32>(input, p, a.tiles, thread);
        // This stage is ready, and every warp of the slot has finished with the other.
        slot_barrier(slot);
        start(tile + step, stage ^ 1);
        if constexpr (TF32)
            multiply_tile_tf32(sums, input, input + INPUT_BYTES, thread / 32, thread % 32);
        else
            multiply_tile_float(sums, input, input + INPUT_BYTES,
                                min(p.width - coordinate_of(a.tiles, tile).x, TILE_COLUMNS), thread);
    }
    // The second slot's sums overwrite its own tiles, for which a barrier of that slot would suffice. But racecheck of
    // CUDA 13.0 reports false hazards where some threads wait at barrier 0 while others pass one of their own
    // (benchmarks/notes/mnist.md).
    __syncthreads();
    float4 *const others = reinterpret_cast<float4 *>(shared + 2 * STAGE_BYTES);
    if (slot == 1) {
#pragma unroll
        for (int i = 0; i < THREAD_SUMS / 4; i++)
            others[i * SLOT_THREADS + thread] =
                make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    }
    __syncthreads();
    if (slot == 1)
        return;
    float4 *const to = a.partial + (block * kinds + kind) * (THREAD_SUMS / 4 * SLOT_THREADS);
#pragma unroll
    for (int i = 0; i < THREAD_SUMS / 4; i++) {
        float4 v = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        if (slots == 2) {
            const float4 other = others[i * SLOT_THREADS + thread];
            v.x += other.x, v.y += other.y, v.z += other.z, v.w += other.w;
        }
        to[i * SLOT_THREADS + thread] = v;
    }
#endif
}

// Adds the blocks' sums in order: warps add slices of the blocks, then the slices are added.
static constexpr int SLICES = 8;

template <bool TF32>
__global__ void __launch_bounds__(SLICES *WARP_SIZE)
    weight_sum_kernel(float *grad_weight, const float4 *partial, int64_t blocks, int in_kinds, int64_t vectors,
                      int in_channels, int out_channels)
{
    __shared__ float4 of_slices[SLICES][WARP_SIZE];
    const int slice = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
    const int64_t index = (int64_t)blockIdx.x * WARP_SIZE + lane; // of vectors, a whole number of warps
    wait_for_predecessor();
    release_successor();
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int64_t block = slice; block < blocks; block += SLICES) {
        const float4 v = partial[block * vectors + index];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    of_slices[slice][lane] = sum;
    __syncthreads();
    if (slice > 0)
        return;
    for (int i = 1; i < SLICES; i++) {
        const float4 v = of_slices[i][lane];
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    const int thread = (int)(index % SLOT_THREADS), i = (int)(index / SLOT_THREADS % (THREAD_SUMS / 4));
    const int64_t kind = index / SLOT_THREADS / (THREAD_SUMS / 4);
    const int64_t first_out = kind / in_kinds * OUT, first_in = kind % in_kinds * IN;
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    const int tap = i / 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int64_t out, in;
        if (TF32) {
            const int f = i % 4, g = thread % 32 / 4;
            out = first_out + f / 2 * 32 + 4 * g + f % 2 * 2 + e / 2;
            in = first_in + thread / 32 * 8 + thread % 4 * 2 + e % 2;
        } else {
            out = first_out + thread / 8 * 4 + i % 4;
            in = first_in + thread % 8 * 4 + e;
        }
        if (out < out_channels && in < in_channels)
            grad_weight[(out * in_channels + in) * TAPS + tap] = values[e];
    }
}

static int64_t kinds_of(const tiled_problem &p)
{
    return ceil_div(p.out_channels, OUT) * ceil_div(p.in_channels, IN);
}

static int slots_of_a_block()
{
    return current_device().shared_bytes >= 4 * STAGE_BYTES ? 2 : 1;
}

// No more than have work for all of their slots, since each block's sums are written and read again.
static int64_t blocks_of(const tiled_problem &p)
{
    const int64_t work = p.winograd       ? winograd_weight_groups(p)
                         : p.wgmma_weight ? wgmma_weight_tiles(p)
                                          : ceil_div(tiling_of(p, ROWS).count, slots_of_a_block());
    return tiled_blocks(work, kinds_of(p));
}

int64_t tiled_weight_workspace(const tiled_problem &p)
{
    return blocks_of(p) * kinds_of(p) * (THREAD_SUMS * SLOT_THREADS * (int64_t)sizeof(float));
}

template <bool TF32>
static cuda_ops_status launch(const weight_arguments &a, cudaStream_t stream)
{
    const int slots = slots_of_a_block(), bytes = slots * 2 * STAGE_BYTES;
    const int64_t blocks = blocks_of(a.problem) * kinds_of(a.problem);
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    allow_shared_memory(weight_kernel<TF32>, bytes);
    launch_dependent(weight_kernel<TF32>, (unsigned int)blocks, slots * SLOT_THREADS, bytes, stream, a);
    return launch_status();
}

cuda_ops_status tiled_weight_gradient(float4 *partial, float *grad_input, const gradient_source &source,
                                      const float *input, const float *weight, const tiled_problem &p,
                                      cudaStream_t stream)
{
    if (p.winograd)
        return winograd_weight_gradient(partial, source, input, p, blocks_of(p) * kinds_of(p), stream);
    if (p.wgmma_backward && grad_input)
        return wgmma_backward(grad_input, partial, source, input, weight, p, blocks_of(p), stream);
    if (p.wgmma_weight)
        return wgmma_weight_gradient(partial, source, input, p, blocks_of(p) * kinds_of(p), stream);
    weight_arguments a = {};
    a.problem = p;
    a.tiles = tiling_of(p, ROWS);
    a.out_kinds = (int)ceil_div(p.out_channels, OUT);
    a.in_kinds = (int)ceil_div(p.in_channels, IN);
    a.gradient = source;
    a.input = input;
    a.partial = partial;
    return p.tf32 ? launch<true>(a, stream) : launch<false>(a, stream);
}

cuda_ops_status tiled_weight_sum(float *grad_weight, const float4 *partial, const tiled_problem &p, cudaStream_t stream)
{
    const int64_t vectors = kinds_of(p) * (THREAD_SUMS / 4 * SLOT_THREADS);
    if (vectors / WARP_SIZE > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent(p.tf32 && !p.wgmma_weight ? weight_sum_kernel<true> : weight_sum_kernel<false>,
                     (unsigned int)(vectors / WARP_SIZE), SLICES * WARP_SIZE, 0, stream, grad_weight, partial,
                     blocks_of(p), (int)ceil_div(p.in_channels, IN), vectors, p.in_channels, p.out_channels);
    return launch_status();
}
