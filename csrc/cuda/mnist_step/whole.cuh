// mnist_step: the second block of pictures that a block has for itself, one for each of its warpgroups.
//
// As in conv_bn_relu_pool/sm90.cu, the convolution is nine shifted products by wgmma, whose 112 accumulators a thread
// are channels 16 warp + row and 8 further, pixels 2 quad and the next of each half of the 14 image rows: whole pooling
// windows. What backward needs of them, rounded, goes to where their gradient comes to be later, a warp's values by
// stmatrix to places that no other warp looks at.
#ifndef CUDA_OPS_MNIST_STEP_WHOLE_CUH
#define CUDA_OPS_MNIST_STEP_WHOLE_CUH

#include "mnist_step/batch.cuh"
#include "mnist_step/forward.cuh"
#include "mnist_step/thread.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of this warpgroup's picture, if it has one: a nibble a window tells which of its four values is the largest, if that
// is above 0.
struct KeptWhole {
    uint32_t largest[4]; // four nibbles for each row of windows, the first one's lowest

    // The next row's nibbles to the lowest place; eight times is once round.
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

// For stmatrix and ldmatrix, transposed: what this lane gives as the address of the first image row of a picture's tile
// of convolution 2's output or its gradient. Lane l: pixel l % 8 of matrix l / 8 (two channel vectors, then the next 8
// pixels), so that register 2 half + h has two neighbouring pixels of half a row of the channel row + 8 h.
template <class L>
__device__ __forceinline__ uint32_t row_of_output2(const Thread<L> &t, int picture)
{
    const int pixel = 16 + 1 + t.lane % 8 + t.lane / 16 * 8;
    return shared_address(shared + L::AT_GRADIENT) + picture * GRAD_TILE_BYTES + pixel * GRAD_PIXEL +
           ((2 * (t.warp % 4) + t.lane / 8 % 2) ^ (pixel & 7)) * 16;
}
static constexpr int ROW_OF_OUTPUT2 = 16 * GRAD_PIXEL; // to the next one

// Two sums of each thread's two channels: over its warpgroup's picture and the other's, to partials[2][CHANNELS2] of
// this block.
template <class L>
__device__ __forceinline__ void sum_over_pictures(const Thread<L> &t, const float (&first)[2], const float (&second)[2],
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

// Of a picture, in rounds: each window's largest value if scaled, as convolution 2 left it, rounded, and its place
// among the four. Which that is depends on the sign of the scale alone, so that the values themselves need not be read
// to pool them; of equal values it is the first, and with a scale of zero all are equal.
static constexpr int LARGEST_ROWS = LARGEST_BYTES / WARPGROUP / 8; // [row][thread] uint2, the last one of the places
static_assert(LARGEST_ROWS == SIDE2 + 1, "");
struct LargestOf {
    uint32_t keep[2], flip[2]; // what makes of a value one whose largest is wanted
    uint64_t places;           // eight bits a row, the first row's lowest

    template <class L>
    __device__ __forceinline__ explicit LargestOf(const Thread<L> &t) : places(0)
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
                // Of equal columns the left one is first, unless its value is the lower one and the other's is not.
                const bool is_right =
                    high_of(pair) > low_of(pair) || (high_of(pair) == low_of(pair) && lower[h] == 0xffffu);
                chosen += is_right ? (h ? 0x2200 : 0x22) : 0;
                right |= is_right ? (h ? 0x10000 : 1) : 0;
            }
            values[w / 2] = __byte_perm(larger[0], larger[1], chosen);
            found |= ((__byte_perm(lower[0], lower[1], chosen) & 0x20002u) | right) << w;
        }
        places = places >> 8 | (uint64_t)((found & 0xf) | (found >> 12 & 0xf0)) << 8 * (SIDE2 - 1);
        return make_uint2(values[0], values[1]);
    }
};
struct Windows {
    uint2 values[SIDE2]; // of rows; the first one is the next
    uint64_t places;

    template <class L>
    __device__ __forceinline__ void load(const Thread<L> &t, const uint2 *from)
    {
        from += t.thread % WARPGROUP;
#pragma unroll
        for (int i = 0; i < SIDE2; i++)
            values[i] = __ldcg(from + i * WARPGROUP);
        const uint2 last = __ldcg(from + SIDE2 * WARPGROUP);
        places = (uint64_t)last.y << 32 | last.x;
    }
    __device__ __forceinline__ void next_row()
    {
#pragma unroll
        for (int i = 0; i < SIDE2 - 1; i++)
            values[i] = values[i + 1];
        places >>= 8;
    }
    __device__ __forceinline__ float value(int w) const
    {
        const uint32_t pair = w / 2 ? values[0].y : values[0].x;
        return w % 2 ? high_of(pair) : low_of(pair);
    }
    __device__ __forceinline__ uint32_t place(int w) const
    {
        return (uint32_t)places >> (w % 2 * 4 + w / 2 * 2) & 3;
    }
};

// Convolution 2 of this warpgroup's picture, if it is one of `pictures`, to its tile of AT_GRADIENT, and its sums.
// In rounds they add up, the largest values of its windows go to `windows`: see Windows, and who waits to multiply
// waits for `multiplied`, if that is not 0.
template <class L>
__device__ __forceinline__ void convolve2(const Thread<L> &t, int pictures, float (&first)[2], float (&second)[2],
                                          uint2 *windows, uint32_t multiplied)
{
    const int group = warpgroup_of(t);
    if (group < pictures) {
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
            windows[SIDE2 * WARPGROUP] = make_uint2((uint32_t)largest.places, (uint32_t)(largest.places >> 32));
        }
    }
}

// Normalises, rectifies and pools: the features to AT_STAGE. Of equal values the first is the largest.
template <class L>
__device__ __forceinline__ void pool_whole(const Thread<L> &t, KeptWhole &kept)
{
    const int group = warpgroup_of(t), channel = channel_of(t);
    if (group < t.pictures) {
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
                const uint32_t place = best > 0 ? (lower > upper ? below : above) : 0;
                kept.largest[0] |= (w < 2 || t.quad < 3 ? place : 0) << w * 4; // columns 14 and 15 are none
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
    for (int i = t.thread; i < t.pictures * VECTORS; i += THREADS)
        ((uint4 *)(t.template workspace<char>(WS_POOLED) +
                   (int64_t)(t.owner + i / VECTORS * L::OWNERS) * FEATURES * 2))[i % VECTORS] =
            ((const uint4 *)(shared + L::AT_STAGE))[i];
}

// The gradient behind the pooling of this thread's window `w` of a row; of what is no window, any number.
template <class L>
__device__ __forceinline__ float staged_whole(const Thread<L> &t, const __nv_bfloat16 *stage, int row, int w)
{
    return __bfloat162float(stage[8 * (w % 2) * SIDE2 * SIDE2 + row * SIDE2 + (w / 2 && t.quad == 3 ? 3 : w / 2 * 4)]);
}
template <class L>
__device__ __forceinline__ const __nv_bfloat16 *stage_of(const Thread<L> &t, int picture)
{
    return (const __nv_bfloat16 *)(shared + L::AT_STAGE + picture * L::STAGE_BYTES) + channel_of(t) * SIDE2 * SIDE2 +
           t.quad;
}

// The gradient of the features to AT_STAGE; through pooling and ReLU, and batch norm's sums.
template <class L>
__device__ __forceinline__ void sums_whole(const Thread<L> &t, KeptWhole kept)
{
    static constexpr int VECTORS = L::STAGE_BYTES / 16, EACH = (L::PICTURES * VECTORS + THREADS - 1) / THREADS;
    uint4 values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int vector = t.thread + i * THREADS;
        if (vector < t.pictures * VECTORS)
            values[i] = __ldcg((const uint4 *)(t.template workspace<const char>(WS_GRAD_POOLED) +
                                               (int64_t)(t.owner + vector / VECTORS * L::OWNERS) * FEATURES * 2) +
                               vector % VECTORS);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int vector = t.thread + i * THREADS;
        if (vector < t.pictures * VECTORS)
            ((uint4 *)(shared + L::AT_STAGE))[vector] = values[i];
    }
    __syncthreads();
    float first[2] = {0, 0}, second[2] = {0, 0};
    if (warpgroup_of(t) < t.pictures) {
        const __nv_bfloat16 *stage = stage_of(t, warpgroup_of(t));
        const float mean[2] = {t.small.mean2[channel_of(t)], t.small.mean2[channel_of(t) + 8]};
#pragma unroll 1
        for (int row = 0; row < SIDE2; row++) {
            uint32_t up[4], down[4];
            ldmatrix_x4_trans(up, row_of_output2(t, warpgroup_of(t)) + 2 * row * ROW_OF_OUTPUT2);
            ldmatrix_x4_trans(down, row_of_output2(t, warpgroup_of(t)) + (2 * row + 1) * ROW_OF_OUTPUT2);
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const int h = w % 2;
                const uint32_t bits = kept.largest[0] >> w * 4;
                const uint32_t pair = bits & 12 ? down[w] : up[w];
                const float y = bits & 10 ? high_of(pair) : low_of(pair);
                const float dz = bits & 15 ? staged_whole(t, stage, row, w) : 0.0f;
                first[h] += dz;
                second[h] += dz * (y - mean[h]);
            }
            kept.next_row();
        }
    }
    sum_over_pictures(t, first, second, t.template workspace<float>(WS_SUMS2));
}

// The gradient of convolution 2's output of a picture, by a warpgroup, to where that output is.
template <class L>
__device__ __forceinline__ void store_gradient_whole(const Thread<L> &t, int picture, KeptWhole kept)
{
    const int channel = channel_of(t);
    const __nv_bfloat16 *stage = stage_of(t, picture);
    const Small<L> &s = t.small;
    const float by_dz[2] = {s.by_dz[channel], s.by_dz[channel + 8]}, by_y[2] = {s.by_y[channel], s.by_y[channel + 8]},
                constant[2] = {s.constant[channel], s.constant[channel + 8]};
    const uint32_t keep_second = t.quad == 3 ? 0 : ~0u; // columns 14 and 15 are padding
#pragma unroll 1
    for (int row = 0; row < SIDE2; row++) {
        const uint32_t above = row_of_output2(t, picture) + 2 * row * ROW_OF_OUTPUT2, below = above + ROW_OF_OUTPUT2;
        uint32_t up[4], down[4];
        ldmatrix_x4_trans(up, above);
        ldmatrix_x4_trans(down, below);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int h = w % 2;
            const uint32_t bits = kept.largest[0] >> w * 4;
            const float dz = by_dz[h] * staged_whole(t, stage, row, w);
            const uint32_t y0 = up[w], y1 = down[w];
            const float v0 = by_y[h] * low_of(y0) + constant[h] + (bits & 1 ? dz : 0.0f);
            const float v1 = by_y[h] * high_of(y0) + constant[h] + (bits & 2 ? dz : 0.0f);
            const float v2 = by_y[h] * low_of(y1) + constant[h] + (bits & 4 ? dz : 0.0f);
            const float v3 = by_y[h] * high_of(y1) + constant[h] + (bits & 8 ? dz : 0.0f);
            up[w] = pack_pair(v0, v1) & (w >= 2 ? keep_second : ~0u);
            down[w] = pack_pair(v2, v3) & (w >= 2 ? keep_second : ~0u);
        }
        __syncwarp(); // all lanes have what was there
        stmatrix_x4_trans(above, up[0], up[1], up[2], up[3]);
        stmatrix_x4_trans(below, down[0], down[1], down[2], down[3]);
        kept.next_row();
    }
}

__device__ __forceinline__ void clear(float (&sums)[4][2][4], float (&plain)[2])
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        sums[i / 8][i / 4 % 2][i % 4] = 0.0f;
    plain[0] = plain[1] = 0.0f;
}

// Adds the first block's sums from rows `from` to `to` of a picture, by a warp: channels 16 (warp % 2) on.
// sums[place][n]: of channels row + 8 (e / 2) and the pixels 8 n + 2 quad + e % 2 of the 4 x 4 under a window, where
// `place` has the window's maximum; and of the gradients alone.
template <class L>
__device__ __forceinline__ void backward1_whole(const Thread<L> &t, const char *picture, const char *places,
                                                uint32_t input, int from, int to, float (&sums)[4][2][4],
                                                float (&plain)[2])
{
    const int first_channel = t.warp % 2 * 16;
    static constexpr int AT_ONCE = L::ROUNDS > 1 ? 2 : 1; // rows, of which there are multiples of that
#pragma unroll 1
    for (int first = from; first < to; first += AT_ONCE)
#pragma unroll
        for (int y = first; y < first + AT_ONCE; y++) {
            uint32_t packed[4], where[4], b[2][2];
            {
                const int pixel = y * 16 + t.lane / 16 * 8 + t.lane % 8;
                ldmatrix_x4_trans(packed, input + pixel * TILE_PIXEL +
                                              ((first_channel / 8 + t.lane / 8 % 2) ^ (pixel >> 1 & 3)) * 16);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) { // rows row + 8 (i % 2), windows 2 quad + 8 (i / 2) and the next
                const char *at =
                    places + (y * 16 + i / 2 * 8 + 2 * t.quad) * CHANNELS1 + first_channel + t.row + i % 2 * 8;
                const uint32_t low = *(const uint8_t *)at, high = *(const uint8_t *)(at + CHANNELS1);
                packed[i] &= (low == 4 ? 0 : 0xffffu) | (high == 4 ? 0 : 0xffff0000u);
                where[i] = low | high << 8;
                plain[i % 2] += low_of(packed[i]) + high_of(packed[i]);
            }
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const char *at =
                        picture +
                        ((2 * y + 2 * n + t.row / 4) * PICTURE_ROW + 2 * (8 * half + 2 * t.quad) + t.row % 4) * 2;
                    b[n][half] = two_halves(at, at + 4);
                }
#pragma unroll
            for (int place = 0; place < 4; place++) {
                uint32_t a[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[i] = packed[i] &
                           (((where[i] & 255) == place ? 0xffffu : 0u) | (where[i] >> 8 == place ? 0xffff0000u : 0u));
                mma_sync<__nv_bfloat16>(sums[place][0], a, b[0][0], b[0][1]);
                mma_sync<__nv_bfloat16>(sums[place][1], a, b[1][0], b[1][1]);
            }
        }
}

// The sums of all warps, turned from places and pixels into taps: to WS_SUMS1. A barrier of the block before it.
template <class L>
__device__ __forceinline__ void store_sums1_whole(const Thread<L> &t, const float (&sums)[4][2][4], float (&plain)[2])
{
    float *warps = (float *)(shared + L::AT_SUMS1), *sum_dz = warps + WARPS * 4 * 16 * 16;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
            plain[i] += __shfl_xor_sync(FULL_WARP, plain[i], lanes);
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
    __syncthreads();
    for (int i = t.thread; i < CHANNELS1 * GRAM_SIDE; i += THREADS) {
        const int channel = i / GRAM_SIDE, tap = i % GRAM_SIDE;
        float total = 0;
        if (tap < TAPS) {
#pragma unroll
            for (int w = 0; w < WARPS; w += 2)
#pragma unroll
                for (int place = 0; place < 4; place++)
                    total += warps[(((w + channel / 16) * 4 + place) * 16 + channel % 16) * 16 +
                                   (place / 2 + tap / 3) * 4 + place % 2 + tap % 3];
        } else {
#pragma unroll
            for (int w = 0; w < WARPS; w += 2)
                total += sum_dz[(w + channel / 16) * 16 + channel % 16];
        }
        t.template workspace<float>(WS_SUMS1)[(t.block * CHANNELS1 + channel) * SUMS1 + tap] = total;
    }
}

// Adds to the gradient of convolution 2's weights what the pictures from `first` to `end` have of it; by the first
// warpgroup. d[tap]: out channels as in wgmma's rows, in channels as in its columns.
template <class L>
__device__ __forceinline__ void add_weights2(const Thread<L> &t, int first, int end, float (&d)[TAPS][16])
{
    const uint64_t tiles = wgmma_descriptor(shared_address(shared + L::AT_MAPS), WGMMA_SWIZZLE_64, 8 * TILE_PIXEL);
#pragma unroll 1
    for (int i = first; i < end; i++) {
        const uint64_t tile = wgmma_advance(tiles, i * TILE_BYTES);
#pragma unroll
        for (int row = 0; row < SIDE2; row++) {
            uint32_t a[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++)
                ldmatrix_x4_trans(a[h], row_of_output2(t, i) + (2 * row + h) * ROW_OF_OUTPUT2);
            wgmma_fence();
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++)
                    wgmma<__nv_bfloat16, 32, 1>(
                        d[tap], a[h], wgmma_advance(tile, ((2 * row + h + tap / 3) * 16 + tap % 3) * TILE_PIXEL), 1);
            wgmma_commit_group();
            if (row == SIDE2 - 1)
                wgmma_wait_group<0>();
            else
                wgmma_wait_group<1>();
        }
    }
}

// Each block of the cluster adds up half of the channels of the weights' gradient, those row + 8 rank: sends the other
// half there, by the first warpgroup; and later stores the sum of what came and its own.
template <class L>
__device__ __forceinline__ void send_weights2(const Thread<L> &t, const float (&d)[TAPS][16],
                                              float4 (&ours)[L::EXCHANGED_VECTORS])
{
    const uint32_t to = of_other(t, shared_address(shared + L::AT_EXCHANGE) + t.thread * 16);
    const uint32_t arrived = of_other(t, shared_address(&t.small.arrived));
#pragma unroll
    for (int i = 0; i < L::EXCHANGED_VECTORS; i++) {
        const float(&v)[16] = d[i / 2];
        const int at = i % 2 * 8;
        float4 theirs = {v[at], v[at + 1], v[at + 4], v[at + 5]};
        const float4 second = {v[at + 2], v[at + 3], v[at + 6], v[at + 7]};
        ours[i] = t.rank ? second : theirs;
        theirs = t.rank ? theirs : second;
        st_async(to + i * WARPGROUP * 16, theirs, arrived);
    }
}
template <class L>
__device__ __forceinline__ void store_weights2(const Thread<L> &t, const float4 (&ours)[L::EXCHANGED_VECTORS])
{
    const float4 *theirs = (const float4 *)(shared + L::AT_EXCHANGE) + t.thread;
    float *to = t.template workspace<float>(WS_GRAD_WEIGHTS2) + (int64_t)t.cluster * WEIGHTS2 +
                (channel_of(t) + 8 * t.rank) * CHANNELS1 + 2 * t.quad;
#pragma unroll
    for (int i = 0; i < L::EXCHANGED_VECTORS; i++) {
        const float4 other = theirs[i * WARPGROUP];
        float *const at = to + i / 2 * CHANNELS2 * CHANNELS1 + i % 2 * 16;
        __stcg((float2 *)at, make_float2(ours[i].x + other.x, ours[i].y + other.y));
        __stcg((float2 *)(at + 8), make_float2(ours[i].z + other.z, ours[i].w + other.w));
    }
}

// The weights that the gradient of convolution 2's input is made with, by the second warpgroup. a[k]: depth 16 output
// channels of column tap f; k < 12: the gradient's row above, tap row 2 in rows 0..7 and tap row 1 in rows 8..15; else
// its row below, tap row 0 in rows 0..7.
template <class L>
__device__ __forceinline__ void weights_of_input2(const Thread<L> &t, uint32_t (&a)[24][4])
{
    const uint32_t weights =
        shared_address(shared + L::AT_WEIGHTS2) + (t.lane / 16 * 8 + t.lane % 8) * PITCH + t.warp % 4 * 16;
    const bool second = t.lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < 24; k++) {
        const int f = k / 4 % 3, tap = (k >= 12 ? 0 : second ? 1 : 2) * 3 + 2 - f;
        ldmatrix_x4_trans(a[k], weights + (tap * CHANNELS2 + k % 4 * 16) * PITCH);
        if (k >= 12)
            a[k][1] = a[k][3] = 0;
    }
}
// That gradient of picture i.
template <class L>
__device__ __forceinline__ void make_input2(const Thread<L> &t, int i, const uint32_t (&a)[24][4])
{
    const int warp = t.warp % 4;
    const uint32_t input = shared_address(shared + L::AT_INPUT);
    const uint64_t tiles = wgmma_descriptor(shared_address(shared + L::AT_GRADIENT), WGMMA_SWIZZLE_128, 8 * GRAD_PIXEL);
    // Seven rows at a time, and the one that belongs to the next: all fourteen would leave no registers for what the
    // other phases keep, which were then spilled throughout.
#pragma unroll 1
    for (int first = 0; first < SIDE1; first += SIDE1 / 2) {
        const uint64_t tile = wgmma_advance(tiles, i * GRAD_TILE_BYTES + first * 16 * GRAD_PIXEL);
        float d[64];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 24; k++)
            wgmma<__nv_bfloat16, 128, 0>(
                d, a[k], wgmma_advance(tile, ((k >= 12 ? 32 : 0) + k / 4 % 3) * GRAD_PIXEL + k % 4 * 32), k > 0);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        // Rows 8..15 of a warp hold what belongs one image row up. [pixel][32 channels], the four vectors of a pixel
        // rotated so that eight pixels fall into different banks.
#pragma unroll
        for (int j = 0; j < SIDE1; j += 2) {
            uint32_t m[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float *v = d + (j + e) * 4;
                m[e] = pack_pair(v[0] + v[8 + 2], v[1] + v[8 + 3]);
            }
            const int pixel = first * 16 + j * 8 + t.lane % 16;
            stmatrix_x2_trans(input + i * INPUT_BYTES + pixel * TILE_PIXEL + (warp ^ (pixel >> 1 & 3)) * 16, m[0],
                              m[1]);
        }
    }
}

// Gradients of both weights and of the first convolution's sums. The gradient of convolution 2's output is made by each
// warpgroup for its picture; then the first warpgroup makes the weights' gradient from both pictures, and the second
// one both pictures' gradient of the input, which is what block 1 needs, a warpgroup a picture again. What a warpgroup
// waits for meanwhile are mbarriers: they cost no more than named barriers of 128 threads, behind which racecheck
// 2025.3 loses count of the whole block's.
template <class L>
__device__ __forceinline__ void backward_whole(const Thread<L> &t, int parity, const KeptWhole &kept)
{
    const int group = warpgroup_of(t), warp = t.warp % 4;
    const uint32_t input = shared_address(shared + L::AT_INPUT);
    if (group < t.pictures)
        store_gradient_whole(t, group, kept);
    fence_proxy_async();
    __syncthreads();
    float sums[4][2][4], plain[2];
    const char *const picture = picture_of<L>(parity, 0), *const places = shared + L::AT_PLACES;
    const int half = warp / 2;
    if (group == 0) {
        cluster_arrive_aligned();
        if (t.thread == 0)
            mbarrier_arrive_expect_tx(shared_address(&t.small.arrived), L::EXCHANGED_VECTORS * WARPGROUP * 16);
        float d[TAPS][16];
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int i = 0; i < 16; i++)
                d[tap][i] = 0.0f;
        add_weights2(t, 0, t.pictures, d);
        float4 ours[L::EXCHANGED_VECTORS];
        cluster_wait_aligned();
        send_weights2(t, d, ours);
        clear(sums, plain);
        if (t.pictures) {
            mbarrier_wait(shared_address(&t.small.first_made), parity);
            backward1_whole(t, picture, places, input, half * 3, half * 3 + 3, sums, plain);
        }
        mbarrier_wait(shared_address(&t.small.arrived), parity);
        store_weights2(t, ours);
    } else {
        uint32_t a[24][4];
        weights_of_input2(t, a);
        cluster_arrive_aligned(); // the weights have been read, so that the other block may write there
#pragma unroll 1
        for (int i = 0; i < t.pictures; i++) {
            make_input2(t, i, a);
            if (i == 0)
                mbarrier_arrive(shared_address(&t.small.first_made));
        }
        cluster_wait_aligned();
        mbarrier_arrive(shared_address(&t.small.all_made));
        mbarrier_wait(shared_address(&t.small.all_made), parity);
        clear(sums, plain);
        // The first warpgroup has less time left, and gets fewer rows of the first picture.
#pragma unroll 1
        for (int i = 0; i < t.pictures; i++)
            backward1_whole(t, picture + i * PICTURE_BYTES, places + i * L::PLACES_BYTES, input + i * INPUT_BYTES,
                            i ? half * 7 : 6 + half * 4, i ? half * 7 + 7 : 10 + half * 4, sums, plain);
    }
    // What has been read where the weights were is read: the next step's come there by a bulk copy.
    fence_proxy_async();
    __syncthreads();
    store_sums1_whole(t, sums, plain);
}

#endif
#endif
