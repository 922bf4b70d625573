// conv2d's sm90 path where there are few tiles: the blocks of a cluster share one, each with a split of k. Every block
// leaves its sums in its shared memory, and adds a share of the tile up, over the blocks in their order. One tile a
// cluster; not persistent. Its epilogue stores any layout of grad_weight, so that no other kernel adds or rearranges.
#ifndef CUDA_OPS_CONV2D_SM90_CLUSTER_CUH
#define CUDA_OPS_CONV2D_SM90_CLUSTER_CUH

#include "conv2d/sm90/launch.cuh"

static constexpr int MOST_SHARING = 8; // blocks of a cluster, as many as every GPU has

template <typename T, int N, int STAGES, bool A_MN_MAJOR, bool B_MN_MAJOR>
using ClusterTile = Tile<T, 128, N, 1, 1, false, STAGES, A_MN_MAJOR, B_MN_MAJOR, false, false, 1, true>;

struct ClusterWork {
    ConvWork conv;
    int sharing; // blocks of a cluster
    // backward_weight: elements from a channel of grad_output, a tap and a channel of the input to the next one, and
    // how many of those there are.
    int64_t out_stride, tap_stride, channel_stride;
    int channels;
};

#if defined(CUDA_OPS_HOPPER_CODE)

// Sums of four columns of the tile, over the blocks of the cluster.
__device__ __forceinline__ float4 add_over_cluster(const float *mine, int sharing)
{
    float4 part[MOST_SHARING];
#pragma unroll
    for (int rank = 0; rank < MOST_SHARING; rank++)
        if (rank < sharing)
            part[rank] = *(const float4 *)mapa(mine, rank);
    float4 sum = part[0];
#pragma unroll
    for (int rank = 1; rank < MOST_SHARING; rank++)
        if (rank < sharing) {
            sum.x += part[rank].x, sum.y += part[rank].y;
            sum.z += part[rank].z, sum.w += part[rank].w;
        }
    return sum;
}

// Four elements `stride` apart, the first `count` of them.
template <typename T>
__device__ __forceinline__ void store_four(T *to, float4 sum, int64_t stride, int count, bool whole)
{
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (whole) {
        aligned_vector<T, 4> vector;
#pragma unroll
        for (int i = 0; i < 4; i++)
            vector.element[i] = store_from_accumulate<T>(values[i]);
        store_vector((aligned_vector<T, 4> *)to, vector);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count)
                to[i * stride] = store_from_accumulate<T>(values[i]);
    }
}

// This block's share of the tile. `tile`: its sums, rows of `pitch`; thread: of both consumer warpgroups.
template <typename C, bool IS_WEIGHT>
__device__ __forceinline__ void store_share(const ClusterWork &work, const float *tile, int pitch,
                                            const TileCoordinates &at, uint32_t rank, int thread)
{
    typedef typename C::T T;
    const GemmWork &gemm = work.conv.gemm;
    constexpr int VECTORS = C::N / 4; // of a row
    for (int i = rank * 2 * WARPGROUP + thread; i < C::M * VECTORS; i += work.sharing * 2 * WARPGROUP) {
        const int in_row = i / VECTORS, in_column = i % VECTORS * 4;
        const int row = at.m + in_row, column = at.n + in_column;
        if (row >= gemm.m || column >= gemm.n)
            continue;
        if constexpr (IS_WEIGHT) {
            const int chunk = column / C::ROW, tap = chunk / work.conv.chunks;
            const int channel = (chunk - tap * work.conv.chunks) * C::ROW + column % C::ROW;
            if (channel >= work.channels)
                continue;
            T *const to = (T *)gemm.d + row * work.out_stride + tap * work.tap_stride + channel * work.channel_stride;
            store_four(to, add_over_cluster(tile + in_row * pitch + in_column, work.sharing), work.channel_stride,
                       work.channels - channel, work.channel_stride == 1 && work.channels % 4 == 0);
        } else {
            float4 sum = add_over_cluster(tile + in_row * pitch + in_column, work.sharing);
            if (gemm.bias) {
                const T *const bias = (const T *)gemm.bias + column;
                const int last = gemm.n - 1 - column; // columns past it are not stored
                sum.x += load_as_accumulate(bias[0]), sum.y += load_as_accumulate(bias[min(1, last)]);
                sum.z += load_as_accumulate(bias[min(2, last)]), sum.w += load_as_accumulate(bias[min(3, last)]);
            }
            float value[] = {sum.x, sum.y, sum.z, sum.w};
            activate_simply(value, gemm.activation);
            sum = make_float4(value[0], value[1], value[2], value[3]);
            store_four((T *)gemm.d + row * gemm.ldd + column, sum, 1, gemm.n - column, gemm.ldd % 4 == 0);
        }
    }
}
#endif // CUDA_OPS_HOPPER_CODE

template <typename C, bool IS_WEIGHT>
__global__ void __launch_bounds__(3 * WARPGROUP, 1)
    conv2d_sm90_cluster_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                               const __grid_constant__ ClusterWork work)
{
#if defined(CUDA_OPS_HOPPER_CODE)
    static_assert(C::CLUSTER == 1 && !C::PINGPONG && !C::IN_REGISTERS && C::BLOCKS == 1, "the cluster shares a tile");
    typedef typename C::T T;
    constexpr int PITCH = C::N + 8; // lets a warp's stores meet all banks
    static_assert(C::M * PITCH * 4 <= C::RING_BYTES, "room for the sums where the stages were");
    extern __shared__ char shared[];
    const uint32_t stages = (shared_address(shared) + SWIZZLE_ATOM - 1) / SWIZZLE_ATOM * SWIZZLE_ATOM;
    const uint32_t full = stages + C::RING_BYTES, empty = full + 8 * C::STAGES;
    const GemmWork &gemm = work.conv.gemm;
    const uint32_t rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_a);
        prefetch_tensormap(&map_b);
        for (int stage = 0; stage < C::STAGES; stage++) {
            mbarrier_init(full + 8 * stage, 1);
            mbarrier_init(empty + 8 * stage, 2);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    // Splits are numbered after the tiles.
    const int index = rank * (gemm.clusters_m * gemm.clusters_n) + blockIdx.x / work.sharing;
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == 0)
            conv2d_produce<C>(work.conv, &map_a, &map_b, stages, full, empty, 0, 0, index, gemm.total);
        __syncwarp(); // cluster_sync wants whole warps
        if (work.sharing > 1) {
            cluster_sync();
            cluster_sync();
        }
    } else {
        setmaxnreg_inc<232>();
        const int group = threadIdx.x / WARPGROUP - 1, thread = threadIdx.x % WARPGROUP;
        const TileCoordinates at = tile_coordinates<C>(gemm, index, 0, 0);
        const uint32_t a_first =
            stages + (C::A_MN_MAJOR ? group * C::GROUP_M / C::ROW * C::COLUMN_BYTES : group * C::GROUP_M * SWIZZLE_ROW);
        const uint64_t a_tile = wgmma_descriptor(a_first, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        const uint64_t b_tile = wgmma_descriptor(stages + C::A_BYTES, WGMMA_SWIZZLE_128, SWIZZLE_ATOM, C::COLUMN_BYTES);
        constexpr int A_STEP = C::A_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32, B_STEP = C::B_MN_MAJOR ? 2 * SWIZZLE_ATOM : 32;
        float sum[C::N / 2];
#pragma unroll
        for (int i = 0; i < C::N / 2; i++)
            sum[i] = 0;
        int stage = 0, phase = 0, before = 0;
        for (int step = 0; step < at.steps; step++) {
            mbarrier_wait(full + 8 * stage, phase);
            const uint64_t a = wgmma_advance(a_tile, stage * C::STAGE_BYTES),
                           b = wgmma_advance(b_tile, stage * C::STAGE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++)
                wgmma<T, C::N, C::A_MN_MAJOR, C::B_MN_MAJOR>(sum, wgmma_advance(a, i * A_STEP),
                                                             wgmma_advance(b, i * B_STEP), 1);
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
        bar_sync(1, 2 * WARPGROUP); // both warpgroups have read the last stage: sums may lie there
        float *const tile = (float *)(shared + (stages - shared_address(shared)));
        float *const mine = tile + (group * C::GROUP_M + row_of<C>(thread, 0, 0)) * PITCH + 2 * (thread % 4);
#pragma unroll
        for (int i = 0; i < C::N / 8; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)(mine + 8 * half * PITCH + 8 * i) =
                    make_float2(sum[4 * i + 2 * half], sum[4 * i + 2 * half + 1]);
        // A block alone needs no warps but these two groups'.
        if (work.sharing > 1)
            cluster_sync();
        else
            bar_sync(1, 2 * WARPGROUP);
        store_share<C, IS_WEIGHT>(work, tile, PITCH, at, rank, threadIdx.x - WARPGROUP);
        if (work.sharing > 1)
            cluster_sync(); // the others have read this block's sums
    }
#endif
}

template <typename C, bool IS_WEIGHT>
static cuda_ops_status conv2d_start_cluster(const CUtensorMap &map_a, const CUtensorMap &map_b, ClusterWork work,
                                            const ConvPlan &plan, const ConvProduct &p)
{
    GroupedGemmWork &gemm = work.conv.gemm;
    work.sharing = plan.sharing;
    gemm.splits = plan.sharing;
    gemm.chunk = (int)(ceil_div(ceil_div(gemm.k, C::K), plan.sharing) * C::K);
    if (!conv2d_set_tiles<C>(gemm, p, plan))
        return CUDA_OPS_INVALID_ARGUMENT;
    const auto kernel = conv2d_sm90_cluster_kernel<C, IS_WEIGHT>;
    allow_shared_memory(kernel, C::SHARED_BYTES);
    start_clusters(kernel, gemm.total, 3 * WARPGROUP, plan.sharing, C::SHARED_BYTES, 90, p.stream, map_a, map_b, work);
    return launch_status();
}

// forward and backward_input of one group, as conv2d_launch_forward.
template <typename C>
static cuda_ops_status conv2d_launch_forward_cluster(const ConvProduct &p, const ConvPlan &plan)
{
    constexpr bool tf32 = sizeof(typename C::T) == 4;
    ClusterWork work = {};
    work.conv = conv2d_work(p, C::K);
    GemmWork &gemm = work.conv.gemm;
    gemm.m = (int)conv2d_pixels(p.grid), gemm.n = (int)p.columns, gemm.k = work.conv.taps * work.conv.chunks * C::K;
    gemm.d = p.result;
    gemm.ldd = p.columns;
    gemm.bias = p.bias;
    gemm.activation = p.activation;
    CUtensorMap map_a, map_b;
    const bool mapped =
        make_pixel_map(&map_a, p.source, p.dtype, tf32, p.grid, C::ROW, C::M) && conv2d_map_weight<C>(&map_b, p);
    return mapped ? conv2d_start_cluster<C, false>(map_a, map_b, work, plan, p) : CUDA_OPS_INVALID_ARGUMENT;
}

// backward_weight of one group in 16 bits, as conv2d_launch_backward_weight, but that it stores the gradient as it is to lie.
template <typename C>
static cuda_ops_status conv2d_launch_backward_weight_cluster(const ConvProduct &p, const ConvPlan &plan)
{
    static_assert(sizeof(typename C::T) == 2 && C::A_MN_MAJOR && C::B_MN_MAJOR, "k is pixels");
    const int64_t taps = conv2d_taps(p), pixels = conv2d_pixels(p.grid), channels = p.grid.channels;
    ClusterWork work = {};
    work.conv = conv2d_work(p, C::ROW);
    work.channels = (int)channels;
    work.out_stride = taps * channels;
    work.tap_stride = p.weight_channels_last ? channels : 1;
    work.channel_stride = p.weight_channels_last ? 1 : taps;
    GemmWork &gemm = work.conv.gemm;
    gemm.m = (int)p.columns, gemm.n = (int)(taps * work.conv.chunks * C::ROW), gemm.k = (int)pixels;
    gemm.d = p.result;
    CUtensorMap map_a, map_b;
    const bool mapped = make_map(&map_a, p.other, p.dtype, false, p.columns, pixels, 1, p.columns, 0, C::ROW, C::K) &&
                        make_pixel_map(&map_b, p.source, p.dtype, false, p.grid, C::ROW, C::K);
    return mapped ? conv2d_start_cluster<C, true>(map_a, map_b, work, plan, p) : CUDA_OPS_INVALID_ARGUMENT;
}

#endif
