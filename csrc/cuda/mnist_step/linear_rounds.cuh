// mnist_step: linear1 and the loss where a batch has more than two images a block.
//
// Forward a block has 64 images and a seventh of k (the features), backward a cluster has 64 features and each of its
// blocks half of the images: that reads the least from the L2, and gives wgmma whole tiles. Features, gradients and
// weights come by cp.async, in stages of three tiles of 64 x 64, into rows of 128 bytes with wgmma's swizzle, over the
// second convolution's weights, which are loaded again later.
#ifndef CUDA_OPS_MNIST_STEP_LINEAR_ROUNDS_CUH
#define CUDA_OPS_MNIST_STEP_LINEAR_ROUNDS_CUH

#include "mnist_step/linear.cuh"
#include "mnist_step/whole_forward.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

static constexpr int SPLIT_CHUNKS = FEATURES / SPLITS / CHUNK;
static_assert(SPLIT_CHUNKS * CHUNK * SPLITS == FEATURES && CHUNK == 64 && WIDE == CHUNK, "");
static constexpr int CHUNK_ROW = CHUNK * 2, CHUNK_BYTES = CHUNK * CHUNK_ROW; // 64 rows of 64
static constexpr int STAGES = 3, STAGE_CHUNKS = 3; // two tiles for 128 rows or columns, and one
template <class L>
static constexpr int AT_LINEAR =
    (L::AT_WEIGHTS2 + 1023) / 1024 * 1024; // backward: the weights, then what the blocks exchange
template <class L>
static constexpr int AT_CHUNKS = AT_LINEAR<L> + 2 * CHUNK_BYTES;
static_assert(AT_CHUNKS<Rounds> + STAGES * STAGE_CHUNKS * CHUNK_BYTES <= Rounds::AT_SMALL, "");

template <class L>
__device__ __forceinline__ uint32_t chunks_of_stage(int stage)
{
    return shared_address(shared + AT_CHUNKS<L>) + stage * STAGE_CHUNKS * CHUNK_BYTES;
}
// The offset of a 16-byte vector of a row of a tile.
__device__ __forceinline__ uint32_t in_chunk(int row, int vector)
{
    return row * CHUNK_ROW + ((vector ^ (row & 7)) << 4);
}
// Copies rows of 64 from device memory, `pitch` apart; from row `valid` on zeros.
template <int rows, class L>
__device__ __forceinline__ void load_rows(const Thread<L> &t, uint32_t to, const __nv_bfloat16 *from, int pitch,
                                          int valid)
{
#pragma unroll 2
    for (int i = 0; i < rows * 8 / THREADS; i++) {
        const int vector = t.thread + i * THREADS, row = vector / 8;
        cp_async<16>(to + in_chunk(row, vector % 8), from + (int64_t)row * pitch + vector % 8 * 8,
                     row < valid ? 16 : 0);
    }
}

// pooled -> partials. start_split loads what does not depend on the features.
template <class L>
__device__ __forceinline__ bool has_split(const Thread<L> &t)
{
    return t.block / SPLITS * CHUNK < t.a.batch;
}
template <class L>
__device__ __forceinline__ void load_split_weights(const Thread<L> &t, int chunk)
{
    load_rows<HIDDEN>(t, chunks_of_stage<L>(chunk % STAGES),
                      t.template workspace<const __nv_bfloat16>(WS_LINEAR1) +
                          (t.block % SPLITS * SPLIT_CHUNKS + chunk) * CHUNK,
                      FEATURES, HIDDEN);
}
template <class L>
__device__ __forceinline__ void load_split_features(const Thread<L> &t, int chunk)
{
    load_rows<CHUNK>(t, chunks_of_stage<L>(chunk % STAGES) + 2 * CHUNK_BYTES,
                     t.template workspace<const __nv_bfloat16>(WS_POOLED) +
                         (int64_t)(t.block / SPLITS * CHUNK) * FEATURES +
                         (t.block % SPLITS * SPLIT_CHUNKS + chunk) * CHUNK,
                     FEATURES, CHUNK);
}
template <class L>
__device__ __forceinline__ void start_split(const Thread<L> &t)
{
#pragma unroll 1
    for (int chunk = 0; chunk < STAGES - 1; chunk++)
        load_split_weights(t, chunk);
}
template <class L>
__device__ __forceinline__ void forward_split(const Thread<L> &t)
{
#pragma unroll 1
    for (int chunk = 0; chunk < STAGES - 1; chunk++) {
        load_split_features(t, chunk);
        cp_async_commit_group();
    }
    const int group = warpgroup_of(t), warp = t.warp % 4;
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; i++)
        d[i] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < SPLIT_CHUNKS; chunk++) {
        cp_async_wait_group<STAGES - 2>();
        fence_proxy_async();
        __syncthreads();
        if (chunk + STAGES - 1 < SPLIT_CHUNKS) {
            load_split_weights(t, chunk + STAGES - 1);
            load_split_features(t, chunk + STAGES - 1);
        }
        cp_async_commit_group();
        const uint32_t weights = chunks_of_stage<L>(chunk % STAGES), features = weights + 2 * CHUNK_BYTES;
        uint32_t a[CHUNK / 16][4];
        const int row = 16 * warp + t.lane % 8 + t.lane / 8 % 2 * 8;
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++)
            ldmatrix_x4(a[k], features + in_chunk(row, 2 * k + t.lane / 16));
        const uint64_t right = wgmma_descriptor(weights + group * CHUNK_BYTES, WGMMA_SWIZZLE_128, 8 * CHUNK_ROW);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < CHUNK / 16; k++)
            wgmma<__nv_bfloat16, 64, 0>(d, a[k], wgmma_advance(right, k * 32), 1);
        wgmma_commit_group();
        wgmma_wait_group<0>();
    }
    const int image = t.block / SPLITS * CHUNK + 16 * warp + t.row;
    float *to = t.template workspace<float>(WS_PARTIAL) + (t.block % SPLITS * MOST + image) * HIDDEN + group * UNITS +
                2 * t.quad;
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (image + 8 * h < t.a.batch)
#pragma unroll
            for (int j = 0; j < 8; j++)
                __stcg((float2 *)(to + 8 * h * HIDDEN + 8 * j), make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]));
}

// partials -> hidden, a warp an image: from the partial sums of its hidden units, of which a lane has four, to their
// gradient.
template <class L>
__device__ __forceinline__ void head_of_warp(const Thread<L> &t, int64_t step)
{
    static_assert(L::IMAGES <= WARPS, "");
    if (t.warp >= t.images)
        return;
    const int64_t image = t.owner + t.warp * L::OWNERS;
    float4 parts[SPLITS];
#pragma unroll
    for (int i = 0; i < SPLITS; i++)
        parts[i] = __ldcg(
            (const float4 *)(t.template workspace<const float>(WS_PARTIAL) + (i * MOST + image) * HIDDEN) + t.lane);
    const float4 *weight = (const float4 *)(shared + L::AT_LINEAR2) + t.lane;
    const float *bias2 = (const float *)(shared + L::AT_LINEAR2) + CLASSES * HIDDEN + HIDDEN;
    const float4 bias1 = weight[CLASSES * HIDDEN / 4];
    float hidden[4] = {bias1.x, bias1.y, bias1.z, bias1.w};
#pragma unroll
    for (int i = 0; i < SPLITS; i++)
        hidden[0] += parts[i].x, hidden[1] += parts[i].y, hidden[2] += parts[i].z, hidden[3] += parts[i].w;
#pragma unroll
    for (int i = 0; i < 4; i++)
        hidden[i] = rounded(hidden[i] <= 0 ? 0 : hidden[i]);
    // Five classes at a time, for the instruction cache; the lane with the number of a class has what belongs to it.
    static constexpr int AT_ONCE = CLASSES / 2;
    static_assert(AT_ONCE * 2 == CLASSES, "");
    float mine = 0;
#pragma unroll 1
    for (int first = 0; first < CLASSES; first += AT_ONCE) {
        float logits[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const float4 w = weight[(first + j) * HIDDEN / 4];
            logits[j] = hidden[0] * w.x + hidden[1] * w.y + hidden[2] * w.z + hidden[3] * w.w;
        }
#pragma unroll
        for (int lanes = 1; lanes < WARP_SIZE; lanes *= 2)
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                logits[j] += __shfl_xor_sync(FULL_WARP, logits[j], lanes);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            mine = first + j == t.lane ? logits[j] : mine;
    }
    const bool is_class = t.lane < CLASSES;
    mine = is_class ? mine + bias2[t.lane] : -CUDART_INF_F;
    float most = mine;
#pragma unroll
    for (int lanes = 1; lanes < WARP_SIZE; lanes *= 2)
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, lanes));
    const int label = t.small.label[step % 2][t.warp];
    const bool good = label >= 0;
    const float logit = is_class ? mine - most : 0.0f, exponential = is_class ? __expf(logit) : 0.0f;
    const float total = warp_sum(exponential), all = warp_sum(logit);
    const float wanted_logit = __shfl_sync(FULL_WARP, logit, good ? label : 0);
    const float smoothing = t.a.label_smoothing, share = smoothing / CLASSES, each = __fdividef(1.0f, (float)t.a.batch);
    const float wanted = share + (t.lane == label ? 1 - smoothing : 0.0f);
    const float gradient = good ? exponential * __fdividef(each, total) - wanted * each : 0.0f;
    float sums[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < CLASSES; first += AT_ONCE)
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const float g = __shfl_sync(FULL_WARP, gradient, first + j);
            const float4 w = weight[(first + j) * HIDDEN / 4];
            sums[0] += g * w.x, sums[1] += g * w.y, sums[2] += g * w.z, sums[3] += g * w.w;
        }
#pragma unroll
    for (int i = 0; i < 4; i++)
        sums[i] = hidden[i] <= 0 ? 0.0f : sums[i];
    const int64_t at = image * (HIDDEN / 4) + t.lane;
    t.template workspace<uint2>(WS_GRAD_HIDDEN)[at] =
        make_uint2(pack_pair(sums[0], sums[1]), pack_pair(sums[2], sums[3]));
    t.template workspace<uint2>(WS_HIDDEN)[at] =
        make_uint2(pack_pair(hidden[0], hidden[1]), pack_pair(hidden[2], hidden[3]));
    if (t.lane < CLASSES)
        t.template workspace<float>(WS_GRAD_LOGITS)[image * 16 + t.lane] = gradient;
    if (t.lane == 0) // -sum of wanted * log-probability, with all wanted adding up to 1
        t.template workspace<float>(WS_LOSS)[image] =
            logf(total) - (1 - smoothing) * (good ? wanted_logit : CUDART_NAN_F) - share * all;
}

// hidden -> features: chunks rank, rank + 2, ... of the images, starting at one that differs from cluster to cluster,
// since all read the same gradients. start_backward_linear1 loads what does not depend on the hidden units.
template <class L>
__device__ __forceinline__ int own_chunks(const Thread<L> &t)
{
    return ((t.a.batch + CHUNK - 1) / CHUNK - t.rank + 1) / 2;
}
template <class L>
__device__ __forceinline__ int chunk_of(const Thread<L> &t, int i)
{
    return t.rank + 2 * ((i + t.cluster) % own_chunks(t));
}
template <class L>
__device__ __forceinline__ void load_chunk_features(const Thread<L> &t, int chunk, int stage)
{
    load_rows<CHUNK>(t, chunks_of_stage<L>(stage) + 2 * CHUNK_BYTES,
                     t.template workspace<const __nv_bfloat16>(WS_POOLED) + (int64_t)(chunk * CHUNK) * FEATURES +
                         t.cluster * WIDE,
                     FEATURES, t.a.batch - chunk * CHUNK);
}
template <class L>
__device__ __forceinline__ void load_chunk_gradients(const Thread<L> &t, int chunk, int stage)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        load_rows<CHUNK>(t, chunks_of_stage<L>(stage) + i * CHUNK_BYTES,
                         t.template workspace<const __nv_bfloat16>(WS_GRAD_HIDDEN) + (int64_t)(chunk * CHUNK) * HIDDEN +
                             i * CHUNK,
                         HIDDEN, t.a.batch - chunk * CHUNK);
}
template <class L>
__device__ __forceinline__ void start_backward_linear1(const Thread<L> &t)
{
    load_rows<HIDDEN>(t, shared_address(shared + AT_LINEAR<L>),
                      t.template workspace<const __nv_bfloat16>(WS_LINEAR1) + t.cluster * WIDE, FEATURES, HIDDEN);
    load_chunk_features(t, chunk_of(t, 0), 0);
}
// The first warpgroup computes the gradient of the features, the second one the block's images' part of the weights'
// gradient, of which the other block of the cluster gets its slice.
template <class L>
__device__ __forceinline__ void backward_linear1_rounds(const Thread<L> &t)
{
    const int group = warpgroup_of(t), warp = t.warp % 4;
    const int chunks = own_chunks(t); // two at least
    int chunk = chunk_of(t, 0), ahead = chunk_of(t, 1);
    const auto next = [&](int now) { return now + 2 < 2 * chunks ? now + 2 : t.rank; };
    load_chunk_gradients(t, chunk, 0);
    cp_async_commit_group();
    load_chunk_features(t, ahead, 1);
    load_chunk_gradients(t, ahead, 1);
    cp_async_commit_group();
    float d[2][32]; // of the first and the second 64 hidden units
#pragma unroll
    for (int i = 0; i < 64; i++)
        d[i / 32][i % 32] = 0.0f;
    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < chunks; i++, chunk = next(chunk)) {
        cp_async_wait_group<STAGES - 2>();
        fence_proxy_async();
        __syncthreads();
        if (i + STAGES - 1 < chunks) {
            const int to = (stage + STAGES - 1) % STAGES;
            ahead = next(ahead);
            load_chunk_features(t, ahead, to);
            load_chunk_gradients(t, ahead, to);
        }
        cp_async_commit_group();
        const uint32_t gradients = chunks_of_stage<L>(stage), features = gradients + 2 * CHUNK_BYTES;
        stage = (stage + 1) % STAGES;
        if (group == 0) {
            uint32_t a[HIDDEN / 16][4];
            const int row = 16 * warp + t.lane % 8 + t.lane / 8 % 2 * 8;
#pragma unroll
            for (int k = 0; k < HIDDEN / 16; k++)
                ldmatrix_x4(a[k], gradients + k / 4 * CHUNK_BYTES + in_chunk(row, 2 * (k % 4) + t.lane / 16));
            const uint64_t right =
                wgmma_descriptor(shared_address(shared + AT_LINEAR<L>), WGMMA_SWIZZLE_128, 8 * CHUNK_ROW);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < HIDDEN / 16; k++)
                wgmma<__nv_bfloat16, 64, 1>(d[0], a[k], wgmma_advance(right, k * 16 * CHUNK_ROW), k > 0);
            wgmma_commit_group();
            wgmma_wait_group<0>();
            const int64_t image = chunk * CHUNK + 16 * warp + t.row;
            __nv_bfloat16 *to =
                t.template workspace<__nv_bfloat16>(WS_GRAD_POOLED) + image * FEATURES + t.cluster * WIDE + 2 * t.quad;
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (image + 8 * h < t.a.batch)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        *(uint32_t *)(to + 8 * h * FEATURES + 8 * j) =
                            pack_pair(d[0][4 * j + 2 * h], d[0][4 * j + 2 * h + 1]);
        } else {
            uint32_t a[2][CHUNK / 16][4];
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int k = 0; k < CHUNK / 16; k++)
                    ldmatrix_x4_trans(a[i][k],
                                      gradients + i * CHUNK_BYTES +
                                          in_chunk(16 * k + t.lane % 8 + t.lane / 16 * 8, 2 * warp + t.lane / 8 % 2));
            const uint64_t right = wgmma_descriptor(features, WGMMA_SWIZZLE_128, 8 * CHUNK_ROW);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < CHUNK / 16; k++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    wgmma<__nv_bfloat16, 64, 1>(d[i], a[i][k], wgmma_advance(right, k * 16 * CHUNK_ROW), 1);
            wgmma_commit_group();
            wgmma_wait_group<0>();
        }
    }
    const uint32_t exchanged = shared_address(&t.small.exchanged);
    if (t.thread == 0)
        mbarrier_arrive_expect_tx(exchanged, 2 * CHUNK_BYTES);
    cluster_arrive_aligned(); // the weights have been read, and the other block may send over them
    t.arrive();
    cluster_wait_aligned();
    if (group == 1) {
        const int mine = t.thread % WARPGROUP;
        const uint32_t to = of_other(t, shared_address(shared + AT_LINEAR<L>) + mine * 16),
                       arrived = of_other(t, exchanged);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float *v = d[i / 4] + i % 4 * 4;
            const float4 low = {v[0], v[1], v[2], v[3]}, high = {v[16], v[17], v[18], v[19]};
            const float4 theirs = t.rank ? low : high;
            ((float4 *)(shared + AT_CHUNKS<L>))[i * WARPGROUP + mine] = t.rank ? high : low;
            st_async(to + i * WARPGROUP * 16, theirs, arrived);
        }
    }
}
// After another barrier of the block.
template <class L>
__device__ __forceinline__ void update_linear1_rounds(const Thread<L> &t, int64_t step, float (&weight)[4][4],
                                                      float rate)
{
    mbarrier_wait(shared_address(&t.small.exchanged), step & 1);
    // The fragment layout of the weights: the warp of the other half of the units is four further.
    const int at = t.thread / WARPGROUP * 4 * WARPGROUP + t.thread % WARPGROUP;
    const float4 *ours = (const float4 *)(shared + AT_CHUNKS<L>)+at,
                 *theirs = (const float4 *)(shared + AT_LINEAR<L>)+at;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float4 a = ours[n * WARPGROUP], b = theirs[n * WARPGROUP];
        weight[n][0] -= rate * (a.x + b.x), weight[n][1] -= rate * (a.y + b.y);
        weight[n][2] -= rate * (a.z + b.z), weight[n][3] -= rate * (a.w + b.w);
    }
    store_linear1(t, weight);
}

#endif
#endif
