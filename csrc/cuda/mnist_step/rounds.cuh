// mnist_step with more than two images a block, in rounds of two that are computed as in whole_*.cuh.
//
// Each phase that works on images takes one round after the other: the convolutions forward from the first to the last,
// backward from the last to the first, so that the last round stays in shared memory. What backward needs of the others
// (convolution 2's output and input, block 1's argmax) is saved to the workspace and loaded back by bulk copies, during
// another round or the other block. Pooling and batch norm's sums need neither: from a value and its argmax for each
// window (Windows) they read a quarter of what convolution 2 wrote. Sums over images stay in registers over all rounds.
#ifndef CUDA_OPS_MNIST_STEP_ROUNDS_CUH
#define CUDA_OPS_MNIST_STEP_ROUNDS_CUH

#include "mnist_step/whole_backward.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A block has at least two images here, so that all its rounds but the last are full.
template <class L>
__device__ __forceinline__ int rounds_of(const Thread<L> &t)
{
    return (t.images + L::AT_ONCE - 1) / L::AT_ONCE;
}
template <class L>
__device__ __forceinline__ int images_of_round(const Thread<L> &t, int round)
{
    return min(L::AT_ONCE, t.images - round * L::AT_ONCE);
}

// Where image `number` of this block is saved in the workspace.
template <class L>
__device__ __forceinline__ char *tiles_of(const Thread<L> &t, int number)
{
    return t.template workspace<char>(WS_TILES) + (int64_t)(t.owner * L::IMAGES + number) * KEPT_BYTES;
}
template <class L>
__device__ __forceinline__ uint2 *windows_of(const Thread<L> &t, int number)
{
    return t.template workspace<uint2>(WS_LARGEST) + (t.owner * L::IMAGES + number) * (LARGEST_BYTES / 8);
}
template <class L>
__device__ __forceinline__ uint4 *kept_of(const Thread<L> &t, int number)
{
    return t.template workspace<uint4>(WS_KEPT) + (t.owner * L::IMAGES + number) * WARPGROUP + t.thread % WARPGROUP;
}

// The rows of an image in its tiles, without the padding above and below, in one of two slots.
template <class L>
__device__ __forceinline__ uint32_t kept_output(int slot)
{
    return shared_address(shared + L::AT_GRADIENT) + slot * GRAD_TILE_BYTES + (16 + 1) * GRAD_PIXEL;
}
template <class L>
__device__ __forceinline__ uint32_t kept_maps(int slot)
{
    return shared_address(shared + L::AT_MAPS) + slot * TILE_BYTES + 16 * TILE_PIXEL;
}
template <class L>
__device__ __forceinline__ uint32_t kept_argmax(int slot)
{
    return shared_address(shared + L::AT_ARGMAX) + slot * L::ARGMAX_BYTES;
}

// Synchronises a warpgroup: twice an image, so that the phases alternate between 0 and 1.
template <class L>
__device__ __forceinline__ void sync_group(const Thread<L> &t, int phase)
{
    const uint32_t made = shared_address(t.small.group_made + warpgroup_of(t));
    mbarrier_arrive(made);
    mbarrier_wait(made, phase);
}

// weights -> statistics. The first two images are at image_of(1, ...). Each warpgroup has every second image,
// independently of the other; it computes block 1 while the other one multiplies.
template <class L>
__device__ __forceinline__ void forward_rounds(const Thread<L> &t, int64_t step)
{
    const int group = warpgroup_of(t);
    const bool elected = t.thread % WARPGROUP == 0;
    OneImage<L> image;
    statistics1(t);
    float first[2] = {0, 0}, second[2] = {0, 0};
#pragma unroll 1
    for (int number = group; number < t.images; number += WARPGROUPS) {
        const int round = number / WARPGROUPS;
        const bool more = number + WARPGROUPS < t.images; // else the image stays in shared memory
        char *const to = tiles_of(t, number);
        if (more)
            image.load(t, step, number + WARPGROUPS);
        {
            uint32_t weights[8 * GROUPS1<L>][2];
            weights_of_forward1(t, weights);
            forward1(t, round + 1, group * ROWS1<L> + t.warp % 4 / WARPS1<L>, (group + 1) * ROWS1<L>, 4 / WARPS1<L>,
                     weights);
        }
        fence_proxy_async();
        if (round == 0) {
            mbarrier_wait(shared_address(&t.small.mapped), 0);
            if (group)
                mbarrier_wait(shared_address(&t.small.multiplied), step & 1);
        }
        if (elected)
            bulk_wait_group_read<0>(); // the previous image's output has been stored, and is overwritten next
        sync_group(t, 0);
        if (more && elected) {
            bulk_store(to + KEPT_OUTPUT, kept_maps<L>(group), KEPT_MAPS);
            bulk_store(to + KEPT_OUTPUT + KEPT_MAPS, kept_argmax<L>(group), KEPT_ARGMAX);
            bulk_commit_group();
        }
        convolve2(t, WARPGROUPS, first, second, windows_of(t, number),
                  number ? 0 : shared_address(&t.small.multiplied));
        fence_proxy_async();
        if (more)
            image.store(t, image_of<L>(round, group));
        if (elected)
            bulk_wait_group_read<0>();
        sync_group(t, 1);
        if (more && elected) {
            bulk_store(to, kept_output<L>(group), KEPT_OUTPUT);
            bulk_commit_group();
        }
    }
    sum_over_images(t, first, second, t.template workspace<float>(WS_STATISTICS));
}

// statistics -> pooled: batch norm, ReLU and max-pool.
template <class L>
__device__ __forceinline__ void pool_rounds(const Thread<L> &t)
{
    const int group = warpgroup_of(t), channel = channel_of(t), rounds = rounds_of(t);
    const float scale[2] = {t.small.scale2[channel], t.small.scale2[channel + 8]};
    const float shift[2] = {t.small.shift2[channel], t.small.shift2[channel + 8]};
    Windows next;
    next.load(t, windows_of(t, group));
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        const int count = images_of_round(t, round);
        Windows windows = next;
        if (round + 1 < rounds)
            next.load(t, windows_of(t, (round + 1) * L::AT_ONCE + group));
        char *const staged = shared + (round % 2 ? L::AT_HIDDEN : L::AT_STAGE);
        static_assert(L::AT_HIDDEN + L::AT_ONCE * L::STAGE_BYTES <= L::AT_STAGE, "");
        if (group < count) {
            __nv_bfloat16 *stage =
                (__nv_bfloat16 *)(staged + group * L::STAGE_BYTES) + channel * SIDE2 * SIDE2 + t.quad;
            KeptWhole kept = {{0, 0, 0, 0}};
#pragma unroll 1
            for (int row = 0; row < SIDE2; row++) {
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const int h = w % 2;
                    const float z = fmaf(windows.value(w), scale[h], shift[h]);
                    if (w < 2 || t.quad < 3) { // columns 14 and 15 are garbage
                        kept.largest[0] |= (z > 0 ? 1u << windows.argmax_of(w) : 0u) << w * 4;
                        stage[8 * h * SIDE2 * SIDE2 + row * SIDE2 + w / 2 * 4] =
                            __float2bfloat16_rn(z <= 0 ? 0 : z); // NaN stays
                    }
                }
                kept.next_row();
                windows.next_row();
            }
            kept.next_row();
            *kept_of(t, round * L::AT_ONCE + group) =
                make_uint4(kept.largest[0], kept.largest[1], kept.largest[2], kept.largest[3]);
        }
        __syncthreads(); // no thread is two rounds behind, whose stage the next round uses
        static constexpr int VECTORS = L::STAGE_BYTES / 16;
#pragma unroll 1
        for (int i = t.thread; i < count * VECTORS; i += THREADS)
            ((uint4 *)(t.template workspace<char>(WS_POOLED) +
                       (int64_t)(t.owner + (round * L::AT_ONCE + i / VECTORS) * L::OWNERS) * FEATURES *
                           2))[i % VECTORS] = ((const uint4 *)staged)[i];
    }
}

// The address of vector i of the gradient of the features, counted from image `number` on.
template <class L>
__device__ __forceinline__ const uint4 *grad_pooled(const Thread<L> &t, int number, int i)
{
    static constexpr int VECTORS = L::STAGE_BYTES / 16;
    return (const uint4 *)(t.template workspace<const char>(WS_GRAD_POOLED) +
                           (int64_t)(t.owner + (number + i / VECTORS) * L::OWNERS) * FEATURES * 2) +
           i % VECTORS;
}

// features -> sums: through max-pool and ReLU.
template <class L>
__device__ __forceinline__ void sums_rounds(const Thread<L> &t)
{
    static constexpr int VECTORS = L::STAGE_BYTES / 16, EACH = (L::AT_ONCE * VECTORS + THREADS - 1) / THREADS;
    const int group = warpgroup_of(t), channel = channel_of(t), rounds = rounds_of(t);
    uint4 values[EACH];
    const auto load = [&](int round) {
        const int vectors = images_of_round(t, round) * VECTORS;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (t.thread + i * THREADS < vectors)
                values[i] = __ldcg(grad_pooled(t, round * L::AT_ONCE, t.thread + i * THREADS));
    };
    load(0);
    Windows next;
    next.load(t, windows_of(t, group));
    const float scale[2] = {t.small.scale2[channel], t.small.scale2[channel + 8]};
    const float shift[2] = {t.small.shift2[channel], t.small.shift2[channel + 8]};
    const float mean[2] = {t.small.mean2[channel], t.small.mean2[channel + 8]};
    float first[2] = {0, 0}, second[2] = {0, 0};
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        char *const staged =
            shared + ((rounds - round) % 2 ? L::AT_STAGE : L::AT_HIDDEN); // the last round's is not at AT_SCRATCH
        const int count = images_of_round(t, round);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (t.thread + i * THREADS < count * VECTORS)
                ((uint4 *)staged)[t.thread + i * THREADS] = values[i];
        __syncthreads(); // no thread is two rounds behind
        Windows windows = next;
        if (round + 1 < rounds) {
            load(round + 1);
            next.load(t, windows_of(t, (round + 1) * L::AT_ONCE + group));
        }
        if (group < count) {
            const __nv_bfloat16 *stage =
                (const __nv_bfloat16 *)(staged + group * L::STAGE_BYTES) + channel * SIDE2 * SIDE2 + t.quad;
#pragma unroll 1
            for (int row = 0; row < SIDE2; row++) {
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const int h = w % 2;
                    const float y = windows.value(w);
                    const bool some = fmaf(y, scale[h], shift[h]) > 0 && (w < 2 || t.quad < 3);
                    const float dz = some ? staged_whole(t, stage, row, w) : 0.0f;
                    first[h] += dz;
                    second[h] += dz * (y - mean[h]);
                }
                windows.next_row();
            }
        }
    }
    sum_over_images(t, first, second, t.template workspace<float>(WS_SUMS2));
}

// Starts the copies of the gradient of the last two images' features to their slots at AT_STAGE.
template <class L>
__device__ __forceinline__ void start_stage(const Thread<L> &t)
{
    static constexpr int VECTORS = L::STAGE_BYTES / 16;
#pragma unroll 1
    for (int i = t.thread; i < L::AT_ONCE * VECTORS; i += THREADS) {
        const int number = t.images - 1 - i / VECTORS;
        cp_async_16(shared_address(shared + L::AT_STAGE) + number % 2 * L::STAGE_BYTES + i % VECTORS * 16,
                    grad_pooled(t, number, i % VECTORS));
    }
    cp_async_commit_group();
}

// Adds the Gram matrices of the first warpgroup's warps: to the workspace. After a barrier of the block.
template <class L>
__device__ __forceinline__ void store_grams(const Thread<L> &t)
{
    const float *const warps = (const float *)(shared + L::AT_GRAMS) + t.thread;
    if (t.thread < GRAM)
        t.template workspace<float>(WS_GRAM)[t.block * GRAM + t.thread] =
            (warps[0] + warps[GRAM]) + (warps[2 * GRAM] + warps[3 * GRAM]);
}
// Before the first step, what backward_rounds does for the next one: the Gram matrix, and the first two images.
template <class L>
__device__ __forceinline__ void first_grams(const Thread<L> &t)
{
    float products[2][4] = {};
    for (int number = t.images - 1; number >= 0; number--) {
        char *const at = image_of<L>(1, number % 2);
        if (warpgroup_of(t) == 0) {
            OneImage<L> image;
            image.load(t, 0, number);
            image.store(t, at);
        }
        __syncthreads(); // no thread is two images behind
        if (warpgroup_of(t) == 0)
            add_products(t, at, 1, t.warp, 4, products[0], products[1]);
    }
    if (warpgroup_of(t) == 0)
        store_products(t, (float *)(shared + L::AT_GRAMS) + t.warp * GRAM, products[0], products[1]);
    __syncthreads();
    store_grams(t);
}

// sums -> gradients, from the last image to the first, in two slots alternately. The first warpgroup computes the
// gradient of an image's convolution 2's output, and from it that of the weights; the second one the gradient of the
// convolution's input, and block 1's sums. In the time left the first one computes the next batch's Gram matrix, if
// there are `more` batches. They wait for each other only for data, so that one keeps the tensor cores busy while the
// other does not. Both in one function, since each barrier is arrived at in one branch and waited for in the other.
template <class L>
__device__ __forceinline__ void backward_rounds(const Thread<L> &t, int64_t step, bool more)
{
    static constexpr int VECTORS = L::STAGE_BYTES / 16;
    Small<L> &s = t.small;
    float sums[4][2][4], plain[2];
    clear(sums, plain);
    // How often an image's slot has been used, and how often loaded, since the first step.
    const auto use_of = [&](int number) {
        const int each = (t.images + 1 - number % 2) / 2;
        return (int)step * each + each - 1 - number / 2;
    };
    const auto load_of = [&](int number) {
        const int each = (t.images + 1 - number % 2) / 2;
        return (int)step * (each - 1) + each - 2 - number / 2;
    };
    const int last = t.images - 1;
    if (t.thread % WARPGROUP == 0) {
        bulk_wait_group<0>(); // what forward saved can be loaded
        fence_proxy_async_global();
    }
    cp_async_wait_group<0>();
    __syncthreads();
    if (warpgroup_of(t) == 0) {
        cluster_arrive_aligned();
        if (t.thread == 0)
            mbarrier_arrive_expect_tx(shared_address(&s.arrived), L::EXCHANGED_VECTORS * WARPGROUP * 16);
        float d[TAPS][16];
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int i = 0; i < 16; i++)
                d[tap][i] = 0.0f;
        uint4 next = __ldcg(kept_of(t, last));
        OneImage<L> image; // of the next batch
        float products[2][4] = {};
        if (more)
            image.load(t, step + 1, last);
#pragma unroll 1
        for (int number = last; number >= 0; number--) {
            const int slot = number % 2;
            const KeptWhole kept = {{next.x, next.y, next.z, next.w}};
            if (number < last - 1)
                mbarrier_wait(shared_address(s.tiles_loaded + slot), load_of(number) & 1);
            store_gradient_whole(t, slot, kept);
            if (more)
                image.store(t, image_of<L>(1, slot));
            cp_async_wait_group<0>(); // for the next image
            fence_proxy_async();
            mbarrier_arrive(shared_address(s.gradient_made + slot));
            if (number)
                next = __ldcg(kept_of(t, number - 1));
            if (number && more)
                image.load(t, step + 1, number - 1);
            mbarrier_wait(shared_address(s.gradient_made + slot), use_of(number) & 1);
            if (number > 1) {
#pragma unroll 1
                for (int i = t.thread; i < VECTORS; i += WARPGROUP)
                    cp_async_16(shared_address(shared + L::AT_STAGE) + slot * L::STAGE_BYTES + i * 16,
                                grad_pooled(t, number - 2, i));
                cp_async_commit_group();
            }
            add_weights2(t, slot, slot + 1, d);
            if (number > 1) { // its gradient has been read, and a bulk copy may overwrite it
                fence_proxy_async();
                mbarrier_arrive(shared_address(s.weights_made + slot));
            }
            if (more)
                add_products(t, image_of<L>(1, slot), 1, t.warp, 4, products[0], products[1]);
        }
        if (more)
            store_products(t, (float *)(shared + L::AT_GRAMS) + t.warp * GRAM, products[0], products[1]);
        float4 ours[L::EXCHANGED_VECTORS];
        cluster_wait_aligned();
        send_weights2(t, d, ours);
        mbarrier_wait(shared_address(&s.arrived), step & 1);
        store_weights2(t, ours);
    } else {
        const int half = t.warp % 4 / 2;
        mbarrier_wait(shared_address(&s.mapped), 1);
        uint32_t a[24][4];
        weights_of_input2(t, a);
        cluster_arrive_aligned(); // the weights have been read, and the other block may send over them
        OneImage<L> image;
        image.load(t, step, last);
#pragma unroll 1
        for (int number = last; number >= 0; number--) {
            const int slot = number % 2;
            image.store(t, image_of<L>(0, slot));
            if (number)
                image.load(t, step, number - 1);
            mbarrier_wait(shared_address(s.gradient_made + slot), use_of(number) & 1);
            make_input2(t, slot, a);
            fence_proxy_async(); // the argmax of the previous image has been read
            mbarrier_arrive(shared_address(&s.all_made));
            mbarrier_wait(shared_address(&s.all_made), ((int)step * t.images + last - number) & 1);
            if (t.thread == WARPGROUP && number && number < last) { // over that of the previous image
                const uint32_t loaded = shared_address(s.argmax_loaded + 1 - slot);
                mbarrier_arrive_expect_tx(loaded, KEPT_ARGMAX);
                bulk_load(kept_argmax<L>(1 - slot), tiles_of(t, number - 1) + KEPT_OUTPUT + KEPT_MAPS, KEPT_ARGMAX,
                          loaded);
            }
            if (t.thread == WARPGROUP && number > 1) { // over this image's tiles
                const uint32_t loaded = shared_address(s.tiles_loaded + slot);
                const char *const from = tiles_of(t, number - 2);
                mbarrier_wait(shared_address(s.weights_made + slot), load_of(number - 2) & 1);
                mbarrier_arrive_expect_tx(loaded, KEPT_OUTPUT + KEPT_MAPS);
                bulk_load(kept_output<L>(slot), from, KEPT_OUTPUT, loaded);
                bulk_load(kept_maps<L>(slot), from + KEPT_OUTPUT, KEPT_MAPS, loaded);
            }
            __syncwarp();
            if (number < last - 1)
                mbarrier_wait(shared_address(s.argmax_loaded + slot), load_of(number) & 1);
            backward1_whole(t, image_of<L>(0, slot), shared + L::AT_ARGMAX + slot * L::ARGMAX_BYTES,
                            shared_address(shared + L::AT_INPUT) + slot * INPUT_BYTES, half * 8, half ? SIDE1 : 8, sums,
                            plain);
        }
        cluster_wait_aligned();
    }
    // All reads where the weights were are done before the bulk copy of the next step's.
    fence_proxy_async();
    __syncthreads();
    if (more)
        store_grams(t);
    store_sums1_whole(t, sums, plain);
}

#endif
#endif
