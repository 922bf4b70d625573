// A reduction as its launchers get it, and how it is cut. reduction.cu chooses the family (total.cu, extreme.cu,
// moments.cu), kernels.cuh has the kernels.
#ifndef CUDA_OPS_REDUCTION_REDUCTION_H
#define CUDA_OPS_REDUCTION_REDUCTION_H

#include <cuda_runtime.h>

#include "cuda_ops/reduction.h"

struct ReductionCall {
    void *output, *workspace;
    const void *input;
    cuda_ops_reduction_sizes sizes;
    cuda_ops_reduction_kind kind;
    double parameter;
    cuda_ops_dtype dtype, output_dtype;
    cudaStream_t stream;
};

static constexpr int ROW_THREADS = 512;
static constexpr int SHORT_ROW_THREADS = 128; // of rows of a warp or less, which wait for no other warp of their block
static constexpr int COLUMN_THREADS = 256;
static constexpr int WIDEST_TILE = 64; // vectors
// Blocks that run at once on a large GPU, two on each of 132 multiprocessors, and twice as many of columns. Constants, so
// that sums are cut alike on every device.
static constexpr int64_t ROW_BLOCKS = 264;
static constexpr int64_t COLUMN_BLOCKS = 528;
static constexpr int64_t LEAST_PART = 8192;  // elements of a part of a row
static constexpr int64_t PART_MULTIPLE = 64; // so that every part starts as aligned as its row
static constexpr int64_t FEWEST_ROWS = 8;    // of a thread that goes down columns
// Wide rows, and elements in all, from which on rows are folded: the states are then few beside what is read.
static constexpr int64_t LEAST_FOLDED = 128, FOLDED_ELEMENTS = 1 << 20;
static constexpr int64_t PARTIAL_BYTES = 24; // the most that a family keeps of a part: three doubles

// inner == 1: a row is cut into `parts` of `step` elements, of which `lanes` threads have one. inner > 1: a block has
// `tile` vectors across, `height` rows down, a power of two, and goes down `step` rows, one of `parts`.
struct ReductionPlan {
    int64_t parts, step;
    int lanes;
    int tile, height;
    int64_t tiles;
};

static inline int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

// `count`: elements of a vector.
static inline ReductionPlan plan_reduction(const cuda_ops_reduction_sizes &sizes, int count)
{
    ReductionPlan plan = {};
    plan.parts = 1, plan.step = sizes.cols;
    const int64_t rows = sizes.batch * sizes.outer;
    if (sizes.inner == 1) {
        // A warp needs no barrier, but with few rows it leaves multiprocessors idle.
        plan.lanes = ROW_THREADS;
        if (sizes.cols <= 1024 || (sizes.cols <= 16384 && rows >= ROW_BLOCKS * ROW_THREADS / 32)) {
            plan.lanes = 1;
            const int64_t share = sizes.cols >= 8 * count ? 4 * count : 4; // elements of a thread, about
            while (plan.lanes < 32 && plan.lanes * share < sizes.cols)
                plan.lanes *= 2;
            if (plan.lanes == 32 && sizes.cols < 32 * share) // half a warp has more in flight
                plan.lanes = 16;
        } else if (rows < ROW_BLOCKS) {
            const int64_t wanted = ROW_BLOCKS / rows, useful = divide_up(sizes.cols, LEAST_PART);
            const int64_t parts = wanted < useful ? wanted : useful;
            plan.step = divide_up(divide_up(sizes.cols, parts), PART_MULTIPLE) * PART_MULTIPLE;
            plan.parts = divide_up(sizes.cols, plan.step);
        }
        return plan;
    }
    const int64_t width = divide_up(sizes.inner, count);
    plan.tiles = divide_up(width, WIDEST_TILE);
    plan.tile = (int)divide_up(width, plan.tiles);
    plan.height = 1;
    while (2 * plan.height * plan.tile <= COLUMN_THREADS && plan.height < sizes.cols)
        plan.height *= 2;
    const int64_t blocks = rows * plan.tiles;
    if (blocks < COLUMN_BLOCKS) {
        const int64_t wanted = COLUMN_BLOCKS / blocks, useful = divide_up(sizes.cols, plan.height * FEWEST_ROWS);
        const int64_t parts = wanted < useful ? wanted : useful;
        plan.step = divide_up(sizes.cols, parts);
        plan.parts = divide_up(sizes.cols, plan.step);
    }
    return plan;
}

// Rows of columns that are taken for one wider row, so that these are whole vectors: each then leaves a state of its own
// for the kernel that merges them. 0 where rows do not come out even, or are too few for that.
static inline int64_t fold_of(const cuda_ops_reduction_sizes &sizes, int count)
{
    int64_t fold = 1;
    while (fold * sizes.inner % count != 0)
        fold *= 2;
    if (fold == 1)
        return 1;
    const int64_t rows = sizes.batch * sizes.outer, cols = sizes.cols / fold;
    return sizes.cols % fold == 0 && cols >= LEAST_FOLDED && rows * sizes.cols * sizes.inner >= FOLDED_ELEMENTS ? fold
                                                                                                                : 0;
}

static inline cuda_ops_reduction_sizes folded(const cuda_ops_reduction_sizes &sizes, int64_t fold)
{
    return {sizes.batch, sizes.outer, sizes.cols / fold, sizes.inner * fold};
}

cuda_ops_status reduction_total(const ReductionCall &call);
cuda_ops_status reduction_extreme(const ReductionCall &call);
cuda_ops_status reduction_moments(const ReductionCall &call);

#endif
