// mnist_step with whole images, one a warpgroup: batch norm's sums backward, and the gradients of convolution 2 and of
// block 1.
#ifndef CUDA_OPS_MNIST_STEP_WHOLE_BACKWARD_CUH
#define CUDA_OPS_MNIST_STEP_WHOLE_BACKWARD_CUH

#include "mnist_step/whole_forward.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The gradient of the pooled value of this thread's window `w` in a row; any number where there is no window.
template <class L>
__device__ __forceinline__ float staged_whole(const Thread<L> &t, const __nv_bfloat16 *stage, int row, int w)
{
    return __bfloat162float(stage[8 * (w % 2) * SIDE2 * SIDE2 + row * SIDE2 + (w / 2 && t.quad == 3 ? 3 : w / 2 * 4)]);
}
template <class L>
__device__ __forceinline__ const __nv_bfloat16 *stage_of(const Thread<L> &t, int image)
{
    return (const __nv_bfloat16 *)(shared + L::AT_STAGE + image * L::STAGE_BYTES) + channel_of(t) * SIDE2 * SIDE2 +
           t.quad;
}

// Loads the gradient of the features to AT_STAGE, and through max-pool and ReLU computes batch norm's sums.
template <class L>
__device__ __forceinline__ void sums_whole(const Thread<L> &t, KeptWhole kept)
{
    static constexpr int VECTORS = L::STAGE_BYTES / 16, EACH = (L::IMAGES * VECTORS + THREADS - 1) / THREADS;
    uint4 values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int vector = t.thread + i * THREADS;
        if (vector < t.images * VECTORS)
            values[i] = __ldcg((const uint4 *)(t.template workspace<const char>(WS_GRAD_POOLED) +
                                               (int64_t)(t.owner + vector / VECTORS * L::OWNERS) * FEATURES * 2) +
                               vector % VECTORS);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int vector = t.thread + i * THREADS;
        if (vector < t.images * VECTORS)
            ((uint4 *)(shared + L::AT_STAGE))[vector] = values[i];
    }
    __syncthreads();
    float first[2] = {0, 0}, second[2] = {0, 0};
    if (warpgroup_of(t) < t.images) {
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
    sum_over_images(t, first, second, t.template workspace<float>(WS_SUMS2));
}

// The gradient of convolution 2's output for an image, by a warpgroup, in place of that output.
template <class L>
__device__ __forceinline__ void store_gradient_whole(const Thread<L> &t, int image, KeptWhole kept)
{
    const int channel = channel_of(t);
    const __nv_bfloat16 *stage = stage_of(t, image);
    const Small<L> &s = t.small;
    const float by_dz[2] = {s.by_dz[channel], s.by_dz[channel + 8]}, by_y[2] = {s.by_y[channel], s.by_y[channel + 8]},
                constant[2] = {s.constant[channel], s.constant[channel + 8]};
    const uint32_t keep_second = t.quad == 3 ? 0 : ~0u; // columns 14 and 15 are padding
#pragma unroll 1
    for (int row = 0; row < SIDE2; row++) {
        const uint32_t above = row_of_output2(t, image) + 2 * row * ROW_OF_OUTPUT2, below = above + ROW_OF_OUTPUT2;
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
        __syncwarp(); // all lanes have read what is overwritten
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

// Adds rows `from` to `to` of an image to block 1's sums, by a warp: channels 16 (warp % 2) on. sums[position][n]: of
// channels row + 8 (e / 2) and the pixels 8 n + 2 quad + e % 2 of the 4 x 4 under a window whose argmax is `position`;
// plain: of the gradients alone.
template <class L>
__device__ __forceinline__ void backward1_whole(const Thread<L> &t, const char *image, const char *argmax,
                                                uint32_t input, int from, int to, float (&sums)[4][2][4],
                                                float (&plain)[2])
{
    const int first_channel = t.warp % 2 * 16;
    static constexpr int AT_ONCE = L::ROUNDS > 1 ? 2 : 1; // rows, whose number is a multiple of it
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
                    argmax + (y * 16 + i / 2 * 8 + 2 * t.quad) * CHANNELS1 + first_channel + t.row + i % 2 * 8;
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
                        image + ((2 * y + 2 * n + t.row / 4) * IMAGE_ROW + 2 * (8 * half + 2 * t.quad) + t.row % 4) * 2;
                    b[n][half] = two_halves(at, at + 4);
                }
#pragma unroll
            for (int position = 0; position < 4; position++) {
                uint32_t a[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[i] = packed[i] & (((where[i] & 255) == position ? 0xffffu : 0u) |
                                        (where[i] >> 8 == position ? 0xffff0000u : 0u));
                mma_sync<__nv_bfloat16>(sums[position][0], a, b[0][0], b[0][1]);
                mma_sync<__nv_bfloat16>(sums[position][1], a, b[1][0], b[1][1]);
            }
        }
}

// Adds the sums of all warps, converted from positions and pixels to taps: to WS_SUMS1. After a barrier of the block.
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
    for (int position = 0; position < 4; position++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2 *)(warps + ((t.warp * 4 + position) * 16 + t.row + 8 * half) * 16 + 8 * n + 2 * t.quad) =
                    make_float2(sums[position][n][2 * half], sums[position][n][2 * half + 1]);
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
                for (int position = 0; position < 4; position++)
                    total += warps[(((w + channel / 16) * 4 + position) * 16 + channel % 16) * 16 +
                                   (position / 2 + tap / 3) * 4 + position % 2 + tap % 3];
        } else {
#pragma unroll
            for (int w = 0; w < WARPS; w += 2)
                total += sum_dz[(w + channel / 16) * 16 + channel % 16];
        }
        t.template workspace<float>(WS_SUMS1)[(t.block * CHANNELS1 + channel) * SUMS1 + tap] = total;
    }
}

// Adds images `first` to `end` to the gradient of convolution 2's weights, by the first warpgroup. d[tap]: output
// channels as wgmma's rows, input channels as its columns.
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

// Each block of the cluster adds up half of the channels of the weights' gradient, row + 8 rank, and sends its part of
// the other half, by the first warpgroup. store_weights2 then adds what was received to its own.
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

// The weights as A's fragments for the gradient of convolution 2's input, by the second warpgroup. a[k]: k runs over 16
// output channels of column tap f; k < 12: the gradient's row above, tap row 2 in rows 0..7 and tap row 1 in rows
// 8..15; else its row below, tap row 0 in rows 0..7.
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
// The gradient of convolution 2's input for image i.
template <class L>
__device__ __forceinline__ void make_input2(const Thread<L> &t, int i, const uint32_t (&a)[24][4])
{
    const int warp = t.warp % 4;
    const uint32_t input = shared_address(shared + L::AT_INPUT);
    const uint64_t tiles = wgmma_descriptor(shared_address(shared + L::AT_GRADIENT), WGMMA_SWIZZLE_128, 8 * GRAD_PIXEL);
    // Seven rows at a time, and one that belongs to the next: all fourteen would take the registers of what the other
    // phases keep, which would then be spilled throughout.
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
        // Rows 8..15 of a warp belong one image row up. Stored as [pixel][32 channels], the four vectors of a pixel
        // swizzled so that eight pixels meet different banks.
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

// The gradients of convolution 2's weights and block 1's sums. Each warpgroup computes the gradient of convolution 2's
// output for its image. Then the first one computes the weights' gradient from both images, and the second one both
// images' gradient of the input, which block 1 needs, again a warpgroup an image. Warpgroups wait at mbarriers
// meanwhile, which cost no more than named barriers of 128 threads, but which racecheck 2025.3 follows.
template <class L>
__device__ __forceinline__ void backward_whole(const Thread<L> &t, int parity, const KeptWhole &kept)
{
    const int group = warpgroup_of(t), warp = t.warp % 4;
    const uint32_t input = shared_address(shared + L::AT_INPUT);
    if (group < t.images)
        store_gradient_whole(t, group, kept);
    fence_proxy_async();
    __syncthreads();
    float sums[4][2][4], plain[2];
    const char *const image = image_of<L>(parity, 0), *const argmax = shared + L::AT_ARGMAX;
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
        add_weights2(t, 0, t.images, d);
        float4 ours[L::EXCHANGED_VECTORS];
        cluster_wait_aligned();
        send_weights2(t, d, ours);
        clear(sums, plain);
        if (t.images) {
            mbarrier_wait(shared_address(&t.small.first_made), parity);
            backward1_whole(t, image, argmax, input, half * 3, half * 3 + 3, sums, plain);
        }
        mbarrier_wait(shared_address(&t.small.arrived), parity);
        store_weights2(t, ours);
    } else {
        uint32_t a[24][4];
        weights_of_input2(t, a);
        cluster_arrive_aligned(); // the weights have been read, and the other block may send over them
#pragma unroll 1
        for (int i = 0; i < t.images; i++) {
            make_input2(t, i, a);
            if (i == 0)
                mbarrier_arrive(shared_address(&t.small.first_made));
        }
        cluster_wait_aligned();
        mbarrier_arrive(shared_address(&t.small.all_made));
        mbarrier_wait(shared_address(&t.small.all_made), parity);
        clear(sums, plain);
        // The first warpgroup has less time left, and takes fewer rows of the first image.
#pragma unroll 1
        for (int i = 0; i < t.images; i++)
            backward1_whole(t, image + i * IMAGE_BYTES, argmax + i * L::ARGMAX_BYTES, input + i * INPUT_BYTES,
                            i ? half * 7 : 6 + half * 4, i ? half * 7 + 7 : 10 + half * 4, sums, plain);
    }
    // All reads where the weights were are done before the bulk copy of the next step's.
    fence_proxy_async();
    __syncthreads();
    store_sums1_whole(t, sums, plain);
}

#endif
#endif
