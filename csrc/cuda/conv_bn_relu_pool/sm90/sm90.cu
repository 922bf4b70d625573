// conv_bn_relu_pool on Hopper's tensor cores: conv 3x3 (padding 1) -> batch norm (training) -> ReLU -> max pool 2x2 in
// fp16 or bf16, [batch][14][14][32] channels_last -> [batch][64][7][7].
//     y[64][224 pixels] = sum over the nine taps of weight[64][32 of a tap] * image shifted by the tap
// The image lies in shared memory as a raster 16 pixels wide with its padding, so that 8 neighbouring pixels are a core
// matrix of wgmma and tap (dy, dx) is an offset of 16 dy + dx pixels in the descriptor's address: no im2col. Two of the
// 16 columns of a result are masked. A warpgroup takes an image; five kernels: forward (y and its statistics), pool,
// sums (of dz and dz (y - mean)), backward (both gradients from dy, which is not stored), reduce (of the blocks' weight
// gradients, in order). Every sum has a fixed order: results repeat bitwise on one kind of device.
// Bound by the tensor cores (21.7 MFLOP an image, both passes) and the traffic of y, small batches by latency. On an
// H200, bf16, 16384 images: forward 0.86 and backward 0.72 of cuBLAS's rate at 4096^3, pool 0.87 of a copy's
// (benchmarks/notes/mnist.md).
#include "conv_bn_relu_pool/sm90/layout.cuh"

#ifdef CUDA_OPS_BLOCK_SM90_CODE
#include "conv_bn_relu_pool/sm90/backward.cuh"
#include "conv_bn_relu_pool/sm90/forward.cuh"
#include "conv_bn_relu_pool/sm90/pool.cuh"
#else // compilations for other architectures see declarations only: `supports` keeps them from being launched

template <typename T>
__global__ void forward_kernel(void *, float2 *, const void *, const void *, bool, int64_t)
{
}
template <typename T>
__global__ void pool_kernel(void *, uint32_t *, uint8_t *, const void *, Statistics, const float2 *, int, int64_t)
{
}
template <typename T>
__global__ void sums_kernel(float2 *, const void *, const uint32_t *, const uint8_t *, const double *, int64_t)
{
}
template <typename T>
__global__ void backward_kernel(void *, float4 *, void *, void *, void *, const void *, const void *, const void *,
                                cuda_ops_norm_parameters, cuda_ops_dtype, const double *, const void *, const uint8_t *,
                                const float2 *, int, bool, int64_t)
{
}
__global__ void reduce_kernel(void *, const float4 *, int, cuda_ops_dtype)
{
}

#endif

Answer conv_bn_relu_pool_sm90_supports(const ConvBlockCall &call, const Device &device)
{
    const cuda_ops_conv2d_sizes &c = call.sizes.conv;
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (call.dtype != CUDA_OPS_BFLOAT16 && call.dtype != CUDA_OPS_FLOAT16)
        return NEEDS_HALVES;
    if (c.in_channels != IN_CHANNELS || c.out_channels != OUT_CHANNELS || c.in_height != SIDE || c.in_width != SIDE)
        return no("takes only 32 channels in, 64 out, images of 14 x 14");
    return device.capability == 90 ? YES : NEEDS_90;
}

// At most a block for each of an H200's multiprocessors, each with an image at least. From the batch alone, so that
// both passes split their sums alike.
static int blocks_of(int64_t batch)
{
    return (int)(batch < MAX_BLOCKS ? batch : MAX_BLOCKS);
}

int64_t conv_bn_relu_pool_sm90_workspace(int64_t batch)
{
    return blocks_of(batch) * (OUT_CHANNELS * (int64_t)sizeof(float2) + GRAD_WEIGHTS * (int64_t)sizeof(float));
}

#ifdef CUDA_OPS_SM90A

template <typename T>
static cuda_ops_status forward(void *output, void *conv_output, void *maximum, uint8_t *argmax, const Statistics &s,
                               void *workspace, const void *input, const void *weight, int64_t batch,
                               cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    const int blocks = blocks_of(batch);
    float2 *partial = (float2 *)workspace;
    allow_shared_memory(forward_kernel<T>, FORWARD_SHARED);
    launch_dependent(forward_kernel<T>, blocks, 2 * WARPGROUP, FORWARD_SHARED, stream, conv_output, partial, input,
                     weight, weight_dtype == CUDA_OPS_FLOAT32, batch);
    launch_dependent(pool_kernel<T>, blocks, POOL_THREADS, 0, stream, output, (uint32_t *)maximum, argmax, conv_output,
                     s, partial, blocks, batch);
    return launch_status();
}

template <typename T>
static cuda_ops_status backward(void *grad_input, void *grad_weight, void *grad_bias, void *grad_norm_weight,
                                void *grad_norm_bias, void *workspace, const void *grad_output, const uint8_t *argmax,
                                const void *maximum, const void *conv_output, const double *statistics,
                                const void *input, const void *weight, const cuda_ops_norm_parameters *norm,
                                int64_t batch, cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    const int blocks = blocks_of(batch);
    float4 *grad_weight_partial = (float4 *)workspace;
    float2 *partial = (float2 *)(grad_weight_partial + blocks * (GRAD_WEIGHTS / 4));
    constexpr int SUMS_SHARED = POOL_GROUPS * 2 * POOLED_BYTES;
    allow_shared_memory(sums_kernel<T>, SUMS_SHARED);
    allow_shared_memory(backward_kernel<T>, BACKWARD_SHARED);
    launch_dependent(sums_kernel<T>, blocks, POOL_THREADS, SUMS_SHARED, stream, partial, grad_output,
                     (const uint32_t *)maximum, argmax, statistics, batch);
    launch_dependent(backward_kernel<T>, blocks, 2 * WARPGROUP, BACKWARD_SHARED, stream, grad_input,
                     grad_weight_partial, grad_norm_weight, grad_norm_bias, grad_bias, grad_output, input, weight,
                     *norm, weight_dtype, statistics, conv_output, argmax, partial, blocks,
                     weight_dtype == CUDA_OPS_FLOAT32, batch);
    launch_dependent(reduce_kernel, GRAD_WEIGHTS / 4 / 32, REDUCE_SLICES * 32, 0, stream, grad_weight,
                     grad_weight_partial, blocks, weight_dtype);
    return launch_status();
}

#endif

cuda_ops_status conv_bn_relu_pool_sm90_forward(void *output, void *conv_output, uint8_t *argmax, void *maximum,
                                               double *statistics, void *workspace,
                                               const cuda_ops_running_statistics *running, const void *input,
                                               const void *weight, const void *bias,
                                               const cuda_ops_norm_parameters *norm, int64_t batch,
                                               cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    if (batch == 0)
        return CUDA_OPS_SUCCESS;
#ifdef CUDA_OPS_SM90A
    const Statistics s = {statistics, *running, *norm, bias, weight_dtype};
    if (dtype == CUDA_OPS_BFLOAT16)
        return forward<__nv_bfloat16>(output, conv_output, maximum, argmax, s, workspace, input, weight, batch,
                                      weight_dtype, stream);
    if (dtype == CUDA_OPS_FLOAT16)
        return forward<__half>(output, conv_output, maximum, argmax, s, workspace, input, weight, batch, weight_dtype,
                               stream);
#else
    (void)output, (void)conv_output, (void)argmax, (void)maximum, (void)statistics, (void)workspace, (void)running;
    (void)input, (void)weight, (void)bias, (void)norm, (void)dtype, (void)weight_dtype, (void)stream;
#endif
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

cuda_ops_status conv_bn_relu_pool_sm90_backward(void *grad_input, void *grad_weight, void *grad_bias,
                                                void *grad_norm_weight, void *grad_norm_bias, void *workspace,
                                                const void *grad_output, const uint8_t *argmax, const void *maximum,
                                                const void *conv_output, const double *statistics, const void *input,
                                                const void *weight, const cuda_ops_norm_parameters *norm, int64_t batch,
                                                cuda_ops_dtype dtype, cuda_ops_dtype weight_dtype, cudaStream_t stream)
{
    if (batch == 0)
        return CUDA_OPS_SUCCESS;
#ifdef CUDA_OPS_SM90A
    if (dtype == CUDA_OPS_BFLOAT16)
        return backward<__nv_bfloat16>(grad_input, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias, workspace,
                                       grad_output, argmax, maximum, conv_output, statistics, input, weight, norm,
                                       batch, weight_dtype, stream);
    if (dtype == CUDA_OPS_FLOAT16)
        return backward<__half>(grad_input, grad_weight, grad_bias, grad_norm_weight, grad_norm_bias, workspace,
                                grad_output, argmax, maximum, conv_output, statistics, input, weight, norm, batch,
                                weight_dtype, stream);
#else
    (void)grad_input, (void)grad_weight, (void)grad_bias, (void)grad_norm_weight, (void)grad_norm_bias;
    (void)workspace, (void)grad_output, (void)argmax, (void)maximum, (void)conv_output, (void)statistics, (void)input;
    (void)weight, (void)norm, (void)dtype, (void)weight_dtype, (void)stream;
#endif
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
