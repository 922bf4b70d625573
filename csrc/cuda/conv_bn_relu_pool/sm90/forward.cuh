// The convolution, and the statistics of its output.
#ifndef CUDA_OPS_CONV_BN_RELU_POOL_SM90_FORWARD_CUH
#define CUDA_OPS_CONV_BN_RELU_POOL_SM90_FORWARD_CUH

#include "common/prefetch.cuh"
#include "conv_bn_relu_pool/sm90/layout.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"

// y and its statistics. The weights stay in registers, 72 a thread, for all images of a warpgroup; the 112 accumulators
// of a thread hold whole pooling windows and are stored in their own layout, 16 bytes a thread and image row.
// Statistics of an image in two passes over the accumulators, merged as Chan et al. do.
template <typename T>
__global__ void __launch_bounds__(2 * WARPGROUP, 1)
    forward_kernel(void *ys, float2 *partial, const void *input, const void *weight, bool is_float, int64_t batch)
{
    extern __shared__ __align__(1024) char shared[];
    // warp_uniform tells the compiler so, and descriptors stay in uniform registers.
    const int group = warp_uniform(threadIdx.x / WARPGROUP), thread = threadIdx.x % WARPGROUP;
    const int warp = thread / 32, lane = thread % 32, r = warp * 16 + lane / 4, q = lane % 4;
    char *tiles = shared + group * 2 * TILE_BYTES;
    T *staged = (T *)(shared + 4 * TILE_BYTES);
    zero_shared(shared, 4 * TILE_BYTES);
    __syncthreads();
    // All blocks together prefetch the weights while the kernel before this one still runs.
    for (int line = blockIdx.x + threadIdx.x * gridDim.x; line < GRAD_WEIGHTS * (is_float ? 4 : 2) / CACHE_LINE;
         line += gridDim.x * blockDim.x)
        prefetch_global_l2((const char *)weight + line * CACHE_LINE);
    wait_for_predecessor();
    release_successor();
    const int64_t step = 2 * (int64_t)gridDim.x;
    int64_t image = blockIdx.x + (int64_t)group * gridDim.x;
    if (image < batch)
        load_tile(shared_address(tiles), input, image, thread);
    cp_async_commit_group();
    stage_weight(staged, weight, is_float);
    __syncthreads();
    uint32_t a[TAPS * 2][4];
    const T *fragment = staged + (warp * 16 + (lane >> 3 & 1) * 8 + lane % 8) * WEIGHT_PITCH + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < TAPS * 2; k++)
        ldmatrix_x4(a[k], shared_address(fragment + k / 2 * WEIGHT_PLANE + k % 2 * 16));
    float mean[2] = {0.0f, 0.0f}, m2[2] = {0.0f, 0.0f};
    int count = 0;
    const uint64_t descriptor = wgmma_descriptor(shared_address(tiles), WGMMA_SWIZZLE_64, 8 * TILE_PIXEL);
    for (; image < batch; image += step) {
        const uint64_t tile = wgmma_advance(descriptor, (count & 1) * TILE_BYTES);
        cp_async_wait_group<0>();
        fence_proxy_async();
        bar_sync(1 + group, WARPGROUP);
        float d[112];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TAPS * 2; k++) {
            const int tap = k / 2;
            wgmma<T, 224, 0>(d, a[k], wgmma_advance(tile, (tap / 3 * 16 + tap % 3) * TILE_PIXEL + k % 2 * 32), k > 0);
        }
        wgmma_commit_group();
        // The other tile was read last by the previous image's products, which every warp has waited for.
        if (image + step < batch)
            load_tile(shared_address(tiles) + (~count & 1) * TILE_BYTES, input, image + step, thread);
        cp_async_commit_group();
        wgmma_wait_group<0>();
        uint4 *y = (uint4 *)((char *)ys + image * Y_BYTES);
#pragma unroll
        for (int row = 0; row < POOLED; row++) {
            const float *v = d + row * 16;
            y[row * ROW_VECTORS + thread] = make_uint4(pack(v[0], v[1], T()), pack(v[2], v[3], T()),
                                                       pack(v[8], v[9], T()), pack(v[10], v[11], T()));
            if (q < 3)
                y[row * ROW_VECTORS + second_vector(thread)] = make_uint4(
                    pack(v[4], v[5], T()), pack(v[6], v[7], T()), pack(v[12], v[13], T()), pack(v[14], v[15], T()));
        }
        // Columns 14 and 15, which are masked, are the second vector of lanes with q = 3.
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.0f, rest = 0.0f;
#pragma unroll
            for (int row = 0; row < SIDE; row++) {
                sum += d[row * 8 + h * 2] + d[row * 8 + h * 2 + 1];
                rest += d[row * 8 + h * 2 + 4] + d[row * 8 + h * 2 + 5];
            }
            sum += q < 3 ? rest : 0.0f;
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            const float m = sum * (1.0f / PIXELS);
            float square = 0.0f, other = 0.0f;
#pragma unroll
            for (int row = 0; row < SIDE; row++) {
                const float *v = d + row * 8 + h * 2;
                square += (v[0] - m) * (v[0] - m) + (v[1] - m) * (v[1] - m);
                other += (v[4] - m) * (v[4] - m) + (v[5] - m) * (v[5] - m);
            }
            square += q < 3 ? other : 0.0f;
            square += __shfl_xor_sync(FULL_WARP, square, 1);
            square += __shfl_xor_sync(FULL_WARP, square, 2);
            const float delta = m - mean[h], weight_new = 1.0f / (float)(count + 1);
            mean[h] += delta * weight_new;
            m2[h] += square + delta * delta * ((float)count * weight_new * PIXELS);
        }
        count++;
    }
    // Merges both warpgroups' statistics into the block's.
    __shared__ float2 statistics[2][OUT_CHANNELS];
    if (q == 0) {
        statistics[group][r] = make_float2(mean[0], m2[0]);
        statistics[group][r + 8] = make_float2(mean[1], m2[1]);
    }
    __syncthreads();
    if (threadIdx.x < OUT_CHANNELS) {
        const float total = (float)block_images(batch, blockIdx.x, gridDim.x);
        const float second = (float)((int64_t)total / 2), first = total - second;
        const float2 x = statistics[0][threadIdx.x], z = statistics[1][threadIdx.x];
        const float delta = z.x - x.x;
        partial[blockIdx.x * OUT_CHANNELS + threadIdx.x] =
            make_float2(x.x + delta * (second / total), x.y + z.y + delta * delta * (first * second / total * PIXELS));
    }
}

#endif
