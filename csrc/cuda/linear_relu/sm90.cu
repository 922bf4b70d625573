// linear_relu in fp16 and bf16 on Hopper, for sizes at which a GEMM has too few tiles to fill the GPU. linear_relu.cu
// has the formulas; linear_relu/mask.cu first makes masked, partial sums of grad_bias and a rounded copy of float32
// weights. Then one launch a pass: a warp loads boxes of 64 x 64 by TMA, in either major order, and warpgroups run
// wgmma on them.
//   forward   tiles of 64 rows x 128 features; k = in_features is split among the blocks of a cluster, which add their
//             sums through distributed shared memory, a few rows each, with bias and relu as the epilogue.
//   backward  both products in one launch, since neither fills the GPU: tiles of 128 x 128 of grad_weight, with k =
//             rows split as above, then of grad_input, a block each, then blocks that add up grad_bias.
// Two blocks share a multiprocessor, so that one loads while the other stores. Every sum has a fixed order.
// Bound by latency, then by the L2: 1024 rows, 3136 to 128 features have 7 us of L2 traffic in backward and 2 us of
// products.
#include "linear_relu/paths.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/tensor_map.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

static constexpr int BOX = 64, BOX_BYTES = BOX * SWIZZLE_ROW; // a box's side; 16-bit elements
static constexpr int TILE_N = 128, PITCH = TILE_N + 8;
[[maybe_unused]] static constexpr int DEPTH = BOX;
[[maybe_unused]] static constexpr int MOST_SPLITS = 8; // blocks of a cluster
static constexpr int64_t WANTED_BLOCKS = 132;          // a large GPU's; a constant, so that k is split alike on all

// A block of GROUPS consumer warpgroups, which multiply 64 rows each, and a producer warp.
template <int GROUPS>
struct HeadTile {
    static constexpr int M = GROUPS * 64, CONSUMERS = GROUPS * WARPGROUP, THREADS = CONSUMERS + WARP_SIZE;
    static constexpr int STAGE_BYTES = (GROUPS + TILE_N / BOX) * BOX_BYTES, STAGES = 12 / (GROUPS + TILE_N / BOX);
    static constexpr int SHARED_BYTES = SWIZZLE_ATOM + STAGES * STAGE_BYTES + 2 * STAGES * 8;
    static_assert(M * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums fit into the operands' stages");
    static_assert(2 * (SHARED_BYTES + 1024) <= 228 << 10, "two blocks share a multiprocessor");
};
typedef HeadTile<1> ForwardTile;
typedef HeadTile<2> BackwardTile;

struct HeadForward {
    void *output;
    const void *bias;
    int64_t rows, out_features;
    int tiles_m, splits, chunk, steps; // k = steps * 64 in `splits` splits of `chunk` steps
};

struct HeadBackward {
    void *grad_weight, *grad_bias;
    const float *bias_parts; // [parts][out_features]
    int64_t in_features, out_features;
    int parts;
    int weight_tiles_m, splits, chunk, weight_steps; // as above
    int input_tiles_m, input_steps;
    int weight_items, input_items, bias_items; // blocks, the first two multiples of the cluster
};

#if defined(CUDA_OPS_HOPPER_CODE)

struct HeadShared {
    uint32_t stages, full, empty;
    char *memory; // what `stages` is the address of
};

template <typename C>
__device__ __forceinline__ HeadShared prepare_shared(char *shared)
{
    const uint32_t address = shared_address(shared),
                   stages = (address + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t full = stages + C::STAGES * C::STAGE_BYTES, empty = full + 8 * C::STAGES;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, C::CONSUMERS / WARPGROUP);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    return {stages, full, empty, shared + (stages - address)};
}

// The whole block multiplies a tile over `steps` steps of k from `first_step` on; the sums are in the consumers'
// registers. MN-major: the contiguous dimension is not k.
template <typename C, typename T, bool A_MN_MAJOR, bool B_MN_MAJOR>
__device__ __forceinline__ void multiply(float (&sum)[TILE_N / 2], const HeadShared &s, const CUtensorMap *map_a,
                                         const CUtensorMap *map_b, int first_m, int first_n, int first_step, int steps)
{
    constexpr int GROUPS = C::CONSUMERS / WARPGROUP;
    int stage = 0, phase = 0;
    if (threadIdx.x >= C::CONSUMERS) {
        if (threadIdx.x == C::CONSUMERS)
            for (int step = 0; step < steps; step++) {
                const uint32_t arrived = s.full + 8 * stage, a = s.stages + stage * C::STAGE_BYTES;
                const uint32_t b = a + GROUPS * BOX_BYTES;
                const int k = (first_step + step) * DEPTH;
                mbarrier_wait(s.empty + 8 * stage, phase ^ 1);
                mbarrier_arrive_expect_tx(arrived, C::STAGE_BYTES);
#pragma unroll
                for (int i = 0; i < GROUPS; i++) {
                    const int m = first_m + i * BOX;
                    tma_load_3d(a + i * BOX_BYTES, map_a, arrived, A_MN_MAJOR ? m : k, A_MN_MAJOR ? k : m, 0);
                }
#pragma unroll
                for (int i = 0; i < TILE_N / BOX; i++) {
                    const int n = first_n + i * BOX;
                    tma_load_3d(b + i * BOX_BYTES, map_b, arrived, B_MN_MAJOR ? n : k, B_MN_MAJOR ? k : n, 0);
                }
                if (++stage == C::STAGES) {
                    stage = 0;
                    phase ^= 1;
                }
            }
        __syncwarp();
    } else {
        // Shuffled so that the compiler knows it to be warp-uniform.
        const int group = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);
        const uint64_t a_tile =
            wgmma_descriptor(s.stages + group * BOX_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, BOX_BYTES);
        const uint64_t b_tile =
            wgmma_descriptor(s.stages + GROUPS * BOX_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, BOX_BYTES);
        // Steps of 16 along k: within the row, or 16 rows on.
        constexpr int A_STEP = A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        int before = 0;
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(s.full + 8 * stage, phase);
            const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                           b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < DEPTH / 16; i++)
                wgmma<T, TILE_N, A_MN_MAJOR, B_MN_MAJOR>(sum, wgmma_advance(a, i * A_STEP),
                                                         wgmma_advance(b, i * B_STEP), step > 0 || i > 0);
            wgmma_commit_group();
            // This stage's products are in flight; those of the stage before are complete.
            wgmma_wait_group<1>();
            if (step > 0 && threadIdx.x % WARPGROUP == 0)
                mbarrier_arrive(s.empty + 8 * before);
            before = stage;
            if (++stage == C::STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
        wgmma_wait_group<0>();
        bar_sync(1, C::CONSUMERS); // all operands have been read
    }
}

// Adds the cluster's sums of a tile in the order of its blocks, each block a share of the tile's vectors of four, and
// calls store(row, column, sum) for each.
template <typename C, typename Store>
__device__ __forceinline__ void add_splits(const float (&sum)[TILE_N / 2], const HeadShared &s, int splits, Store store)
{
    float *const own = (float *)s.memory;
    if (threadIdx.x < C::CONSUMERS) {
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < TILE_N / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)(own + (row + 8 * half) * PITCH + column + 8 * i) =
                    make_float2(sum[4 * i + 2 * half], sum[4 * i + 2 * half + 1]);
    }
    cluster_sync();
    const int rank = (int)cluster_ctarank();
    for (int v = rank * C::THREADS + threadIdx.x; v < C::M * TILE_N / 4; v += splits * C::THREADS) {
        const int row = v / (TILE_N / 4), column = v % (TILE_N / 4) * 4;
        const float *const mine = own + row * PITCH + column;
        float4 part[MOST_SPLITS], total = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < MOST_SPLITS; i++) // all loads in flight at once
            if (i < splits)
                part[i] = *(const float4 *)mapa(mine, i);
#pragma unroll
        for (int i = 0; i < MOST_SPLITS; i++)
            if (i < splits) {
                total.x += part[i].x, total.y += part[i].y;
                total.z += part[i].z, total.w += part[i].w;
            }
        store(row, column, total);
    }
    cluster_sync(); // a block's shared memory must outlive the others' reads
}

template <typename T>
__device__ __forceinline__ void store_vector(T *to, const float4 &value)
{
    typedef aligned_vector<T, 4> Four;
    const Four four = {{store_from_accumulate<T>(value.x), store_from_accumulate<T>(value.y),
                        store_from_accumulate<T>(value.z), store_from_accumulate<T>(value.w)}};
    *(Four *)to = four;
}

template <typename T>
__device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    const aligned_vector<T, 2> two = {{store_from_accumulate<T>(low), store_from_accumulate<T>(high)}};
    return *(const uint32_t *)&two;
}

// Stores a tile of grad_input by TMA, through shared memory.
template <typename C, typename T>
__device__ __forceinline__ void store_tile(const float (&sum)[TILE_N / 2], const HeadShared &s, const CUtensorMap *map,
                                           int first_m, int first_n)
{
    if (threadIdx.x >= C::CONSUMERS)
        return;
    const int group = threadIdx.x / WARPGROUP, warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
    const uint32_t boxes = s.stages + group * (TILE_N / BOX) * BOX_BYTES;
    const int row = 16 * warp + lane % 16; // stmatrix: lanes 16 to 31 have the same rows' next eight columns
#pragma unroll
    for (int i = 0; i < TILE_N / 16; i++) {
        const float *const x = sum + 8 * i;
        const int vector = (2 * i + lane / 16) % 8 ^ row % 8;
        stmatrix_x4(boxes + i / 4 * BOX_BYTES + row * SWIZZLE_ROW + vector * 16, pair_of<T>(x[0], x[1]),
                    pair_of<T>(x[2], x[3]), pair_of<T>(x[4], x[5]), pair_of<T>(x[6], x[7]));
    }
    fence_proxy_async();
    bar_sync(2 + group, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
        for (int i = 0; i < TILE_N / BOX; i++) {
            tma_store_3d(map, boxes + i * BOX_BYTES, first_n + i * BOX, first_m + group * BOX, 0);
            bulk_commit_group();
        }
        bulk_wait_group_read<0>();
    }
}

// 32 columns of grad_bias: each of eight warps adds every eighth partial sum.
template <typename P>
__device__ __forceinline__ void add_bias_parts(const HeadBackward &work, int item, float *scratch)
{
    constexpr int SLICES = 8;
    const int lane = threadIdx.x % WARP_SIZE, slice = threadIdx.x / WARP_SIZE;
    const int64_t column = (int64_t)item * WARP_SIZE + lane;
    float sum = 0;
    if (slice < SLICES && column < work.out_features)
#pragma unroll 4
        for (int part = slice; part < work.parts; part += SLICES)
            sum += work.bias_parts[part * work.out_features + column];
    if (slice < SLICES)
        scratch[slice * WARP_SIZE + lane] = sum;
    __syncthreads();
    if (slice == 0 && column < work.out_features) {
        for (int i = 1; i < SLICES; i++)
            sum += scratch[i * WARP_SIZE + lane];
        ((P *)work.grad_bias)[column] = store_from_accumulate<P>(sum);
    }
}

#endif

template <typename T, typename P>
__global__ void __launch_bounds__(ForwardTile::THREADS, 2)
    linear_relu_sm90_forward_kernel(const __grid_constant__ CUtensorMap map_input,
                                    const __grid_constant__ CUtensorMap map_weight,
                                    const __grid_constant__ HeadForward work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    typedef ForwardTile C;
    extern __shared__ char shared[];
    const HeadShared s = prepare_shared<C>(shared);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_input);
        prefetch_tensormap(&map_weight);
    }
    release_successor();
    wait_for_predecessor();
    const int tile = blockIdx.x / work.splits, first_step = blockIdx.x % work.splits * work.chunk;
    const int first_m = tile % work.tiles_m * C::M, first_n = tile / work.tiles_m * TILE_N;
    float sum[TILE_N / 2];
    multiply<C, T, false, false>(sum, s, &map_input, &map_weight, first_m, first_n, first_step,
                                 min(work.chunk, work.steps - first_step));
    add_splits<C>(sum, s, work.splits, [&](int row, int column, float4 value) {
        const int64_t m = first_m + row, n = first_n + column;
        if (m >= work.rows || n >= work.out_features)
            return;
        if (work.bias) {
            const P *const bias = (const P *)work.bias + n;
            value.x += load_as_accumulate(bias[0]), value.y += load_as_accumulate(bias[1]);
            value.z += load_as_accumulate(bias[2]), value.w += load_as_accumulate(bias[3]);
        }
        // NaN stays
        value.x = value.x < 0.0f ? 0.0f : value.x, value.y = value.y < 0.0f ? 0.0f : value.y;
        value.z = value.z < 0.0f ? 0.0f : value.z, value.w = value.w < 0.0f ? 0.0f : value.w;
        store_vector((T *)work.output + m * work.out_features + n, value);
    });
#endif
}

template <typename T, typename P>
__global__ void __launch_bounds__(BackwardTile::THREADS, 2)
    linear_relu_sm90_backward_kernel(const __grid_constant__ CUtensorMap map_masked,
                                     const __grid_constant__ CUtensorMap map_weight,
                                     const __grid_constant__ CUtensorMap map_input,
                                     const __grid_constant__ CUtensorMap map_grad_input,
                                     const __grid_constant__ HeadBackward work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    typedef BackwardTile C;
    extern __shared__ char shared[];
    const HeadShared s = prepare_shared<C>(shared);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_masked);
        prefetch_tensormap(&map_weight);
        prefetch_tensormap(&map_input);
        prefetch_tensormap(&map_grad_input);
    }
    release_successor();
    wait_for_predecessor();
    float sum[TILE_N / 2];
    int item = (int)blockIdx.x;
    if (item < work.weight_items) {
        const int tile = item / work.splits, first_step = item % work.splits * work.chunk;
        const int first_m = tile % work.weight_tiles_m * C::M, first_n = tile / work.weight_tiles_m * TILE_N;
        multiply<C, T, true, true>(sum, s, &map_masked, &map_input, first_m, first_n, first_step,
                                   min(work.chunk, work.weight_steps - first_step));
        add_splits<C>(sum, s, work.splits, [&](int row, int column, float4 value) {
            const int64_t m = first_m + row, n = first_n + column;
            if (m < work.out_features && n < work.in_features)
                store_vector((P *)work.grad_weight + m * work.in_features + n, value);
        });
    } else if ((item -= work.weight_items) < work.input_items) {
        const int first_m = item % work.input_tiles_m * C::M, first_n = item / work.input_tiles_m * TILE_N;
        multiply<C, T, false, true>(sum, s, &map_masked, &map_weight, first_m, first_n, 0, work.input_steps);
        store_tile<C, T>(sum, s, &map_grad_input, first_m, first_n);
    } else if ((item -= work.input_items) < work.bias_items) {
        add_bias_parts<P>(work, item, (float *)s.memory);
    }
#endif
}

static int64_t rounded_up(int64_t bytes)
{
    return ceil_div(bytes, 256) * 256;
}

Answer linear_relu_sm90_supports(const LinearReluCall &call, const Device &device)
{
    const int64_t most = 1 << 24; // coordinates and the numbers of blocks have 32 bits
    const auto whole = [&](int64_t features) { return 0 < features && features <= most && features % 8 == 0; };
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (device.capability != 90)
        return NEEDS_90;
    if (call.dtype != CUDA_OPS_BFLOAT16 && call.dtype != CUDA_OPS_FLOAT16)
        return NEEDS_HALVES;
    if (call.parameter_dtype != call.dtype && call.parameter_dtype != CUDA_OPS_FLOAT32)
        return no("takes parameters of input's dtype or float32");
    if (call.rows <= 0 || call.rows > most || !whole(call.in_features) || !whole(call.out_features))
        return no("in_features and out_features are not both multiples of 8, or a size is beyond 2^24");
    for (const void *pointer : {call.input, call.weight, call.grad_output, call.activated})
        if (!is_aligned_16(pointer))
            return NEEDS_ALIGNMENT;
    return YES;
}

// Measured with 3136 -> 128 features: forward loses to the GEMM once its tiles fill the GPU, backward to the skinny
// path while the rows are few.
Answer linear_relu_sm90_is_fast(const LinearReluCall &call, const Device &)
{
    if (call.backward) {
        if (call.rows < 512)
            return no("fewer than 512 rows");
        return ceil_div(call.out_features, BackwardTile::M) * ceil_div(call.in_features, TILE_N) <= WANTED_BLOCKS / 4
                   ? YES
                   : no("grad_weight has enough tiles to fill the GPU");
    }
    if (call.rows < 128 || call.in_features < 512)
        return no("fewer than 128 rows or 512 in_features");
    return ceil_div(call.rows, ForwardTile::M) * ceil_div(call.out_features, TILE_N) <= WANTED_BLOCKS / 2
               ? YES
               : no("output has enough tiles to fill the GPU");
}

int64_t linear_relu_sm90_workspace(const LinearReluCall &call, const Device &)
{
    return rounded_up(2 * call.in_features * call.out_features) + rounded_up(2 * call.rows * call.out_features) +
           linear_relu_mask_workspace(call.rows, call.out_features);
}

#ifdef CUDA_OPS_SM90A

// Splits k, `steps` steps, so that `tiles` fill the GPU: splits of `chunk` steps, none empty.
static void split_k(int64_t steps, int64_t tiles, int *splits, int *chunk)
{
    int64_t most = WANTED_BLOCKS / tiles;
    most = most < 1 ? 1 : most > MOST_SPLITS ? MOST_SPLITS : most;
    *chunk = (int)ceil_div(steps, most);
    *splits = (int)ceil_div(steps, *chunk);
}

static bool map_boxes(CUtensorMap *map, const void *matrix, cuda_ops_dtype dtype, int64_t rows, int64_t columns)
{
    return make_map(map, matrix, dtype, false, columns, rows, 1, columns, rows * columns, BOX, BOX);
}

template <typename T, typename P>
static cuda_ops_status forward(void *output, const void *input, const void *weight, const void *bias, int64_t rows,
                               int64_t in_features, int64_t out_features, cuda_ops_dtype dtype, cudaStream_t stream)
{
    CUtensorMap map_input, map_weight;
    if (!map_boxes(&map_input, input, dtype, rows, in_features) ||
        !map_boxes(&map_weight, weight, dtype, out_features, in_features))
        return CUDA_OPS_INVALID_ARGUMENT;
    HeadForward work = {};
    work.output = output, work.bias = bias, work.rows = rows, work.out_features = out_features;
    work.tiles_m = (int)ceil_div(rows, ForwardTile::M), work.steps = (int)ceil_div(in_features, DEPTH);
    const int64_t tiles = work.tiles_m * ceil_div(out_features, TILE_N);
    split_k(work.steps, tiles, &work.splits, &work.chunk);
    launch_dependent_clusters(linear_relu_sm90_forward_kernel<T, P>, (unsigned int)(tiles * work.splits),
                              ForwardTile::THREADS, work.splits, ForwardTile::SHARED_BYTES, stream, map_input,
                              map_weight, work);
    return launch_status();
}

template <typename T, typename P>
static cuda_ops_status backward(void *grad_input, void *grad_weight, void *grad_bias, const void *masked,
                                const float *bias_parts, int parts, const void *input, const void *weight, int64_t rows,
                                int64_t in_features, int64_t out_features, cuda_ops_dtype dtype, cudaStream_t stream)
{
    CUtensorMap map_masked, map_weight, map_input, map_grad_input;
    // A map that is not used describes another tensor, since it has to be valid.
    if (!map_boxes(&map_masked, masked, dtype, rows, out_features) ||
        !map_boxes(&map_weight, grad_input ? weight : input, dtype, out_features, in_features) ||
        !map_boxes(&map_input, input, dtype, rows, in_features) ||
        !map_boxes(&map_grad_input, grad_input ? grad_input : input, dtype, rows, in_features))
        return CUDA_OPS_INVALID_ARGUMENT;
    typedef BackwardTile C;
    HeadBackward work = {};
    work.grad_weight = grad_weight, work.grad_bias = grad_bias, work.bias_parts = bias_parts, work.parts = parts;
    work.in_features = in_features, work.out_features = out_features;
    work.weight_tiles_m = (int)ceil_div(out_features, C::M), work.weight_steps = (int)ceil_div(rows, DEPTH);
    work.input_tiles_m = (int)ceil_div(rows, C::M), work.input_steps = (int)ceil_div(out_features, DEPTH);
    const int64_t columns = ceil_div(in_features, TILE_N);
    work.splits = 1;
    if (grad_weight) {
        split_k(work.weight_steps, work.weight_tiles_m * columns, &work.splits, &work.chunk);
        work.weight_items = (int)(work.weight_tiles_m * columns * work.splits);
    }
    const int64_t input_tiles = grad_input ? work.input_tiles_m * columns : 0;
    const int64_t bias_tiles = grad_bias ? ceil_div(out_features, WARP_SIZE) : 0;
    const int64_t blocks = work.weight_items + ceil_div(input_tiles + bias_tiles, work.splits) * work.splits;
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    work.input_items = (int)input_tiles, work.bias_items = (int)bias_tiles;
    launch_dependent_clusters(linear_relu_sm90_backward_kernel<T, P>, (unsigned int)blocks, C::THREADS, work.splits,
                              C::SHARED_BYTES, stream, map_masked, map_weight, map_input, map_grad_input, work);
    return launch_status();
}

// function(T, P) for the call's mix of dtypes.
#define SM90_DISPATCH(call, function)                                                                                  \
    if (call.dtype == CUDA_OPS_BFLOAT16)                                                                               \
        return call.parameter_dtype == call.dtype ? function(__nv_bfloat16, __nv_bfloat16)                             \
                                                  : function(__nv_bfloat16, float);                                    \
    return call.parameter_dtype == call.dtype ? function(__half, __half) : function(__half, float)

static cuda_ops_status run_forward(const LinearReluCall &call)
{
    const bool copies = call.parameter_dtype != call.dtype;
    const cuda_ops_status status =
        copies ? linear_relu_prepare(nullptr, nullptr, nullptr, call.workspace, nullptr, nullptr, call.weight,
                                     call.rows, call.in_features, call.out_features, call.dtype, call.stream)
               : CUDA_OPS_SUCCESS;
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const void *const weight = copies ? call.workspace : call.weight;
#define SM90_FORWARD(T, P)                                                                                             \
    (forward<T, P>(call.output, call.input, weight, call.bias, call.rows, call.in_features, call.out_features,         \
                   call.dtype, call.stream))
    SM90_DISPATCH(call, SM90_FORWARD);
#undef SM90_FORWARD
}

static cuda_ops_status run_backward(const LinearReluCall &call)
{
    if (!call.grad_input && !call.grad_weight && !call.grad_bias)
        return CUDA_OPS_SUCCESS; // a launch of no blocks is an error
    char *const copy = (char *)call.workspace, *const masked =
                                                   copy + rounded_up(2 * call.in_features * call.out_features);
    float *const parts = (float *)(masked + rounded_up(2 * call.rows * call.out_features));
    const bool copies = call.parameter_dtype != call.dtype;
    int64_t count = 0;
    const cuda_ops_status status = linear_relu_prepare(
        masked, call.grad_bias ? parts : nullptr, &count, copies && call.grad_input ? copy : nullptr, call.grad_output,
        call.activated, call.weight, call.rows, call.in_features, call.out_features, call.dtype, call.stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    const void *const weight = copies ? copy : call.weight;
#define SM90_BACKWARD(T, P)                                                                                            \
    (backward<T, P>(call.grad_input, call.grad_weight, call.grad_bias, masked, parts, (int)count, call.input, weight,  \
                    call.rows, call.in_features, call.out_features, call.dtype, call.stream))
    SM90_DISPATCH(call, SM90_BACKWARD);
#undef SM90_BACKWARD
}

#endif

cuda_ops_status linear_relu_sm90(const LinearReluCall &call, const Device &)
{
#ifdef CUDA_OPS_SM90A
    return call.backward ? run_backward(call) : run_forward(call);
#else
    (void)call;
    return CUDA_OPS_INVALID_ARGUMENT; // never chosen
#endif
}
