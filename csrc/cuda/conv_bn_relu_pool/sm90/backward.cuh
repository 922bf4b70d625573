// Backward: sums, both gradients from dy, and the sum of the blocks' weight gradients.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM90_BACKWARD_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM90_BACKWARD_CUH

#include "common/prefetch.cuh"
#include "common/value.cuh"
#include "conv_bn_relu_pool/sm90/layout.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/global_memory.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_memory.cuh"

// partial[block][channel] = (sum of dz, sum of dz * (y - mean)) over the block's images.
template <typename T>
__global__ void __launch_bounds__(POOL_THREADS, 1)
    sums_kernel(float2 *partial, const void *grad_output, const uint32_t *raws, const uint8_t *masks_in,
                const double *statistics, int64_t batch)
{
    extern __shared__ __align__(1024) char shared[];
    const int group = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const int warp = thread / 32, lane = thread % 32, r = warp * 16 + lane / 4, q = lane % 4;
    char *grads = shared + group * 2 * POOLED_BYTES;
    int64_t image = blockIdx.x + (int64_t)group * gridDim.x;
    const int64_t step = (int64_t)POOL_GROUPS * gridDim.x;
    // Prefetch what forward stored of the first images, while the kernel before this one still runs.
    for (int64_t p = image, i = 0; p < batch && i < 2; p += step, i++) {
        if (thread < RAW_BYTES / CACHE_LINE)
            prefetch_global_l2((const char *)raws + p * RAW_BYTES + thread * CACHE_LINE);
        else if (thread - RAW_BYTES / CACHE_LINE < MASK_BYTES / CACHE_LINE)
            prefetch_global_l2(masks_in + p * MASK_BYTES + (thread - RAW_BYTES / CACHE_LINE) * CACHE_LINE);
    }
    wait_for_predecessor();
    release_successor();
    const float mean_of[2] = {(float)statistics[r], (float)statistics[r + 8]};
    float sum[2] = {0.0f, 0.0f}, product[2] = {0.0f, 0.0f};
    uint2 raw[POOLED], raw_next[POOLED] = {};
    uint4 mask, mask_next = {};
    auto load = [&](int64_t p, int stage) {
        if (p < batch) {
            const char *from = (const char *)grad_output + p * POOLED_BYTES;
            for (int i = thread; i < POOLED_BYTES / 16; i += WARPGROUP)
                cp_async_16(shared_address(grads + stage * POOLED_BYTES) + i * 16, from + i * 16);
            const uint32_t *raw_of = (const uint32_t *)((const char *)raws + p * RAW_BYTES);
#pragma unroll
            for (int row = 0; row < POOLED; row++)
                raw_next[row] = make_uint2(raw_of[row * ROW_VECTORS + thread],
                                           q < 3 ? raw_of[row * ROW_VECTORS + second_vector(thread)] : 0);
            mask_next = ((const uint4 *)(masks_in + p * MASK_BYTES))[thread];
        }
        cp_async_commit_group();
    };
    load(image, 0);
    for (int stage = 0; image < batch; image += step, stage ^= 1) {
#pragma unroll
        for (int row = 0; row < POOLED; row++)
            raw[row] = raw_next[row];
        mask = mask_next;
        load(image + step, stage ^ 1);
        cp_async_wait_group<1>();
        bar_sync(1 + group, WARPGROUP);
        const T *g = (const T *)(grads + stage * POOLED_BYTES);
        const uint32_t masks[4] = {mask.x, mask.y, mask.z, mask.w};
#pragma unroll
        for (int row = 0; row < POOLED; row++) {
            const float2 a = unpack(raw[row].x, T()), b = unpack(raw[row].y, T());
            const float v[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (masks[row / 2] >> (row % 2 * 16 + i * 4) & 15) {
                    const float dz = load_as_accumulate(g[(r + i % 2 * 8) * WINDOWS + row * POOLED + q + i / 2 * 4]);
                    sum[i % 2] += dz;
                    product[i % 2] += dz * (v[i] - mean_of[i % 2]);
                }
        }
        bar_sync(1 + group, WARPGROUP);
    }
    __shared__ float2 results[POOL_GROUPS][OUT_CHANNELS];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 1);
        sum[h] += __shfl_xor_sync(FULL_WARP, sum[h], 2);
        product[h] += __shfl_xor_sync(FULL_WARP, product[h], 1);
        product[h] += __shfl_xor_sync(FULL_WARP, product[h], 2);
        if (q == 0)
            results[group][r + 8 * h] = make_float2(sum[h], product[h]);
    }
    __syncthreads();
    if (threadIdx.x < OUT_CHANNELS) {
        float2 total = results[0][threadIdx.x];
        for (int i = 1; i < POOL_GROUPS; i++) {
            total.x += results[i][threadIdx.x].x;
            total.y += results[i][threadIdx.x].y;
        }
        partial[blockIdx.x * OUT_CHANNELS + threadIdx.x] = total;
    }
}

static constexpr int BARRIER_FULL = 1, BARRIER_EMPTY = 3, BARRIER_FIRST = 5, BARRIER_SECOND = 6;

// Both gradients, by two warpgroups. The first makes dy = scale dz + slope y + offset in accumulator layout, which is
// also the layout of wgmma's left operand, multiplies it with the image (9 taps x 16 accumulators, kept over all
// images), and stores it to shared memory; the second multiplies the weights (96 registers) with it. In the second the
// 64 rows of wgmma serve 32 channels: rows 8..15 of each warp compute tap row 1 where rows 0..7 compute tap row 0, one
// image row apart, so that both end up in one thread's registers. One long function: the two warpgroups' parts of one
// pipeline, which share its barriers and layout of shared memory.
template <typename T>
__global__ void __launch_bounds__(2 * WARPGROUP, 1)
    backward_kernel(void *grad_input, float4 *grad_weight_partial, void *grad_bn_weight, void *grad_bn_bias,
                    void *grad_bias, const void *grad_output, const void *input, const void *weight,
                    cuda_ops_norm_parameters norm, cuda_ops_dtype bias_dtype, const double *statistics,
                    const void *ys_in, const uint8_t *masks_in, const float2 *partial, int partials, bool is_float,
                    int64_t batch)
{
    extern __shared__ __align__(1024) char shared[];
    char *grad_tiles = shared, *tiles = grad_tiles + 2 * GRAD_TILE_BYTES, *ys = tiles + 2 * TILE_BYTES;
    char *grads = ys + 2 * Y_BYTES, *staging = grads + 2 * POOLED_BYTES, *end = staging + SIDE * 16 * 64;
    T *staged = (T *)end;
    float2 *coefficients = (float2 *)(end + WEIGHT_BYTES);
    const uint32_t barriers = shared_address(end + WEIGHT_BYTES + 512);
    const int group = warp_uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP;
    const int warp = thread / 32, lane = thread % 32, r = warp * 16 + lane / 4, q = lane % 4;
    const int images = (int)block_images(batch, blockIdx.x, gridDim.x);
    __shared__ float2 scratch[2 * WARPGROUP];
    __shared__ float scales[OUT_CHANNELS];
    zero_shared(shared, 2 * GRAD_TILE_BYTES + 2 * TILE_BYTES);
    if (threadIdx.x == 0) {
        mbarrier_init_fenced(barriers);
        mbarrier_init_fenced(barriers + 8);
    }
    fence_proxy_async();
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    auto load = [&](int i) { // by the first warpgroup
        if (i >= images)
            return;
        const int64_t image = blockIdx.x + (int64_t)i * gridDim.x;
        const int stage = i & 1;
        if (thread == 0) {
            mbarrier_arrive_expect_tx(barriers + stage * 8, Y_BYTES + POOLED_BYTES);
            bulk_load(shared_address(ys + stage * Y_BYTES), (const char *)ys_in + image * Y_BYTES, Y_BYTES,
                      barriers + stage * 8);
            bulk_load(shared_address(grads + stage * POOLED_BYTES), (const char *)grad_output + image * POOLED_BYTES,
                      POOLED_BYTES, barriers + stage * 8);
        }
        load_tile(shared_address(tiles + stage * TILE_BYTES), input, image, thread);
    };
    if (group == 0) {
        load(0);
        cp_async_commit_group();
        load(1);
        cp_async_commit_group();
    }
    {
        const int channel = threadIdx.x % OUT_CHANNELS, slice = threadIdx.x / OUT_CHANNELS;
        float2 sum = make_float2(0.0f, 0.0f);
        if (partials > 0) {
#pragma unroll 11
            for (int part = slice; part < partials; part += 2 * WARPGROUP / OUT_CHANNELS) {
                const float2 p = partial[part * OUT_CHANNELS + channel];
                sum.x += p.x;
                sum.y += p.y;
            }
        }
        stage_weight(staged, weight, is_float);
        scratch[threadIdx.x] = sum;
        __syncthreads();
        if (slice == 0) {
            for (int i = 1; i < 2 * WARPGROUP / OUT_CHANNELS; i++) {
                sum.x += scratch[channel + i * OUT_CHANNELS].x;
                sum.y += scratch[channel + i * OUT_CHANNELS].y;
            }
            const float mean = (float)statistics[channel], n = (float)batch * PIXELS;
            const float rstd = rsqrtf((float)statistics[OUT_CHANNELS + channel] + (float)norm.eps);
            const float scale = norm.weight ? rstd * (float)load_value(norm.weight, norm.dtype, channel) : rstd;
            const float slope = -scale * rstd * rstd * sum.y / n;
            scales[channel] = scale;
            coefficients[channel] = make_float2(-scale * sum.x / n - slope * mean, slope);
            if (blockIdx.x == 0) {
                if (grad_bn_weight)
                    store_value(grad_bn_weight, norm.dtype, channel, (double)(sum.y * rstd));
                if (grad_bn_bias)
                    store_value(grad_bn_bias, norm.dtype, channel, (double)sum.x);
                if (grad_bias) // batch norm subtracts the mean, so that bias has no effect
                    store_value(grad_bias, bias_dtype, channel, (double)(sum.x * 0.0f));
            }
        }
        __syncthreads();
    }
    if (group == 0) {
        const float2 of[2] = {coefficients[r], coefficients[r + 8]};
        const float scale[2] = {scales[r], scales[r + 8]};
        float d[TAPS][16];
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int i = 0; i < 16; i++)
                d[tap][i] = 0.0f;
        // stmatrix: lane l has the address of pixel l % 8 of matrix l / 8 (two channel chunks, then the next 8 pixels).
        const int lane_pixel = 16 + 1 + lane % 8 + (lane >> 4) * 8;
        const uint32_t lane_offset = lane_pixel * GRAD_PIXEL + ((2 * warp + (lane >> 3 & 1)) ^ (lane_pixel & 7)) * 16;
        const uint4 *mask_of = (const uint4 *)masks_in + thread;
        const uint64_t descriptor = wgmma_descriptor(shared_address(tiles), WGMMA_SWIZZLE_64, 8 * TILE_PIXEL);
        // Zeros the masked columns' words.
        const uint32_t keep_second = q == 3 ? 0 : ~0u;
        uint4 mask = images > 0 ? mask_of[(int64_t)blockIdx.x * (MASK_BYTES / 16)] : make_uint4(0, 0, 0, 0);
        for (int i = 0; i < images; i++) {
            const int stage = i & 1;
            const uint64_t tile = wgmma_advance(descriptor, stage * TILE_BYTES);
            const uint32_t grad_tile = shared_address(grad_tiles) + stage * GRAD_TILE_BYTES + lane_offset;
            const uint32_t masks[4] = {mask.x, mask.y, mask.z, mask.w};
            if (i + 1 < images)
                mask = mask_of[(blockIdx.x + (int64_t)(i + 1) * gridDim.x) * (MASK_BYTES / 16)];
            cp_async_wait_group<1>();
            fence_proxy_async();
            bar_sync(BARRIER_FIRST, WARPGROUP);
            if (i >= 2)
                bar_sync(BARRIER_EMPTY + stage, 2 * WARPGROUP);
            mbarrier_wait(barriers + stage * 8, i >> 1 & 1);
            const uint4 *y = (const uint4 *)(ys + stage * Y_BYTES);
            const T *g = (const T *)(grads + stage * POOLED_BYTES) + r * WINDOWS + q;
#pragma unroll
            for (int row = 0; row < POOLED; row++) {
                // Where q = 3 there is no second vector: any address in bounds will do.
                const uint4 y0 = y[row * ROW_VECTORS + thread];
                const uint4 y1 = y[row * ROW_VECTORS + SECOND_VECTORS + thread / 4 * 3 + (q < 3 ? q : 2)];
                const uint32_t top[4] = {y0.x, y0.y, y1.x, y1.y}, low[4] = {y0.z, y0.w, y1.z, y1.w};
                uint32_t a[2][4];
                const uint32_t bits = masks[row / 2] >> (row % 2 * 16);
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const float2 c = of[w % 2], t = unpack(top[w], T()), l = unpack(low[w], T());
                    // For w >= 2 and q = 3 the element does not exist: its mask is 0, and the address another's.
                    const float dz = scale[w % 2] *
                                     load_as_accumulate(
                                         g[w % 2 * 8 * WINDOWS + row * POOLED + w / 2 * 4 - (w / 2 && q == 3 ? 1 : 0)]);
                    const float v0 = fmaf(c.y, t.x, c.x) + (bits >> (w * 4) & 1 ? dz : 0.0f);
                    const float v1 = fmaf(c.y, t.y, c.x) + (bits >> (w * 4) & 2 ? dz : 0.0f);
                    const float v2 = fmaf(c.y, l.x, c.x) + (bits >> (w * 4) & 4 ? dz : 0.0f);
                    const float v3 = fmaf(c.y, l.y, c.x) + (bits >> (w * 4) & 8 ? dz : 0.0f);
                    a[0][w] = pack(v0, v1, T()) & (w >= 2 ? keep_second : ~0u);
                    a[1][w] = pack(v2, v3, T()) & (w >= 2 ? keep_second : ~0u);
                }
                stmatrix_x4_trans(grad_tile + 2 * row * 16 * GRAD_PIXEL, a[0][0], a[0][1], a[0][2], a[0][3]);
                stmatrix_x4_trans(grad_tile + (2 * row + 1) * 16 * GRAD_PIXEL, a[1][0], a[1][1], a[1][2], a[1][3]);
                if (row == POOLED - 1) {
                    fence_proxy_async();
                    bar_arrive(BARRIER_FULL + stage, 2 * WARPGROUP);
                }
                wgmma_fence();
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int tap = 0; tap < TAPS; tap++)
                        wgmma<T, 32, 1>(d[tap], a[h],
                                        wgmma_advance(tile, ((2 * row + h + tap / 3) * 16 + tap % 3) * TILE_PIXEL), 1);
                wgmma_commit_group();
                if (row == POOLED - 1)
                    wgmma_wait_group<0>();
                else
                    wgmma_wait_group<1>(); // overlaps with making dy of the next two rows
            }
            bar_sync(BARRIER_FIRST, WARPGROUP);
            load(i + 2);
            cp_async_commit_group();
        }
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                grad_weight_partial[((int64_t)blockIdx.x * TAPS * 4 + tap * 4 + j) * WARPGROUP + thread] =
                    make_float4(d[tap][j * 4], d[tap][j * 4 + 1], d[tap][j * 4 + 2], d[tap][j * 4 + 3]);
    } else {
        if (!grad_input) {
            for (int i = 0; i < images; i++) {
                bar_sync(BARRIER_FULL + (i & 1), 2 * WARPGROUP);
                if (i + 2 < images)
                    bar_arrive(BARRIER_EMPTY + (i & 1), 2 * WARPGROUP);
            }
            return;
        }
        // a[k]: 16 output channels (its k) of tap column f. k < 12: dy's row above, tap row 2 in rows 0..7 and tap row
        // 1 in rows 8..15; else dy's row below, tap row 0 in rows 0..7.
        uint32_t a[24][4];
        const T *fragment = staged + ((lane >> 4) * 8 + lane % 8) * WEIGHT_PITCH + warp * 8;
        const bool second = lane >> 3 & 1;
#pragma unroll
        for (int k = 0; k < 24; k++) {
            const int f = k / 4 % 3, tap = (k >= 12 ? 0 : second ? 1 : 2) * 3 + 2 - f;
            ldmatrix_x4_trans(a[k], shared_address(fragment + tap * WEIGHT_PLANE + k % 4 * 16 * WEIGHT_PITCH));
            if (k >= 12)
                a[k][1] = a[k][3] = 0;
        }
        const uint64_t descriptor = wgmma_descriptor(shared_address(grad_tiles), WGMMA_SWIZZLE_128, 8 * GRAD_PIXEL);
        for (int i = 0; i < images; i++) {
            const int64_t image = blockIdx.x + (int64_t)i * gridDim.x;
            const uint64_t grad_tile = wgmma_advance(descriptor, (i & 1) * GRAD_TILE_BYTES);
            bar_sync(BARRIER_FULL + (i & 1), 2 * WARPGROUP);
            float d[120];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < 24; k++)
                wgmma<T, 240, 0>(d, a[k],
                                 wgmma_advance(grad_tile, ((k >= 12 ? 32 : 0) + k / 4 % 3) * GRAD_PIXEL + k % 4 * 32),
                                 k > 0);
            wgmma_commit_group();
            wgmma_wait_group<0>();
            if (i + 2 < images)
                bar_arrive(BARRIER_EMPTY + (i & 1), 2 * WARPGROUP);
            // Rows 8..15 of a warp belong one image row up. Staged as [pixel][32 channels], the four vectors of a pixel
            // swizzled so that eight pixels fall into different banks.
#pragma unroll
            for (int j = 0; j < 28; j += 4) {
                uint32_t m[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *v = d + (j + e) * 4;
                    m[e] = pack(v[0] + v[8 + 2], v[1] + v[8 + 3], T());
                }
                const int pixel = j * 8 + lane;
                stmatrix_x4_trans(shared_address(staging) + pixel * 64 + (warp ^ (pixel >> 1 & 3)) * 16, m[0], m[1],
                                  m[2], m[3]);
            }
            bar_sync(BARRIER_SECOND, WARPGROUP);
            char *to = (char *)grad_input + image * (PIXELS * IN_CHANNELS * 2);
#pragma unroll
            for (int e = 0; e < 7; e++) {
                const int vector = thread + e * WARPGROUP;
                if (e < 6 || vector < PIXELS * IN_CHANNELS / 8) {
                    const int from = vector >> 2, row = from / SIDE, pixel = from + 2 * row;
                    *(uint4 *)(to + vector * 16) =
                        *(const uint4 *)(staging + pixel * 64 + ((vector & 3) ^ (pixel >> 1 & 3)) * 16);
                }
            }
        }
    }
}

// Adds the blocks' weight gradients in order: threads add 16 slices of the blocks, then the slices are added.
__global__ void __launch_bounds__(REDUCE_SLICES * 32)
    reduce_kernel(void *grad_weight, const float4 *partial, int partials, cuda_ops_dtype dtype)
{
    __shared__ float4 sums[REDUCE_SLICES][32];
    const int slice = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * 32 + lane;
    wait_for_predecessor();
    release_successor();
    constexpr int EACH = (MAX_BLOCKS + REDUCE_SLICES - 1) / REDUCE_SLICES;
    float4 p[EACH], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < EACH; i++) { // all in flight at once: their latency is most of this kernel's time
        const int part = slice + i * REDUCE_SLICES;
        p[i] = part < partials ? partial[(int64_t)part * (GRAD_WEIGHTS / 4) + index] : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        sum.x += p[i].x;
        sum.y += p[i].y;
        sum.z += p[i].z;
        sum.w += p[i].w;
    }
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice == 0) {
#pragma unroll
        for (int i = 1; i < REDUCE_SLICES; i++) {
            sum.x += sums[i][lane].x;
            sum.y += sums[i][lane].y;
            sum.z += sums[i][lane].z;
            sum.w += sums[i][lane].w;
        }
        const int thread = index % WARPGROUP, tap = index / WARPGROUP / 4, j = index / WARPGROUP % 4;
        const int out_channel = thread / 32 * 16 + lane / 4, channel = j * 8 + 2 * (lane % 4);
        const int to = out_channel * WEIGHT_ROW + channel * TAPS + tap;
        store_value(grad_weight, dtype, to, (double)sum.x);
        store_value(grad_weight, dtype, to + TAPS, (double)sum.y);
        store_value(grad_weight, dtype, to + 8 * WEIGHT_ROW, (double)sum.z);
        store_value(grad_weight, dtype, to + 8 * WEIGHT_ROW + TAPS, (double)sum.w);
    }
}

#endif
