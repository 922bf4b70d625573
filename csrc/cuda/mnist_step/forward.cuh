// mnist_step: forward of both blocks (convolution, batch norm, ReLU, max-pool).
#ifndef CUDA_OPS_MNIST_STEP_FORWARD_CUH
#define CUDA_OPS_MNIST_STEP_FORWARD_CUH

#include "mnist_step/thread.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The index in the workspace of weight [tap][out][in] of convolution 2: with the pitch of shared memory, where a block
// copies all weights.
template <class L>
__device__ __forceinline__ int weight2_of(int weight)
{
    return L::MEMBERS == 1 ? weight / CHANNELS1 * (PITCH / 2) + weight % CHANNELS1 : weight;
}

// Starts the copies of this block's part of convolution 2's weights to shared memory.
template <class L>
__device__ __forceinline__ void start_weights2(const Thread<L> &t)
{
    const char *source = t.template workspace<const char>(WS_WEIGHTS2);
    if constexpr (L::MEMBERS == 1) {
        // One bulk copy: cp.async by all threads would delay everything else.
        static constexpr int BYTES = TAPS * CHANNELS2 * PITCH;
        if (t.thread == 0 && t.images) {
            fence_proxy_async_global();
            const uint32_t arrived = shared_address(&t.small.mapped);
            mbarrier_arrive_expect_tx(arrived, BYTES);
            bulk_load(shared_address(shared + L::AT_WEIGHTS2), source, BYTES, arrived);
        }
    } else {
        for (int i = t.thread; i < TAPS * L::CHANNELS * 4; i += THREADS) {
            const int tap = i / (L::CHANNELS * 4), channel = i / 4 % L::CHANNELS;
            cp_async_16(shared_address(shared + L::AT_WEIGHTS2) + (i / 4) * PITCH + i % 4 * 16,
                        source + ((tap * CHANNELS2 + t.member * L::CHANNELS + channel) * CHANNELS1) * 2 + i % 4 * 16);
        }
        cp_async_commit_group();
    }
}

__device__ __forceinline__ int in_kernel1(int tap)
{
    return (1 + tap / 3) * KERNEL1_ROW + 1 + tap % 3;
}

// The scale and shift of the first block, from the taps' moments and the current weights.
template <class L>
__device__ __forceinline__ void statistics1(const Thread<L> &t)
{
    static_assert(CHANNELS1 * TAPS <= 2 * THREADS && 2 * CHANNELS1 + MOMENTS <= THREADS, "");
    Small<L> &s = t.small;
    const cuda_ops_mnist_block &block = t.a.parameters.block1;
    // All loads are issued before the first is needed.
    const int norm = t.thread - MOMENTS, second = t.thread + THREADS;
    const float weight = __ldcg(block.weight + t.thread);
    const float another = second < CHANNELS1 * TAPS ? __ldcg(block.weight + second) : 0.0f;
    const float other = t.thread < MOMENTS     ? __ldcg(t.template workspace<const float>(WS_MOMENTS) + t.thread)
                        : norm < CHANNELS1     ? __ldcg(block.norm_weight + norm)
                        : norm < 2 * CHANNELS1 ? __ldcg(block.norm_bias + norm - CHANNELS1)
                        : norm < 3 * CHANNELS1 && block.bias ? block.bias[norm - 2 * CHANNELS1]
                                                             : 0.0f;
    start_weights2(t);
    s.kernel1[t.thread / TAPS * KERNEL1 + in_kernel1(t.thread % TAPS)] = __float2bfloat16_rn(weight);
    if (second < CHANNELS1 * TAPS)
        s.kernel1[second / TAPS * KERNEL1 + in_kernel1(second % TAPS)] = __float2bfloat16_rn(another);
    float *biases = (float *)(shared + L::AT_SCRATCH);
    if (t.thread < MOMENTS)
        s.moments[t.thread] = other;
    else if (norm < CHANNELS1)
        s.norm_weight1[norm] = other;
    else if (norm < 2 * CHANNELS1)
        s.norm_bias1[norm - CHANNELS1] = other;
    else if (norm < 3 * CHANNELS1)
        biases[norm - 2 * CHANNELS1] = other;
    __syncthreads();
    // Eight lanes a channel, one row of the covariance each, and the first lane the ninth row too.
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
        s.running_variance1[channel] +=
            block.momentum * (variance * __fdividef(n, n - 1) - s.running_variance1[channel]);
    }
    __syncthreads();
}

// How many of the two groups of 16 channels a warp computes of an image row; how many warps a row has; and how many
// rows of an image a block computes.
template <class L>
static constexpr int GROUPS1 = L::MEMBERS == 2 ? 2 : 1;
template <class L>
static constexpr int WARPS1 = 2 / GROUPS1<L>;
template <class L>
static constexpr int ROWS1 = SIDE1 / L::MEMBERS;
template <class L>
__device__ __forceinline__ int group_of(const Thread<L> &t, int g)
{
    return GROUPS1<L> == 2 ? g : t.warp % 2;
}

// Block 1 forward, for this block's share of the rows: all rows of its own images, or every second row for both blocks
// of the cluster. Its output goes to AT_MAPS, and the argmax in each pooling window (4: none, rectified away) to
// AT_ARGMAX of the block that has the channel. The 4 x 4 pixels under a pooling window are k of the product; its
// columns are the channels at each of the four positions in the window: channel 16 (h / 2) + 4 quad + 2 (h % 2) + i is
// column 2 quad + i of tile h. `first`, `end`, `by`: the rows of a warp, counted through the images.
template <class L>
__device__ __forceinline__ void forward1(const Thread<L> &t, int64_t step, int first, int end, int by,
                                         const uint32_t (&weights)[8 * GROUPS1<L>][2])
{
    uint32_t theirs = 0, arrived = 0;
    if constexpr (L::MEMBERS == 2) {
        theirs = of_other(t, shared_address(shared)), arrived = of_other(t, shared_address(&t.small.mapped));
        if (t.thread == 0 && t.images)
            mbarrier_arrive_expect_tx(shared_address(&t.small.mapped), t.images * ROWS_BYTES);
    }
    static constexpr int EACH = 2 * GROUPS1<L>, ROWS = ROWS1<L>;
    for (int row = first; row < end; row += by) {
        const int number = row / ROWS, y = row % ROWS * L::MEMBERS + t.member;
        const char *image = image_of<L>(step, number);
        uint32_t a[4];
        const char *at = image + ((2 * y + t.quad / 2) * IMAGE_ROW + 2 * t.row + t.quad % 2 * 2) * 2;
        a[0] = *(const uint32_t *)at;
        a[1] = *(const uint32_t *)(at + 32);
        a[2] = *(const uint32_t *)(at + 4 * IMAGE_ROW);
        a[3] = *(const uint32_t *)(at + 4 * IMAGE_ROW + 32);
        float product[4 * EACH][4];
#pragma unroll
        for (int j = 0; j < 4 * EACH; j++) {
            product[j][0] = product[j][1] = product[j][2] = product[j][3] = 0;
            mma_sync<__nv_bfloat16>(product[j], a, weights[j][0], weights[j][1]);
        }
#pragma unroll
        for (int g = 0; g < GROUPS1<L>; g++) {
            const int group = group_of(t, g);
            const float4 scale = *(const float4 *)(t.small.scale1 + 16 * group + 4 * t.quad);
            const float4 shift = *(const float4 *)(t.small.shift1 + 16 * group + 4 * t.quad);
            const float scales[4] = {fabsf(scale.x), fabsf(scale.y), fabsf(scale.z), fabsf(scale.w)};
            const float shifts[4] = {shift.x, shift.y, shift.z, shift.w};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int x = t.row + 8 * half;
                float largest[4];
                uint32_t argmax[4] = {0, 0, 0, 0};
#pragma unroll
                for (int c = 0; c < 4; c++)
                    largest[c] = product[2 * g + c / 2][2 * half + c % 2];
#pragma unroll
                for (int p = 1; p < 4; p++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const float value = product[EACH * p + 2 * g + c / 2][2 * half + c % 2];
                        argmax[c] = value > largest[c] ? p : argmax[c];
                        largest[c] = fmaxf(largest[c], value);
                    }
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const float z = largest[c] * scales[c] + shifts[c];
                    argmax[c] = z > 0 ? argmax[c] : 4;
                    largest[c] = z <= 0 ? 0 : z; // NaN stays
                }
                if (x >= SIDE1)
                    continue;
                const uint2 values = make_uint2(pack_pair(largest[0], largest[1]), pack_pair(largest[2], largest[3]));
                const uint32_t packed_argmax = argmax[0] | argmax[1] << 8 | argmax[2] << 16 | argmax[3] << 24;
                if constexpr (L::MEMBERS == 1) {
                    const int pixel = (y + 1) * 16 + x + 1, vector = (2 * group + t.quad / 2) ^ (pixel >> 1 & 3);
                    *(uint2 *)(shared + L::AT_MAPS + number * TILE_BYTES + pixel * TILE_PIXEL + vector * 16 +
                               t.quad % 2 * 8) = values;
                    *(uint32_t *)(shared + L::AT_ARGMAX + number * L::ARGMAX_BYTES + (y * 16 + x) * CHANNELS1 +
                                  16 * group + 4 * t.quad) = packed_argmax;
                    continue;
                }
                const int map =
                    L::AT_MAPS + number * MAP_BYTES + ((y + 1) * MAP_ROW + x + 1) * PITCH + 32 * group + 8 * t.quad;
                *(uint2 *)(shared + map) = values;
                st_async(theirs + map, values, arrived);
                const int where = L::AT_ARGMAX + number * L::ARGMAX_BYTES + (y * 16 + x) * 16 + 4 * t.quad;
                if (group == t.rank)
                    *(uint32_t *)(shared + where) = packed_argmax;
                else
                    st_async(theirs + where, packed_argmax, arrived);
            }
        }
    }
}

// B's fragments of forward1. Where a channel's scale is negative, so are its weights here: the largest product is then
// the largest output.
template <class L>
__device__ __forceinline__ void weights_of_forward1(const Thread<L> &t, uint32_t (&weights)[8 * GROUPS1<L>][2])
{
    static constexpr int EACH = 2 * GROUPS1<L>;
    uint32_t sign[EACH];
#pragma unroll
    for (int h = 0; h < EACH; h++)
        sign[h] =
            t.small.scale1[16 * group_of(t, h / 2) + t.row / 2 * 4 + 2 * (h % 2) + t.row % 2] < 0 ? 0x80008000u : 0;
    const __nv_bfloat16 *kernel =
        t.small.kernel1 + (t.row / 2 * 4 + t.row % 2) * KERNEL1 + (t.quad / 2 + 1) * KERNEL1_ROW + t.quad % 2 * 2 + 1;
#pragma unroll
    for (int j = 0; j < 4 * EACH; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int h = j % EACH, position = j / EACH;
            const char *at = (const char *)(kernel + (16 * group_of(t, h / 2) + 2 * (h % 2)) * KERNEL1 +
                                            (2 * half - position / 2) * KERNEL1_ROW - position % 2);
            weights[j][half] = two_halves(at, at + 2) ^ sign[h];
        }
}

// Convolution 2 of this block's channels: y[16 m + 4 n + e] is row 2 warp + m, pixel row + 8 (e / 2), channel 8 n + 2
// quad + e % 2. Pixels from 14 on are garbage.
template <class L>
__device__ __forceinline__ void forward2(const Thread<L> &t, float (&y)[32])
{
    float sum[2][4][4];
#pragma unroll
    for (int i = 0; i < 32; i++)
        sum[i / 16][i / 4 % 4][i % 4] = 0;
    const uint32_t from =
        shared_address(shared + L::AT_MAPS) + 2 * t.warp * MAP_ROW * PITCH + below_first(t.lane, PITCH);
    const uint32_t weights = shared_address(shared + L::AT_WEIGHTS2) + beside_first(t.lane, PITCH);
#pragma unroll 1
    for (int x = 0; x < 3; x++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t a[4][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                ldmatrix_x4(a[i], from + (i * MAP_ROW + x) * PITCH + 32 * k);
#pragma unroll
            for (int dy = 0; dy < 3; dy++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    uint32_t b[4];
                    ldmatrix_x4(b, weights + ((dy * 3 + x) * HALF2 + 16 * n) * PITCH + 32 * k);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma_sync<__nv_bfloat16>(sum[m][2 * n], a[m + dy], b[0], b[1]);
                        mma_sync<__nv_bfloat16>(sum[m][2 * n + 1], a[m + dy], b[2], b[3]);
                    }
                }
        }
#pragma unroll
    for (int i = 0; i < 32; i++)
        y[i] = sum[i / 16][i / 4 % 4][i % 4];
}

// What a thread saves of its image from forward to backward: convolution 2's output, rounded, and which of its values
// are the maxima of their windows.
struct Kept {
    uint32_t y[16], largest;

    __device__ __forceinline__ void pack(const float (&values)[32])
    {
#pragma unroll
        for (int i = 0; i < 16; i++)
            y[i] = pack_pair(values[2 * i], values[2 * i + 1]);
    }
    __device__ __forceinline__ void unpack(float (&values)[32]) const
    {
#pragma unroll
        for (int i = 0; i < 16; i++)
            values[2 * i] = low_of(y[i]), values[2 * i + 1] = high_of(y[i]);
    }
};

// The value that the second block's variance is computed around: any number near the mean will do, the same in all
// blocks.
template <class L>
__device__ __forceinline__ float center2(const Thread<L> &t, int channel)
{
    return t.small.running_mean2[channel] - t.small.bias2[channel];
}

template <class L>
__device__ __forceinline__ bool is_pixel(const Thread<L> &t, int e)
{
    return t.row + e / 2 % 2 * 8 < SIDE1;
}

template <class L>
__device__ __forceinline__ void statistics2(const Thread<L> &t)
{
    float sum, squares;
    sum_over_owners(t, t.template workspace<const float>(WS_STATISTICS), sum, squares);
    if (t.thread % CHANNEL_LANES<L> == 0) {
        Small<L> &s = t.small;
        const int c = t.thread / CHANNEL_LANES<L>;
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

// Batch norm, ReLU and max-pool: the features to `stage`, [channel][7][7]. The bits of the result say which of this
// thread's values are the maximum of their window and above 0, the first of equal ones. Columns x and x + 1 are in
// lanes that differ by 4.
template <class L>
__device__ __forceinline__ uint32_t pool2(const Thread<L> &t, const float (&y)[32], __nv_bfloat16 *stage)
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
    // Of equal values the upper one is first, and in a row the left one, whose column is even.
    const uint32_t wins_ties = odd ? ~lower & other_lower : ~lower | other_lower;
    // No branches: both lanes of a pair store the same value, and garbage goes to scratch memory, to an address of its
    // own for each pair (the offsets below are multiples of 49, and there are fewer pairs with garbage).
    static_assert(CONV_WARPS * 4 < SIDE2 * SIDE2, "");
    __nv_bfloat16 *const right = inside ? stage + 4 : (__nv_bfloat16 *)(shared + L::AT_SCRATCH) + 4 * t.warp + t.quad;
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

#endif
#endif
