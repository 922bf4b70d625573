// mnist_step: backward of both blocks, and their updates.
#ifndef CUDA_OPS_MNIST_STEP_BACKWARD_CUH
#define CUDA_OPS_MNIST_STEP_BACKWARD_CUH

#include "mnist_step/batch.cuh"
#include "mnist_step/forward.cuh"
#include "mnist_step/thread.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Loads the gradient of this block's features to AT_STAGE.
template <class L>
__device__ __forceinline__ void load_stage(const Thread<L> &t)
{
    if (t.images && t.thread < L::STAGE_BYTES / 16)
        ((uint4 *)(shared + L::AT_STAGE))[t.thread] =
            __ldcg((const uint4 *)(t.template workspace<const char>(WS_GRAD_POOLED) + (int64_t)t.owner * FEATURES * 2 +
                                   t.member * L::STAGE_BYTES) +
                   t.thread);
    __syncthreads();
}

// The gradient of the pooled value above this thread's values 4 n + e and 16 + 4 n + e.
template <class L>
__device__ __forceinline__ float staged(const Thread<L> &t, const __nv_bfloat16 *stage, int n, int e)
{
    // Columns from 14 on read that of the column before.
    const int x = e / 2 && t.row >= 6 ? SIDE2 - 1 : t.row / 2 + e / 2 * 4;
    return __bfloat162float(stage[(8 * n + 2 * t.quad + e % 2) * SIDE2 * SIDE2 + t.warp * SIDE2 + x]);
}

template <class L>
__device__ __forceinline__ void coefficients2(const Thread<L> &t, float rate)
{
    float sum, dot;
    sum_over_owners(t, t.template workspace<const float>(WS_SUMS2), sum, dot);
    if (t.thread % CHANNEL_LANES<L> == 0) {
        Small<L> &s = t.small;
        const int c = t.thread / CHANNEL_LANES<L>;
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

// Stores the gradient of convolution 2's output to shared memory: of the pixels only, the padding stays zero.
template <class L>
__device__ __forceinline__ void store_gradient2(const Thread<L> &t, const float (&y)[32], uint32_t largest,
                                                const __nv_bfloat16 *stage)
{
    // Garbage columns go to memory that nobody reads, to addresses of their own, which is faster than a branch.
    char *const left = shared + L::AT_GRADIENT + ((2 * t.warp + 1) * MAP_ROW + t.row + 1) * PITCH + 4 * t.quad;
    char *const garbage = shared + L::AT_SLICE + (2 * t.warp + t.row % 2) * PITCH + 4 * t.quad;
    char *const right = t.row + 8 < SIDE1 ? left + 8 * PITCH : garbage;
    static_assert(SIDE1 + 2 == 16 && 2 * CONV_WARPS <= MAP_ROW && (MAP_ROW + 2 * CONV_WARPS) * PITCH <= SLICE_BYTES,
                  "");
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 by_dz = *(const float2 *)(t.small.by_dz + 8 * n + 2 * t.quad);
        const float2 by_y = *(const float2 *)(t.small.by_y + 8 * n + 2 * t.quad);
        const float2 constant = *(const float2 *)(t.small.constant + 8 * n + 2 * t.quad);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float dz0 = by_dz.x * staged(t, stage, n, 2 * half),
                        dz1 = by_dz.y * staged(t, stage, n, 2 * half + 1);
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

// This block's channels' part of the gradient of convolution 2's input. gradient[m][r][n]: input channels 16 m + row +
// 8 (e / 2), image row 2 warp + r, pixel 8 n + 2 quad + e % 2.
template <class L>
__device__ __forceinline__ void backward_input2(const Thread<L> &t, float (&gradient)[2][2][2][4])
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        gradient[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0;
    const uint32_t from =
        shared_address(shared + L::AT_GRADIENT) + 2 * t.warp * MAP_ROW * PITCH + beside_first(t.lane, PITCH);
    const uint32_t weights = shared_address(shared + L::AT_WEIGHTS2) + beside_first(t.lane, PITCH);
#pragma unroll 1
    for (int x = 0; x < 3; x++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t b[4][4];
#pragma unroll
            for (int r = 0; r < 4; r++)
                ldmatrix_x4(b[r], from + (r * MAP_ROW + x) * PITCH + 32 * k);
#pragma unroll
            for (int dy = 0; dy < 3; dy++)
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint32_t a[4];
                    ldmatrix_x4_trans(a, weights + (((2 - dy) * 3 + 2 - x) * HALF2 + 16 * k) * PITCH + 32 * m);
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        mma_sync<__nv_bfloat16>(gradient[m][r][0], a, b[r + dy][0], b[r + dy][1]);
                        mma_sync<__nv_bfloat16>(gradient[m][r][1], a, b[r + dy][2], b[r + dy][3]);
                    }
                }
        }
}

// Adds one image's part of the gradient of convolution 2's weights. sum[tap]: output channels 16 (warp % 2) + row + 8
// (e / 2), input channels 8 (warp / 2) + 2 quad + e % 2. A row of the map serves three rows of the gradient.
template <class L>
__device__ __forceinline__ void backward_weights2(const Thread<L> &t, uint32_t map, float (&sum)[TAPS][4])
{
    const uint32_t left = shared_address(shared + L::AT_GRADIENT) + (MAP_ROW + 1) * PITCH + 32 * (t.warp % 2) +
                          beside_first(t.lane, PITCH);
    const uint32_t right = map + 16 * (t.warp / 2) + (t.lane % 16) * PITCH + t.lane / 16 * PITCH;
    uint32_t a[3][4];
#pragma unroll
    for (int row = 0; row < 16; row++) {
        if (row < SIDE1)
            ldmatrix_x4_trans(a[row % 3], left + row * MAP_ROW * PITCH);
        uint32_t b[4], third[2];
        ldmatrix_x4_trans(b, right + row * MAP_ROW * PITCH); // of pixels from x, and from x + 1
        ldmatrix_x2_trans(third[0], third[1], right + (row * MAP_ROW + 2) * PITCH);
#pragma unroll
        for (int dy = 0; dy < 3; dy++) {
            if (row - dy < 0 || row - dy >= SIDE1)
                continue;
            const uint32_t(&mine)[4] = a[(row - dy) % 3];
            mma_sync<__nv_bfloat16>(sum[dy * 3], mine, b[0], b[1]);
            mma_sync<__nv_bfloat16>(sum[dy * 3 + 1], mine, b[2], b[3]);
            mma_sync<__nv_bfloat16>(sum[dy * 3 + 2], mine, third[0], third[1]);
        }
    }
}

// Sends sixteen values of each thread to a buffer of the other block of the cluster, whose mbarrier counts the bytes.
template <class L>
__device__ __forceinline__ void send(const Thread<L> &t, uint32_t buffer, uint32_t barrier,
                                     const float (&values)[2][2][4])
{
    const uint32_t to = of_other(t, buffer), their_barrier = of_other(t, barrier);
#pragma unroll
    for (int i = 0; i < EXCHANGED / 4; i++) {
        const float(&v)[4] = values[i / 2][i % 2];
        st_async(to + (i * CONV_WARPS * WARP_SIZE + t.thread) * 16, make_float4(v[0], v[1], v[2], v[3]), their_barrier);
    }
}

// Adds one image to block 1's sums. sums[position][n]: of channels row + 8 (e / 2) and the pixels 8 n + 2 quad + e % 2
// of the 4 x 4 under a window whose argmax is `position`; plain: of the gradients alone.
template <class L>
__device__ __forceinline__ void backward1(const Thread<L> &t, const char *image, const char *argmax,
                                          const float (&gradient)[2][2][4], float (&sums)[4][2][4], float (&plain)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int y = 2 * t.warp + r;
        uint32_t packed[4], where[4], b[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) { // rows row + 8 (i % 2), windows 2 quad + 8 (i / 2) and the next
            packed[i] = pack_pair(gradient[r][i / 2][i % 2 * 2], gradient[r][i / 2][i % 2 * 2 + 1]);
            const char *at = argmax + (y * 16 + i / 2 * 8 + 2 * t.quad) * 16 + t.row + i % 2 * 8;
            const uint32_t low = *(const uint8_t *)at, high = *(const uint8_t *)(at + 16);
            packed[i] &= (low == 4 ? 0 : 0xffffu) | (high == 4 ? 0 : 0xffff0000u);
            where[i] = low | high << 8;
            plain[i % 2] += low_of(packed[i]) + high_of(packed[i]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const char *at =
                    image + ((2 * y + 2 * n + t.row / 4) * IMAGE_ROW + 2 * (8 * half + 2 * t.quad) + t.row % 4) * 2;
                b[n][half] = two_halves(at, at + 4);
            }
#pragma unroll
        for (int position = 0; position < 4; position++) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = packed[i] &
                       (((where[i] & 255) == position ? 0xffffu : 0u) | (where[i] >> 8 == position ? 0xffff0000u : 0u));
            mma_sync<__nv_bfloat16>(sums[position][0], a, b[0][0], b[0][1]);
            mma_sync<__nv_bfloat16>(sums[position][1], a, b[1][0], b[1][1]);
        }
    }
}

// Adds the sums of all warps, converted from positions and pixels to taps: to WS_SUMS1.
template <class L>
__device__ __forceinline__ void store_sums1(const Thread<L> &t, const float (&sums)[4][2][4], float (&plain)[2])
{
    float *warps = (float *)(shared + L::AT_EXCHANGE),
          *sum_dz = warps + CONV_WARPS * 4 * 16 * 16; // on into AT_HIDDEN
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
            plain[i] += __shfl_xor_sync(FULL_WARP, plain[i], lanes);
    __syncthreads(); // the other block's values have been read
    if (t.warp < CONV_WARPS) {
#pragma unroll
        for (int position = 0; position < 4; position++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    *(float2 *)(warps + ((t.warp * 4 + position) * 16 + t.row + 8 * half) * 16 + 8 * n + 2 * t.quad) =
                        make_float2(sums[position][n][2 * half], sums[position][n][2 * half + 1]);
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
                for (int position = 0; position < 4; position++)
                    total += warps[((w * 4 + position) * 16 + channel) * 16 + (position / 2 + tap / 3) * 4 +
                                   position % 2 + tap % 3];
        } else {
#pragma unroll
            for (int w = 0; w < CONV_WARPS; w++)
                total += sum_dz[w * 16 + channel];
        }
        t.template workspace<float>(WS_SUMS1)[(t.cluster * CHANNELS1 + t.rank * 16 + channel) * SUMS1 + tap] = total;
    }
}
static_assert(CONV_WARPS * (4 * 16 + 1) * 16 * 4 <= EXCHANGE_BYTES + HIDDEN_BYTES, "");

// The gradients of convolution 2's weights and block 1's sums.
template <class L>
__device__ __forceinline__ void backward_conv2(const Thread<L> &t, int parity, const Kept &kept)
{
    float weights[TAPS][4] = {}, sums[4][2][4] = {}, plain[2] = {0, 0};
    if (t.images) {
        if (t.warp < CONV_WARPS) {
            float y[32];
            kept.unpack(y);
            store_gradient2(t, y, kept.largest, (const __nv_bfloat16 *)(shared + L::AT_STAGE));
        }
        __syncthreads();
        const uint32_t buffer = shared_address(shared + L::AT_EXCHANGE), barrier = shared_address(&t.small.arrived);
        float gradient[2][2][2][4];
        if (t.warp < CONV_WARPS) {
            if (t.thread == 0)
                mbarrier_arrive_expect_tx(barrier, EXCHANGE_BYTES);
            backward_input2(t, gradient);
            if (t.rank == 0)
                send(t, buffer, barrier, gradient[1]);
            else
                send(t, buffer, barrier, gradient[0]);
        }
        backward_weights2(t, shared_address(shared + L::AT_MAPS), weights);
        if (t.warp < CONV_WARPS) {
            mbarrier_wait(barrier, parity);
            const float4 *other = (const float4 *)(shared + L::AT_EXCHANGE) + t.thread;
            float mine[2][2][4];
#pragma unroll
            for (int j = 0; j < EXCHANGED / 4; j++) {
                const float4 theirs = other[j * CONV_WARPS * WARP_SIZE];
                const float(&ours)[4] = (t.rank == 0 ? gradient[0] : gradient[1])[j / 2][j % 2];
                float(&sum)[4] = mine[j / 2][j % 2];
                sum[0] = ours[0] + theirs.x, sum[1] = ours[1] + theirs.y;
                sum[2] = ours[2] + theirs.z, sum[3] = ours[3] + theirs.w;
            }
            backward1(t, image_of<L>(parity, 0), shared + L::AT_ARGMAX, mine, sums, plain);
        }
    }
    float *to = t.template workspace<float>(WS_GRAD_WEIGHTS2) + (int64_t)t.cluster * WEIGHTS2;
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

// The index in the parameter, [out][in][tap], of weight [tap][out][in] of convolution 2.
__device__ __forceinline__ int parameter_of_weight2(int weight)
{
    return weight % (CHANNELS2 * CHANNELS1) * TAPS + weight / (CHANNELS2 * CHANNELS1);
}

// Updates both convolutions: every block has some of the second one's weights (`weight`, of the first threads), and the
// last blocks one channel of the first one each, which their last warp updates at the same time; `channel` < 0: none.
template <class L>
__device__ __forceinline__ void update_convolutions(const Thread<L> &t, float &weight, int channel, float rate)
{
    static constexpr int VECTORS = OWN_WEIGHTS2 / 4, GROUPS = THREADS / VECTORS,
                         EACH = (CLUSTERS + GROUPS - 1) / GROUPS;
    static constexpr int GROUPS1 = 16, EACH1 = L::OWNERS / GROUPS1;
    static_assert(OWN_WEIGHTS2 <= (WARPS - 1) * WARP_SIZE, "the last warp updates convolution 1");
    float *groups = (float *)(shared + L::AT_SCRATCH), *groups1 = groups + GROUPS * OWN_WEIGHTS2;
    const float *partials = t.template workspace<const float>(WS_GRAD_WEIGHTS2) + t.block * OWN_WEIGHTS2;
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
            sums[i] = __ldcg(t.template workspace<const float>(WS_SUMS1) +
                             ((group1 * EACH1 + i) * CHANNELS1 + channel) * SUMS1 + which);
    if (group < GROUPS) {
        float4 sum = values[0];
#pragma unroll
        for (int i = 1; i < EACH; i++)
            sum.x += values[i].x, sum.y += values[i].y, sum.z += values[i].z, sum.w += values[i].w;
        ((float4 *)groups)[group * VECTORS + vector] = sum;
    }
    if (channel >= 0) {
        float total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if constexpr (EACH1 == 8)
            total += (sums[4] + sums[5]) + (sums[6] + sums[7]);
        groups1[group1 * 16 + which] = total;
    }
    static_assert(EACH1 == 4 || EACH1 == 8, "");
    __syncthreads();
    if (t.thread < OWN_WEIGHTS2) {
        float total = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            total += groups[g * OWN_WEIGHTS2 + t.thread];
        weight -= rate * total;
        const int at = t.block * OWN_WEIGHTS2 + t.thread;
        t.template workspace<__nv_bfloat16>(WS_WEIGHTS2)[weight2_of<L>(at)] = __float2bfloat16_rn(weight);
        if constexpr (L::MEMBERS == 1)
            fence_proxy_async_global();
    }
    if (channel < 0 || t.warp != WARPS - 1)
        return;
    // One lane a tap; the tenth has the sum of dz.
    const Small<L> &s = t.small;
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

#endif
#endif
