// mnist_step: a thread's coordinates, the grid barrier, packing, and sums over threads and blocks.
#ifndef CUDA_OPS_MNIST_STEP_THREAD_CUH
#define CUDA_OPS_MNIST_STEP_THREAD_CUH

#include "mnist_step/layout.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

extern __shared__ __align__(1024) char shared[];

__device__ __forceinline__ uint32_t pack_pair(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&pair;
}
__device__ __forceinline__ float low_of(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_of(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float rounded(float value)
{
    return __bfloat162float(__float2bfloat16_rn(value));
}
__device__ __forceinline__ uint32_t two_halves(const char *low, const char *high)
{
    return *(const uint16_t *)low | (uint32_t)*(const uint16_t *)high << 16;
}
// The row addresses that lanes give to ldmatrix for four 8 x 8 matrices, as offsets in rows of `pitch` bytes: matrices
// 0 and 1 one below the other, 2 and 3 to their right (A as it is stored, B stored [n][k] with .trans).
__device__ __forceinline__ uint32_t below_first(int lane, int pitch)
{
    return (lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * 16;
}
// The same with matrices 0 and 1 beside each other, 2 and 3 below them.
__device__ __forceinline__ uint32_t beside_first(int lane, int pitch)
{
    return (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
}

// The thread that arrives and waits for its block: of the last warp, which has the least to do meanwhile.
static constexpr int AT_BARRIER = THREADS - WARP_SIZE;

// A thread's coordinates in the launch, and the grid barrier: `arrive` when all that others wait for is written, `wait`
// before what they wrote is read.
template <class L>
struct Thread {
    const Arguments &a;
    Small<L> &small;
    int thread, lane, warp, row, quad;       // row = lane / 4, quad = lane % 4: coordinates in mma's fragments
    int block, cluster, rank, owner, member; // block `rank` of the cluster, `member` of the owner
    int images;                              // of the owner: images owner, owner + OWNERS, ...
    unsigned int phase;

    template <typename T>
    __device__ __forceinline__ T *workspace(int64_t offset) const
    {
        return (T *)(a.workspace + offset);
    }
    __device__ __forceinline__ void arrive() const
    {
        __syncthreads();
        if (thread == AT_BARRIER)
            red_release_gpu_add(a.workspace + WS_BARRIER, 1);
    }
    __device__ __forceinline__ void wait()
    {
        phase += BLOCKS;
        if (thread == AT_BARRIER) {
            while (ld_acquire_gpu(a.workspace + WS_BARRIER) < phase)
                ;
        }
        __syncthreads();
        // Otherwise the compiler computes all phases' addresses before the first step, and has no registers for them.
        thread = opaque(thread), lane = opaque(lane), row = opaque(row), quad = opaque(quad);
    }
};

template <class L>
__device__ __forceinline__ Thread<L> thread_of(const Arguments &a)
{
    Thread<L> t = {a, *(Small<L> *)(shared + L::AT_SMALL), (int)threadIdx.x};
    t.lane = t.thread % WARP_SIZE, t.warp = warp_uniform(t.thread / WARP_SIZE);
    t.row = t.lane / 4, t.quad = t.lane % 4;
    t.block = blockIdx.x, t.cluster = t.block / 2, t.rank = t.block % 2;
    t.owner = t.block / L::MEMBERS, t.member = t.block % L::MEMBERS;
    t.images = a.batch <= t.owner ? 0 : (a.batch - t.owner + L::OWNERS - 1) / L::OWNERS;
    t.phase = 0;
    return t;
}

// Maps an address in this block's shared memory to that of the other block of the cluster.
template <class L>
__device__ __forceinline__ uint32_t of_other(const Thread<L> &t, uint32_t address)
{
    return mapa(address, 1 - t.rank);
}
// Sums over all owners, in a fixed order, of the two values of each of this block's channels: lane 0 of a channel's
// threads gets both.
template <class L>
static constexpr int CHANNEL_LANES = THREADS / L::CHANNELS;
template <class L>
__device__ __forceinline__ void sum_over_owners(const Thread<L> &t, const float *partials, float &first, float &second)
{
    static constexpr int VALUES = 2 * L::CHANNELS, VECTORS = VALUES / 4, GROUPS = THREADS / VECTORS,
                         EACH = L::OWNERS / GROUPS, PARTS = CHANNEL_LANES<L> / 2;
    static constexpr int PITCH_OF_GROUP = VALUES + 4;
    float *groups = (float *)(shared + L::AT_SCRATCH);
    const int vector = t.thread % VECTORS, group = t.thread / VECTORS;
    float4 values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        values[i] = __ldcg((const float4 *)(partials + ((group * EACH + i) * L::MEMBERS + t.member) * VALUES) + vector);
    float4 sum = values[0];
#pragma unroll
    for (int i = 1; i < EACH; i++)
        sum.x += values[i].x, sum.y += values[i].y, sum.z += values[i].z, sum.w += values[i].w;
    *(float4 *)(groups + group * PITCH_OF_GROUP + 4 * vector) = sum;
    __syncthreads();
    const int value = t.thread / CHANNEL_LANES<L> + t.thread / PARTS % 2 * L::CHANNELS, part = t.thread % PARTS;
    float total = 0;
#pragma unroll
    for (int g = 0; g < GROUPS / PARTS; g++)
        total += groups[(PARTS * g + part) * PITCH_OF_GROUP + value];
#pragma unroll
    for (int lanes = 1; lanes < PARTS; lanes *= 2)
        total += __shfl_xor_sync(FULL_WARP, total, lanes);
    first = total;
    second = __shfl_xor_sync(FULL_WARP, total, PARTS);
}

// Adds two values of each thread for the eight channels of its accumulators' columns (2 quad + i of each of four tiles)
// over all pixels of the block: to this block's partials[2][HALF2].
template <class L>
__device__ __forceinline__ void sum_over_pixels(const Thread<L> &t, float (&first)[8], float (&second)[8],
                                                float *partials)
{
    float *warps = (float *)(shared + L::AT_SCRATCH);
    // Over the eight rows of lanes: each round halves the values that a lane keeps, down to two.
    float four[2][4], two[2][2], one[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool high = t.lane & 16;
        four[0][i] = (high ? first[i + 4] : first[i]) + __shfl_xor_sync(FULL_WARP, high ? first[i] : first[i + 4], 16);
        four[1][i] =
            (high ? second[i + 4] : second[i]) + __shfl_xor_sync(FULL_WARP, high ? second[i] : second[i + 4], 16);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const bool middle = t.lane & 8, low = t.lane & 4;
#pragma unroll
        for (int i = 0; i < 2; i++)
            two[j][i] = (middle ? four[j][i + 2] : four[j][i]) +
                        __shfl_xor_sync(FULL_WARP, middle ? four[j][i] : four[j][i + 2], 8);
        one[j] = (low ? two[j][1] : two[j][0]) + __shfl_xor_sync(FULL_WARP, low ? two[j][0] : two[j][1], 4);
    }
    if (t.warp < CONV_WARPS) {
        const int i = (t.lane & 16 ? 4 : 0) + (t.lane & 8 ? 2 : 0) + (t.lane & 4 ? 1 : 0);
        const int channel = i / 2 * 8 + 2 * t.quad + i % 2;
        warps[t.warp * 2 * HALF2 + channel] = one[0];
        warps[t.warp * 2 * HALF2 + HALF2 + channel] = one[1];
    }
    __syncthreads();
    if (t.thread < 2 * HALF2) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < CONV_WARPS; w++)
            total += warps[w * 2 * HALF2 + t.thread];
        partials[t.block * 2 * HALF2 + t.thread] = total;
    }
}

#endif
#endif
