// What the kernels of the few_channels path share: the problem, and the patch: a tile's input with its halo, in shared
// memory.
#ifndef CUDA_OPS_CONV2D_FEW_CHANNELS_PROBLEM_CUH
#define CUDA_OPS_CONV2D_FEW_CHANNELS_PROBLEM_CUH

#include "conv2d/direct.cuh"
#include "ptx/cvt.cuh"

// FMA in float32, or mma.sync, whose operands are 32-bit words: a TF32 number, or a pair of fp16 or bf16 elements. In a
// patch of 16-bit elements a word holds the element at its coordinate and the one `pair` columns to the right, so that
// a pair at any coordinate, even or odd, is one load.
enum FewMath { FEW_FMA, FEW_TF32, FEW_16BIT };

static constexpr int FEW_THREADS = 128, FEW_WARPS = FEW_THREADS / WARP_SIZE;
static constexpr int FEW_MOST_CHANNELS = 4;

// Sizes fit in 32 bits; the plans check that.
struct FewProblem {
    const void *input, *weight, *bias, *output;
    void *result;
    struct DirectStrides in, out, w;
    int64_t batch;
    int channels, height, width;
    int out_channels, out_height, out_width;
    int kernel_height, kernel_width, stride_height, stride_width, padding_top, padding_left;
    int dilation_height, dilation_width;
    int activation; // forward: a cuda_ops_conv2d_activation

    // Tiles of output (backward_input: of grad_input), and the patch of one: `rows` x `columns` words for each channel;
    // then, where an odd width of 16-bit elements needs it, the same with single elements, whose neighbour in the word
    // is zero; then `zeros` words of zeros. Operands that must not be multiplied, since they could be infinite, are
    // read from the latter two instead.
    int tile_width, tile_height, tiles_x, tiles_y;
    int64_t tiles;
    int rows, columns, plane, single, zero, zeros, patch; // single, zero: their offsets; patch: all words
    struct Divisor by_columns, by_rows;
    int pair;          // columns between the elements of a word
    int words;         // forward: of k, not padded to whole steps
    int vector;        // bytes of an access to output; sizeof(T): elements one by one
    int warps_x;       // of a block's warps, those that are neighbours along columns (or taps)
    int splits, steps; // backward_weight: blocks that share the pixels
};

template <int MATH>
__device__ __forceinline__ uint32_t few_operand(uint32_t word)
{
    return MATH == FEW_TF32 ? cvt_rna_tf32(__uint_as_float(word)) : word;
}

// A tile's image, and its row and column among the image's tiles.
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

// The zeros of a patch, once for all tiles.
__device__ __forceinline__ void few_clear_zeros(uint32_t *patch, const FewProblem &p)
{
    for (int i = threadIdx.x; i < p.zeros; i += blockDim.x)
        patch[p.zero + i] = 0;
}

// The coordinates of a patch's words, packed as channel, row, column: once per block, so that no tile divides.
__device__ __forceinline__ void few_write_coordinates(uint32_t *coordinates, const FewProblem &p)
{
    for (int i = threadIdx.x; i < p.channels * p.plane; i += blockDim.x) {
        const int line = quotient(i, p.by_columns), c = quotient(line, p.by_rows);
        coordinates[i] = (uint32_t)c << 30 | (uint32_t)(line - c * p.rows) << 15 | (uint32_t)(i - line * p.columns);
    }
}

// Copies the patch whose corner is row y0, column x0 of image `n` of the input, around the arithmetic of another tile:
// `fetch` starts the loads, `store` may wait for them. float32 goes by cp.async; 16-bit elements, which go to two words
// each, wait in AHEAD registers, and what exceeds these is copied by `store`, AT_ONCE elements of a thread at a time.
template <typename T, int AHEAD>
struct FewPatch {
    static constexpr int AT_ONCE = 8;
    uint32_t ahead[AHEAD];
    const T *image;
    int y0, x0;

    // Offsets within an image fit in 32 bits.
    __device__ __forceinline__ bool locate(const FewProblem &p, uint32_t coordinate, int &offset, int &x) const
    {
        const int y = y0 + (int)(coordinate >> 15 & 0x7fff);
        x = x0 + (int)(coordinate & 0x7fff);
        offset = (int)(coordinate >> 30) * (int)p.in.c + y * (int)p.in.y + x * (int)p.in.x;
        return (unsigned int)y < (unsigned int)p.height;
    }

    __device__ __forceinline__ uint32_t element_at(const FewProblem &p, uint32_t coordinate) const
    {
        int offset, x;
        const bool inside = locate(p, coordinate, offset, x) && (unsigned int)x < (unsigned int)p.width;
        return inside ? bits_of(image[offset]) : 0;
    }

    // An element is the low half of its own word and the high half of another. (The last columns' words, whose high
    // halves are missing, are never read as a pair.)
    __device__ __forceinline__ void put(uint32_t *patch, const FewProblem &p, int i, uint32_t coordinate,
                                        uint32_t bits) const
    {
        unsigned short *const words16 = (unsigned short *)patch;
        words16[2 * i] = (unsigned short)bits;
        if ((int)(coordinate & 0x7fff) >= p.pair)
            words16[2 * (i - p.pair) + 1] = (unsigned short)bits;
        if (p.single > 0)
            patch[p.single + i] = bits;
    }

    __device__ __forceinline__ void fetch(uint32_t *patch, const uint32_t *coordinates, const FewProblem &p, int64_t n,
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
                    locate(p, coordinates[i], offset, column) && (unsigned int)column < (unsigned int)p.width;
                copy_to_shared<4>(patch + i, image + (inside ? offset : 0), inside);
            }
        } else {
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int i = threadIdx.x + k * blockDim.x;
                ahead[k] = i < count ? element_at(p, coordinates[i]) : 0;
            }
        }
    }

    __device__ __forceinline__ void store(uint32_t *patch, const uint32_t *coordinates, const FewProblem &p)
    {
        if constexpr (sizeof(T) == 2) {
            const int count = p.channels * p.plane;
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int i = threadIdx.x + k * blockDim.x;
                if (i < count)
                    put(patch, p, i, coordinates[i], ahead[k]);
            }
            for (int first = threadIdx.x + AHEAD * blockDim.x; first < count; first += AT_ONCE * blockDim.x) {
                uint32_t bits[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    const int i = first + k * blockDim.x;
                    bits[k] = i < count ? element_at(p, coordinates[i]) : 0;
                }
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    const int i = first + k * blockDim.x;
                    if (i < count)
                        put(patch, p, i, coordinates[i], bits[k]);
                }
            }
        }
    }
};

// Shared memory that a block may have; on Hopper two of them fit on a multiprocessor.
static inline size_t few_most_shared(int capability)
{
    return capability >= 90 ? 112 * 1024 : 96 * 1024;
}

// The blocks of a kernel that run at once: the grid of persistent kernels.
template <typename Kernel>
static inline int64_t few_resident_blocks(Kernel kernel, int threads, size_t shared, ConvDevice device)
{
    allow_shared_memory(kernel, shared);
    return (int64_t)active_blocks(kernel, threads, shared) * device.multiprocessors;
}

static inline FewMath few_math(const ConvCall &call)
{
    if (call.dtype == CUDA_OPS_FLOAT32)
        return call.sizes.allow_tf32 ? FEW_TF32 : FEW_FMA;
    return FEW_16BIT;
}

// Keeps in p the cheapest of the tiles that it is called with: width x height, of which across x down are covered, with
// a patch of rows x columns, at a cost of `each`. least: the cost of the tile kept so far; 0: none. Returns whether
// this tile is kept, and then the caller sets what else p says of it.
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

// The gradients, each in the file of its name. They return CUDA_OPS_INVALID_ARGUMENT where they do not support the
// call.
bool conv2d_few_channels_backward_input_supports(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels_backward_input(const ConvCall &call, ConvDevice device);
bool conv2d_few_channels_backward_input_small_filter_supports(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels_backward_input_small_filter(const ConvCall &call, ConvDevice device);
bool conv2d_few_channels_backward_input_stride2_supports(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels_backward_input_stride2(const ConvCall &call, ConvDevice device);
bool conv2d_few_channels_backward_weight_supports(const ConvCall &call, ConvDevice device);
size_t conv2d_few_channels_backward_weight_workspace(const ConvCall &call, ConvDevice device);
cuda_ops_status conv2d_few_channels_backward_weight(const ConvCall &call, ConvDevice device);

#endif
