// mnist_step with whole images, one a warpgroup: convolution 2 forward and its pooling.
//
// As in conv_bn_relu_pool/sm90.cu, the convolution is nine shifted products by wgmma. Of its 112 accumulators a thread
// has channels 16 warp + row and 8 further, pixels 2 quad and the next in each half of the 14 image rows: whole pooling
// windows. Backward needs them, rounded: stmatrix stores them where their gradient will be, to addresses that no other
// warp reads.
#ifndef CUDA_OPS_MNIST_STEP_WHOLE_FORWARD_CUH
#define CUDA_OPS_MNIST_STEP_WHOLE_FORWARD_CUH

#include "mnist_step/batch.cuh"
#include "mnist_step/forward.cuh"
#include "mnist_step/thread.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a thread saves of its warpgroup's image: a nibble a window, one-hot: which of its four values is the maximum; 0
// unless that is above 0.
struct KeptWhole {
    uint32_t largest[4]; // four nibbles for each row of windows, the first row lowest

    // Rotates the next row's nibbles to the lowest bits; eight times is a full rotation.
    __device__ __forceinline__ void next_row()
    {
        const uint32_t first = largest[0];
#pragma unroll
        for (int i = 0; i < 4; i++)
            largest[i] = __funnelshift_r(largest[i], i < 3 ? largest[i + 1] : first, 16);
    }
};

template <class L>
__device__ __forceinline__ int warpgroup_of(const Thread<L> &t)
{
    return t.warp / 4;
}
template <class L>
__device__ __forceinline__ int channel_of(const Thread<L> &t)
{
    return t.warp % 4 * 16 + t.row;
}

// For stmatrix and ldmatrix with .trans: this lane's address in the first image row of an image's tile of convolution
// 2's output or its gradient. Lane l: pixel l % 8 of matrix l / 8 (two channel vectors, then the next 8 pixels), so
// that register 2 half + h has two adjacent pixels in half of a row, of channel row + 8 h.
template <class L>
__device__ __forceinline__ uint32_t row_of_output2(const Thread<L> &t, int image)
{
    const int pixel = 16 + 1 + t.lane % 8 + t.lane / 16 * 8;
    return shared_address(shared + L::AT_GRADIENT) + image * GRAD_TILE_BYTES + pixel * GRAD_PIXEL +
           swizzled_vector<GRAD_PIXEL>(pixel, 2 * (t.warp % 4) + t.lane / 8 % 2) * 16;
}
static constexpr int ROW_OF_OUTPUT2 = 16 * GRAD_PIXEL; // to the next one

// Adds two values of each of a thread's two channels over its warpgroup's image and the other's: to this block's
// partials[2][CHANNELS2].
template <class L>
__device__ __forceinline__ void sum_over_images(const Thread<L> &t, const float (&first)[2], const float (&second)[2],
                                                float *partials)
{
    float *sums = (float *)(shared + L::AT_SCRATCH) + warpgroup_of(t) * 2 * CHANNELS2 + channel_of(t);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float a = first[h], b = second[h];
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            a += __shfl_xor_sync(FULL_WARP, a, lanes);
            b += __shfl_xor_sync(FULL_WARP, b, lanes);
        }
        if (t.quad == 0)
            sums[8 * h] = a, sums[CHANNELS2 + 8 * h] = b;
    }
    __syncthreads();
    const float *totals = (const float *)(shared + L::AT_SCRATCH);
    if (t.thread < 2 * CHANNELS2)
        partials[t.block * 2 * CHANNELS2 + t.thread] = totals[t.thread] + totals[2 * CHANNELS2 + t.thread];
}

// In rounds, of an image: each window's value that is largest once scaled, as convolution 2 left it, rounded, and its
// argmax. That depends on the scale's sign only, so that pooling need not read the other values. Of equal values the
// first one, and with a scale of zero all are equal.
static constexpr int LARGEST_ROWS = LARGEST_BYTES / WARPGROUP / 8; // [row][thread] uint2, then the argmax
static_assert(LARGEST_ROWS == SIDE2 + 1, "");
struct LargestOf {
    uint32_t keep[2], flip[2]; // value & keep ^ flip has the same order as the scaled value
    uint64_t argmax;           // eight bits a row, the first row lowest

    template <class L>
    __device__ __forceinline__ explicit LargestOf(const Thread<L> &t) : argmax(0)
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float scale = t.small.norm_weight2[channel_of(t) + 8 * h];
            keep[h] = scale == 0 ? 0 : ~0u;
            flip[h] = scale < 0 ? 0x80008000u : 0;
        }
    }
    // The next row's values, of windows 0 and 1, 2 and 3.
    __device__ __forceinline__ uint2 next_row(const uint32_t (&up)[4], const uint32_t (&down)[4])
    {
        uint32_t values[2], found = 0;
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            uint32_t larger[2], lower[2], chosen = 0x5410, right = 0; // of each column; of the window
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint32_t a = (up[w + h] & keep[h]) ^ flip[h], b = (down[w + h] & keep[h]) ^ flip[h];
                const uint32_t pair = max_bf16x2(a, b);
                lower[h] = ~__hle2_mask(*(const __nv_bfloat162 *)&b, *(const __nv_bfloat162 *)&a);
                larger[h] = (down[w + h] & lower[h]) | (up[w + h] & ~lower[h]);
                // Of equal columns the left one is first, unless only its maximum is the lower value.
                const bool is_right =
                    high_of(pair) > low_of(pair) || (high_of(pair) == low_of(pair) && lower[h] == 0xffffu);
                chosen += is_right ? (h ? 0x2200 : 0x22) : 0;
                right |= is_right ? (h ? 0x10000 : 1) : 0;
            }
            values[w / 2] = __byte_perm(larger[0], larger[1], chosen);
            found |= ((__byte_perm(lower[0], lower[1], chosen) & 0x20002u) | right) << w;
        }
        argmax = argmax >> 8 | (uint64_t)((found & 0xf) | (found >> 12 & 0xf0)) << 8 * (SIDE2 - 1);
        return make_uint2(values[0], values[1]);
    }
};
struct Windows {
    uint2 values[SIDE2]; // of rows; the next one is first
    uint64_t argmax;

    template <class L>
    __device__ __forceinline__ void load(const Thread<L> &t, const uint2 *from)
    {
        from += t.thread % WARPGROUP;
#pragma unroll
        for (int i = 0; i < SIDE2; i++)
            values[i] = __ldcg(from + i * WARPGROUP);
        const uint2 last = __ldcg(from + SIDE2 * WARPGROUP);
        argmax = (uint64_t)last.y << 32 | last.x;
    }
    __device__ __forceinline__ void next_row()
    {
#pragma unroll
        for (int i = 0; i < SIDE2 - 1; i++)
            values[i] = values[i + 1];
        argmax >>= 8;
    }
    __device__ __forceinline__ float value(int w) const
    {
        const uint32_t pair = w / 2 ? values[0].y : values[0].x;
        return w % 2 ? high_of(pair) : low_of(pair);
    }
    __device__ __forceinline__ uint32_t argmax_of(int w) const
    {
        return (uint32_t)argmax >> (w % 2 * 4 + w / 2 * 2) & 3;
    }
};

// Convolution 2 of this warpgroup's image, if it is one of `images`, to its tile of AT_GRADIENT, and its sums. In
// rounds the sums accumulate, the maxima of its windows go to `windows` (see Windows), and `multiplied`, if not 0, is
// the barrier of the warpgroup that multiplies next.
template <class L>
__device__ __forceinline__ void convolve2(const Thread<L> &t, int images, float (&first)[2], float (&second)[2],
                                          uint2 *windows, uint32_t multiplied)
{
    const int group = warpgroup_of(t);
    if (group < images) {
        uint32_t left[2 * TAPS][4];
        const uint32_t weights =
            shared_address(shared + L::AT_WEIGHTS2) + t.warp % 4 * 16 * PITCH + below_first(t.lane, PITCH);
#pragma unroll
        for (int k = 0; k < 2 * TAPS; k++)
            ldmatrix_x4(left[k], weights + k / 2 * CHANNELS2 * PITCH + k % 2 * 32);
        const uint64_t tile = wgmma_descriptor(shared_address(shared + L::AT_MAPS) + group * TILE_BYTES,
                                               WGMMA_SWIZZLE_64, 8 * TILE_PIXEL);
        float d[8 * SIDE1];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 2 * TAPS; k++)
            wgmma<__nv_bfloat16, 224, 0>(
                d, left[k], wgmma_advance(tile, (k / 6 * 16 + k / 2 % 3) * TILE_PIXEL + k % 2 * 32), k > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        if (L::ROUNDS > 1 && multiplied)
            mbarrier_arrive(multiplied);
        const bool inside = t.quad < 3; // else the second half's columns are 14 and 15
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float center = center2(t, channel_of(t) + 8 * h);
            float sums[2] = {0, 0}, squares[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < 4 * SIDE1; i++) {
                const int half = i / 2 % 2;
                const float v = d[i / 4 * 8 + half * 4 + h * 2 + i % 2] - center;
                sums[half] += v;
                squares[half] += v * v;
            }
            const float sum = sums[0] + (inside ? sums[1] : 0.0f), square = squares[0] + (inside ? squares[1] : 0.0f);
            first[h] = L::ROUNDS > 1 ? first[h] + sum : sum;
            second[h] = L::ROUNDS > 1 ? second[h] + square : square;
        }
#pragma unroll
        for (int y = 0; y < SIDE1; y++) {
            const float *v = d + 8 * y;
            stmatrix_x4_trans(row_of_output2(t, group) + y * ROW_OF_OUTPUT2, pack_pair(v[0], v[1]),
                              pack_pair(v[2], v[3]), pack_pair(v[4], v[5]), pack_pair(v[6], v[7]));
        }
        if constexpr (L::ROUNDS > 1) {
            LargestOf largest(t);
            windows += t.thread % WARPGROUP;
            __syncwarp();
#pragma unroll 1
            for (int row = 0; row < SIDE2; row++) {
                uint32_t up[4], down[4];
                ldmatrix_x4_trans(up, row_of_output2(t, group) + 2 * row * ROW_OF_OUTPUT2);
                ldmatrix_x4_trans(down, row_of_output2(t, group) + (2 * row + 1) * ROW_OF_OUTPUT2);
                windows[row * WARPGROUP] = largest.next_row(up, down);
            }
            windows[SIDE2 * WARPGROUP] = make_uint2((uint32_t)largest.argmax, (uint32_t)(largest.argmax >> 32));
        }
    }
}

// Batch norm, ReLU and max-pool: the features to AT_STAGE. Of equal values the first is the maximum.
template <class L>
__device__ __forceinline__ void pool_whole(const Thread<L> &t, KeptWhole &kept)
{
    const int group = warpgroup_of(t), channel = channel_of(t);
    if (group < t.images) {
        __nv_bfloat16 *stage =
            (__nv_bfloat16 *)(shared + L::AT_STAGE + group * L::STAGE_BYTES) + channel * SIDE2 * SIDE2 + t.quad;
        const float scale[2] = {t.small.scale2[channel], t.small.scale2[channel + 8]};
        const float shift[2] = {t.small.shift2[channel], t.small.shift2[channel + 8]};
        kept.largest[0] = kept.largest[1] = kept.largest[2] = kept.largest[3] = 0;
#pragma unroll 1
        for (int row = 0; row < SIDE2; row++) {
            uint32_t ups[4], downs[4];
            ldmatrix_x4_trans(ups, row_of_output2(t, group) + 2 * row * ROW_OF_OUTPUT2);
            ldmatrix_x4_trans(downs, row_of_output2(t, group) + (2 * row + 1) * ROW_OF_OUTPUT2);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const int h = w % 2;
                const uint32_t up = ups[w], down = downs[w];
                const float v0 = low_of(up) * scale[h] + shift[h], v1 = high_of(up) * scale[h] + shift[h];
                const float v2 = low_of(down) * scale[h] + shift[h], v3 = high_of(down) * scale[h] + shift[h];
                const uint32_t above = v1 > v0 ? 2 : 1, below = v3 > v2 ? 8 : 4;
                const float upper = max_nan(v0, v1), lower = max_nan(v2, v3);
                const float best = max_nan(upper, lower);
                const uint32_t bit = best > 0 ? (lower > upper ? below : above) : 0;
                kept.largest[0] |= (w < 2 || t.quad < 3 ? bit : 0) << w * 4; // columns 14 and 15 are garbage
                if (w < 2 || t.quad < 3)
                    stage[8 * h * SIDE2 * SIDE2 + row * SIDE2 + w / 2 * 4] =
                        __float2bfloat16_rn(best <= 0 ? 0 : best); // NaN stays
            }
            kept.next_row();
        }
        kept.next_row();
    }
    __syncthreads();
    static constexpr int VECTORS = L::STAGE_BYTES / 16;
    for (int i = t.thread; i < t.images * VECTORS; i += THREADS)
        ((uint4 *)(t.template workspace<char>(WS_POOLED) +
                   (int64_t)(t.owner + i / VECTORS * L::OWNERS) * FEATURES * 2))[i % VECTORS] =
            ((const uint4 *)(shared + L::AT_STAGE))[i];
}

#endif
#endif
