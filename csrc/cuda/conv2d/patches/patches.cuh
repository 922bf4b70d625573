// Patches of the input of a convolution in 16 bits: rows [pixel][k], in memory for gemm (patches.cu) or in shared memory
// (forward_sm80.cu). k counts the lines of a kernel, and along a line its elements, as they lie side by side in the
// image: kernel_width of a channel, or kernel_width x channels in channels_last.
#ifndef CUDA_OPS_CONV2D_PATCHES_CUH
#define CUDA_OPS_CONV2D_PATCHES_CUH

#include <limits.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/fast_division.cuh"
#include "conv2d/paths.h"

static constexpr int VECTOR = 8; // elements of 16 bytes

// Sizes fit in 32 bits. `unit`: elements of an image that a step along x is apart.
struct Patches {
    int64_t image;      // elements of an image of input
    int height, length; // lines of a channel, or of an image in channels_last, and elements of one
    int lines;          // of an image
    int out_height, out_width;
    int kernel_height, run_length; // run_length: elements of a line that a kernel reads
    int step_y, step_x, shift_y, shift_x, dilation_y;
    int reach_y;              // lines from a kernel's first to its last
    int pixels, taken, pitch; // taken: k, in rows of `pitch` elements, of which the others are zero
    int bias;                 // whether element `taken` is one, beside the bias in the weight
    int channels, last;       // of input, and whether it is channels_last
    int output_last;
    int out_channels;
    int64_t weight_o, weight_c, weight_y, weight_x; // the weight's strides
    int patch_blocks;
    int block_channels; // of forward's blocks
    Divider by_width, by_height, by_runs, by_lines, by_channel_height, by_step_y, by_step_x;
};

// What element k of a patch is.
struct Place {
    int line, at;
};

__device__ __forceinline__ Place place_of(const Patches &p, int k)
{
    const int line = k / p.run_length;
    return {line, k - line * p.run_length};
}

__device__ __forceinline__ int64_t weight_offset(const Patches &p, int o, int k)
{
    const Place place = place_of(p, k);
    const int c = p.last ? place.at % p.channels : place.line / p.kernel_height;
    const int r = p.last ? place.line : place.line % p.kernel_height, s = p.last ? place.at / p.channels : place.at;
    return o * p.weight_o + c * p.weight_c + r * p.weight_y + s * p.weight_x;
}

// 16 bytes of runs.
__device__ __forceinline__ uint4 packed(const uint16_t (&r)[8])
{
    return make_uint4(r[0] | (uint32_t)r[1] << 16, r[2] | (uint32_t)r[3] << 16, r[4] | (uint32_t)r[5] << 16,
                      r[6] | (uint32_t)r[7] << 16);
}
__device__ __forceinline__ uint4 packed(const uint32_t (&r)[4])
{
    return make_uint4(r[0], r[1], r[2], r[3]);
}
__device__ __forceinline__ uint4 packed(const uint2 (&r)[2])
{
    return make_uint4(r[0].x, r[0].y, r[1].x, r[1].y);
}
__device__ __forceinline__ uint4 packed(const uint4 (&r)[1])
{
    return r[0];
}

// Ones in the bits of the first `count` of a word's two elements.
__device__ __forceinline__ uint32_t first_bits(int count)
{
    return count <= 0 ? 0 : count == 1 ? 0xffffu : 0xffffffffu;
}

// The same 16 bytes of the patches of any pixels, from loads of a Run, of 1 to 8 elements, each.
template <typename Run>
struct PatchVector {
    static constexpr int RUN = sizeof(Run) / 2, RUNS = VECTOR / RUN;
    const Run *input;
    int offset[RUNS], line_y[RUNS], at_x[RUNS];
    uint4 there; // ones in the bits of elements that are taken

    __device__ __forceinline__ PatchVector(const Patches &p, const Run *from, int vector) : input(from)
    {
        const int count = p.taken - vector * VECTOR;
        there = make_uint4(first_bits(count), first_bits(count - 2), first_bits(count - 4), first_bits(count - 6));
#pragma unroll
        for (int i = 0; i < RUNS; i++) {
            const int k = vector * VECTOR + i * RUN;
            const Place place = place_of(p, k);
            const int channel = p.last ? 0 : place.line / p.kernel_height;
            const bool taken = k < p.taken;
            line_y[i] = taken ? (place.line - channel * p.kernel_height) * p.dilation_y : INT_MIN / 2; // never inside
            at_x[i] = place.at;
            offset[i] = taken ? ((channel * p.height + line_y[i]) * p.length + place.at) / RUN : 0;
        }
    }

    __device__ __forceinline__ uint4 of(const Patches &p, int pixel) const
    {
        const int line = (int)p.by_width.of((uint32_t)pixel), x = pixel - line * p.out_width;
        const int image = (int)p.by_height.of((uint32_t)line), y = line - image * p.out_height;
        const int first_y = y * p.step_y - p.shift_y, first_x = x * p.step_x - p.shift_x;
        const Run *const from = input + (image * p.image + (int64_t)first_y * p.length + first_x) / RUN;
        Run runs[RUNS];
        // A patch of which nothing is padding, as most are.
        if (first_y >= 0 && first_y + p.reach_y <= p.height && first_x >= 0 && first_x + p.run_length <= p.length) {
#pragma unroll
            for (int i = 0; i < RUNS; i++)
                runs[i] = from[offset[i]];
            const uint4 all = packed(runs);
            return make_uint4(all.x & there.x, all.y & there.y, all.z & there.z, all.w & there.w);
        }
#pragma unroll
        for (int i = 0; i < RUNS; i++) {
            const bool inside = (unsigned int)(first_y + line_y[i]) < (unsigned int)p.height &&
                                (unsigned int)(first_x + at_x[i]) < (unsigned int)p.length;
            runs[i] = inside ? from[offset[i]] : Run{};
        }
        return packed(runs);
    }
};

// The elements of a run, of so many bytes each: a power of two that all places in the images where one may begin are
// multiples of.
static inline int conv2d_patches_run(const Patches &p, const void *images, int element = 2)
{
    const uint64_t all = (uint64_t)p.length | (uint64_t)p.run_length | (uint64_t)p.step_x | (uint64_t)p.shift_x |
                         (uint64_t)(uintptr_t)images / element;
    int run = 16 / element;
    while (all % run != 0)
        run /= 2;
    return run;
}

Patches conv2d_patches_of(const ConvCall &call);
// Whether it is rectangles that grad_input is cut into.
bool conv2d_patches_share_pixels(const ConvCall &call);

// All passes by way of device memory and gemm (patches.cu).
size_t conv2d_patches_memory_workspace(const ConvCall &call);
cuda_ops_status conv2d_patches_in_memory(const ConvCall &call, ConvDevice device);

// The gradient of the input where patches share pixels (rectangles.cu), in float32 too.
Answer conv2d_rectangles_supports(const ConvCall &call, ConvDevice device);
double conv2d_rectangles_microseconds(const ConvCall &call, ConvDevice device);
size_t conv2d_rectangles_workspace(const ConvCall &call);
cuda_ops_status conv2d_rectangles(const ConvCall &call);

// Forward in one kernel (forward_sm80.cu), which reads elements one by one.
bool conv2d_patches_forward_fits(const Patches &p);
cuda_ops_status conv2d_patches_forward(const ConvCall &call, const Patches &p, ConvDevice device);

#endif
