// mnist_step: whole training steps of the MNIST CNN in one kernel, the last rung of the step's ladder.
//
// At batch 64 a step is microseconds of arithmetic; sixteen kernels one after the other wait for memory and for each
// other most of the time. Here 128 blocks stay on their multiprocessors for all steps of a call, keep what they can in
// shared memory and registers, and meet at eight barriers a step, each where every block needs what all others made:
//
//     weights     new weights, moments of this batch     -> convolution 1 + pooling, convolution 2, its sums
//     statistics  sums of y over the batch               -> normalise, ReLU, pool
//     pooled      all pictures' features                 -> a slice of linear1's sum
//     partials    all slices of that sum                 -> hidden units, logits, loss, their gradients
//     hidden      all pictures' gradient of the hidden   -> gradient of a slice of the features, update of linear1
//     features    all slices of that gradient            -> through pooling and ReLU, sums for batch norm
//     sums        those sums over the batch              -> gradient of y, of convolution 2, of convolution 1
//     gradients   all pictures' weight gradients         -> their sum, update of the convolutions
//
// Two blocks, a cluster, share a picture (up to four pictures, one after the other): each recomputes the first
// convolution, and has half of the second one's output channels. A barrier is arrived at when a block has written what
// others wait for; what nobody waits for (linear1's update, the next batch's pictures and their moments, linear2) is
// done between arriving and waiting.
//
// The first convolution's batch norm needs no pass over its output: its statistics follow from the mean and covariance of
// the nine pixels under the kernel (conv_bn_relu_pool_one.cu has the formulas). All products are mma.sync m16n8k16 in
// bfloat16 on operands in shared memory, whose pixel pitch of 80 bytes spreads ldmatrix over the banks. Sums over blocks
// are added in a fixed order, so that results repeat bit by bit.
#include "cuda_ops/mnist_step.h"

#include <stddef.h>

#include "loss.cuh"
#include "wgmma.cuh"

static constexpr int CLUSTERS = 64, BLOCKS = 2 * CLUSTERS;
[[maybe_unused]] static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int PICTURES = CUDA_OPS_MNIST_STEP_MOST / CLUSTERS; // of a cluster, at most
static constexpr int SIDE = 28, PIXELS = SIDE * SIDE;                // of a picture
static constexpr int SIDE1 = 14, CHANNELS1 = 32;                     // of the first block's output
static constexpr int SIDE2 = 7, CHANNELS2 = 64, HALF2 = CHANNELS2 / 2;
static constexpr int FEATURES = CHANNELS2 * SIDE2 * SIDE2, HIDDEN = 128, CLASSES = 10;
static constexpr int SLICE = 32, SLICES = FEATURES / SLICE; // of the features; a block has one, or none
static constexpr int CHUNK = 64;                            // pictures that linear1's products take at once
static constexpr int TAPS = 9;
static constexpr int64_t MOST_STEPS = 1 << 21; // the barrier counts 1024 arrivals each, in 32 bits
// Sums of products of pairs of the taps and a constant: sum over positions of p_i p_j, p_9 = 1.
static constexpr int GRAM_SIDE = TAPS + 1, GRAM = GRAM_SIDE * GRAM_SIDE;
static constexpr int MOMENTS = TAPS + TAPS * TAPS; // means, covariances
static constexpr int SUMS1 = 12; // per channel of the first block: S of nine taps, sum of dz, padding
static constexpr int WEIGHTS2 = TAPS * CHANNELS2 * CHANNELS1, OWN_WEIGHTS2 = WEIGHTS2 / BLOCKS;
static constexpr int CONV_WARPS = 7; // a row of pooling windows each
static constexpr int EXCHANGED = 16; // values of a thread that the other block of the cluster gets
// Blocks without a slice, and what they do while the others have theirs: linear2, a class each, linear1's bias, and the
// moments of the next batch.
static constexpr int LINEAR2_BLOCKS = SLICES, BIAS1_BLOCK = SLICES + CLASSES, MOMENTS_BLOCK = BIAS1_BLOCK + 1;
static_assert(MOMENTS_BLOCK < BLOCKS && SLICES * SLICE == FEATURES && OWN_WEIGHTS2 * BLOCKS == WEIGHTS2, "");
[[maybe_unused]] static constexpr int CONV1_BLOCKS = BLOCKS - CHANNELS1; // from this block on, a channel each

// ---- Shared memory, in bytes ----
static constexpr int PICTURE_ROW = 32, PICTURE_BYTES = (30 * PICTURE_ROW + 8) * 2; // padded by a pixel all around
static constexpr int PITCH = 80;                                                   // of 32 channels
static constexpr int MAP_ROW = 18, MAP_BYTES = 16 * MAP_ROW * PITCH; // 14 x 14 with padding; tiles are 16 wide, plus taps
static constexpr int PLACES_BYTES = SIDE1 * 16 * 16; // [row][16 columns][this block's channels]
static constexpr int WEIGHTS_BYTES = TAPS * HALF2 * PITCH;
static constexpr int EXCHANGE_BYTES = EXCHANGED * CONV_WARPS * WARP_SIZE * 4;
static constexpr int KERNEL1_ROW = 6, KERNEL1 = 5 * KERNEL1_ROW; // of the first convolution, with zeros around it
static constexpr int HIDDEN_PITCH = HIDDEN * 2 + 16, HIDDEN_BYTES = CHUNK * HIDDEN_PITCH;
static constexpr int SLICE_BYTES = CHUNK * PITCH, LINEAR1_BYTES = HIDDEN * PITCH;
static constexpr int STAGE_BYTES = HALF2 * SIDE2 * SIDE2 * 2; // half a picture's features

static constexpr int AT_PICTURES = 0; // this batch's and the next one's
static constexpr int AT_MAPS = AT_PICTURES + 2 * PICTURES * PICTURE_BYTES;
static constexpr int AT_PLACES = AT_MAPS + PICTURES * MAP_BYTES;
static constexpr int AT_GRADIENT = AT_PLACES + PICTURES * PLACES_BYTES; // of convolution 2's output, this block's half
static constexpr int AT_WEIGHTS2 = AT_GRADIENT + MAP_BYTES;             // [tap][out channel][in channel]
// Two buffers that the other block writes, for pictures in turn. The second is also where linear1 keeps gradients, and
// is scratch memory for sums: neither while the other block may write there (see `backward_conv2`). The first also holds
// linear2's parameters.
static constexpr int AT_EXCHANGE = AT_WEIGHTS2 + WEIGHTS_BYTES, AT_LINEAR2 = AT_EXCHANGE;
static constexpr int AT_HIDDEN = AT_EXCHANGE + EXCHANGE_BYTES, AT_SCRATCH = AT_HIDDEN;
static constexpr int AT_SLICE = AT_HIDDEN + HIDDEN_BYTES;
static constexpr int AT_LINEAR1 = AT_SLICE + SLICE_BYTES;
static constexpr int AT_STAGE = AT_LINEAR1 + LINEAR1_BYTES;
static constexpr int AT_SMALL = AT_STAGE + PICTURES * STAGE_BYTES;
static_assert(EXCHANGE_BYTES <= HIDDEN_BYTES && (CLASSES * HIDDEN + CLASSES + HIDDEN) * 4 <= EXCHANGE_BYTES, "");

struct Small {
    uint64_t arrived[2]; // mbarriers of the two exchange buffers
    float moments[MOMENTS];
    float running_mean1[CHANNELS1], running_variance1[CHANNELS1], running_mean2[HALF2], running_variance2[HALF2];
    float norm_weight1[CHANNELS1], norm_bias1[CHANNELS1];
    __align__(16) float scale1[CHANNELS1];
    __align__(16) float shift1[CHANNELS1]; // the absolute value; a negative sign is with the kernel
    float norm_weight2[HALF2], norm_bias2[HALF2], scale2[HALF2], shift2[HALF2], mean2[HALF2], rstd2[HALF2], bias2[HALF2];
    float by_dz[HALF2], by_y[HALF2], constant[HALF2];
    int64_t index[2][PICTURES];
    int label[2][PICTURES];
    __align__(16) __nv_bfloat16 kernel1[CHANNELS1 * KERNEL1];
};
static constexpr int SHARED_BYTES = AT_SMALL + (int)sizeof(Small);
static_assert(SHARED_BYTES <= 232448, "more than a block of Hopper has");

// ---- Workspace, in bytes ----
static constexpr int64_t align_256(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}
static constexpr int64_t WS_BARRIER = 0; // arrivals, blocks that have left
static constexpr int64_t WS_GRAM = 256;  // [block][GRAM] float
static constexpr int64_t WS_MOMENTS = WS_GRAM + align_256(BLOCKS * GRAM * 4);              // [MOMENTS] float
static constexpr int64_t WS_WEIGHTS2 = WS_MOMENTS + align_256(MOMENTS * 4);                // [tap][out][in] bfloat16
static constexpr int64_t WS_STATISTICS = WS_WEIGHTS2 + align_256(WEIGHTS2 * 2);            // [cluster][rank][2][HALF2]
static constexpr int64_t WS_SUMS2 = WS_STATISTICS + align_256(BLOCKS * 2 * HALF2 * 4);     // the same
static constexpr int64_t WS_POOLED = WS_SUMS2 + align_256(BLOCKS * 2 * HALF2 * 4);         // [batch][FEATURES] bfloat16
static constexpr int64_t FEATURE_BYTES = (int64_t)CUDA_OPS_MNIST_STEP_MOST * FEATURES * 2;
static constexpr int64_t WS_GRAD_POOLED = WS_POOLED + FEATURE_BYTES;                       // the same
static constexpr int64_t WS_PARTIAL = WS_GRAD_POOLED + FEATURE_BYTES;                      // [slice][batch][HIDDEN] float
static constexpr int64_t HIDDEN_VALUES = (int64_t)CUDA_OPS_MNIST_STEP_MOST * HIDDEN;
static constexpr int64_t WS_HIDDEN = WS_PARTIAL + SLICES * HIDDEN_VALUES * 4;              // [batch][HIDDEN] bfloat16
static constexpr int64_t WS_GRAD_HIDDEN = WS_HIDDEN + HIDDEN_VALUES * 2;                   // the same
static constexpr int64_t WS_GRAD_LOGITS = WS_GRAD_HIDDEN + HIDDEN_VALUES * 2;              // [batch][16] float
static constexpr int64_t WS_LOSS = WS_GRAD_LOGITS + CUDA_OPS_MNIST_STEP_MOST * 16 * 4;     // [batch] float
static constexpr int64_t WS_GRAD_WEIGHTS2 = WS_LOSS + align_256(CUDA_OPS_MNIST_STEP_MOST * 4); // [cluster][tap][out][in]
static constexpr int64_t WS_SUMS1 = WS_GRAD_WEIGHTS2 + (int64_t)CLUSTERS * WEIGHTS2 * 4;   // [cluster][channel][SUMS1]
static constexpr int64_t WS_SPILL = WS_SUMS1 + align_256(CLUSTERS * CHANNELS1 * SUMS1 * 4);
static constexpr int64_t SPILL_BYTES = (int64_t)BLOCKS * PICTURES * 33 * THREADS * 4;
static constexpr int64_t WORKSPACE_BYTES = WS_SPILL + SPILL_BYTES;

struct Arguments {
    float *losses;
    cuda_ops_mnist_parameters parameters;
    char *workspace;
    cuda_ops_index_error *error;
    const uint8_t *images;
    const int64_t *labels, *indices;
    const float *rates;
    int64_t count, steps;
    int batch;
    float center, scale; // of pixels: (byte - center) * scale
    float label_smoothing;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || (!defined(__CUDA_ARCH__) && defined(CUDA_OPS_SM90A))

extern __shared__ __align__(1024) char shared[];

// ---- Pieces ----

__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
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
    return (uint32_t) * (const uint16_t *)low | (uint32_t) * (const uint16_t *)high << 16;
}
// The addresses that lanes give to ldmatrix for four 8 x 8 matrices, as offsets of rows of `pitch` bytes:
// matrices 0 and 1 one below the other, 2 and 3 to the right of them (operand A stored as it is, B stored [n][k] turned).
__device__ __forceinline__ uint32_t below_first(int lane, int pitch)
{
    return (lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * 16;
}
// matrices 0 and 1 side by side, 2 and 3 below them.
__device__ __forceinline__ uint32_t beside_first(int lane, int pitch)
{
    return (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
}

// What a thread knows of the launch. Barrier: `arrive` when all that others wait for is written, `wait` before what
// they wrote is read.
struct Thread {
    const Arguments &a;
    Small &small;
    int thread, lane, warp, row, quad; // row = lane / 4, quad = lane % 4: the coordinates of mma's registers
    int block, cluster, rank;
    int pictures; // of this cluster: cluster, cluster + CLUSTERS, ...
    unsigned int phase;

    template <typename T>
    __device__ __forceinline__ T *workspace(int64_t offset) const
    {
        return (T *)(a.workspace + offset);
    }
    __device__ __forceinline__ void arrive() const
    {
        __syncthreads();
        if (thread == 0)
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(a.workspace + WS_BARRIER) : "memory");
    }
    __device__ __forceinline__ void wait()
    {
        phase += BLOCKS;
        if (thread == 0) {
            unsigned int arrived;
            do
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                             : "=r"(arrived)
                             : "l"(a.workspace + WS_BARRIER)
                             : "memory");
            while (arrived < phase);
        }
        __syncthreads();
        // Else the compiler computes all phases' addresses once, before the first step, and has no registers for them.
        asm volatile("" : "+r"(thread), "+r"(lane), "+r"(row), "+r"(quad));
    }
};

// Sums over all clusters, in a fixed order, of this rank's two values a channel: lane 0 of the eight threads that a
// channel has gets both.
__device__ __forceinline__ void sum_over_clusters(const Thread &t, const float *partials, float &first, float &second)
{
    static constexpr int VALUES = 2 * HALF2, VECTORS = VALUES / 4, GROUPS = THREADS / VECTORS, EACH = CLUSTERS / GROUPS;
    static constexpr int PITCH_OF_GROUP = VALUES + 4;
    float *groups = (float *)(shared + AT_SCRATCH);
    const int vector = t.thread % VECTORS, group = t.thread / VECTORS;
    float4 values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        values[i] = __ldcg((const float4 *)(partials + ((group * EACH + i) * 2 + t.rank) * VALUES) + vector);
    float4 sum = values[0];
#pragma unroll
    for (int i = 1; i < EACH; i++)
        sum.x += values[i].x, sum.y += values[i].y, sum.z += values[i].z, sum.w += values[i].w;
    *(float4 *)(groups + group * PITCH_OF_GROUP + 4 * vector) = sum;
    __syncthreads();
    const int value = t.thread / 8 + t.thread / 4 % 2 * HALF2, part = t.thread % 4;
    float total = 0;
#pragma unroll
    for (int g = 0; g < GROUPS / 4; g++)
        total += groups[(4 * g + part) * PITCH_OF_GROUP + value];
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
    first = total;
    second = __shfl_xor_sync(FULL_WARP, total, 4);
}

// Two sums of each thread for the eight channels of its accumulators' columns (2 quad + i of each of four tiles), over
// all pixels of the block: to partials[2][HALF2] of this block.
__device__ __forceinline__ void sum_over_pixels(const Thread &t, float (&first)[8], float (&second)[8], float *partials)
{
    float *warps = (float *)(shared + AT_SCRATCH);
    // Over the eight rows of lanes: each round halves the values that a lane cares for, so that it ends with two.
    float four[2][4], two[2][2], one[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool high = t.lane & 16;
        four[0][i] = (high ? first[i + 4] : first[i]) + __shfl_xor_sync(FULL_WARP, high ? first[i] : first[i + 4], 16);
        four[1][i] = (high ? second[i + 4] : second[i]) + __shfl_xor_sync(FULL_WARP, high ? second[i] : second[i + 4], 16);
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

// ---- The batch ----

// Where the pictures of `step` are, and their labels.
__device__ __forceinline__ void look_up(const Thread &t, int64_t step)
{
    if (t.thread >= t.pictures)
        return;
    const int64_t number = step * t.a.batch + t.cluster + t.thread * CLUSTERS, index = t.a.indices[number];
    const bool good = 0 <= index && index < t.a.count;
    if (!good && t.rank == 0)
        record_bad_index(t.a.error, number, index, t.a.count);
    const int64_t label = good ? t.a.labels[index] : -1;
    t.small.index[step % 2][t.thread] = good ? index : -1;
    t.small.label[step % 2][t.thread] = 0 <= label && label < CLASSES ? (int)label : -1;
}

__device__ __forceinline__ char *picture_of(int64_t step, int number)
{
    return shared + AT_PICTURES + ((int)(step % 2) * PICTURES + number) * PICTURE_BYTES;
}

// The pictures of `step` to shared memory, normalised. A barrier of the block before and after it.
__device__ __forceinline__ void load_pictures(const Thread &t, int64_t step)
{
    for (int i = 0; i < t.pictures; i++) {
        const int64_t index = t.small.index[step % 2][i];
        if (t.thread >= PIXELS / 4)
            continue;
        const uint32_t word = index < 0 ? 0 : ((const uint32_t *)(t.a.images + index * PIXELS))[t.thread];
        const int y = t.thread / 7, x = t.thread % 7 * 4;
        __nv_bfloat16 *to = (__nv_bfloat16 *)picture_of(step, i) + (y + 1) * PICTURE_ROW + x + 1;
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const float byte = (float)(word >> 8 * b & 255);
            to[b] = __float2bfloat16_rn(index < 0 ? CUDART_NAN_F : (byte - t.a.center) * t.a.scale);
        }
    }
}

// Sums of products of the taps over this block's share of the positions of its cluster's pictures. As a product of a
// 16 x positions matrix with its transpose: mma's registers of the one are those of the other.
__device__ __forceinline__ void gram(const Thread &t, int64_t step)
{
    float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
    const int tap = (t.row / 3 * PICTURE_ROW + t.row % 3) * 2, ninth = (2 * PICTURE_ROW + 2) * 2;
    for (int i = 0; i < t.pictures; i++) {
        const char *picture = picture_of(step, i);
        for (int k = t.rank * WARPS + t.warp; k < PIXELS / 16; k += 2 * WARPS) {
            uint32_t a[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int position = 16 * k + 2 * t.quad + 8 * half;
                const char *at = picture + (position / SIDE * PICTURE_ROW + position % SIDE) * 2;
                a[2 * half] = two_halves(at + tap, at + tap + 2);
                a[2 * half + 1] = t.row == 0   ? two_halves(at + ninth, at + ninth + 2)
                                  : t.row == 1 ? 0x3f803f80u // the constant 1
                                               : 0;
            }
            multiply(first, a, a[0], a[2]);
            multiply(second, a, a[1], a[3]);
        }
    }
    float *warps = (float *)(shared + AT_SCRATCH) + t.warp * GRAM;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int i = t.row + e / 2 * 8, j = 2 * t.quad + e % 2;
        if (i < GRAM_SIDE) {
            warps[i * GRAM_SIDE + j] = first[e];
            if (j < GRAM_SIDE - 8)
                warps[i * GRAM_SIDE + 8 + j] = second[e];
        }
    }
    __syncthreads();
    if (t.thread < GRAM) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += ((float *)(shared + AT_SCRATCH))[w * GRAM + t.thread];
        t.workspace<float>(WS_GRAM)[t.block * GRAM + t.thread] = total;
    }
}

// By one block: the blocks' sums, added, and what they say of the batch.
__device__ __forceinline__ void add_grams(const Thread &t)
{
    static constexpr int VECTORS = GRAM / 4, GROUPS = 8, EACH = BLOCKS / GROUPS;
    double *groups = (double *)(shared + AT_SCRATCH), *totals = groups + GROUPS * GRAM;
    const float4 *partials = t.workspace<const float4>(WS_GRAM);
    if (t.thread < VECTORS * GROUPS) {
        const int vector = t.thread % VECTORS, group = t.thread / VECTORS;
        double x = 0, y = 0, z = 0, w = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 v = __ldcg(partials + (group * EACH + i) * VECTORS + vector);
            x += v.x, y += v.y, z += v.z, w += v.w;
        }
        double *mine = groups + group * GRAM + 4 * vector;
        mine[0] = x, mine[1] = y, mine[2] = z, mine[3] = w;
    }
    __syncthreads();
    if (t.thread < GRAM) {
        double total = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            total += groups[g * GRAM + t.thread];
        totals[t.thread] = total / ((double)t.a.batch * PIXELS);
    }
    __syncthreads();
    if (t.thread < MOMENTS) {
        const int i = (t.thread - TAPS) / TAPS, j = (t.thread - TAPS) % TAPS;
        const double *mean = totals + TAPS * GRAM_SIDE;
        t.workspace<float>(WS_MOMENTS)[t.thread] =
            (float)(t.thread < TAPS ? mean[t.thread] : totals[i * GRAM_SIDE + j] - mean[i] * mean[j]);
    }
}

// ---- Forward ----

// This block's half of convolution 2's weights, on its way to shared memory.
__device__ __forceinline__ void start_weights2(const Thread &t)
{
    const char *source = t.workspace<const char>(WS_WEIGHTS2);
    for (int i = t.thread; i < TAPS * HALF2 * 4; i += THREADS) {
        const int tap = i / (HALF2 * 4), channel = i / 4 % HALF2;
        copy_async_16(shared_address(shared + AT_WEIGHTS2) + (i / 4) * PITCH + i % 4 * 16,
                      source + ((tap * CHANNELS2 + t.rank * HALF2 + channel) * CHANNELS1) * 2 + i % 4 * 16);
    }
    copy_async_commit();
}

__device__ __forceinline__ int in_kernel1(int tap)
{
    return (1 + tap / 3) * KERNEL1_ROW + 1 + tap % 3;
}

// The first block's coefficients, from the taps' moments and the latest weights.
__device__ __forceinline__ void statistics1(const Thread &t)
{
    static_assert(CHANNELS1 * TAPS <= 2 * THREADS && 2 * CHANNELS1 + MOMENTS <= THREADS, "");
    Small &s = t.small;
    const cuda_ops_mnist_block &block = t.a.parameters.block1;
    // All loads are on their way before the first is needed.
    const int norm = t.thread - MOMENTS, second = t.thread + THREADS;
    const float weight = __ldcg(block.weight + t.thread);
    const float another = second < CHANNELS1 * TAPS ? __ldcg(block.weight + second) : 0.0f;
    const float other = t.thread < MOMENTS            ? __ldcg(t.workspace<const float>(WS_MOMENTS) + t.thread)
                        : norm < CHANNELS1            ? __ldcg(block.norm_weight + norm)
                        : norm < 2 * CHANNELS1        ? __ldcg(block.norm_bias + norm - CHANNELS1)
                        : norm < 3 * CHANNELS1 && block.bias ? block.bias[norm - 2 * CHANNELS1]
                                                      : 0.0f;
    start_weights2(t);
    s.kernel1[t.thread / TAPS * KERNEL1 + in_kernel1(t.thread % TAPS)] = __float2bfloat16_rn(weight);
    if (second < CHANNELS1 * TAPS)
        s.kernel1[second / TAPS * KERNEL1 + in_kernel1(second % TAPS)] = __float2bfloat16_rn(another);
    float *biases = (float *)(shared + AT_SCRATCH);
    if (t.thread < MOMENTS)
        s.moments[t.thread] = other;
    else if (norm < CHANNELS1)
        s.norm_weight1[norm] = other;
    else if (norm < 2 * CHANNELS1)
        s.norm_bias1[norm - CHANNELS1] = other;
    else if (norm < 3 * CHANNELS1)
        biases[norm - 2 * CHANNELS1] = other;
    __syncthreads();
    // Eight lanes a channel, a row of the covariance each, and the first one the ninth too.
    const int channel = t.thread / 8, lane = t.thread % 8;
    const __nv_bfloat16 *kernel = s.kernel1 + channel * KERNEL1;
    float mean = 0, variance = 0;
#pragma unroll
    for (int round = 0; round < 2; round++) {
        const int i = round ? 8 : lane;
        float product = 0;
#pragma unroll
        for (int j = 0; j < TAPS; j++)
            product += s.moments[TAPS + i * TAPS + j] * __bfloat162float(kernel[in_kernel1(j)]);
        const float w = round && lane ? 0.0f : __bfloat162float(kernel[in_kernel1(i)]);
        variance += w * product;
        mean += w * s.moments[i];
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
        mean += __shfl_xor_sync(FULL_WARP, mean, lanes);
        variance += __shfl_xor_sync(FULL_WARP, variance, lanes);
    }
    if (lane == 0) {
        variance = variance < 0 ? 0 : variance;
        const float n = (float)t.a.batch * PIXELS, scale = s.norm_weight1[channel] * rsqrtf(variance + block.eps);
        s.scale1[channel] = scale;
        s.shift1[channel] = s.norm_bias1[channel] - mean * scale;
        s.running_mean1[channel] += block.momentum * (mean + biases[channel] - s.running_mean1[channel]);
        s.running_variance1[channel] += block.momentum * (variance * __fdividef(n, n - 1) - s.running_variance1[channel]);
    }
    __syncthreads();
}

// The first block, of one picture: its output to `map`, and of this block's 16 channels the places of the maxima (4:
// none, rectified away). The 4 x 4 pixels around a pooling window are the depth of the product, and its columns the
// channels for each of the four places in the window; channel 16 (h / 2) + 4 quad + 2 (h % 2) + i is column 2 quad + i
// of tile h.
__device__ __forceinline__ void forward1(const Thread &t, const char *picture, char *map, char *places,
                                         const uint32_t (&weights)[16][2])
{
    for (int y = t.warp; y < SIDE1; y += WARPS) {
        uint32_t a[4];
        const char *at = picture + ((2 * y + t.quad / 2) * PICTURE_ROW + 2 * t.row + t.quad % 2 * 2) * 2;
        a[0] = *(const uint32_t *)at;
        a[1] = *(const uint32_t *)(at + 32);
        a[2] = *(const uint32_t *)(at + 4 * PICTURE_ROW);
        a[3] = *(const uint32_t *)(at + 4 * PICTURE_ROW + 32);
        float product[16][4];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            product[j][0] = product[j][1] = product[j][2] = product[j][3] = 0;
            multiply(product[j], a, weights[j][0], weights[j][1]);
        }
#pragma unroll
        for (int group = 0; group < 2; group++) {
            const float4 scale = *(const float4 *)(t.small.scale1 + 16 * group + 4 * t.quad);
            const float4 shift = *(const float4 *)(t.small.shift1 + 16 * group + 4 * t.quad);
            const float scales[4] = {fabsf(scale.x), fabsf(scale.y), fabsf(scale.z), fabsf(scale.w)};
            const float shifts[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int x = t.row + 8 * half;
                float largest[4];
                uint32_t place[4] = {0, 0, 0, 0};
#pragma unroll
                for (int c = 0; c < 4; c++)
                    largest[c] = product[2 * group + c / 2][2 * half + c % 2];
#pragma unroll
                for (int p = 1; p < 4; p++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const float value = product[4 * p + 2 * group + c / 2][2 * half + c % 2];
                        if (group == t.rank) // nobody asks for the others' places here
                            place[c] = value > largest[c] ? p : place[c];
                        largest[c] = fmaxf(largest[c], value);
                    }
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const float z = largest[c] * scales[c] + shifts[c];
                    place[c] = z > 0 ? place[c] : 4;
                    largest[c] = z <= 0 ? 0 : z; // NaN stays
                }
                if (x >= SIDE1)
                    continue;
                *(uint2 *)(map + ((y + 1) * MAP_ROW + x + 1) * PITCH + 32 * group + 8 * t.quad) =
                    make_uint2(pack_pair(largest[0], largest[1]), pack_pair(largest[2], largest[3]));
                if (group == t.rank)
                    *(uint32_t *)(places + (y * 16 + x) * 16 + 4 * t.quad) =
                        place[0] | place[1] << 8 | place[2] << 16 | place[3] << 24;
            }
        }
    }
}

// B's registers of `forward1`. Where a channel's scale is negative so are its weights: the largest product is then the
// largest output.
__device__ __forceinline__ void weights_of_forward1(const Thread &t, uint32_t (&weights)[16][2])
{
    uint32_t sign[4];
#pragma unroll
    for (int h = 0; h < 4; h++)
        sign[h] = t.small.scale1[16 * (h / 2) + t.row / 2 * 4 + 2 * (h % 2) + t.row % 2] < 0 ? 0x80008000u : 0;
    const __nv_bfloat16 *kernel = t.small.kernel1 + (t.row / 2 * 4 + t.row % 2) * KERNEL1 +
                                  (t.quad / 2 + 1) * KERNEL1_ROW + t.quad % 2 * 2 + 1;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int h = j % 4;
            const char *at = (const char *)(kernel + (16 * (h / 2) + 2 * (h % 2)) * KERNEL1 +
                                            (2 * half - j / 8) * KERNEL1_ROW - j / 4 % 2);
            weights[j][half] = two_halves(at, at + 2) ^ sign[h];
        }
}

// Convolution 2 of this block's channels: y[16 m + 4 n + e] is row 2 warp + m, pixel row + 8 (e / 2), channel 8 n + 2
// quad + e % 2; pixels from 14 on are garbage.
__device__ __forceinline__ void forward2(const Thread &t, uint32_t map, float (&y)[32])
{
    float sum[2][4][4];
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i / 16][i / 4 % 4][i % 4] = 0;
    const uint32_t from = map + 2 * t.warp * MAP_ROW * PITCH + below_first(t.lane, PITCH);
    const uint32_t weights = shared_address(shared + AT_WEIGHTS2) + beside_first(t.lane, PITCH);
#pragma unroll 1
    for (int x = 0; x < 3; x++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t a[4][4];
#pragma unroll
            for (int r = 0; r < 4; r++)
                load_matrices(a[r], from + (r * MAP_ROW + x) * PITCH + 32 * k);
#pragma unroll
            for (int dy = 0; dy < 3; dy++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    uint32_t b[4];
                    load_matrices(b, weights + ((dy * 3 + x) * HALF2 + 16 * n) * PITCH + 32 * k);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        multiply(sum[m][2 * n], a[m + dy], b[0], b[1]);
                        multiply(sum[m][2 * n + 1], a[m + dy], b[2], b[3]);
                    }
                }
        }
#pragma unroll
    for (int i = 0; i < 32; i++)
        y[i] = sum[i / 16][i / 4 % 4][i % 4];
}

// A thread's values of more than one picture go to the workspace and come back; nobody else reads them.
__device__ __forceinline__ float *spill_of(const Thread &t, int number)
{
    return t.workspace<float>(WS_SPILL) + ((t.block * PICTURES + number) * 33) * THREADS + t.thread;
}
__device__ __forceinline__ void spill(const Thread &t, int number, const float (&y)[32])
{
    float *to = spill_of(t, number);
#pragma unroll
    for (int i = 0; i < 32; i++)
        __stcg(to + i * THREADS, y[i]);
}
__device__ __forceinline__ uint32_t unspill(const Thread &t, int number, float (&y)[32])
{
    const float *from = spill_of(t, number);
#pragma unroll
    for (int i = 0; i < 32; i++)
        y[i] = __ldcg(from + i * THREADS);
    return __float_as_uint(__ldcg(from + 32 * THREADS));
}

// What the second block's variance is taken around: any number near the mean will do, the same in all blocks.
__device__ __forceinline__ float center2(const Thread &t, int channel)
{
    return t.small.running_mean2[channel] - t.small.bias2[channel];
}

__device__ __forceinline__ bool is_pixel(const Thread &t, int e)
{
    return t.row + e / 2 % 2 * 8 < SIDE1;
}

__device__ __forceinline__ void statistics2(const Thread &t)
{
    float sum, squares;
    sum_over_clusters(t, t.workspace<const float>(WS_STATISTICS), sum, squares);
    if (t.thread % 8 == 0) {
        Small &s = t.small;
        const int c = t.thread / 8;
        const cuda_ops_mnist_block &block = t.a.parameters.block2;
        const float n = (float)t.a.batch * (SIDE1 * SIDE1), offset = __fdividef(sum, n), mean = center2(t, c) + offset;
        float variance = __fdividef(squares, n) - offset * offset;
        variance = variance < 0 ? 0 : variance;
        const float rstd = rsqrtf(variance + block.eps), scale = rstd * s.norm_weight2[c];
        s.mean2[c] = mean;
        s.rstd2[c] = rstd;
        s.scale2[c] = scale;
        s.shift2[c] = s.norm_bias2[c] - mean * scale;
        s.running_mean2[c] += block.momentum * (mean + s.bias2[c] - s.running_mean2[c]);
        s.running_variance2[c] += block.momentum * (variance * __fdividef(n, n - 1) - s.running_variance2[c]);
    }
    __syncthreads();
}

// Normalises, rectifies and pools: the features to `stage`, [channel][7][7]; the bits of the result tell which of this
// thread's values are the largest of their window and above 0; of equal ones that is the first. Columns x and x + 1 are
// in lanes that differ by 4.
__device__ __forceinline__ uint32_t pool2(const Thread &t, const float (&y)[32], __nv_bfloat16 *stage)
{
    uint32_t largest = 0, lower = 0;
    const bool odd = t.row % 2, inside = t.row + 8 < SIDE1; // columns from 14 on are garbage
    stage += 2 * t.quad * SIDE2 * SIDE2 + t.warp * SIDE2 + t.row / 2;
    float mine[16], other[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 scale = *(const float2 *)(t.small.scale2 + i / 4 * 8 + 2 * t.quad);
        const float2 shift = *(const float2 *)(t.small.shift2 + i / 4 * 8 + 2 * t.quad);
        const float up = y[i] * (i % 2 ? scale.y : scale.x) + (i % 2 ? shift.y : shift.x);
        const float down = y[16 + i] * (i % 2 ? scale.y : scale.x) + (i % 2 ? shift.y : shift.x);
        lower |= (down > up ? 1u : 0u) << i;
        mine[i] = down > up ? down : up;
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        other[i] = __shfl_xor_sync(FULL_WARP, mine[i], 4);
    const uint32_t other_lower = __shfl_xor_sync(FULL_WARP, lower, 4);
    // Of two equal ones the upper is first, and in a row the left, whose column is even.
    const uint32_t wins_ties = odd ? ~lower & other_lower : ~lower | other_lower;
    // No branches: both lanes of a pair store the same value, and garbage goes to scratch memory.
    __nv_bfloat16 *const right = inside ? stage + 4 : (__nv_bfloat16 *)(shared + AT_SCRATCH);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const bool wins = (mine[i] > other[i]) | ((mine[i] == other[i]) & (wins_ties >> i & 1));
        largest |= (wins & (mine[i] > 0) ? 1u : 0u) << i;
        const float best = (mine[i] < other[i]) | (other[i] != other[i]) ? other[i] : mine[i]; // NaN stays
        (i / 2 % 2 ? right : stage)[(i / 4 * 8 + i % 2) * SIDE2 * SIDE2] = __float2bfloat16_rn(best <= 0 ? 0 : best);
    }
    if (!inside)
        largest &= 0x3333;
    return (largest & ~lower) | (largest & lower) << 16;
}

// linear1: this block's slice of the features times its slice of the weights, of all pictures.
__device__ __forceinline__ uint4 slice_of(const Thread &t, int first)
{
    const int picture = first + t.thread / 4;
    return picture < t.a.batch ? __ldcg((const uint4 *)(t.workspace<const __nv_bfloat16>(WS_POOLED) +
                                                        (int64_t)picture * FEATURES + t.block * SLICE) +
                                        t.thread % 4)
                               : make_uint4(0, 0, 0, 0);
}
__device__ __forceinline__ void store_slice(const Thread &t, uint4 value)
{
    *(uint4 *)(shared + AT_SLICE + t.thread / 4 * PITCH + t.thread % 4 * 16) = value;
}
static_assert(THREADS == CHUNK * 4, "");

__device__ __forceinline__ void forward_linear1(const Thread &t)
{
    uint4 next = slice_of(t, 0);
    for (int first = 0; first < t.a.batch; first += CHUNK) {
        if (first)
            __syncthreads();
        store_slice(t, next);
        __syncthreads();
        if (first + CHUNK < t.a.batch)
            next = slice_of(t, first + CHUNK);
        float sum[8][4] = {};
        const int m = t.warp % 4, n = t.warp / 4;
        const uint32_t left = shared_address(shared + AT_SLICE) + 16 * m * PITCH + below_first(t.lane, PITCH);
        const uint32_t right = shared_address(shared + AT_LINEAR1) + 64 * n * PITCH + beside_first(t.lane, PITCH);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t a[4];
            load_matrices(a, left + 32 * k);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t b[4];
                load_matrices(b, right + 16 * j * PITCH + 32 * k);
                multiply(sum[2 * j], a, b[0], b[1]);
                multiply(sum[2 * j + 1], a, b[2], b[3]);
            }
        }
        float *to = t.workspace<float>(WS_PARTIAL) + ((int64_t)t.block * CUDA_OPS_MNIST_STEP_MOST + first) * HIDDEN;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int picture = 16 * m + t.row + 8 * half;
                if (first + picture < t.a.batch)
                    __stcg((float2 *)(to + picture * HIDDEN + 64 * n + 8 * j + 2 * t.quad),
                           make_float2(sum[j][2 * half], sum[j][2 * half + 1]));
            }
    }
}

// linear2's weights and bias and linear1's bias, to shared memory.
__device__ __forceinline__ void load_linear2(const Thread &t)
{
    float *to = (float *)(shared + AT_LINEAR2);
    const cuda_ops_mnist_parameters &p = t.a.parameters;
    for (int i = t.thread; i < CLASSES * HIDDEN; i += THREADS)
        to[i] = __ldcg(p.linear2_weight + i);
    if (t.thread < HIDDEN)
        to[CLASSES * HIDDEN + t.thread] = __ldcg(p.linear1_bias + t.thread);
    if (t.thread < CLASSES)
        to[CLASSES * HIDDEN + HIDDEN + t.thread] = __ldcg(p.linear2_bias + t.thread);
}

// The parts of a picture's hidden units: of slices warp, warp + 8, ..., four units each.
static constexpr int HEAD_PARTS = (SLICES + WARPS - 1) / WARPS;
__device__ __forceinline__ void load_partials(const Thread &t, int picture, float4 (&values)[HEAD_PARTS])
{
    const float *partial = t.workspace<const float>(WS_PARTIAL) + (int64_t)picture * HIDDEN;
#pragma unroll
    for (int i = 0; i < HEAD_PARTS; i++) {
        const int slice = t.warp + i * WARPS;
        values[i] = slice < SLICES ? __ldcg((const float4 *)(partial + slice * HIDDEN_VALUES) + t.lane)
                                   : make_float4(0, 0, 0, 0);
    }
}

// From the parts of a picture's hidden units to their gradient; then those of the picture `next`, if that is one.
__device__ __forceinline__ void head(const Thread &t, int picture, int label, int next, float4 (&values)[HEAD_PARTS])
{
    const float *weight = (const float *)(shared + AT_LINEAR2), *bias1 = weight + CLASSES * HIDDEN, *bias2 = bias1 + HIDDEN;
    float *groups = (float *)(shared + AT_SCRATCH), *hidden = groups + WARPS * HIDDEN, *logits = hidden + HIDDEN;
    float4 sum = values[0];
#pragma unroll
    for (int i = 1; i < HEAD_PARTS; i++)
        sum.x += values[i].x, sum.y += values[i].y, sum.z += values[i].z, sum.w += values[i].w;
    if (next < t.a.batch)
        load_partials(t, next, values);
    ((float4 *)groups)[t.warp * 32 + t.lane] = sum;
    __syncthreads();
    if (t.thread < HIDDEN) {
        float total = bias1[t.thread];
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += groups[w * HIDDEN + t.thread];
        hidden[t.thread] = rounded(total <= 0 ? 0 : total);
    }
    __syncthreads();
    { // sixteen lanes a class
        const int j = t.thread / 16, part = t.thread % 16;
        float logit = 0;
        if (j < CLASSES)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 h = ((const float4 *)hidden)[part + 16 * i];
                const float4 w = ((const float4 *)(weight + j * HIDDEN))[part + 16 * i];
                logit += h.x * w.x + h.y * w.y + h.z * w.z + h.w * w.w;
            }
#pragma unroll
        for (int lanes = 1; lanes < 16; lanes *= 2)
            logit += __shfl_xor_sync(FULL_WARP, logit, lanes);
        if (j < CLASSES && part == 0)
            logits[j] = logit + bias2[j];
    }
    __syncthreads();
    // Each thread on its own: ten exponentials are less than another barrier.
    float most = logits[0], total = 0, all = 0, gradient[CLASSES];
#pragma unroll
    for (int j = 1; j < CLASSES; j++)
        most = fmaxf(most, logits[j]);
#pragma unroll
    for (int j = 0; j < CLASSES; j++) {
        gradient[j] = __expf(logits[j] - most);
        total += gradient[j];
        all += logits[j] - most;
    }
    const float smoothing = t.a.label_smoothing, share = smoothing / CLASSES, each = __fdividef(1.0f, (float)t.a.batch);
    const float factor = __fdividef(each, total);
    const bool good = label >= 0;
#pragma unroll
    for (int j = 0; j < CLASSES; j++) {
        const float wanted = share + (j == label ? 1 - smoothing : 0.0f);
        gradient[j] = good ? gradient[j] * factor - wanted * each : 0.0f;
    }
    if (t.thread < HIDDEN) {
        const float h = hidden[t.thread];
        float sum = 0;
#pragma unroll
        for (int j = 0; j < CLASSES; j++)
            sum += gradient[j] * weight[j * HIDDEN + t.thread];
        const int64_t at = (int64_t)picture * HIDDEN + t.thread;
        t.workspace<__nv_bfloat16>(WS_GRAD_HIDDEN)[at] = __float2bfloat16_rn(h <= 0 ? 0.0f : sum);
        t.workspace<__nv_bfloat16>(WS_HIDDEN)[at] = __float2bfloat16_rn(h);
    }
#pragma unroll
    for (int j = 0; j < CLASSES; j++) // unrolled, since registers have no numbers
        if (t.thread == j)
            t.workspace<float>(WS_GRAD_LOGITS)[picture * 16 + j] = gradient[j];
    if (t.thread == 0) {
        // -sum of wanted * log-probability, with all wanted adding up to 1.
        const float logit = good ? logits[label] - most : CUDART_NAN_F;
        t.workspace<float>(WS_LOSS)[picture] = logf(total) - (1 - smoothing) * logit - share * all;
    }
}

// ---- Backward ----

__device__ __forceinline__ void store_linear1(const Thread &t, const float (&weight)[4][4])
{
    __nv_bfloat16 *to = (__nv_bfloat16 *)(shared + AT_LINEAR1);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *(uint32_t *)(to + (16 * t.warp + t.row + 8 * half) * (PITCH / 2) + 8 * n + 2 * t.quad) =
                pack_pair(weight[n][2 * half], weight[n][2 * half + 1]);
}

__device__ __forceinline__ void load_grad_hidden(const Thread &t, int first, uint4 (&values)[4])
{
    static_assert(CHUNK * HIDDEN * 2 == 4 * THREADS * 16, "");
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int vector = t.thread + i * THREADS, picture = first + vector / 16;
        values[i] = picture < t.a.batch ? __ldcg(t.workspace<const uint4>(WS_GRAD_HIDDEN) + picture * 16 + vector % 16)
                                        : make_uint4(0, 0, 0, 0);
    }
}

// The gradient of this block's slice of the features, then, behind the barrier's back, that of its weights, and their
// update. `weight`: rows 16 warp + row + 8 (e / 2), columns 8 n + 2 quad + e % 2 of the slice.
__device__ __forceinline__ void backward_linear1(const Thread &t, float (&weight)[4][4], float rate)
{
    float sum[4][4] = {};
    const uint32_t hidden = shared_address(shared + AT_HIDDEN), slice = shared_address(shared + AT_SLICE);
    uint4 next[4], next_slice = {0, 0, 0, 0};
    load_grad_hidden(t, 0, next);
    if (t.a.batch > CHUNK) // else the slice is there from forward
        next_slice = slice_of(t, 0);
    for (int first = 0; first < t.a.batch; first += CHUNK) {
        const bool last = first + CHUNK >= t.a.batch;
        if (first)
            __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int vector = t.thread + i * THREADS;
            *(uint4 *)(shared + AT_HIDDEN + vector / 16 * HIDDEN_PITCH + vector % 16 * 16) = next[i];
        }
        if (t.a.batch > CHUNK)
            store_slice(t, next_slice);
        __syncthreads();
        if (!last) {
            load_grad_hidden(t, first + CHUNK, next);
            next_slice = slice_of(t, first + CHUNK);
        }
        const int m = t.warp % 4, n = t.warp / 4;
        float halves[2][2][4] = {}; // of even and odd steps, so that two sums are under way
        const uint32_t left = hidden + 16 * m * HIDDEN_PITCH + below_first(t.lane, HIDDEN_PITCH);
        const uint32_t right = shared_address(shared + AT_LINEAR1) + 32 * n + below_first(t.lane, PITCH);
#pragma unroll
        for (int k = 0; k < HIDDEN / 16; k++) {
            uint32_t a[4], b[4];
            load_matrices(a, left + 32 * k);
            load_matrices_transposed(b, right + 16 * k * PITCH);
            multiply(halves[k % 2][0], a, b[0], b[1]);
            multiply(halves[k % 2][1], a, b[2], b[3]);
        }
        __nv_bfloat16 *to = t.workspace<__nv_bfloat16>(WS_GRAD_POOLED) + t.block * SLICE + 16 * n + 2 * t.quad;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t picture = first + 16 * m + t.row + 8 * half;
                if (picture < t.a.batch)
                    *(uint32_t *)(to + picture * FEATURES + 8 * j) =
                        pack_pair(halves[0][j][2 * half] + halves[1][j][2 * half],
                                  halves[0][j][2 * half + 1] + halves[1][j][2 * half + 1]);
            }
        if (last)
            t.arrive();
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++) {
            uint32_t a[4], b[2][4];
            load_matrices_transposed(a, hidden + 16 * k * HIDDEN_PITCH + 32 * t.warp + beside_first(t.lane, HIDDEN_PITCH));
            load_matrices_transposed(b[0], slice + 16 * k * PITCH + below_first(t.lane, PITCH));
            load_matrices_transposed(b[1], slice + 16 * k * PITCH + 32 + below_first(t.lane, PITCH));
#pragma unroll
            for (int n = 0; n < 4; n++)
                multiply(sum[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            weight[n][e] -= rate * sum[n][e];
    store_linear1(t, weight);
}

// By one block for each class: linear2's gradient and update; the first one also has the loss of the batch.
__device__ __forceinline__ void update_linear2(const Thread &t, int label, int64_t step, float rate)
{
    const cuda_ops_mnist_parameters &p = t.a.parameters;
    static constexpr int PARTS = THREADS / (HIDDEN / 4);
    const int column = t.thread % (HIDDEN / 4), part = t.thread / (HIDDEN / 4);
    const uint2 *hidden = t.workspace<const uint2>(WS_HIDDEN) + column;
    const float *logits = t.workspace<const float>(WS_GRAD_LOGITS) + label;
    float4 *parts = (float4 *)(shared + AT_SCRATCH);
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int i = part; i < t.a.batch; i += PARTS) {
        const uint2 h = __ldcg(hidden + i * (HIDDEN / 4));
        const float g = __ldcg(logits + i * 16);
        sum.x += g * low_of(h.x), sum.y += g * high_of(h.x), sum.z += g * low_of(h.y), sum.w += g * high_of(h.y);
    }
    parts[part * (HIDDEN / 4) + column] = sum;
    // One warp's bias, another's loss; in order by lanes.
    float bias = 0, loss = 0;
    if (t.warp == 6)
        for (int i = t.lane; i < t.a.batch; i += WARP_SIZE)
            bias += __ldcg(logits + i * 16);
    if (t.warp == 7 && label == 0)
        for (int i = t.lane; i < t.a.batch; i += WARP_SIZE)
            loss += __ldcg(t.workspace<const float>(WS_LOSS) + i);
    __syncthreads();
    if (t.thread < HIDDEN) {
        float total = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            total += ((const float *)parts)[i * HIDDEN + t.thread];
        float *weight = p.linear2_weight + label * HIDDEN + t.thread;
        *weight = __ldcg(weight) - rate * total;
    }
    bias = warp_sum(bias), loss = warp_sum(loss);
    if (t.thread == 6 * WARP_SIZE)
        p.linear2_bias[label] = __ldcg(p.linear2_bias + label) - rate * bias;
    if (t.thread == 7 * WARP_SIZE && label == 0)
        t.a.losses[step] = loss / t.a.batch;
}

__device__ __forceinline__ void update_bias1(const Thread &t, float rate)
{
    if (t.thread >= HIDDEN)
        return;
    const __nv_bfloat16 *gradient = t.workspace<const __nv_bfloat16>(WS_GRAD_HIDDEN) + t.thread;
    float sum = 0;
#pragma unroll 16
    for (int i = 0; i < t.a.batch; i++)
        sum += __bfloat162float(__ldcg(gradient + i * HIDDEN));
    float *bias = t.a.parameters.linear1_bias + t.thread;
    *bias = __ldcg(bias) - rate * sum;
}

// The gradient of the features of all pictures of the cluster, this block's half of the channels, to AT_STAGE.
__device__ __forceinline__ void load_stage(const Thread &t)
{
    for (int i = 0; i < t.pictures; i++)
        if (t.thread < STAGE_BYTES / 16) {
            const int64_t picture = t.cluster + i * CLUSTERS;
            ((uint4 *)(shared + AT_STAGE + i * STAGE_BYTES))[t.thread] =
                __ldcg((const uint4 *)(t.workspace<const char>(WS_GRAD_POOLED) + picture * FEATURES * 2 +
                                       t.rank * STAGE_BYTES) +
                       t.thread);
        }
    __syncthreads();
}

// The gradient behind the pooling at this thread's values 4 n + e and 16 + 4 n + e.
__device__ __forceinline__ float staged(const Thread &t, const __nv_bfloat16 *stage, int n, int e)
{
    // Columns from 14 on take the one before.
    const int x = e / 2 && t.row >= 6 ? SIDE2 - 1 : t.row / 2 + e / 2 * 4;
    return __bfloat162float(stage[(8 * n + 2 * t.quad + e % 2) * SIDE2 * SIDE2 + t.warp * SIDE2 + x]);
}

__device__ __forceinline__ void coefficients2(const Thread &t, float rate)
{
    float sum, dot;
    sum_over_clusters(t, t.workspace<const float>(WS_SUMS2), sum, dot);
    if (t.thread % 8 == 0) {
        Small &s = t.small;
        const int c = t.thread / 8;
        const float n = (float)t.a.batch * (SIDE1 * SIDE1), rstd = s.rstd2[c], scale = s.norm_weight2[c] * rstd;
        dot *= rstd;
        const float by_y = __fdividef(-scale * rstd * dot, n);
        s.by_dz[c] = scale;
        s.by_y[c] = by_y;
        s.constant[c] = __fdividef(-scale * sum, n) - by_y * s.mean2[c];
        s.norm_weight2[c] -= rate * dot;
        s.norm_bias2[c] -= rate * sum;
    }
    __syncthreads();
}

// The gradient of convolution 2's output, to shared memory: of the pixels alone, the padding stays zero.
__device__ __forceinline__ void store_gradient2(const Thread &t, const float (&y)[32], uint32_t largest,
                                                const __nv_bfloat16 *stage)
{
    // Garbage columns go to scratch memory, which is quicker than a branch.
    char *const left = shared + AT_GRADIENT + ((2 * t.warp + 1) * MAP_ROW + t.row + 1) * PITCH + 4 * t.quad;
    char *const right = t.row + 8 < SIDE1 ? left + 8 * PITCH : shared + AT_SLICE;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 by_dz = *(const float2 *)(t.small.by_dz + 8 * n + 2 * t.quad);
        const float2 by_y = *(const float2 *)(t.small.by_y + 8 * n + 2 * t.quad);
        const float2 constant = *(const float2 *)(t.small.constant + 8 * n + 2 * t.quad);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float dz0 = by_dz.x * staged(t, stage, n, 2 * half), dz1 = by_dz.y * staged(t, stage, n, 2 * half + 1);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const int at = 16 * m + 4 * n + 2 * half;
                const float first = by_y.x * y[at] + constant.x + (largest >> at & 1 ? dz0 : 0.0f);
                const float second = by_y.y * y[at + 1] + constant.y + (largest >> (at + 1) & 1 ? dz1 : 0.0f);
                *(uint32_t *)((half ? right : left) + m * MAP_ROW * PITCH + 16 * n) = pack_pair(first, second);
            }
        }
    }
}

// What this block's channels say of the gradient of convolution 2's input: gradient[m][r][n]: input channels 16 m + row
// + 8 (e / 2), image row 2 warp + r, pixel 8 n + 2 quad + e % 2.
__device__ __forceinline__ void backward_input2(const Thread &t, float (&gradient)[2][2][2][4])
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        gradient[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0;
    const uint32_t from = shared_address(shared + AT_GRADIENT) + 2 * t.warp * MAP_ROW * PITCH + beside_first(t.lane, PITCH);
    const uint32_t weights = shared_address(shared + AT_WEIGHTS2) + beside_first(t.lane, PITCH);
#pragma unroll 1
    for (int x = 0; x < 3; x++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t b[4][4];
#pragma unroll
            for (int r = 0; r < 4; r++)
                load_matrices(b[r], from + (r * MAP_ROW + x) * PITCH + 32 * k);
#pragma unroll
            for (int dy = 0; dy < 3; dy++)
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint32_t a[4];
                    load_matrices_transposed(a, weights + (((2 - dy) * 3 + 2 - x) * HALF2 + 16 * k) * PITCH + 32 * m);
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        multiply(gradient[m][r][0], a, b[r + dy][0], b[r + dy][1]);
                        multiply(gradient[m][r][1], a, b[r + dy][2], b[r + dy][3]);
                    }
                }
        }
}

// Adds one picture's part to the gradient of convolution 2's weights: sum[tap]: out channels 16 (warp % 2) + row + 8 (e /
// 2), in channels 8 (warp / 2) + 2 quad + e % 2. A row of the map serves three rows of the gradient.
__device__ __forceinline__ void backward_weights2(const Thread &t, uint32_t map, float (&sum)[TAPS][4])
{
    const uint32_t left = shared_address(shared + AT_GRADIENT) + (MAP_ROW + 1) * PITCH + 32 * (t.warp % 2) +
                          beside_first(t.lane, PITCH);
    const uint32_t right = map + 16 * (t.warp / 2) + (t.lane % 16) * PITCH + t.lane / 16 * PITCH;
    uint32_t a[3][4];
#pragma unroll
    for (int row = 0; row < 16; row++) {
        if (row < SIDE1)
            load_matrices_transposed(a[row % 3], left + row * MAP_ROW * PITCH);
        uint32_t b[4], third[4];
        load_matrices_transposed(b, right + row * MAP_ROW * PITCH); // of pixels from x, and from x + 1
        load_matrices_transposed(third, right + (row * MAP_ROW + (t.lane < 16 ? 2 : 1)) * PITCH);
#pragma unroll
        for (int dy = 0; dy < 3; dy++) {
            if (row - dy < 0 || row - dy >= SIDE1)
                continue;
            const uint32_t(&mine)[4] = a[(row - dy) % 3];
            multiply(sum[dy * 3], mine, b[0], b[1]);
            multiply(sum[dy * 3 + 1], mine, b[2], b[3]);
            multiply(sum[dy * 3 + 2], mine, third[0], third[1]);
        }
    }
}

// Sixteen values of each thread to a buffer of the other block of the cluster, whose mbarrier counts their bytes.
__device__ __forceinline__ void send(const Thread &t, uint32_t buffer, uint32_t barrier, const float (&values)[2][2][4])
{
    uint32_t to, their_barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(buffer), "r"(1 - t.rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(their_barrier) : "r"(barrier), "r"(1 - t.rank));
#pragma unroll
    for (int i = 0; i < EXCHANGED / 4; i++) {
        const float(&v)[4] = values[i / 2][i % 2];
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                         to + (i * CONV_WARPS * WARP_SIZE + t.thread) * 16),
                     "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(their_barrier)
                     : "memory");
    }
}

// The first block's sums from one picture: sums[place][n] of channels row + 8 (e / 2) and the pixels 8 n + 2 quad + e %
// 2 of the 4 x 4 under a window, where `place` has the window's maximum; and of the gradients alone.
__device__ __forceinline__ void backward1(const Thread &t, const char *picture, const char *places,
                                          const float (&gradient)[2][2][4], float (&sums)[4][2][4], float (&plain)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int y = 2 * t.warp + r;
        uint32_t packed[4], where[4], b[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) { // rows row + 8 (i % 2), windows 2 quad + 8 (i / 2) and the next
            packed[i] = pack_pair(gradient[r][i / 2][i % 2 * 2], gradient[r][i / 2][i % 2 * 2 + 1]);
            const char *at = places + (y * 16 + i / 2 * 8 + 2 * t.quad) * 16 + t.row + i % 2 * 8;
            const uint32_t low = *(const uint8_t *)at, high = *(const uint8_t *)(at + 16);
            packed[i] &= (low == 4 ? 0 : 0xffffu) | (high == 4 ? 0 : 0xffff0000u);
            where[i] = low | high << 8;
            plain[i % 2] += low_of(packed[i]) + high_of(packed[i]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const char *at = picture + ((2 * y + 2 * n + t.row / 4) * PICTURE_ROW + 2 * (8 * half + 2 * t.quad) +
                                            t.row % 4) * 2;
                b[n][half] = two_halves(at, at + 4);
            }
#pragma unroll
        for (int place = 0; place < 4; place++) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = packed[i] & (((where[i] & 255) == place ? 0xffffu : 0u) |
                                    (where[i] >> 8 == place ? 0xffff0000u : 0u));
            multiply(sums[place][0], a, b[0][0], b[0][1]);
            multiply(sums[place][1], a, b[1][0], b[1][1]);
        }
    }
}

// The sums of all warps, turned from places and pixels into taps: to WS_SUMS1.
__device__ __forceinline__ void store_sums1(const Thread &t, const float (&sums)[4][2][4], float (&plain)[2])
{
    float *warps = (float *)(shared + AT_EXCHANGE), *sum_dz = warps + CONV_WARPS * 4 * 16 * 16; // on into AT_HIDDEN
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
            plain[i] += __shfl_xor_sync(FULL_WARP, plain[i], lanes);
    __syncthreads(); // the other block's values have been read
    if (t.warp < CONV_WARPS) {
#pragma unroll
        for (int place = 0; place < 4; place++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(float2 *)(warps + ((t.warp * 4 + place) * 16 + t.row + 8 * half) * 16 + 8 * n + 2 * t.quad) =
                        make_float2(sums[place][n][2 * half], sums[place][n][2 * half + 1]);
        if (t.quad == 0)
            sum_dz[t.warp * 16 + t.row] = plain[0], sum_dz[t.warp * 16 + t.row + 8] = plain[1];
    }
    __syncthreads();
    if (t.thread < 16 * GRAM_SIDE) {
        const int channel = t.thread / GRAM_SIDE, tap = t.thread % GRAM_SIDE;
        float total = 0;
        if (tap < TAPS) {
#pragma unroll
            for (int w = 0; w < CONV_WARPS; w++)
#pragma unroll
                for (int place = 0; place < 4; place++)
                    total += warps[((w * 4 + place) * 16 + channel) * 16 + (place / 2 + tap / 3) * 4 + place % 2 + tap % 3];
        } else {
#pragma unroll
            for (int w = 0; w < CONV_WARPS; w++)
                total += sum_dz[w * 16 + channel];
        }
        t.workspace<float>(WS_SUMS1)[(t.cluster * CHANNELS1 + t.rank * 16 + channel) * SUMS1 + tap] = total;
    }
}
static_assert(CONV_WARPS * (4 * 16 + 1) * 16 * 4 <= EXCHANGE_BYTES + HIDDEN_BYTES, "");

// Gradients of both weights and of the first convolution's sums, for all pictures of the cluster; `y` and `largest`
// are those of the only picture, or in the workspace. `exchanges`: the phases of the two buffers' mbarriers.
__device__ __forceinline__ void backward_conv2(const Thread &t, int64_t step, float (&y)[32], uint32_t largest,
                                               uint32_t &exchanges)
{
    float weights[TAPS][4] = {}, sums[4][2][4] = {}, plain[2] = {0, 0};
    if (t.pictures > 1)
        largest = unspill(t, 0, y);
    for (int i = 0; i < t.pictures; i++) {
        const uint32_t map = shared_address(shared + AT_MAPS + i * MAP_BYTES);
        if (i)
            __syncthreads(); // the gradient of the picture before has been read
        if (t.warp < CONV_WARPS)
            store_gradient2(t, y, largest, (const __nv_bfloat16 *)(shared + AT_STAGE + i * STAGE_BYTES));
        __syncthreads();
        // Buffers in turn: what has come from the other block tells that all its threads have read what was sent before
        // the last time. The second buffer, scratch memory otherwise, is first written when this block has sent
        // something, and so has done with that.
        const uint32_t buffer = shared_address(shared + (i % 2 ? AT_HIDDEN : AT_EXCHANGE));
        const uint32_t barrier = shared_address(&t.small.arrived[i % 2]);
        float gradient[2][2][2][4];
        if (t.warp < CONV_WARPS) {
            if (t.thread == 0)
                bulk_expect(barrier, EXCHANGE_BYTES);
            backward_input2(t, gradient);
            if (t.rank == 0)
                send(t, buffer, barrier, gradient[1]);
            else
                send(t, buffer, barrier, gradient[0]);
        }
        backward_weights2(t, map, weights);
        if (t.warp < CONV_WARPS) {
            bulk_wait(barrier, exchanges >> i % 2 & 1);
            const float4 *other = (const float4 *)(shared + (i % 2 ? AT_HIDDEN : AT_EXCHANGE)) + t.thread;
            float mine[2][2][4];
#pragma unroll
            for (int j = 0; j < EXCHANGED / 4; j++) {
                const float4 theirs = other[j * CONV_WARPS * WARP_SIZE];
                const float(&ours)[4] = (t.rank == 0 ? gradient[0] : gradient[1])[j / 2][j % 2];
                float(&sum)[4] = mine[j / 2][j % 2];
                sum[0] = ours[0] + theirs.x, sum[1] = ours[1] + theirs.y;
                sum[2] = ours[2] + theirs.z, sum[3] = ours[3] + theirs.w;
            }
            backward1(t, picture_of(step, i), shared + AT_PLACES + i * PLACES_BYTES, mine, sums, plain);
        }
        exchanges ^= 1 << i % 2;
        if (i + 1 < t.pictures) // here rather than at the top: y need not outlive its use
            largest = unspill(t, i + 1, y);
    }
    float *to = t.workspace<float>(WS_GRAD_WEIGHTS2) + (int64_t)t.cluster * WEIGHTS2;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int channel = t.rank * HALF2 + 16 * (t.warp % 2) + t.row + 8 * half;
            __stcg((float2 *)(to + (tap * CHANNELS2 + channel) * CHANNELS1 + 8 * (t.warp / 2) + 2 * t.quad),
                   make_float2(weights[tap][2 * half], weights[tap][2 * half + 1]));
        }
    store_sums1(t, sums, plain);
}

// ---- The convolutions' update ----

// Convolution 2's weights [tap][out][in] from here on are [out][in][tap] in the parameter.
__device__ __forceinline__ int parameter_of_weight2(int weight)
{
    return weight % (CHANNELS2 * CHANNELS1) * TAPS + weight / (CHANNELS2 * CHANNELS1);
}

// Both convolutions' updates: every block has some of the second one's weights (`weight`: of the first threads), and
// the last ones a channel of the first one each, which their last warp sees to at the same time; `channel` < 0: none.
__device__ __forceinline__ void update_convolutions(const Thread &t, float &weight, int channel, float rate)
{
    static constexpr int VECTORS = OWN_WEIGHTS2 / 4, GROUPS = THREADS / VECTORS, EACH = (CLUSTERS + GROUPS - 1) / GROUPS;
    static constexpr int GROUPS1 = 16, EACH1 = CLUSTERS / GROUPS1;
    static_assert(OWN_WEIGHTS2 <= (WARPS - 1) * WARP_SIZE, "the last warp has other work");
    float *groups = (float *)(shared + AT_SCRATCH), *groups1 = groups + GROUPS * OWN_WEIGHTS2;
    const float *partials = t.workspace<const float>(WS_GRAD_WEIGHTS2) + t.block * OWN_WEIGHTS2;
    const int vector = t.thread % VECTORS, group = t.thread / VECTORS;
    float4 values[EACH];
    float sums[EACH1] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int cluster = group + i * GROUPS;
        values[i] = group < GROUPS && cluster < CLUSTERS
                        ? __ldcg((const float4 *)(partials + (int64_t)cluster * WEIGHTS2) + vector)
                        : make_float4(0, 0, 0, 0);
    }
    const int which = t.thread % 16, group1 = t.thread / 16;
    if (channel >= 0 && which < GRAM_SIDE)
#pragma unroll
        for (int i = 0; i < EACH1; i++)
            sums[i] = __ldcg(t.workspace<const float>(WS_SUMS1) +
                             ((group1 * EACH1 + i) * CHANNELS1 + channel) * SUMS1 + which);
    if (group < GROUPS) {
        float4 sum = values[0];
#pragma unroll
        for (int i = 1; i < EACH; i++)
            sum.x += values[i].x, sum.y += values[i].y, sum.z += values[i].z, sum.w += values[i].w;
        ((float4 *)groups)[group * VECTORS + vector] = sum;
    }
    if (channel >= 0)
        groups1[group1 * 16 + which] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    static_assert(EACH1 == 4, "");
    __syncthreads();
    if (t.thread < OWN_WEIGHTS2) {
        float total = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            total += groups[g * OWN_WEIGHTS2 + t.thread];
        weight -= rate * total;
        const int at = t.block * OWN_WEIGHTS2 + t.thread;
        t.workspace<__nv_bfloat16>(WS_WEIGHTS2)[at] = __float2bfloat16_rn(weight);
    }
    if (channel < 0 || t.warp != WARPS - 1)
        return;
    // A lane a tap; the tenth has the sum of dz.
    const Small &s = t.small;
    const cuda_ops_mnist_block &block = t.a.parameters.block1;
    const int tap = t.lane < TAPS ? t.lane : 0;
    float total = 0, product = 0;
#pragma unroll
    for (int g = 0; g < GROUPS1; g++)
        total += groups1[g * 16 + (t.lane < GRAM_SIDE ? t.lane : 0)];
    const float sum_dz = __shfl_sync(FULL_WARP, total, TAPS), centered = total - sum_dz * s.moments[tap];
    const __nv_bfloat16 *kernel = s.kernel1 + channel * KERNEL1;
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        product += s.moments[TAPS + tap * TAPS + j] * __bfloat162float(kernel[in_kernel1(j)]);
    const float mine = t.lane < TAPS ? __bfloat162float(kernel[in_kernel1(tap)]) : 0.0f;
    const float variance = warp_sum(mine * product), rstd = rsqrtf((variance < 0 ? 0 : variance) + block.eps);
    const float dot = rstd * warp_sum(mine * centered);
    if (t.lane < TAPS) {
        float *parameter = block.weight + channel * TAPS + tap;
        *parameter = __ldcg(parameter) - rate * rstd * s.norm_weight1[channel] * (centered - dot * rstd * product);
    }
    if (t.lane == 0) {
        block.norm_weight[channel] = s.norm_weight1[channel] - rate * dot;
        block.norm_bias[channel] = s.norm_bias1[channel] - rate * sum_dz;
    }
}

// ---- The kernel ----

// Everything in shared memory that is never written but has to be zero, the parameters that stay in the block, and the
// first batch.
__device__ __forceinline__ void start(Thread &t, float (&linear1)[4][4], float &weight2)
{
    for (int i = t.thread; i < AT_SMALL / 16; i += THREADS)
        ((uint4 *)shared)[i] = make_uint4(0, 0, 0, 0);
    const cuda_ops_mnist_parameters &p = t.a.parameters;
    if (t.thread < CHANNELS1) {
        const int c = t.thread, second = t.rank * HALF2 + c;
        Small &s = t.small;
        s.running_mean1[c] = p.block1.running_mean[c], s.running_variance1[c] = p.block1.running_variance[c];
        s.running_mean2[c] = p.block2.running_mean[second];
        s.running_variance2[c] = p.block2.running_variance[second];
        s.norm_weight2[c] = p.block2.norm_weight[second], s.norm_bias2[c] = p.block2.norm_bias[second];
        s.bias2[c] = p.block2.bias ? p.block2.bias[second] : 0.0f;
    }
    if (t.thread < CHANNELS1 * KERNEL1 / 8)
        ((uint4 *)t.small.kernel1)[t.thread] = make_uint4(0, 0, 0, 0);
    static_assert(CHANNELS1 * KERNEL1 / 8 <= THREADS && offsetof(Small, kernel1) % 16 == 0, "");
    if (t.thread == 0) {
        bulk_barrier_init(shared_address(&t.small.arrived[0]));
        bulk_barrier_init(shared_address(&t.small.arrived[1]));
    }
    look_up(t, 0);
    __syncthreads();
    for (int i = t.thread; i < PICTURES * PLACES_BYTES / 4; i += THREADS)
        ((uint32_t *)(shared + AT_PLACES))[i] = 0x04040404u; // of what is no window
    if (t.thread < OWN_WEIGHTS2) {
        const int at = t.block * OWN_WEIGHTS2 + t.thread;
        weight2 = p.block2.weight[parameter_of_weight2(at)];
        t.workspace<__nv_bfloat16>(WS_WEIGHTS2)[at] = __float2bfloat16_rn(weight2);
    }
    if (t.block < SLICES) {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 pair = *(const float2 *)(p.linear1_weight + (16 * t.warp + t.row + 8 * half) * FEATURES +
                                                      t.block * SLICE + 8 * n + 2 * t.quad);
                linear1[n][2 * half] = pair.x, linear1[n][2 * half + 1] = pair.y;
            }
        store_linear1(t, linear1);
    }
    load_pictures(t, 0);
    __syncthreads();
    gram(t, 0);
    t.arrive();
    t.wait();
    if (t.block == MOMENTS_BLOCK)
        add_grams(t);
    t.arrive();
    t.wait();
}

__device__ __forceinline__ void finish(const Thread &t, const float (&linear1)[4][4], float weight2)
{
    const cuda_ops_mnist_parameters &p = t.a.parameters;
    const Small &s = t.small;
    if (t.block < SLICES)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)(p.linear1_weight + (16 * t.warp + t.row + 8 * half) * FEATURES + t.block * SLICE + 8 * n +
                            2 * t.quad) = make_float2(linear1[n][2 * half], linear1[n][2 * half + 1]);
    if (t.thread < OWN_WEIGHTS2)
        p.block2.weight[parameter_of_weight2(t.block * OWN_WEIGHTS2 + t.thread)] = weight2;
    if (t.cluster == 0 && t.thread < HALF2) {
        const int c = t.thread, second = t.rank * HALF2 + c;
        p.block2.running_mean[second] = s.running_mean2[c];
        p.block2.running_variance[second] = s.running_variance2[c];
        p.block2.norm_weight[second] = s.norm_weight2[c], p.block2.norm_bias[second] = s.norm_bias2[c];
        if (t.rank == 0) {
            p.block1.running_mean[c] = s.running_mean1[c];
            p.block1.running_variance[c] = s.running_variance1[c];
            if (c == 0) {
                if (p.block1.batches)
                    *p.block1.batches += t.a.steps;
                if (p.block2.batches)
                    *p.block2.batches += t.a.steps;
            }
        }
    }
    // The last block to leave puts the barrier back: nobody looks at it any more.
    if (t.thread == 0) {
        unsigned int *barrier = t.workspace<unsigned int>(WS_BARRIER);
        if (atomicAdd(barrier + 1, 1) == BLOCKS - 1)
            barrier[0] = barrier[1] = 0;
    }
}

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) mnist_step_kernel(const __grid_constant__ Arguments a)
{
    Thread t = {a, *(Small *)(shared + AT_SMALL), (int)threadIdx.x};
    t.lane = t.thread % WARP_SIZE, t.warp = warp_uniform(t.thread / WARP_SIZE);
    t.row = t.lane / 4, t.quad = t.lane % 4;
    t.block = blockIdx.x, t.cluster = t.block / 2, t.rank = t.block % 2;
    t.pictures = a.batch <= t.cluster ? 0 : (a.batch - t.cluster + CLUSTERS - 1) / CLUSTERS;
    t.phase = 0;
    float linear1[4][4], weight2 = 0;
    uint32_t exchanges = 0;
    start(t, linear1, weight2);

    for (int64_t step = 0; step < a.steps; step++) {
        const float conv_rate = a.rates[2 * step], linear_rate = a.rates[2 * step + 1];
        const bool more = step + 1 < a.steps;
        const bool several = t.pictures > 1;
        float y[32];
        uint32_t largest = 0;

        // weights -> statistics
        statistics1(t);
        {
            uint32_t weights[16][2];
            weights_of_forward1(t, weights);
            for (int i = 0; i < t.pictures; i++)
                forward1(t, picture_of(step, i), shared + AT_MAPS + i * MAP_BYTES, shared + AT_PLACES + i * PLACES_BYTES,
                         weights);
        }
        copy_async_wait<0>();
        __syncthreads();
        {
            float first[8] = {}, second[8] = {};
            for (int i = 0; i < t.pictures; i++)
                if (t.warp < CONV_WARPS) {
                    forward2(t, shared_address(shared + AT_MAPS + i * MAP_BYTES), y);
                    float center[8];
#pragma unroll
                    for (int c = 0; c < 8; c++)
                        center[c] = center2(t, c / 2 * 8 + 2 * t.quad + c % 2);
#pragma unroll
                    for (int j = 0; j < 32; j++) {
                        const float d = is_pixel(t, j) ? y[j] - center[j / 4 % 4 * 2 + j % 2] : 0;
                        first[j / 4 % 4 * 2 + j % 2] += d;
                        second[j / 4 % 4 * 2 + j % 2] += d * d;
                    }
                    if (several)
                        spill(t, i, y);
                }
            sum_over_pixels(t, first, second, t.workspace<float>(WS_STATISTICS));
        }
        t.arrive();
        if (more)
            look_up(t, step + 1);
        t.wait();

        // statistics -> pooled
        statistics2(t);
        for (int i = 0; i < t.pictures && t.warp < CONV_WARPS; i++) {
            if (several)
                unspill(t, i, y);
            largest = pool2(t, y, (__nv_bfloat16 *)(shared + AT_STAGE + i * STAGE_BYTES));
            if (several)
                __stcg(spill_of(t, i) + 32 * THREADS, __uint_as_float(largest));
        }
        __syncthreads();
        for (int i = 0; i < t.pictures; i++)
            if (t.thread < STAGE_BYTES / 16)
                ((uint4 *)(t.workspace<char>(WS_POOLED) + (int64_t)(t.cluster + i * CLUSTERS) * FEATURES * 2 +
                           t.rank * STAGE_BYTES))[t.thread] =
                    ((const uint4 *)(shared + AT_STAGE + i * STAGE_BYTES))[t.thread];
        t.arrive();
        if (more)
            load_pictures(t, step + 1);
        load_linear2(t);
        t.wait();

        // pooled -> partials
        if (t.block < SLICES)
            forward_linear1(t);
        t.arrive();
        if (more)
            gram(t, step + 1);
        t.wait();

        // partials -> hidden
        {
            float4 values[HEAD_PARTS];
            if (t.rank < t.pictures)
                load_partials(t, t.cluster + t.rank * CLUSTERS, values);
            for (int i = t.rank; i < t.pictures; i += 2) {
                if (i >= 2)
                    __syncthreads();
                const int picture = t.cluster + i * CLUSTERS;
                head(t, picture, t.small.label[step % 2][i], picture + 2 * CLUSTERS, values);
            }
        }
        t.arrive();
        t.wait();

        // hidden -> features
        if (t.block < SLICES) {
            backward_linear1(t, linear1, linear_rate); // arrives
        } else {
            t.arrive();
            if (t.block < LINEAR2_BLOCKS + CLASSES)
                update_linear2(t, t.block - LINEAR2_BLOCKS, step, linear_rate);
            else if (t.block == BIAS1_BLOCK)
                update_bias1(t, linear_rate);
            else if (t.block == MOMENTS_BLOCK && more)
                add_grams(t);
        }
        t.wait();

        // features -> sums
        load_stage(t);
        {
            float first[8] = {}, second[8] = {};
            for (int i = 0; i < t.pictures; i++)
                if (t.warp < CONV_WARPS) {
                    if (several)
                        largest = unspill(t, i, y);
                    const __nv_bfloat16 *stage = (const __nv_bfloat16 *)(shared + AT_STAGE + i * STAGE_BYTES);
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const float2 mean = *(const float2 *)(t.small.mean2 + 8 * n + 2 * t.quad);
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float gradient = staged(t, stage, n, e);
#pragma unroll
                            for (int m = 0; m < 2; m++) {
                                const int at = 16 * m + 4 * n + e;
                                const float dz = largest >> at & 1 ? gradient : 0.0f;
                                first[2 * n + e % 2] += dz;
                                second[2 * n + e % 2] += dz * (y[at] - (e % 2 ? mean.y : mean.x));
                            }
                        }
                    }
                }
            sum_over_pixels(t, first, second, t.workspace<float>(WS_SUMS2));
        }
        t.arrive();
        t.wait();

        // sums -> gradients
        coefficients2(t, conv_rate);
        backward_conv2(t, step, y, largest, exchanges);
        t.arrive();
        t.wait();

        // gradients -> weights
        update_convolutions(t, weight2, t.block - CONV1_BLOCKS, conv_rate);
        t.arrive();
        t.wait();
    }
    finish(t, linear1, weight2);
}

#endif

int cuda_ops_mnist_step_supported(int64_t batch)
{
#ifdef CUDA_OPS_SM90A
    int device = 0, major = 0, processors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return 0;
    return major == 9 && processors >= BLOCKS && batch >= 1 && batch <= CUDA_OPS_MNIST_STEP_MOST;
#else
    (void)batch;
    return 0;
#endif
}

int64_t cuda_ops_mnist_step_workspace(void)
{
    return WORKSPACE_BYTES;
}

cuda_ops_status cuda_ops_mnist_step_cuda(float *losses, const cuda_ops_mnist_parameters *parameters, void *workspace,
                                         cuda_ops_index_error *error, const uint8_t *images, const int64_t *labels,
                                         int64_t count, const int64_t *indices, const float *rates, int64_t steps,
                                         int64_t batch, double mean, double std, double label_smoothing,
                                         cuda_ops_stream stream)
{
    if (!cuda_ops_mnist_step_supported(batch) || steps < 0 || steps > MOST_STEPS || (uintptr_t)images % 4 != 0 ||
        (uintptr_t)workspace % 256 != 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (steps == 0)
        return CUDA_OPS_SUCCESS;
#ifdef CUDA_OPS_SM90A
    const Arguments arguments = {losses,
                                 *parameters,
                                 (char *)workspace,
                                 error,
                                 images,
                                 labels,
                                 indices,
                                 rates,
                                 count,
                                 steps,
                                 (int)batch,
                                 (float)(255 * mean),
                                 (float)(1 / (255 * std)),
                                 (float)label_smoothing};
    cudaFuncSetAttribute(mnist_step_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative; // all blocks at once, or none
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = BLOCKS;
    config.blockDim = THREADS;
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, mnist_step_kernel, arguments);
    return launch_status();
#else
    (void)losses, (void)parameters, (void)error, (void)labels, (void)count, (void)indices, (void)rates, (void)mean;
    (void)std, (void)label_smoothing, (void)stream;
    return CUDA_OPS_UNSUPPORTED_DTYPE;
#endif
}
