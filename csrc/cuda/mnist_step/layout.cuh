// mnist_step: sizes, and what lies where in shared memory and in the workspace.
#ifndef CUDA_OPS_MNIST_STEP_LAYOUT_CUH
#define CUDA_OPS_MNIST_STEP_LAYOUT_CUH

#include <stddef.h>

#include "common.cuh"
#include "cuda_ops/mnist_step.h"

static constexpr int CLUSTERS = 64, BLOCKS = 2 * CLUSTERS;
[[maybe_unused]] static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
static constexpr int PICTURES = CUDA_OPS_MNIST_STEP_MOST / CLUSTERS; // of a cluster, at most
static constexpr int SIDE = 28, PIXELS = SIDE * SIDE;                // of a picture
static constexpr int SIDE1 = 14, CHANNELS1 = 32;                     // of the first block's output
static constexpr int SIDE2 = 7, CHANNELS2 = 64, HALF2 = CHANNELS2 / 2;
static constexpr int FEATURES = CHANNELS2 * SIDE2 * SIDE2, HIDDEN = 128, CLASSES = 10;
static constexpr int SLICE = 32, SLICES = FEATURES / SLICE; // of the features; a block has one, or none
static constexpr int CHUNK = 64;                            // pictures that linear1's products take at once
// Forward a cluster has two slices, and each of its blocks half of the hidden units: half as many partial sums as if
// each block had its slice and all units.
static constexpr int PAIRS = SLICES / 2, WIDE = 2 * SLICE, UNITS = HIDDEN / 2, WIDE_CHUNK = 2 * CHUNK;
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
static constexpr int PLACES_BYTES = SIDE1 * 16 * 16;   // [row][16 columns][this block's channels]
// Of a picture, what a block gets from the other one: every second row, all channels, and the places of its own.
static constexpr int ROWS_BYTES = SIDE1 / 2 * SIDE1 * (CHANNELS1 * 2 + CHANNELS1 / 2);
static constexpr int WEIGHTS_BYTES = TAPS * HALF2 * PITCH;
static constexpr int EXCHANGE_BYTES = EXCHANGED * CONV_WARPS * WARP_SIZE * 4;
static constexpr int KERNEL1_ROW = 6, KERNEL1 = 5 * KERNEL1_ROW; // of the first convolution, with zeros around it
static constexpr int HIDDEN_PITCH = HIDDEN * 2 + 16, HIDDEN_BYTES = CHUNK * HIDDEN_PITCH;
static constexpr int SLICE_BYTES = CHUNK * PITCH, LINEAR1_BYTES = HIDDEN * PITCH;
static constexpr int WIDE_PITCH = WIDE * 2 + 16, LINEAR2_BYTES = (CLASSES * HIDDEN + CLASSES + HIDDEN) * 4;
static constexpr int STAGE_BYTES = HALF2 * SIDE2 * SIDE2 * 2; // half a picture's features

static constexpr int AT_PICTURES = 0; // this batch's and the next one's
static constexpr int AT_MAPS = AT_PICTURES + 2 * PICTURES * PICTURE_BYTES;
static constexpr int AT_PLACES = AT_MAPS + PICTURES * MAP_BYTES;
static constexpr int AT_GRADIENT = AT_PLACES + PICTURES * PLACES_BYTES; // of convolution 2's output, this block's half
static constexpr int AT_WEIGHTS2 = AT_GRADIENT + MAP_BYTES;             // [tap][out channel][in channel]
// Two buffers that the other block writes, for pictures in turn. The second is also where linear1 keeps gradients, and
// is scratch memory for sums: neither while the other block may write there (see `backward_conv2`). The first also
// holds linear2's parameters.
static constexpr int AT_EXCHANGE = AT_WEIGHTS2 + WEIGHTS_BYTES, AT_LINEAR2 = AT_EXCHANGE;
static constexpr int AT_HIDDEN = AT_EXCHANGE + EXCHANGE_BYTES, AT_SCRATCH = AT_HIDDEN;
static constexpr int AT_SLICE = AT_HIDDEN + HIDDEN_BYTES;
static constexpr int AT_LINEAR1 = AT_SLICE + SLICE_BYTES;
static constexpr int AT_STAGE = AT_LINEAR1 + LINEAR1_BYTES;
static constexpr int AT_SMALL = AT_STAGE + PICTURES * STAGE_BYTES;
static_assert(EXCHANGE_BYTES <= HIDDEN_BYTES && LINEAR2_BYTES <= EXCHANGE_BYTES, "");
// What linear1 works on forward, behind linear2's parameters up to AT_LINEAR1: weights [unit][feature], then features
// [picture][feature].
static constexpr int AT_WIDE_WEIGHTS = (AT_LINEAR2 + LINEAR2_BYTES + 15) / 16 * 16,
                     AT_WIDE = AT_WIDE_WEIGHTS + UNITS * WIDE_PITCH;
static_assert(AT_WIDE + WIDE_CHUNK * WIDE_PITCH <= AT_LINEAR1, "");

struct Small {
    uint64_t arrived[2], mapped; // mbarriers of the two exchange buffers, and of the maps and places
    float moments[MOMENTS];
    float running_mean1[CHANNELS1], running_variance1[CHANNELS1], running_mean2[HALF2], running_variance2[HALF2];
    float norm_weight1[CHANNELS1], norm_bias1[CHANNELS1];
    __align__(16) float scale1[CHANNELS1];
    __align__(16) float shift1[CHANNELS1]; // the absolute value; a negative sign is with the kernel
    float norm_weight2[HALF2], norm_bias2[HALF2], scale2[HALF2], shift2[HALF2], mean2[HALF2], rstd2[HALF2],
        bias2[HALF2];
    float by_dz[HALF2], by_y[HALF2], constant[HALF2];
    int64_t index[2][PICTURES];
    int label[2][PICTURES];
    __align__(16) __nv_bfloat16 kernel1[CHANNELS1 * KERNEL1];
};
static constexpr int SHARED_BYTES = AT_SMALL + (int)sizeof(Small);
static_assert(SHARED_BYTES <= 232448, "more than a block of Hopper has");

// ---- Workspace, in bytes ----
static constexpr int64_t align_256(int64_t bytes)
{
    return (bytes + 255) / 256 * 256;
}
static constexpr int64_t WS_BARRIER = 0;                                        // arrivals, blocks that have left
static constexpr int64_t WS_GRAM = 256;                                         // [block][GRAM] float
static constexpr int64_t WS_MOMENTS = WS_GRAM + align_256(BLOCKS * GRAM * 4);   // [MOMENTS] float
static constexpr int64_t WS_WEIGHTS2 = WS_MOMENTS + align_256(MOMENTS * 4);     // [tap][out][in] bfloat16
static constexpr int64_t WS_STATISTICS = WS_WEIGHTS2 + align_256(WEIGHTS2 * 2); // [cluster][rank][2][HALF2]
static constexpr int64_t WS_SUMS2 = WS_STATISTICS + align_256(BLOCKS * 2 * HALF2 * 4); // the same
static constexpr int64_t WS_POOLED = WS_SUMS2 + align_256(BLOCKS * 2 * HALF2 * 4);     // [batch][FEATURES] bfloat16
static constexpr int64_t FEATURE_BYTES = (int64_t)CUDA_OPS_MNIST_STEP_MOST * FEATURES * 2;
static constexpr int64_t WS_GRAD_POOLED = WS_POOLED + FEATURE_BYTES;  // the same
static constexpr int64_t WS_PARTIAL = WS_GRAD_POOLED + FEATURE_BYTES; // [pair of slices][batch][HIDDEN] float
static constexpr int64_t HIDDEN_VALUES = (int64_t)CUDA_OPS_MNIST_STEP_MOST * HIDDEN;
static constexpr int64_t WS_LINEAR1 = WS_PARTIAL + PAIRS * HIDDEN_VALUES * 4;          // [HIDDEN][FEATURES] bfloat16
static constexpr int64_t WS_HIDDEN = WS_LINEAR1 + (int64_t)HIDDEN * FEATURES * 2;      // [batch][HIDDEN] bfloat16
static constexpr int64_t WS_GRAD_HIDDEN = WS_HIDDEN + HIDDEN_VALUES * 2;               // the same
static constexpr int64_t WS_GRAD_LOGITS = WS_GRAD_HIDDEN + HIDDEN_VALUES * 2;          // [batch][16] float
static constexpr int64_t WS_LOSS = WS_GRAD_LOGITS + CUDA_OPS_MNIST_STEP_MOST * 16 * 4; // [batch] float
static constexpr int64_t WS_GRAD_WEIGHTS2 =
    WS_LOSS + align_256(CUDA_OPS_MNIST_STEP_MOST * 4);                                   // [cluster][tap][out][in]
static constexpr int64_t WS_SUMS1 = WS_GRAD_WEIGHTS2 + (int64_t)CLUSTERS * WEIGHTS2 * 4; // [cluster][channel][SUMS1]
static constexpr int64_t WS_SPILL = WS_SUMS1 + align_256(CLUSTERS * CHANNELS1 * SUMS1 * 4);
static constexpr int64_t SPILL_BYTES = (int64_t)BLOCKS * PICTURES * 17 * THREADS * 4;
static constexpr int64_t WORKSPACE_BYTES = WS_SPILL + SPILL_BYTES;

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
