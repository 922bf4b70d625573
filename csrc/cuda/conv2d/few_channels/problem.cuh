// What the kernels of conv2d_few_channels*.cu share: the problem as they see it, the patch of input under a tile of
// output, and the instructions.
#ifndef CUDA_OPS_CONV2D_FEW_CHANNELS_PROBLEM_CUH
#define CUDA_OPS_CONV2D_FEW_CHANNELS_PROBLEM_CUH

#include "conv2d/direct.cuh"
#include "ptx/cvt.cuh"

// How products are made: by FMA in float32, or by mma.sync, whose operands are 32-bit words: a TF32 number or a pair of
// halves. In a patch of halves the word at a place holds the element there and the one `pair` columns to its right, so
// that a pair at any place, even or odd, is one load.
enum FewMath { FEW_FMA, FEW_TF32, FEW_HALVES };

static constexpr int FEW_THREADS = 128, FEW_WARPS = FEW_THREADS / WARP_SIZE;
static constexpr int FEW_MOST_CHANNELS = 4;

// Strides in elements; the sizes fit in 32 bits, as the plans see to.
struct FewStrides {
    int64_t n, c, y, x;
};

struct FewProblem {
    const void *input, *weight, *bias, *output;
    void *result;
    struct FewStrides in, out, w; // w.n: output channel, w.y and w.x: rows and columns of the kernel
    int64_t batch;
    int channels, height, width;
    int out_channels, out_height, out_width;
    int kernel_height, kernel_width, stride_height, stride_width, padding_top, padding_left;
    int dilation_height, dilation_width;

    // Tiles of output (of grad_input in its kernel), and the patch of source that belongs to one: `rows` x `columns`
    // words for each channel, then, where halves need it, the same with lone elements (the other
    // half of the word is zero), then `zeros` words of zeros. What must not be multiplied (it could be infinite) is
    // read from the latter two.
    int tile_width, tile_height, tiles_x, tiles_y;
    int64_t tiles;
    int rows, columns, plane, lone, zero, zeros, patch; // lone, zero: offsets of these parts; patch: all words
    struct Divisor by_columns, by_rows;
    int pair;         // columns between the halves of a word
    int words;        // of the summed axis, where it runs over taps; without the filling up to whole steps
    int vector;       // bytes that an output access moves at once; sizeof(T): elements one by one
    int warps_x;      // of a block's warps, those side by side
    int parts, steps; // weight gradient: blocks that share the pixels
};

static inline FewStrides few_strides(int64_t channels, int64_t height, int64_t width, int channels_last)
{
    if (channels_last)
        return {channels * height * width, 1, width * channels, channels};
    return {channels * height * width, height * width, width, 1};
}

template <int MATH>
__device__ __forceinline__ uint32_t few_operand(uint32_t word)
{
    return MATH == FEW_TF32 ? cvt_rna_tf32(__uint_as_float(word)) : word;
}

// Which image a tile is of, and its row and column among the tiles there.
struct FewTile {
    int64_t n;
    int y, x;
};

__device__ __forceinline__ FewTile few_tile(const FewProblem &p, int64_t tile)
{
    const uint32_t each = (uint32_t)p.tiles_x * (uint32_t)p.tiles_y;
    const int64_t n = tile >> 32 == 0 ? (uint32_t)tile / each : tile / each;
    const uint32_t rest = (uint32_t)(tile - n * each), y = rest / (uint32_t)p.tiles_x;
    return {n, (int)y, (int)(rest - y * (uint32_t)p.tiles_x)};
}

// Writes zeros, which never change, once for all tiles.
__device__ __forceinline__ void few_clear_zeros(uint32_t *patch, const FewProblem &p)
{
    for (int i = threadIdx.x; i < p.zeros; i += blockDim.x)
        patch[p.zero + i] = 0;
}

// Where the words of a patch lie, packed, so that no tile has to divide for it: written once by each block.
__device__ __forceinline__ void few_write_places(uint32_t *places, const FewProblem &p)
{
    for (int i = threadIdx.x; i < p.channels * p.plane; i += blockDim.x) {
        const int line = quotient(i, p.by_columns), c = quotient(line, p.by_rows);
        places[i] = (uint32_t)c << 30 | (uint32_t)(line - c * p.rows) << 15 | (uint32_t)(i - line * p.columns);
    }
}

// The patch whose corner is row y0, column x0 of image `n` of the input, in two steps around the arithmetic of another
// tile: `fetch` starts the loads, `store` is called when they may be waited for. float32 goes by cp.async; halves,
// which go to two words each, wait in AHEAD registers, and what exceeds these is copied in `store`.
template <typename T, int AHEAD>
struct FewPatch {
    uint32_t ahead[AHEAD];
    const T *image;
    int y0, x0;

    // Offsets within an image fit in 32 bits.
    __device__ __forceinline__ bool locate(const FewProblem &p, uint32_t place, int &offset, int &x) const
    {
        const int y = y0 + (int)(place >> 15 & 0x7fff);
        x = x0 + (int)(place & 0x7fff);
        offset = (int)(place >> 30) * (int)p.in.c + y * (int)p.in.y + x * (int)p.in.x;
        return (unsigned int)y < (unsigned int)p.height;
    }

    __device__ __forceinline__ uint32_t element_at(const FewProblem &p, uint32_t place) const
    {
        int offset, x;
        const bool inside = locate(p, place, offset, x) && (unsigned int)x < (unsigned int)p.width;
        return inside ? bits_of(image[offset]) : 0;
    }

    // An element is the left half of the word at its place and the right one of another. (In the last columns, where
    // there is no other, no word is ever read as a pair.)
    __device__ __forceinline__ void put(uint32_t *patch, const FewProblem &p, int i, uint32_t place,
                                        uint32_t bits) const
    {
        unsigned short *const halves = (unsigned short *)patch;
        halves[2 * i] = (unsigned short)bits;
        if ((int)(place & 0x7fff) >= p.pair)
            halves[2 * (i - p.pair) + 1] = (unsigned short)bits;
        if (p.lone > 0)
            patch[p.lone + i] = bits;
    }

    __device__ __forceinline__ void fetch(uint32_t *patch, const uint32_t *places, const FewProblem &p, int64_t n,
                                          int y, int x)
    {
        const int count = p.channels * p.plane;
        image = (const T *)p.input + n * p.in.n;
        y0 = y;
        x0 = x;
        if constexpr (sizeof(T) == 4) {
#pragma unroll 4
            for (int i = threadIdx.x; i < count; i += blockDim.x) {
                int offset, column;
                const bool inside =
                    locate(p, places[i], offset, column) && (unsigned int)column < (unsigned int)p.width;
                copy_to_shared<4>(patch + i, image + (inside ? offset : 0), inside);
            }
        } else {
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int i = threadIdx.x + k * blockDim.x;
                ahead[k] = i < count ? element_at(p, places[i]) : 0;
            }
        }
    }

    __device__ __forceinline__ void store(uint32_t *patch, const uint32_t *places, const FewProblem &p)
    {
        if constexpr (sizeof(T) == 2) {
            const int count = p.channels * p.plane;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int i = threadIdx.x + k * blockDim.x;
                if (i < count)
                    put(patch, p, i, places[i], ahead[k]);
            }
            for (int i = threadIdx.x + AHEAD * blockDim.x; i < count; i += blockDim.x)
                put(patch, p, i, places[i], element_at(p, places[i]));
        }
    }
};

// Shared memory that a block may have; on Hopper two of them fit on a multiprocessor.
static inline size_t few_most_shared(int capability)
{
    return capability >= 90 ? 112 * 1024 : 96 * 1024;
}

// The blocks of a kernel that run at once, for kernels whose blocks take tiles in turn.
template <typename Kernel>
static inline int64_t few_held(Kernel kernel, int threads, size_t shared, ConvDevice device)
{
    allow_shared_memory(kernel, shared);
    int blocks = 1;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
    return (int64_t)(blocks > 0 ? blocks : 1) * device.multiprocessors;
}

static inline FewMath few_math(const ConvCall &call)
{
    if (call.dtype == CUDA_OPS_FLOAT32)
        return call.sizes.allow_tf32 ? FEW_TF32 : FEW_FMA;
    return FEW_HALVES;
}

static inline FewProblem few_problem(const ConvCall &call)
{
    const cuda_ops_conv2d_sizes &s = call.sizes;
    FewProblem p = {};
    p.input = call.input;
    p.weight = call.weight;
    p.bias = call.bias;
    p.output = call.output;
    p.result = call.result;
    p.in = few_strides(s.in_channels, s.in_height, s.in_width, s.input_channels_last);
    p.out = few_strides(s.out_channels, s.out_height, s.out_width, s.output_channels_last);
    p.w = few_strides(s.in_channels, s.kernel_height, s.kernel_width, s.weight_channels_last);
    p.batch = s.batch;
    p.channels = (int)s.in_channels;
    p.height = (int)s.in_height;
    p.width = (int)s.in_width;
    p.out_channels = (int)s.out_channels;
    p.out_height = (int)s.out_height;
    p.out_width = (int)s.out_width;
    p.kernel_height = (int)s.kernel_height;
    p.kernel_width = (int)s.kernel_width;
    p.stride_height = (int)s.stride_height;
    p.stride_width = (int)s.stride_width;
    p.padding_top = (int)s.padding_top;
    p.padding_left = (int)s.padding_left;
    p.dilation_height = (int)s.dilation_height;
    p.dilation_width = (int)s.dilation_width;
    return p;
}

// Keeps in p the cheapest of the tiles it is asked about, with the patch of rows x columns that belongs to it: of
// width x height, where across x down are to be covered, at a cost of `each`. least: the cost of the one that is kept,
// 0 before the first. Whether this one is it; what else p says of the tile is the caller's to set then.
static inline bool few_keep_cheaper(FewProblem &p, int64_t across, int64_t down, int width, int height, int64_t rows,
                                    int64_t columns, double each, double &least)
{
    const int64_t tiles_x = ceil_div(across, width), tiles_y = ceil_div(down, height);
    if (tiles_x * tiles_y > INT_MAX)
        return false;
    const double cost = (double)tiles_x * (double)tiles_y * each;
    if (least > 0 && cost >= least)
        return false;
    least = cost;
    p.tile_width = width;
    p.tile_height = height;
    p.tiles_x = (int)tiles_x;
    p.tiles_y = (int)tiles_y;
    p.rows = (int)rows;
    p.columns = (int)columns;
    p.by_columns = make_divisor(p.columns);
    return true;
}

// The gradients' parts of the path, in conv2d/few_channels/backward_input_sm80.cu, backward_input_small_filter_sm80.cu,
// backward_input_stride2_sm80.cu
// and backward_weight_sm80.cu.
bool conv2d_few_channels_input_supports(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels_input(const ConvCall &call, ConvDevice device);
bool conv2d_few_channels_taps_input_supports(const ConvCall &call, ConvDevice device);
// CUDA_OPS_INVALID_ARGUMENT where it does not support the call.
cuda_ops_status conv2d_few_channels_taps_input(const ConvCall &call, ConvDevice device);
bool conv2d_few_channels_strided_input_supports(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels_strided_input(const ConvCall &call, ConvDevice device);
bool conv2d_few_channels_weight_supports(const ConvCall &call, ConvDevice device);
size_t conv2d_few_channels_weight_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels_weight(const ConvCall &call, ConvDevice device);

#endif
