/* cumsum: running sums along a dimension. input and output are dense [outer, cols, inner], of `dtype`:
 *
 *     output[o, c, i] = sum of input[o, 0 ... c, i]              if reverse is 0
 *     output[o, c, i] = sum of input[o, c ... cols - 1, i]       else, which is the gradient's
 *
 *   workspace: of cuda_ops_cumsum_workspace_cuda bytes, aligned to 16; its content does not matter
 *
 * NaN and infinities travel to all sums behind them and to none before. The CPU adds in double, one element after the
 * other; CUDA in float32 for float16, bfloat16 and float32.
 *
 * On CUDA rows of some thousand elements, or more, have a block each, which reads and writes them once. Where rows are so
 * few that this would leave most of a GPU idle, they are cut into parts, and read twice: a first kernel sums the parts up,
 * a second one adds to each the sums of those before it. The second read is the L2 cache's as far as that reaches. To look
 * up the sums while the parts are held ("decoupled look-back", Merrill and Garland, 2016) would read once; the kernel that
 * did so moved so few bytes a second that three passes at a copy's speed take less time (benchmarks/notes/memory_bound.md).
 * Columns that are longer than a block's look back: parts of them are read once and written once, and look up the sums of
 * those before them while their elements are held. There a block usually takes whatever its predecessors have, a sum of
 * theirs or of all before, so that the additions depend on who was first, and float32 results differ from run to run. Here
 * they do not: parts publish their own sums, the last part of each group of some hundred the sum of its group, and every
 * part adds the sums of the groups before its own and of the parts before it in its group, in one order.
 * Results repeat bit by bit, on any device, and depend on the sizes and on whether the arrays are aligned to 16 bytes
 * alone.
 */
#ifndef CUDA_OPS_CUMSUM_H
#define CUDA_OPS_CUMSUM_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The CPU's units of work: a row, or some neighbouring columns of one `outer`. */
int64_t cuda_ops_cumsum_units_cpu(int64_t outer, int64_t inner);
/* Units [begin, end). */
cuda_ops_status cuda_ops_cumsum_cpu(void *output, const void *input, int64_t cols, int64_t inner, int reverse,
                                    int64_t begin, int64_t end, cuda_ops_dtype dtype);

int64_t cuda_ops_cumsum_workspace_cuda(int64_t outer, int64_t cols, int64_t inner, cuda_ops_dtype dtype);
cuda_ops_status cuda_ops_cumsum_cuda(void *output, void *workspace, const void *input, int64_t outer, int64_t cols,
                                     int64_t inner, int reverse, cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
