// mnist_step: sizes, and what lies where in shared memory and in the workspace.
#ifndef CUDA_OPS_MNIST_STEP_LAYOUT_CUH
#define CUDA_OPS_MNIST_STEP_LAYOUT_CUH

#include <stddef.h>
#include <type_traits>

#include "common/common.cuh"
#include "cuda_ops/mnist_step.h"
#include "ptx/wgmma.cuh"

static constexpr int CLUSTERS = 64, BLOCKS = 2 * CLUSTERS;
[[maybe_unused]] static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int SIDE = 28, PIXELS = SIDE * SIDE; // of a picture
static constexpr int SIDE1 = 14, CHANNELS1 = 32;      // of the first block's output
static constexpr int SIDE2 = 7, CHANNELS2 = 64, HALF2 = CHANNELS2 / 2;
static constexpr int FEATURES = CHANNELS2 * SIDE2 * SIDE2, HIDDEN = 128, CLASSES = 10;
static constexpr int SLICE = 32, SLICES = FEATURES / SLICE; // of the features; a block has one, or none
static constexpr int CHUNK = 64;                            // pictures that linear1's products take at once
// Forward a cluster has two slices, and each of its blocks half of the hidden units: half as many partial sums as if
// each block had its slice and all units.
static constexpr int PAIRS = SLICES / 2, WIDE = 2 * SLICE, UNITS = HIDDEN / 2, WIDE_CHUNK = 2 * CHUNK;
static constexpr int SPLITS = 7; // of linear1's sum, in rounds
static constexpr int TAPS = 9;
static constexpr int64_t MOST_STEPS = 1 << 21; // the barrier counts 1024 arrivals each, in 32 bits
// Sums of products of pairs of the taps and a constant: sum over positions of p_i p_j, p_9 = 1.
static constexpr int GRAM_SIDE = TAPS + 1, GRAM = GRAM_SIDE * GRAM_SIDE;
static constexpr int MOMENTS = TAPS + TAPS * TAPS; // means, covariances
static constexpr int SUMS1 = 12;                   // per channel of the first block: S of nine taps, sum of dz, padding
static constexpr int WEIGHTS2 = TAPS * CHANNELS2 * CHANNELS1, OWN_WEIGHTS2 = WEIGHTS2 / BLOCKS;
static constexpr int CONV_WARPS = 7; // a row of pooling windows each
static constexpr int EXCHANGED = 16; // values of a thread that the other block of the cluster gets
// Blocks without a slice, and what they do while the others have theirs: linear2, a class each, linear1's bias, and the
// moments of the next batch.
static constexpr int LINEAR2_BLOCKS = SLICES, BIAS1_BLOCK = SLICES + CLASSES, MOMENTS_BLOCK = BIAS1_BLOCK + 1;
static_assert(MOMENTS_BLOCK < BLOCKS && SLICES % 2 == 0 && SLICES * SLICE == FEATURES &&
                  OWN_WEIGHTS2 * BLOCKS == WEIGHTS2,
              "");
[[maybe_unused]] static constexpr int CONV1_BLOCKS = BLOCKS - CHANNELS1; // from this block on, a channel each

// ---- Shared memory, in bytes ----
static constexpr int PICTURE_ROW = 32, PICTURE_BYTES = (30 * PICTURE_ROW + 8) * 2; // padded by a pixel all around
static constexpr int PITCH = 80;                                                   // of 32 channels
static constexpr int MAP_ROW = 18,
                     MAP_BYTES = 16 * MAP_ROW * PITCH; // 14 x 14 with padding; tiles are 16 wide, plus taps
// Of a picture, what a block gets from the other one: every second row, all channels, and the places of its own.
static constexpr int ROWS_BYTES = SIDE1 / 2 * SIDE1 * (CHANNELS1 * 2 + CHANNELS1 / 2);
static constexpr int WEIGHTS_BYTES = TAPS * HALF2 * PITCH;
static constexpr int EXCHANGE_BYTES = EXCHANGED * CONV_WARPS * WARP_SIZE * 4;
static constexpr int KERNEL1_ROW = 6, KERNEL1 = 5 * KERNEL1_ROW; // of the first convolution, with zeros around it
static constexpr int HIDDEN_PITCH = HIDDEN * 2 + 16, HIDDEN_BYTES = CHUNK * HIDDEN_PITCH;
static constexpr int SLICE_BYTES = CHUNK * PITCH, LINEAR1_BYTES = HIDDEN * PITCH;
static constexpr int WIDE_PITCH = WIDE * 2 + 16, LINEAR2_BYTES = (CLASSES * HIDDEN + CLASSES + HIDDEN) * 4;

static constexpr int WARPGROUPS = THREADS / WARPGROUP;

template <class L>
struct Small {
    // Mbarriers: of what the cluster's other block sends backward; and of the maps and places that it makes, or, where
    // pictures are whole, of convolution 2's weights. Backward, where pictures are whole, the second warpgroup has the
    // first picture's gradient of the input, and all that it makes.
    uint64_t arrived, mapped, first_made, all_made;
    // In rounds also: a warpgroup waits for itself; the first one has multiplied; the cluster's other block has sent
    // its part of linear1's gradient; and of each of two pictures: what was
    // kept of it has come back, the gradient of convolution 2's output is made, and that of its weights.
    uint64_t group_made[WARPGROUPS], multiplied, exchanged, tiles_loaded[2], places_loaded[2], gradient_made[2],
        weights_made[2];
    float moments[MOMENTS];
    float running_mean1[CHANNELS1], running_variance1[CHANNELS1], running_mean2[L::CHANNELS],
        running_variance2[L::CHANNELS];
    float norm_weight1[CHANNELS1], norm_bias1[CHANNELS1];
    __align__(16) float scale1[CHANNELS1];
    __align__(16) float shift1[CHANNELS1]; // the absolute value; a negative sign is with the kernel
    float norm_weight2[L::CHANNELS], norm_bias2[L::CHANNELS], scale2[L::CHANNELS], shift2[L::CHANNELS],
        mean2[L::CHANNELS], rstd2[L::CHANNELS], bias2[L::CHANNELS];
    float by_dz[L::CHANNELS], by_y[L::CHANNELS], constant[L::CHANNELS];
    int64_t index[2][L::PICTURES];
    int label[2][L::PICTURES];
    __align__(16) __nv_bfloat16 kernel1[CHANNELS1 * KERNEL1];
};

// Two ways to deal out a batch. The blocks of an owner share its pictures: owner, owner + OWNERS, ...

// Up to 64 pictures: two blocks, a cluster, share one, with half of the second convolution's channels each.
struct Halves {
    static constexpr int MEMBERS = 2, OWNERS = BLOCKS / MEMBERS, ROUNDS = 1, AT_ONCE = 1, PICTURES = 1;
    static constexpr int CHANNELS = CHANNELS2 / MEMBERS; // of convolution 2, a block's
    // Half a picture's features; the places of block 1's maxima, [row][16 columns][a block's channels]
    static constexpr int STAGE_BYTES = CHANNELS * SIDE2 * SIDE2 * 2, PLACES_BYTES = SIDE1 * 16 * CHANNELS1 / MEMBERS;

    static constexpr int AT_PICTURES = 0; // this batch's and the next one's
    static constexpr int AT_MAPS = AT_PICTURES + 2 * PICTURES * PICTURE_BYTES;
    static constexpr int AT_PLACES = AT_MAPS + PICTURES * MAP_BYTES;
    static constexpr int AT_GRADIENT = AT_PLACES + PICTURES * PLACES_BYTES; // of convolution 2's output, a block's half
    static constexpr int AT_WEIGHTS2 = AT_GRADIENT + MAP_BYTES;             // [tap][out channel][in channel]
    // What the other block sends, and elsewhere in a step linear2's parameters.
    static constexpr int AT_EXCHANGE = AT_WEIGHTS2 + WEIGHTS_BYTES, AT_LINEAR2 = AT_EXCHANGE;
    static constexpr int AT_HIDDEN = AT_EXCHANGE + EXCHANGE_BYTES, AT_SCRATCH = AT_HIDDEN;
    static constexpr int AT_SLICE = AT_HIDDEN + HIDDEN_BYTES;
    static constexpr int AT_LINEAR1 = AT_SLICE + SLICE_BYTES;
    static constexpr int AT_STAGE = AT_LINEAR1 + LINEAR1_BYTES;
    static constexpr int AT_SMALL = AT_STAGE + PICTURES * STAGE_BYTES;
    static_assert(EXCHANGE_BYTES <= HIDDEN_BYTES && LINEAR2_BYTES <= EXCHANGE_BYTES, "");
    // What linear1 works on forward, behind linear2's parameters up to AT_LINEAR1: weights [unit][feature], then
    // features [picture][feature].
    static constexpr int AT_WIDE_WEIGHTS = (AT_LINEAR2 + LINEAR2_BYTES + 15) / 16 * 16,
                         AT_WIDE = AT_WIDE_WEIGHTS + UNITS * WIDE_PITCH;
    static_assert(AT_WIDE + WIDE_CHUNK * WIDE_PITCH <= AT_LINEAR1, "");
};

// More: a block has a picture or two for itself, and each of its warpgroups one of them. Convolution 2's products are
// wgmma, on tiles as in conv_bn_relu_pool/sm90.cu: 16 x 16 pixels with padding, and what garbage columns reach.
static constexpr int TILE_PIXEL = CHANNELS1 * 2, TILE_BYTES = (258 * TILE_PIXEL + 511) / 512 * 512;
static constexpr int GRAD_PIXEL = CHANNELS2 * 2, GRAD_TILE_BYTES = (274 * GRAD_PIXEL + 1023) / 1024 * 1024;
static constexpr int INPUT_BYTES = SIDE1 * 16 * TILE_PIXEL; // a gradient of convolution 2's input
template <int rounds>
struct WholeOf {
    static constexpr int MEMBERS = 1, OWNERS = BLOCKS, ROUNDS = rounds, AT_ONCE = WARPGROUPS,
                         PICTURES = ROUNDS * AT_ONCE;
    static constexpr int CHANNELS = CHANNELS2;
    static constexpr int STAGE_BYTES = CHANNELS * SIDE2 * SIDE2 * 2, PLACES_BYTES = SIDE1 * 16 * CHANNELS1;

    static constexpr int AT_GRADIENT = 0, AT_MAPS = AT_GRADIENT + AT_ONCE * GRAD_TILE_BYTES; // whole swizzles
    static constexpr int AT_PICTURES = AT_MAPS + AT_ONCE * TILE_BYTES; // of two batches, or rounds
    static constexpr int AT_PLACES = AT_PICTURES + 2 * AT_ONCE * PICTURE_BYTES;
    static constexpr int AT_WEIGHTS2 = AT_PLACES + AT_ONCE * PLACES_BYTES; // [tap][out channel][in channel]
    static constexpr int AT_LINEAR1 = AT_WEIGHTS2 + TAPS * CHANNELS2 * PITCH;
    static constexpr int AT_LINEAR2 = AT_LINEAR1 + LINEAR1_BYTES;
    static constexpr int AT_HIDDEN = (AT_LINEAR2 + LINEAR2_BYTES + 15) / 16 * 16, AT_SCRATCH = AT_HIDDEN;
    static constexpr int AT_SLICE = AT_HIDDEN + HIDDEN_BYTES;
    // Gradients of convolution 2's input, when what was staged has been read; in rounds beside what the next one
    // stages.
    static constexpr int AT_INPUT = ROUNDS > 1 ? AT_LINEAR2 : AT_HIDDEN;
    static constexpr int AT_STAGE = ROUNDS > 1 ? (AT_INPUT + AT_ONCE * INPUT_BYTES + 15) / 16 * 16
                                               : AT_SLICE + SLICE_BYTES;
    static constexpr int AT_SMALL = AT_STAGE + AT_ONCE * STAGE_BYTES;
    static_assert(AT_SLICE + SLICE_BYTES <= AT_STAGE && AT_INPUT + AT_ONCE * INPUT_BYTES <= AT_SMALL, "");
    // What linear1 works on forward, when nothing is staged.
    static constexpr int AT_WIDE_WEIGHTS = AT_HIDDEN, AT_WIDE = AT_WIDE_WEIGHTS + UNITS * WIDE_PITCH;
    static_assert(AT_WIDE + WIDE_CHUNK * WIDE_PITCH <= AT_SMALL, "");
    static constexpr int AT_SUMS1 = AT_LINEAR2; // block 1's of warps, at the end
    static constexpr int AT_GRAMS = AT_LINEAR1; // in rounds, of warps, at the same time
    // The part of the weights' gradient that the cluster's other block sends, where the weights were.
    static constexpr int AT_EXCHANGE = AT_WEIGHTS2, EXCHANGED_VECTORS = TAPS * 2;
    static_assert(EXCHANGED_VECTORS * WARPGROUP * 16 <= TAPS * CHANNELS2 * PITCH, "");
    static_assert(AT_SUMS1 + WARPS * (4 * 16 + 1) * 16 * 4 <= AT_SMALL, "");
};
using Whole = WholeOf<1>;
// More still: in rounds of two. What backward needs of a round goes to the workspace but for the last round's, with
// which backward begins (rounds.cuh).
using Rounds = WholeOf<CUDA_OPS_MNIST_STEP_MOST / (BLOCKS * WARPGROUPS)>;
template <class L>
static constexpr int SHARED_BYTES = L::AT_SMALL + (int)sizeof(Small<L>);
static_assert(SHARED_BYTES<Halves> <= 232448 && SHARED_BYTES<Whole> <= 232448 && SHARED_BYTES<Rounds> <= 232448,
              "more than a block of Hopper has");

// ---- Workspace, in bytes ----
static constexpr int64_t align_256(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}
static constexpr int64_t MOST = CUDA_OPS_MNIST_STEP_MOST;
// What lies within 8 MB of the beginning has its offset in the instructions.
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
// Of rounds: [owner][number] a picture's tiles (KEPT_*), [owner][number][vector][thread] its Windows, and
// [owner][number][thread] KeptWhole.
static constexpr int64_t WS_TILES = WS_PARTIAL + PAIRS * HIDDEN_VALUES * 4;
static constexpr int KEPT_OUTPUT = SIDE1 * 16 * GRAD_PIXEL, KEPT_MAPS = SIDE1 * 16 * TILE_PIXEL,
                     KEPT_PLACES = SIDE1 * 16 * CHANNELS1, KEPT_BYTES = KEPT_OUTPUT + KEPT_MAPS + KEPT_PLACES;
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
