// mnist_step: sizes, and the layout of shared memory and of the workspace.
#ifndef CUDA_OPS_MNIST_STEP_LAYOUT_CUH
#define CUDA_OPS_MNIST_STEP_LAYOUT_CUH

#include <stddef.h>
#include <type_traits>

#include "common/common.cuh"
#include "common/swizzle.cuh"
#include "cuda_ops/mnist_step.h"
#include "ptx/wgmma.cuh"

static constexpr int CLUSTERS = 64, BLOCKS = 2 * CLUSTERS;
[[maybe_unused]] static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int SIDE = 28, PIXELS = SIDE * SIDE; // of an image
static constexpr int SIDE1 = 14, CHANNELS1 = 32;      // of the first block's output
static constexpr int SIDE2 = 7, CHANNELS2 = 64, HALF2 = CHANNELS2 / 2;
static constexpr int FEATURES = CHANNELS2 * SIDE2 * SIDE2, HIDDEN = 128, CLASSES = 10;
static constexpr int SLICE = 32, SLICES = FEATURES / SLICE; // of the features; each of the first SLICES blocks has one
static constexpr int CHUNK = 64;                            // images of one of linear1's tiles
// Forward a cluster has two slices, and each of its blocks half of the hidden units: half as many partial sums as with
// a slice and all units for each block.
static constexpr int PAIRS = SLICES / 2, WIDE = 2 * SLICE, UNITS = HIDDEN / 2, WIDE_CHUNK = 2 * CHUNK;
static constexpr int SPLITS = 7; // of linear1's k, in rounds
static constexpr int TAPS = 9;
static constexpr int64_t MOST_STEPS = 1 << 21; // the grid barrier counts 1024 arrivals a step in 32 bits
// The Gram matrix of the taps and the constant 1: sums over positions of p_i p_j, with p_9 = 1.
static constexpr int GRAM_SIDE = TAPS + 1, GRAM = GRAM_SIDE * GRAM_SIDE;
static constexpr int MOMENTS = TAPS + TAPS * TAPS; // means, covariances
static constexpr int SUMS1 = 12;                   // per channel of the first block: S of nine taps, sum of dz, padding
static constexpr int WEIGHTS2 = TAPS * CHANNELS2 * CHANNELS1, OWN_WEIGHTS2 = WEIGHTS2 / BLOCKS;
static constexpr int CONV_WARPS = 7; // with a row of pooling windows each
static constexpr int EXCHANGED = 16; // values that a thread sends to the other block of the cluster
// What the blocks without a slice do meanwhile: linear2, one class each, linear1's bias, and the moments of the next
// batch.
static constexpr int LINEAR2_BLOCKS = SLICES, BIAS1_BLOCK = SLICES + CLASSES, MOMENTS_BLOCK = BIAS1_BLOCK + 1;
static_assert(MOMENTS_BLOCK < BLOCKS && SLICES % 2 == 0 && SLICES * SLICE == FEATURES &&
                  OWN_WEIGHTS2 * BLOCKS == WEIGHTS2,
              "");
[[maybe_unused]] static constexpr int CONV1_BLOCKS = BLOCKS - CHANNELS1; // from this block on, one channel each

// ---- Shared memory, in bytes ----
static constexpr int IMAGE_ROW = 32, IMAGE_BYTES = (30 * IMAGE_ROW + 8) * 2; // padded by a pixel on all sides
static constexpr int PITCH = 80;                                             // of a pixel, 32 channels
static constexpr int MAP_ROW = 18,
                     MAP_BYTES = 16 * MAP_ROW * PITCH; // 14 x 14 with padding; rows of 16 and what the taps reach
// Of an image, what a block receives from the other one: every second row in all channels, and the argmax of its own
// channels.
static constexpr int ROWS_BYTES = SIDE1 / 2 * SIDE1 * (CHANNELS1 * 2 + CHANNELS1 / 2);
static constexpr int WEIGHTS_BYTES = TAPS * HALF2 * PITCH;
static constexpr int EXCHANGE_BYTES = EXCHANGED * CONV_WARPS * WARP_SIZE * 4;
static constexpr int KERNEL1_ROW = 6, KERNEL1 = 5 * KERNEL1_ROW; // of the first convolution, padded with zeros
static constexpr int HIDDEN_PITCH = HIDDEN * 2 + 16, HIDDEN_BYTES = CHUNK * HIDDEN_PITCH;
static constexpr int SLICE_BYTES = CHUNK * PITCH, LINEAR1_BYTES = HIDDEN * PITCH;
static constexpr int WIDE_PITCH = WIDE * 2 + 16, LINEAR2_BYTES = (CLASSES * HIDDEN + CLASSES + HIDDEN) * 4;

static constexpr int WARPGROUPS = THREADS / WARPGROUP;

template <class L>
struct Small {
    // Mbarriers. arrived: what the cluster's other block sends backward. mapped: the maps and argmax that it computes
    // or, with whole images, convolution 2's weights. first_made, all_made: the first image's gradient of the input, by
    // the second warpgroup, and all that it computes (whole images, backward).
    uint64_t arrived, mapped, first_made, all_made;
    // In rounds also. group_made: of a warpgroup for itself; multiplied: the first warpgroup's first product;
    // exchanged: the other block's part of linear1's gradient; and of each of two images: what was saved of it is
    // loaded, the gradient of convolution 2's output is computed, and that of its weights.
    uint64_t group_made[WARPGROUPS], multiplied, exchanged, tiles_loaded[2], argmax_loaded[2], gradient_made[2],
        weights_made[2];
    float moments[MOMENTS];
    float running_mean1[CHANNELS1], running_variance1[CHANNELS1], running_mean2[L::CHANNELS],
        running_variance2[L::CHANNELS];
    float norm_weight1[CHANNELS1], norm_bias1[CHANNELS1];
    __align__(16) float scale1[CHANNELS1];
    __align__(16) float shift1[CHANNELS1]; // for |scale|; its sign is applied to the kernel
    float norm_weight2[L::CHANNELS], norm_bias2[L::CHANNELS], scale2[L::CHANNELS], shift2[L::CHANNELS],
        mean2[L::CHANNELS], rstd2[L::CHANNELS], bias2[L::CHANNELS];
    float by_dz[L::CHANNELS], by_y[L::CHANNELS], constant[L::CHANNELS];
    int64_t index[2][L::IMAGES];
    int label[2][L::IMAGES];
    __align__(16) __nv_bfloat16 kernel1[CHANNELS1 * KERNEL1];
};

// Layouts of a batch over the blocks. The blocks of an owner share its images: owner, owner + OWNERS, ...

// Up to 64 images: a cluster of two blocks shares one, each with half of the second convolution's channels.
struct Pair {
    static constexpr int MEMBERS = 2, OWNERS = BLOCKS / MEMBERS, ROUNDS = 1, AT_ONCE = 1, IMAGES = 1;
    static constexpr int CHANNELS = CHANNELS2 / MEMBERS; // of convolution 2, a block's
    // Half an image's features; block 1's argmax, [row][16 columns][a block's channels]
    static constexpr int STAGE_BYTES = CHANNELS * SIDE2 * SIDE2 * 2, ARGMAX_BYTES = SIDE1 * 16 * CHANNELS1 / MEMBERS;

    static constexpr int AT_IMAGES = 0; // of this batch and the next one
    static constexpr int AT_MAPS = AT_IMAGES + 2 * IMAGES * IMAGE_BYTES;
    static constexpr int AT_ARGMAX = AT_MAPS + IMAGES * MAP_BYTES;
    static constexpr int AT_GRADIENT = AT_ARGMAX + IMAGES * ARGMAX_BYTES; // of convolution 2's output, a block's half
    static constexpr int AT_WEIGHTS2 = AT_GRADIENT + MAP_BYTES;           // [tap][out channel][in channel]
    // What the other block sends; at other times linear2's parameters.
    static constexpr int AT_EXCHANGE = AT_WEIGHTS2 + WEIGHTS_BYTES, AT_LINEAR2 = AT_EXCHANGE;
    static constexpr int AT_HIDDEN = AT_EXCHANGE + EXCHANGE_BYTES, AT_SCRATCH = AT_HIDDEN;
    static constexpr int AT_SLICE = AT_HIDDEN + HIDDEN_BYTES;
    static constexpr int AT_LINEAR1 = AT_SLICE + SLICE_BYTES;
    static constexpr int AT_STAGE = AT_LINEAR1 + LINEAR1_BYTES;
    static constexpr int AT_SMALL = AT_STAGE + IMAGES * STAGE_BYTES;
    static_assert(EXCHANGE_BYTES <= HIDDEN_BYTES && LINEAR2_BYTES <= EXCHANGE_BYTES, "");
    // linear1's operands forward, from linear2's parameters up to AT_LINEAR1: weights [unit][feature], then features
    // [image][feature].
    static constexpr int AT_WIDE_WEIGHTS = (AT_LINEAR2 + LINEAR2_BYTES + 15) / 16 * 16,
                         AT_WIDE = AT_WIDE_WEIGHTS + UNITS * WIDE_PITCH;
    static_assert(AT_WIDE + WIDE_CHUNK * WIDE_PITCH <= AT_LINEAR1, "");
};

// Up to 256: a block has one or two whole images, one a warpgroup. Convolution 2 is wgmma on tiles as in
// conv_bn_relu_pool/sm90/layout.cuh: 16 x 16 pixels with padding, and what garbage columns reach.
static constexpr int TILE_PIXEL = CHANNELS1 * 2, TILE_BYTES = (258 * TILE_PIXEL + 511) / 512 * 512;
static constexpr int GRAD_PIXEL = CHANNELS2 * 2, GRAD_TILE_BYTES = (274 * GRAD_PIXEL + 1023) / 1024 * 1024;
static constexpr int INPUT_BYTES = SIDE1 * 16 * TILE_PIXEL; // a gradient of convolution 2's input
template <int rounds>
struct WholeOf {
    static constexpr int MEMBERS = 1, OWNERS = BLOCKS, ROUNDS = rounds, AT_ONCE = WARPGROUPS, IMAGES = ROUNDS * AT_ONCE;
    static constexpr int CHANNELS = CHANNELS2;
    static constexpr int STAGE_BYTES = CHANNELS * SIDE2 * SIDE2 * 2, ARGMAX_BYTES = SIDE1 * 16 * CHANNELS1;

    static constexpr int AT_GRADIENT = 0, AT_MAPS = AT_GRADIENT + AT_ONCE * GRAD_TILE_BYTES; // aligned to the swizzle
    static constexpr int AT_IMAGES = AT_MAPS + AT_ONCE * TILE_BYTES; // of two batches, or two rounds
    static constexpr int AT_ARGMAX = AT_IMAGES + 2 * AT_ONCE * IMAGE_BYTES;
    static constexpr int AT_WEIGHTS2 = AT_ARGMAX + AT_ONCE * ARGMAX_BYTES; // [tap][out channel][in channel]
    static constexpr int AT_LINEAR1 = AT_WEIGHTS2 + TAPS * CHANNELS2 * PITCH;
    static constexpr int AT_LINEAR2 = AT_LINEAR1 + LINEAR1_BYTES;
    static constexpr int AT_HIDDEN = (AT_LINEAR2 + LINEAR2_BYTES + 15) / 16 * 16, AT_SCRATCH = AT_HIDDEN;
    static constexpr int AT_SLICE = AT_HIDDEN + HIDDEN_BYTES;
    // Gradients of convolution 2's input, once the stage has been read; in rounds beside the next round's stage.
    static constexpr int AT_INPUT = ROUNDS > 1 ? AT_LINEAR2 : AT_HIDDEN;
    static constexpr int AT_STAGE = ROUNDS > 1 ? (AT_INPUT + AT_ONCE * INPUT_BYTES + 15) / 16 * 16
                                               : AT_SLICE + SLICE_BYTES;
    static constexpr int AT_SMALL = AT_STAGE + AT_ONCE * STAGE_BYTES;
    static_assert(AT_SLICE + SLICE_BYTES <= AT_STAGE && AT_INPUT + AT_ONCE * INPUT_BYTES <= AT_SMALL, "");
    // linear1's operands forward, while nothing is staged.
    static constexpr int AT_WIDE_WEIGHTS = AT_HIDDEN, AT_WIDE = AT_WIDE_WEIGHTS + UNITS * WIDE_PITCH;
    static_assert(AT_WIDE + WIDE_CHUNK * WIDE_PITCH <= AT_SMALL, "");
    static constexpr int AT_SUMS1 = AT_LINEAR2; // block 1's sums of all warps, at the end
    static constexpr int AT_GRAMS = AT_LINEAR1; // in rounds, all warps' Gram matrices, at the same time
    // What the other block of the cluster sends of the weights' gradient, where the weights were.
    static constexpr int AT_EXCHANGE = AT_WEIGHTS2, EXCHANGED_VECTORS = TAPS * 2;
    static_assert(EXCHANGED_VECTORS * WARPGROUP * 16 <= TAPS * CHANNELS2 * PITCH, "");
    static_assert(AT_SUMS1 + WARPS * (4 * 16 + 1) * 16 * 4 <= AT_SMALL, "");
};
using Whole = WholeOf<1>;
// Up to 1024: in rounds of two. What backward needs of a round is saved to the workspace, but for the last round's,
// with which backward begins (rounds.cuh).
using Rounds = WholeOf<CUDA_OPS_MNIST_STEP_MOST / (BLOCKS * WARPGROUPS)>;
template <class L>
static constexpr int SHARED_BYTES = L::AT_SMALL + (int)sizeof(Small<L>);
static_assert(SHARED_BYTES<Pair> <= 232448 && SHARED_BYTES<Whole> <= 232448 && SHARED_BYTES<Rounds> <= 232448,
              "more shared memory than a block of Hopper has");

// ---- Workspace, in bytes ----
static constexpr int64_t align_256(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}
static constexpr int64_t MOST = CUDA_OPS_MNIST_STEP_MOST;
// Offsets below 8 MB fit into the instructions.
static constexpr int64_t WS_BARRIER = 0;                                      // arrivals, blocks that have left
static constexpr int64_t WS_GRAM = 256;                                       // [block][GRAM] float
static constexpr int64_t WS_MOMENTS = WS_GRAM + align_256(BLOCKS * GRAM * 4); // [MOMENTS] float
static constexpr int64_t WS_WEIGHTS2 = WS_MOMENTS + align_256(MOMENTS * 4);   // [tap][out][in] bfloat16, see weight2_of
static constexpr int64_t WS_STATISTICS = WS_WEIGHTS2 + align_256(WEIGHTS2 / CHANNELS1 * PITCH); // [block][2][CHANNELS]
static constexpr int64_t WS_SUMS2 = WS_STATISTICS + align_256(BLOCKS * 2 * CHANNELS2 * 4);      // the same
static constexpr int64_t WS_SUMS1 = WS_SUMS2 + align_256(BLOCKS * 2 * CHANNELS2 * 4); // [owner][channel][SUMS1]
static constexpr int64_t WS_LINEAR1 =
    WS_SUMS1 + align_256(BLOCKS * CHANNELS1 * SUMS1 * 4);                                 // [HIDDEN][FEATURES] bfloat16
static constexpr int64_t WS_GRAD_WEIGHTS2 = WS_LINEAR1 + (int64_t)HIDDEN * FEATURES * 2;  // [cluster][tap][out][in]
static constexpr int64_t WS_HIDDEN = WS_GRAD_WEIGHTS2 + (int64_t)CLUSTERS * WEIGHTS2 * 4; // [batch][HIDDEN] bfloat16
static constexpr int64_t WS_GRAD_HIDDEN = WS_HIDDEN + MOST * HIDDEN * 2;                  // the same
static constexpr int64_t WS_GRAD_LOGITS = WS_GRAD_HIDDEN + MOST * HIDDEN * 2;             // [batch][16] float
static constexpr int64_t WS_LOSS = WS_GRAD_LOGITS + MOST * 16 * 4;                        // [batch] float
static constexpr int64_t WS_POOLED = WS_LOSS + align_256(MOST * 4);                       // [batch][FEATURES] bfloat16
static constexpr int64_t WS_GRAD_POOLED = WS_POOLED + MOST * FEATURES * 2;                // the same
static constexpr int64_t WS_PARTIAL = WS_GRAD_POOLED + MOST * FEATURES * 2; // [pair of slices][batch][HIDDEN] float
static constexpr int64_t WHOLE_MOST = BLOCKS * WARPGROUPS, HIDDEN_VALUES = WHOLE_MOST * HIDDEN;
static_assert(SPLITS * MOST <= PAIRS * WHOLE_MOST, "rounds have [split][batch][HIDDEN] there");
// Of rounds: the image's tiles [owner][number] (KEPT_*), its Windows [owner][number][vector][thread], and KeptWhole
// [owner][number][thread].
static constexpr int64_t WS_TILES = WS_PARTIAL + PAIRS * HIDDEN_VALUES * 4;
static constexpr int KEPT_OUTPUT = SIDE1 * 16 * GRAD_PIXEL, KEPT_MAPS = SIDE1 * 16 * TILE_PIXEL,
                     KEPT_ARGMAX = SIDE1 * 16 * CHANNELS1, KEPT_BYTES = KEPT_OUTPUT + KEPT_MAPS + KEPT_ARGMAX;
static constexpr int64_t WS_LARGEST = WS_TILES + MOST * KEPT_BYTES;
static constexpr int LARGEST_VECTORS = 4, LARGEST_BYTES = LARGEST_VECTORS * WARPGROUP * 16;
static constexpr int64_t WS_KEPT = WS_LARGEST + MOST * LARGEST_BYTES;
static constexpr int64_t WORKSPACE_BYTES = WS_KEPT + MOST * WARPGROUP * 16;

struct Arguments {
    float *losses;
    cuda_ops_mnist_parameters parameters;
    char *workspace;
    cuda_ops_index_error *error;
    const uint8_t *images;
    const int64_t *labels, *indices;
    const float *rates;
    int64_t count, steps;
    int batch;
    float center, scale; // of pixels: (byte - center) * scale
    float label_smoothing;
};

#endif
