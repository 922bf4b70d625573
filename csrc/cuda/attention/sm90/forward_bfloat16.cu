// attention's forward on Hopper, bfloat16: output = softmax(scale * query key^T) value, with the exponentials' sums beside.
// A persistent grid of one block an SM: a producer warp loads a tile of queries and, block by block, its keys and values
// by TMA; each consumer warpgroup has 64 queries, whose scores (wgmma from shared memory) become exponentials in
// registers, and these the left operand of the values' product. Scores of block j + 1 are multiplied before the values
// of block j, and the warpgroups issue products in turns, so that exponentials run beside products. There is no running
// maximum: a row keeps the shift of its first block until a sum of exponentials is large, which is seen before they are
// used; then the scores, which are still there, are looked through. Blocks go from the diagonal towards the first key;
// masks are applied only where a block is cut. Long tiles come first, and a last tile that is short comes last. Where
// queries see more and more keys and are no whole tiles, the first tile is the short one: what idles does so where
// there are the fewest keys.
// Short rows of up to 64 elements have tiles of 256 queries and 64 keys, and four warpgroups without turns: each takes
// the next strip of 64 queries as it gets done, so that a tile's end and beginning run beside other tiles.
// Rows of more than 128 elements leave room for one tile of queries, and for 80 to 128 keys in two stages.
// With dropout, an instance of its own (forward_dropout_bfloat16.cu), a thread draws the numbers of the scores that it has;
// with masks, instances of their own too (forward_masked_bfloat16.cu, forward_added_bfloat16.cu), it reads their masks.
// Bound by the tensor cores and, for rows of 64, by the exponentials as much. Measured on an H200 against cuDNN:
// benchmarks/notes/attention.md.
#include "attention/sm90/forward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_forward_bfloat16(const AttentionCall &call, const Device &device)
{
    return launch_forward_of<__nv_bfloat16, false>(call, device);
}
