// attention's forward on Hopper of packed sequences, bfloat16; see forward_bfloat16.cu. The tiles and what they belong
// to are found on the device (sequences.cu); that a sequence ends within a box of rows is the tensor map's business
// (common/tensor_map.h), so that what follows it is neither read nor written. The producer alone looks for tiles.
#include "attention/sm90/forward.cuh"
#include "attention/sm90/sm90.h"

cuda_ops_status attention_sm90_forward_packed_bfloat16(const AttentionCall &call, const Device &device)
{
    return launch_forward_of<__nv_bfloat16, false, true>(call, device);
}
