// mnist_step: the linear layers and the loss, forward, backward and updates.
#ifndef CUDA_OPS_MNIST_STEP_LINEAR_CUH
#define CUDA_OPS_MNIST_STEP_LINEAR_CUH

#include <math_constants.h>

#include "mnist_step/thread.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// 16 bytes of this block's slice of the features.
template <class L>
__device__ __forceinline__ uint4 slice_of(const Thread<L> &t, int first)
{
    const int image = first + t.thread / 4;
    return image < t.a.batch ? __ldcg((const uint4 *)(t.template workspace<const __nv_bfloat16>(WS_POOLED) +
                                                      (int64_t)image * FEATURES + t.block * SLICE) +
                                      t.thread % 4)
                             : make_uint4(0, 0, 0, 0);
}
template <class L>
__device__ __forceinline__ void store_slice(const Thread<L> &t, uint4 value)
{
    *(uint4 *)(shared + L::AT_SLICE + t.thread / 4 * PITCH + t.thread % 4 * 16) = value;
}
static_assert(THREADS == CHUNK * 4, "");

// Starts the copies of this block's part of linear1's weights for forward to shared memory.
template <class L>
__device__ __forceinline__ void start_linear1(const Thread<L> &t)
{
    const __nv_bfloat16 *weights =
        t.template workspace<const __nv_bfloat16>(WS_LINEAR1) + t.rank * UNITS * FEATURES + t.cluster * WIDE;
    for (int i = t.thread; i < UNITS * WIDE / 8; i += THREADS)
        cp_async_16(shared_address(shared + L::AT_WIDE_WEIGHTS) + i / (WIDE / 8) * WIDE_PITCH + i % (WIDE / 8) * 16,
                    weights + i / (WIDE / 8) * FEATURES + i % (WIDE / 8) * 8);
    cp_async_commit_group();
}

// linear1 forward: the cluster's two slices of the features times their weights for this block's half of the units.
static constexpr int WIDE_VECTORS = WIDE_CHUNK * WIDE / 8 / THREADS; // of a thread
template <class L>
__device__ __forceinline__ void load_wide(const Thread<L> &t, int first, uint4 (&values)[WIDE_VECTORS])
{
#pragma unroll
    for (int i = 0; i < WIDE_VECTORS; i++) {
        const int vector = t.thread + i * THREADS, image = first + vector / (WIDE / 8);
        values[i] = image < t.a.batch ? __ldcg((const uint4 *)(t.template workspace<const __nv_bfloat16>(WS_POOLED) +
                                                               (int64_t)image * FEATURES + t.cluster * WIDE) +
                                               vector % (WIDE / 8))
                                      : make_uint4(0, 0, 0, 0);
    }
}
template <class L>
__device__ __forceinline__ void forward_linear1(const Thread<L> &t)
{
    uint4 next[WIDE_VECTORS];
    load_wide(t, 0, next);
    cp_async_wait_group<0>();
    const int m = t.warp % 4, n = t.warp / 4;
    uint32_t weights[WIDE / 16][2][4]; // the same for all images
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WIDE / 16; k++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            ldmatrix_x4(weights[k][i], shared_address(shared + L::AT_WIDE_WEIGHTS) + (32 * n + 16 * i) * WIDE_PITCH +
                                           beside_first(t.lane, WIDE_PITCH) + 32 * k);
    for (int first = 0; first < t.a.batch; first += WIDE_CHUNK) {
        if (first)
            __syncthreads();
#pragma unroll
        for (int i = 0; i < WIDE_VECTORS; i++) {
            const int vector = t.thread + i * THREADS;
            *(uint4 *)(shared + L::AT_WIDE + vector / (WIDE / 8) * WIDE_PITCH + vector % (WIDE / 8) * 16) = next[i];
        }
        __syncthreads();
        if (first + WIDE_CHUNK < t.a.batch)
            load_wide(t, first + WIDE_CHUNK, next);
#pragma unroll 1
        for (int part = 0; part < 2; part++) {
            const int start = first + CHUNK * part;
            if (start >= t.a.batch)
                break;
            const uint32_t left = shared_address(shared + L::AT_WIDE) + (CHUNK * part + 16 * m) * WIDE_PITCH +
                                  below_first(t.lane, WIDE_PITCH);
            float sum[4][4] = {};
#pragma unroll
            for (int k = 0; k < WIDE / 16; k++) {
                uint32_t a[4];
                ldmatrix_x4(a, left + 32 * k);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma_sync<__nv_bfloat16>(sum[j], a, weights[k][j / 2][j % 2 * 2], weights[k][j / 2][j % 2 * 2 + 1]);
            }
            float *to = t.template workspace<float>(WS_PARTIAL) + (t.cluster * WHOLE_MOST + start) * HIDDEN +
                        t.rank * UNITS + 32 * n;
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int image = 16 * m + t.row + 8 * half;
                    if (start + image < t.a.batch)
                        __stcg((float2 *)(to + image * HIDDEN + 8 * j + 2 * t.quad),
                               make_float2(sum[j][2 * half], sum[j][2 * half + 1]));
                }
        }
    }
}

// linear2's weights and bias and linear1's bias: loaded to registers, then stored to shared memory.
struct Linear2 {
    static constexpr int EACH = CLASSES * HIDDEN / THREADS;
    static_assert(EACH * THREADS == CLASSES * HIDDEN && HIDDEN + CLASSES <= THREADS, "");
    float weights[EACH], bias;

    template <class L>
    __device__ __forceinline__ void load(const Thread<L> &t)
    {
        const cuda_ops_mnist_parameters &p = t.a.parameters;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            weights[i] = __ldcg(p.linear2_weight + t.thread + i * THREADS);
        const int second = t.thread - HIDDEN;
        bias = second < 0         ? __ldcg(p.linear1_bias + t.thread)
               : second < CLASSES ? __ldcg(p.linear2_bias + second)
                                  : 0.0f;
    }
    template <class L>
    __device__ __forceinline__ void store(const Thread<L> &t) const
    {
        float *to = (float *)(shared + L::AT_LINEAR2) + t.thread;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            to[i * THREADS] = weights[i];
        if (t.thread < HIDDEN + CLASSES)
            to[CLASSES * HIDDEN] = bias;
    }
};

// An image's partial sums of the hidden units: of the pairs of slices warp, warp + 8, ..., four units each.
static constexpr int HEAD_PARTS = (PAIRS + WARPS - 1) / WARPS;
template <class L>
__device__ __forceinline__ void load_partials(const Thread<L> &t, int image, float4 (&values)[HEAD_PARTS])
{
    const float *partial = t.template workspace<const float>(WS_PARTIAL) + (int64_t)image * HIDDEN;
#pragma unroll
    for (int i = 0; i < HEAD_PARTS; i++) {
        const int pair = t.warp + i * WARPS;
        values[i] =
            pair < PAIRS ? __ldcg((const float4 *)(partial + pair * HIDDEN_VALUES) + t.lane) : make_float4(0, 0, 0, 0);
    }
}

// From the partial sums of an image's hidden units to their gradient; then loads those of image `next`, if there is
// one.
template <class L>
__device__ __forceinline__ void head(const Thread<L> &t, int image, int label, int next, float4 (&values)[HEAD_PARTS])
{
    const float *weight = (const float *)(shared + L::AT_LINEAR2), *bias1 = weight + CLASSES * HIDDEN,
                *bias2 = bias1 + HIDDEN;
    float *groups = (float *)(shared + L::AT_SCRATCH), *hidden = groups + WARPS * HIDDEN, *logits = hidden + HIDDEN;
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
    // By each thread for itself: ten exponentials are faster than another barrier.
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
        const int64_t at = (int64_t)image * HIDDEN + t.thread;
        t.template workspace<__nv_bfloat16>(WS_GRAD_HIDDEN)[at] = __float2bfloat16_rn(h <= 0 ? 0.0f : sum);
        t.template workspace<__nv_bfloat16>(WS_HIDDEN)[at] = __float2bfloat16_rn(h);
    }
    if (t.thread < CLASSES) { // recomputed, since registers cannot be indexed
        const float wanted = share + (t.thread == label ? 1 - smoothing : 0.0f);
        t.template workspace<float>(WS_GRAD_LOGITS)[image * 16 + t.thread] =
            good ? __expf(logits[t.thread] - most) * factor - wanted * each : 0.0f;
    }
    if (t.thread == 0) {
        // -sum of wanted * log-probability, where the wanted add up to 1.
        const float logit = good ? logits[label] - most : CUDART_NAN_F;
        t.template workspace<float>(WS_LOSS)[image] = logf(total) - (1 - smoothing) * logit - share * all;
    }
}

// Stores this block's slice of the weights: for its own backward, and for the clusters' forward.
template <class L>
__device__ __forceinline__ void store_linear1(const Thread<L> &t, const float (&weight)[4][4])
{
    __nv_bfloat16 *to = (__nv_bfloat16 *)(shared + L::AT_LINEAR1),
                  *forward = t.template workspace<__nv_bfloat16>(WS_LINEAR1) + t.block * SLICE;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int unit = 16 * t.warp + t.row + 8 * half, column = 8 * n + 2 * t.quad;
            const uint32_t pair = pack_pair(weight[n][2 * half], weight[n][2 * half + 1]);
            if constexpr (L::ROUNDS == 1)
                *(uint32_t *)(to + unit * (PITCH / 2) + column) = pair;
            *(uint32_t *)(forward + unit * FEATURES + column) = pair;
        }
}

template <class L>
__device__ __forceinline__ void load_grad_hidden(const Thread<L> &t, int first, uint4 (&values)[4])
{
    static_assert(CHUNK * HIDDEN * 2 == 4 * THREADS * 16, "");
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int vector = t.thread + i * THREADS, image = first + vector / 16;
        values[i] = image < t.a.batch
                        ? __ldcg(t.template workspace<const uint4>(WS_GRAD_HIDDEN) + image * 16 + vector % 16)
                        : make_uint4(0, 0, 0, 0);
    }
}

// The gradient of this block's slice of the features, then, after arriving at the barrier, that of its weights, and
// their update. `weight`: rows 16 warp + row + 8 (e / 2), columns 8 n + 2 quad + e % 2 of the slice.
template <class L>
__device__ __forceinline__ void backward_linear1(const Thread<L> &t, float (&weight)[4][4], float rate)
{
    float sum[4][4] = {};
    const uint32_t hidden = shared_address(shared + L::AT_HIDDEN), slice = shared_address(shared + L::AT_SLICE);
    uint4 next[4], next_slice = slice_of(t, 0);
    load_grad_hidden(t, 0, next);
    const int m = t.warp % 4, n = t.warp / 4;
    uint32_t weights[HIDDEN / 16][4]; // the same for all images
#pragma unroll
    for (int k = 0; k < HIDDEN / 16; k++)
        ldmatrix_x4_trans(weights[k], shared_address(shared + L::AT_LINEAR1) + 32 * n + below_first(t.lane, PITCH) +
                                          16 * k * PITCH);
    for (int first = 0; first < t.a.batch; first += CHUNK) {
        const bool last = first + CHUNK >= t.a.batch;
        if (first)
            __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int vector = t.thread + i * THREADS;
            *(uint4 *)(shared + L::AT_HIDDEN + vector / 16 * HIDDEN_PITCH + vector % 16 * 16) = next[i];
        }
        store_slice(t, next_slice);
        __syncthreads();
        if (!last) {
            load_grad_hidden(t, first + CHUNK, next);
            next_slice = slice_of(t, first + CHUNK);
        }
        float partial[2][2][4] = {}; // of even and odd steps: two independent chains of mma
        const uint32_t left = hidden + 16 * m * HIDDEN_PITCH + below_first(t.lane, HIDDEN_PITCH);
#pragma unroll
        for (int k = 0; k < HIDDEN / 16; k++) {
            uint32_t a[4];
            ldmatrix_x4(a, left + 32 * k);
            mma_sync<__nv_bfloat16>(partial[k % 2][0], a, weights[k][0], weights[k][1]);
            mma_sync<__nv_bfloat16>(partial[k % 2][1], a, weights[k][2], weights[k][3]);
        }
        __nv_bfloat16 *to = t.template workspace<__nv_bfloat16>(WS_GRAD_POOLED) + t.block * SLICE + 16 * n + 2 * t.quad;
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t image = first + 16 * m + t.row + 8 * half;
                if (image < t.a.batch)
                    *(uint32_t *)(to + image * FEATURES + 8 * j) =
                        pack_pair(partial[0][j][2 * half] + partial[1][j][2 * half],
                                  partial[0][j][2 * half + 1] + partial[1][j][2 * half + 1]);
            }
        if (last)
            t.arrive();
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++) {
            uint32_t a[4], b[2][4];
            ldmatrix_x4_trans(a, hidden + 16 * k * HIDDEN_PITCH + 32 * t.warp + beside_first(t.lane, HIDDEN_PITCH));
            ldmatrix_x4_trans(b[0], slice + 16 * k * PITCH + below_first(t.lane, PITCH));
            ldmatrix_x4_trans(b[1], slice + 16 * k * PITCH + 32 + below_first(t.lane, PITCH));
#pragma unroll
            for (int n = 0; n < 4; n++)
                mma_sync<__nv_bfloat16>(sum[n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            weight[n][e] -= rate * sum[n][e];
    store_linear1(t, weight);
}

// By one block for each class: linear2's gradient and update; the first of them also computes the batch's loss.
template <class L>
__device__ __forceinline__ void update_linear2(const Thread<L> &t, int label, int64_t step, float rate)
{
    const cuda_ops_mnist_parameters &p = t.a.parameters;
    static constexpr int PARTS = THREADS / (HIDDEN / 4);
    const int column = t.thread % (HIDDEN / 4), part = t.thread / (HIDDEN / 4);
    const uint2 *hidden = t.template workspace<const uint2>(WS_HIDDEN) + column;
    const float *logits = t.template workspace<const float>(WS_GRAD_LOGITS) + label;
    float4 *parts = (float4 *)(shared + L::AT_SCRATCH);
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int i = part; i < t.a.batch; i += PARTS) {
        const uint2 h = __ldcg(hidden + i * (HIDDEN / 4));
        const float g = __ldcg(logits + i * 16);
        sum.x += g * low_of(h.x), sum.y += g * high_of(h.x), sum.z += g * low_of(h.y), sum.w += g * high_of(h.y);
    }
    parts[part * (HIDDEN / 4) + column] = sum;
    // The bias by one warp, the loss by another; in a fixed order.
    float bias = 0, loss = 0;
    if (t.warp == 6)
        for (int i = t.lane; i < t.a.batch; i += WARP_SIZE)
            bias += __ldcg(logits + i * 16);
    if (t.warp == 7 && label == 0)
        for (int i = t.lane; i < t.a.batch; i += WARP_SIZE)
            loss += __ldcg(t.template workspace<const float>(WS_LOSS) + i);
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

template <class L>
__device__ __forceinline__ void update_bias1(const Thread<L> &t, float rate)
{
    if constexpr (L::ROUNDS > 1) { // a thread has eight units of every sixteenth image
        static constexpr int COLUMNS = HIDDEN / 8, PARTS = THREADS / COLUMNS;
        const int column = t.thread % COLUMNS, part = t.thread / COLUMNS;
        const uint4 *gradient = t.template workspace<const uint4>(WS_GRAD_HIDDEN) + column;
        float4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
#pragma unroll 8
        for (int i = part; i < t.a.batch; i += PARTS) {
            const uint4 v = __ldcg(gradient + i * COLUMNS);
            low.x += low_of(v.x), low.y += high_of(v.x), low.z += low_of(v.y), low.w += high_of(v.y);
            high.x += low_of(v.z), high.y += high_of(v.z), high.z += low_of(v.w), high.w += high_of(v.w);
        }
        float4 *parts = (float4 *)(shared + L::AT_SCRATCH) + part * HIDDEN / 4 + 2 * column;
        parts[0] = low, parts[1] = high;
        __syncthreads();
        if (t.thread < HIDDEN) {
            float total = 0;
#pragma unroll
            for (int i = 0; i < PARTS; i++)
                total += ((const float *)(shared + L::AT_SCRATCH))[i * HIDDEN + t.thread];
            float *bias = t.a.parameters.linear1_bias + t.thread;
            *bias = __ldcg(bias) - rate * total;
        }
        return;
    }
    if (t.thread >= HIDDEN)
        return;
    const uint16_t *gradient = t.template workspace<const uint16_t>(WS_GRAD_HIDDEN) + t.thread;
    float sum = 0;
#pragma unroll 16
    for (int i = 0; i < t.a.batch; i++)
        sum += low_of(__ldcg(gradient + i * HIDDEN));
    float *bias = t.a.parameters.linear1_bias + t.thread;
    *bias = __ldcg(bias) - rate * sum;
}

#endif
#endif
