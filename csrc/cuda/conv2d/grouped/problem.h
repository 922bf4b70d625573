// What the kernels of conv2d's grouped path are told; grouped.cu plans them and says what they compute.
#ifndef CUDA_OPS_CONV2D_GROUPED_PROBLEM_H
#define CUDA_OPS_CONV2D_GROUPED_PROBLEM_H

#include <stdint.h>

#include "common/fast_division.cuh"
#include "conv2d/paths.h"

static constexpr int GROUPED_WARPS = 8, GROUPED_THREADS = 32 * GROUPED_WARPS;
static constexpr int GROUPED_ROWS = 4;        // fragments of 16 pixels that a warp has at a time
static constexpr int GROUPED_WEIGHT_ROWS = 5; // of 16 rows of the gradient of the weight
static constexpr int GROUPED_SUM_PITCH = 16 * GROUPED_WEIGHT_ROWS + 4; // words of a column of a warp's sums
static constexpr int GROUPED_MOST_CLUSTER = 8;
static constexpr int GROUPED_MOST_PHASES = 16;

// The images that are read, as tiles in shared memory. A tile is a rectangle of the pixels of a grid, which row v and
// column u of the grid read from row v * step_y + start_y on, and so for columns; the rectangle of the source that they
// read, the halo, is there with all of its pixels. Its columns are sorted by their remainder modulo step_x, so that
// neighbours of the grid are neighbours in shared memory.
struct GroupedTiles {
    const void *source;
    int64_t source_pixel; // channels of all groups
    int height, width;    // of the source
    int start_y, start_x, step_y, step_x;
    int grid_height, grid_width, tile_height, tile_width, tiles; // of all images
    int halo_height, halo_width, halo_slots, slots_of_remainder; // slots: halo_width rounded up to whole remainders
    int pixel_bytes, halo_at; // of a pixel in shared memory, with its padding; where the halo's list is there
    // For wgmma rows are sorted by their remainders too, and a plane has a vector of all pixels.
    int rows_of_remainder, plane_pixels, plane_bytes;
    Divider by_slots; // of a remainder
    Divider tiles_x, tiles_of_image, by_tile_width;
    int count_x, count_of_image;
    // A slab is several groups. vectors: of 16 bytes, of a group's channels and of a slab's.
    int groups, slab_groups, channels, vectors, slab_vectors;
};

// The pixels of the result that have the same taps: of forward all, of backward_input those of one stride phase. Tap
// (j, i) reads row back_y * j + first_y of the halo, and is the kernel's row tap_y + j * next_y; so do columns.
struct GroupedPhase {
    int start, steps; // vectors of k before it, and steps of two vectors
    int taps_y, taps_x, first_y, first_x, back_y, back_x;
    int tap_y, tap_x, next_y, next_x;
    int result_y, result_x;
};

// forward and backward_input.
struct GroupedImages {
    GroupedTiles tiles;
    const void *weight, *bias;
    void *result;
    int64_t result_pixel;
    int result_height, result_width, result_step_y, result_step_x;
    int columns;         // of the result, of a group
    bool stores_vectors; // whose pixels are whole aligned vectors of 16 bytes; in 16 bits
    // The weight has of a group: outs, channels, which may be fewer than the images have.
    int weight_outs, weight_channels, taps, kernel_width;
    bool weight_last, transposed; // transposed: backward_input, whose columns are the weight's channels
    int phase_count, k_vectors;   // of all phases
    GroupedPhase phases[GROUPED_MOST_PHASES];
    int row_blocks, column_blocks, weight_rows; // of a tile and a group; rows of a group in shared memory
    Divider by_row_blocks, by_column_blocks, by_row_vectors, by_taps, by_weight_outs; // row_vectors: of the weight
    int positions_at, weight_at, stages_at, zeros_at, weight_pitch, stage_bytes;      // bytes in shared memory
};

struct GroupedWeight {
    GroupedTiles tiles;
    const void *grad_output;
    void *result; // is_float: [split][group][o][tap][c]
    int64_t grad_pixel;
    int outs, out_vectors, grad_pixel_bytes, pixels; // of a group; pixels of a tile, rounded up to a step of k
    int taps, kernel_width, dilation_y, dilation_x;
    int row_blocks, column_blocks, tasks, parts; // of a group; of a slab
    int pixel_splits;                            // of float32 as it is: threads that share a sum
    bool is_float, result_last;
    bool cluster;                     // the blocks of a slab are one
    int result_outs, result_channels; // of a group: what the result has
    int grad_at, stages_at, stage_bytes;
};

cuda_ops_status conv2d_grouped_images(const GroupedImages &work, int columns, dim3 grid, int shared_bytes,
                                      cuda_ops_dtype dtype, cudaStream_t stream);
// By wgmma (forward_backward_input_sm90.cu), where this build has it.
bool conv2d_grouped_has_sm90(void);
cuda_ops_status conv2d_grouped_images_sm90(const GroupedImages &work, dim3 grid, int shared_bytes, cuda_ops_dtype dtype,
                                           cudaStream_t stream);
cuda_ops_status conv2d_grouped_weight(const GroupedWeight &work, int columns, dim3 grid, int threads, int shared_bytes,
                                      cuda_ops_dtype dtype, cudaStream_t stream);

#endif
