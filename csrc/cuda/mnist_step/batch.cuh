// mnist_step: loads the images of a batch, and computes the moments of the nine pixels under the first convolution.
#ifndef CUDA_OPS_MNIST_STEP_BATCH_CUH
#define CUDA_OPS_MNIST_STEP_BATCH_CUH

#include "common/loss.cuh"
#include "mnist_step/thread.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The indices and labels of the images of `step`.
template <class L>
__device__ __forceinline__ void look_up(const Thread<L> &t, int64_t step)
{
    if (t.thread >= t.images)
        return;
    const int64_t number = step * t.a.batch + t.owner + t.thread * L::OWNERS, index = t.a.indices[number];
    const bool good = 0 <= index && index < t.a.count;
    if (!good && t.member == 0)
        record_bad_index(t.a.error, number, index, t.a.count);
    const int64_t label = good ? t.a.labels[index] : -1;
    t.small.index[step % 2][t.thread] = good ? index : -1;
    t.small.label[step % 2][t.thread] = 0 <= label && label < CLASSES ? (int)label : -1;
}

template <class L>
__device__ __forceinline__ char *image_of(int64_t step, int number)
{
    return shared + L::AT_IMAGES + ((int)(step % 2) * L::AT_ONCE + number) * IMAGE_BYTES;
}

// Normalises and stores four pixels, word `number` of an image.
template <class L>
__device__ __forceinline__ void store_pixels(const Thread<L> &t, char *image, int number, uint32_t word, bool good)
{
    __nv_bfloat16 *to = (__nv_bfloat16 *)image + (number / 7 + 1) * IMAGE_ROW + number % 7 * 4 + 1;
#pragma unroll
    for (int b = 0; b < 4; b++) {
        const float byte = (float)(word >> 8 * b & 255);
        to[b] = __float2bfloat16_rn(good ? (byte - t.a.center) * t.a.scale : CUDART_NAN_F);
    }
}

// The images of `step`: loaded to registers, then normalised to shared memory. A barrier of the block before and after
// both.
template <class L>
struct Images {
    uint32_t words[L::AT_ONCE];
    bool good[L::AT_ONCE];

    __device__ __forceinline__ void load(const Thread<L> &t, int64_t step)
    {
        const bool mine = t.thread < PIXELS / 4;
#pragma unroll
        for (int i = 0; i < L::AT_ONCE; i++) {
            const int64_t index = i < t.images ? t.small.index[step % 2][i] : -1;
            good[i] = index >= 0;
            words[i] = mine && index >= 0 ? ((const uint32_t *)(t.a.images + index * PIXELS))[t.thread] : 0;
        }
    }
    __device__ __forceinline__ void store(const Thread<L> &t, int64_t step) const
    {
        if (t.thread >= PIXELS / 4)
            return;
#pragma unroll
        for (int i = 0; i < L::AT_ONCE; i++) {
            if (i >= t.images)
                break;
            store_pixels(t, image_of<L>(step, i), t.thread, words[i], good[i]);
        }
    }
};

// The same for one image, by one warpgroup.
template <class L>
struct OneImage {
    static constexpr int EACH = (PIXELS / 4 + WARPGROUP - 1) / WARPGROUP;
    uint32_t words[EACH];
    bool good;

    __device__ __forceinline__ void load(const Thread<L> &t, int64_t step, int number)
    {
        const int64_t index = t.small.index[step % 2][number];
        good = index >= 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int word = t.thread % WARPGROUP + i * WARPGROUP;
            words[i] = word < PIXELS / 4 && good ? ((const uint32_t *)(t.a.images + index * PIXELS))[word] : 0;
        }
    }
    __device__ __forceinline__ void store(const Thread<L> &t, char *image) const
    {
        static_assert(EACH == 2, "");
#pragma unroll 1
        for (int i = 0; i < EACH; i++) {
            const int word = t.thread % WARPGROUP + i * WARPGROUP;
            if (word < PIXELS / 4)
                store_pixels(t, image, word, i ? words[1] : words[0], good);
        }
    }
};

// Adds the Gram matrix of the taps over this block's share of the positions of its images: a 16 x positions matrix
// times its transpose, for which mma's registers of A are those of B.
template <class L>
__device__ __forceinline__ void add_products(const Thread<L> &t, const char *images, int count, int from, int by,
                                             float (&first)[4], float (&second)[4])
{
    const int tap = (t.row / 3 * IMAGE_ROW + t.row % 3) * 2, ninth = (2 * IMAGE_ROW + 2) * 2;
    for (int i = 0; i < count; i++) {
        const char *image = images + i * IMAGE_BYTES;
#pragma unroll 4
        for (int k = from; k < PIXELS / 16; k += by) {
            uint32_t a[4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int position = 16 * k + 2 * t.quad + 8 * half;
                const char *at = image + (position / SIDE * IMAGE_ROW + position % SIDE) * 2;
                a[2 * half] = two_halves(at + tap, at + tap + 2);
                a[2 * half + 1] = t.row == 0   ? two_halves(at + ninth, at + ninth + 2)
                                  : t.row == 1 ? 0x3f803f80u // the constant 1
                                               : 0;
            }
            mma_sync<__nv_bfloat16>(first, a, a[0], a[2]);
            mma_sync<__nv_bfloat16>(second, a, a[1], a[3]);
        }
    }
}
// Stores a warp's sums to shared memory.
template <class L>
__device__ __forceinline__ void store_products(const Thread<L> &t, float *to, const float (&first)[4],
                                               const float (&second)[4])
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int i = t.row + e / 2 * 8, j = 2 * t.quad + e % 2;
        if (i < GRAM_SIDE) {
            to[i * GRAM_SIDE + j] = first[e];
            if (j < GRAM_SIDE - 8)
                to[i * GRAM_SIDE + 8 + j] = second[e];
        }
    }
}
template <class L>
__device__ __forceinline__ void gram(const Thread<L> &t, int64_t step)
{
    float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
    add_products(t, image_of<L>(step, 0), t.images, t.member * WARPS + t.warp, L::MEMBERS * WARPS, first, second);
    store_products(t, (float *)(shared + L::AT_SCRATCH) + t.warp * GRAM, first, second);
    __syncthreads();
    if (t.thread < GRAM) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            total += ((float *)(shared + L::AT_SCRATCH))[w * GRAM + t.thread];
        t.template workspace<float>(WS_GRAM)[t.block * GRAM + t.thread] = total;
    }
}

// By one block: adds the blocks' sums, and computes the batch's means and covariances.
static constexpr int GRAM_GROUPS = 8, GRAM_EACH = BLOCKS / GRAM_GROUPS;
template <class L>
__device__ __forceinline__ void load_grams(const Thread<L> &t, float4 (&values)[GRAM_EACH])
{
    static constexpr int VECTORS = GRAM / 4, GROUPS = GRAM_GROUPS, EACH = GRAM_EACH;
    const float4 *partials = t.template workspace<const float4>(WS_GRAM);
    if (t.thread < VECTORS * GROUPS)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            values[i] = __ldcg(partials + (t.thread / VECTORS * EACH + i) * VECTORS + t.thread % VECTORS);
}
template <class L>
__device__ __forceinline__ void add_grams(const Thread<L> &t, const float4 (&values)[GRAM_EACH])
{
    static constexpr int VECTORS = GRAM / 4, GROUPS = GRAM_GROUPS, EACH = GRAM_EACH;
    double *groups = (double *)(shared + L::AT_SCRATCH), *totals = groups + GROUPS * GRAM;
    if (t.thread < VECTORS * GROUPS) {
        const int vector = t.thread % VECTORS, group = t.thread / VECTORS;
        double x = 0, y = 0, z = 0, w = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float4 v = values[i];
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
        t.template workspace<float>(WS_MOMENTS)[t.thread] =
            (float)(t.thread < TAPS ? mean[t.thread] : totals[i * GRAM_SIDE + j] - mean[i] * mean[j]);
    }
}
template <class L>
__device__ __forceinline__ void add_grams(const Thread<L> &t)
{
    float4 values[GRAM_EACH];
    load_grams(t, values);
    add_grams(t, values);
}

#endif
#endif
