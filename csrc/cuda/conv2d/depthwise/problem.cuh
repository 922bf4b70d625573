// What the kernels of the depthwise path share: the problem, and how input reaches shared memory or registers.
#ifndef CUDA_OPS_CONV2D_DEPTHWISE_PROBLEM_CUH
#define CUDA_OPS_CONV2D_DEPTHWISE_PROBLEM_CUH

#include "common/aligned_vector.cuh"
#include "conv2d/direct.cuh"

static constexpr int RUN = 4; // pixels or channels that a thread of the fast kernels moves at once

// Each channel has kernels of its own: output channel o reads input channel o / multiplier.
struct DepthwiseProblem {
    const void *input, *weight, *bias, *output;
    void *result;
    struct DirectStrides in, out, w;
    int64_t batch, channels, out_channels, multiplier;
    int height, width, out_height, out_width;
    int kernel_height, kernel_width, stride_height, stride_width, padding_top, padding_left;
    int dilation_height, dilation_width;
    int flipped;    // the kernel is mirrored
    int activation; // forward: a cuda_ops_conv2d_activation

    // Unrolled kernels: tiles of a plane, and planes of a block.
    int tile_width, tile_height, tiles_x, tiles_y, planes, pitch;
    struct Divisor by_rows, by_units, by_across; // rows of a patch; 4-column units of a tile, and of a row of it
    // backward_weight: splits of the pixels, or of the images.
    int64_t splits;
};

// Each group has one input channel.
static inline DepthwiseProblem depthwise_problem(const ConvCall &call)
{
    DepthwiseProblem p = direct_problem<DepthwiseProblem>(call);
    p.multiplier = call.sizes.out_channels / call.sizes.in_channels;
    return p;
}

// Whether the kernel is 3x3, 5x5 or 7x7 with stride and dilation 1, which has instances with all loops unrolled, in
// float32 arithmetic.
static inline bool depthwise_is_unrolled(const DepthwiseProblem &p, cuda_ops_dtype dtype)
{
    return dtype != CUDA_OPS_FLOAT64 && p.kernel_height == p.kernel_width &&
           (p.kernel_width == 3 || p.kernel_width == 5 || p.kernel_width == 7) && p.stride_height == 1 &&
           p.stride_width == 1 && p.dilation_height == 1 && p.dilation_width == 1 &&
           // Offsets within an image, and planes, have 32 bits.
           p.in.n <= INT_MAX && p.out.n <= INT_MAX && p.batch * p.out_channels <= INT_MAX;
}

template <typename T>
using DepthwiseRun = aligned_vector<T, RUN>;

template <typename T>
__host__ __device__ static inline bool is_aligned_run(const void *pointer)
{
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(DepthwiseRun<T>) == 0;
}

// Copies a tile with its halo to shared memory as float32 [plane][row][pitch], with zeros for the padding, from
// `planes` planes of the input that are `step` elements apart.
template <typename T, int K>
__device__ __forceinline__ void depthwise_patch(float *patch, const DepthwiseProblem &p, const T *source, int64_t step,
                                                int planes, int y0, int x0)
{
    constexpr int LINES = 5; // rows at a time, so that their loads are in flight together
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
    const int rows = p.tile_height + K - 1, columns = p.tile_width + K - 1, lines = planes * rows;
    for (int line0 = warp; line0 < lines; line0 += warps * LINES) {
        const T *from[LINES];
        bool inside[LINES];
#pragma unroll
        for (int i = 0; i < LINES; i++) {
            const int line = line0 + i * warps, plane = quotient(line, p.by_rows);
            const int y = y0 + line - plane * rows - p.padding_top;
            inside[i] = line < lines && (unsigned int)y < (unsigned int)p.height;
            from[i] = source;
            if (inside[i])
                from[i] += plane * step + y * p.width;
        }
        for (int column = lane; column < columns; column += WARP_SIZE) {
            const int x = x0 + column - p.padding_left;
            const bool inside_x = (unsigned int)x < (unsigned int)p.width;
            T value[LINES];
#pragma unroll
            for (int i = 0; i < LINES; i++)
                value[i] = inside[i] && inside_x ? from[i][x] : store_from_accumulate<T>(0.0f);
#pragma unroll
            for (int i = 0; i < LINES; i++)
                if (line0 + i * warps < lines)
                    patch[(line0 + i * warps) * p.pitch + column] = load_as_accumulate(value[i]);
        }
    }
}

// The two 16-bit elements of a word as float32.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t word)
{
    if constexpr (__is_same(T, __half))
        return __half22float2(*(const __half2 *)&word);
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)); // bfloat16
}

// index /= by; returns the remainder. In 32 bits where they suffice.
__device__ __forceinline__ int64_t divide_in_place(int64_t &index, int64_t by)
{
    int64_t quotient;
    if (((index | by) >> 32) == 0)
        quotient = (uint32_t)index / (uint32_t)by;
    else
        quotient = index / by;
    const int64_t rest = index - quotient * by;
    index = quotient;
    return rest;
}

// channels_last.cu: forward and backward_input of any kernel in vectors of channels
bool conv2d_depthwise_channels_last_takes(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward);
cuda_ops_status conv2d_depthwise_channels_last(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward,
                                               cudaStream_t stream);

// unrolled.cu: forward and backward_input in channels_last, of filters that have instances, any number of channels
bool conv2d_depthwise_unrolled_takes(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward);
cuda_ops_status conv2d_depthwise_unrolled(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward,
                                          cudaStream_t stream);

// staged_sm80.cu: the same of whole vectors of channels, by way of shared memory; CUDA_OPS_INVALID_ARGUMENT where it does not
// take that, or is not expected to take less than `microseconds`
cuda_ops_status conv2d_depthwise_staged(const DepthwiseProblem &p, cuda_ops_dtype dtype, bool forward,
                                        double microseconds, const Device &device, cudaStream_t stream);

// unrolled_weight.cu: backward_weight of the same, and the time that it is expected to take
bool conv2d_depthwise_unrolled_weight_takes(const DepthwiseProblem &p, cuda_ops_dtype dtype);
double conv2d_depthwise_unrolled_weight_microseconds(const DepthwiseProblem &p, const Device &device);
size_t conv2d_depthwise_unrolled_weight_workspace(const DepthwiseProblem &p, const Device &device);
cuda_ops_status conv2d_depthwise_unrolled_weight(const DepthwiseProblem &p, cuda_ops_dtype dtype, void *workspace,
                                                 const Device &device, cudaStream_t stream);

// backward_weight.cu
size_t conv2d_depthwise_backward_weight_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_depthwise_backward_weight(const ConvCall &call, ConvDevice device);

#endif
