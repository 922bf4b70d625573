// What the rungs of the teaching ladders share (cuda_ops/ladder.h): a call, and a row of a ladder's table. A ladder is
// csrc/cuda/<ladder>/ladder/: rungs.h has its table, NN_name.cu a rung.
#ifndef CUDA_OPS_LADDER_LADDER_H
#define CUDA_OPS_LADDER_LADDER_H

#include "common/device.h"
#include "common/paths.h"
#include "cuda_ops/ladder.h"

typedef cuda_ops_ladder_tensor LadderTensor;

struct LadderCall : cuda_ops_ladder_call {
    cudaStream_t stream;
};

struct LadderRung {
    int number;
    cuda_ops_status (*launch)(const LadderCall &call);
    // Beyond what the ladder asks of every call; NULL: nothing. `device` is the one that it would run on.
    Answer (*supports)(const LadderCall &call, const Device &device);
    int64_t (*workspace)(const LadderCall &call); // bytes; NULL: none
};

struct Ladder {
    const char *name;
    // The shapes and dtypes that its rungs rely on: a kernel reads and writes within what this has checked.
    Answer (*check)(const LadderCall &call);
    const LadderRung *rungs;
    int count;
};

static inline bool has_tensors(const LadderCall &call, int outputs, int inputs, int scalars = 0)
{
    return call.output_count == outputs && call.input_count == inputs && call.scalar_count == scalars;
}

static inline bool has_shape(const LadderTensor &tensor, int dims, int64_t s0 = 1, int64_t s1 = 1)
{
    return tensor.dims == dims && (dims < 1 || tensor.sizes[0] == s0) && (dims < 2 || tensor.sizes[1] == s1);
}

static inline bool same_shape(const LadderTensor &a, const LadderTensor &b)
{
    bool same = a.dims == b.dims;
    for (int i = 0; i < a.dims && same; i++)
        same = a.sizes[i] == b.sizes[i];
    return same;
}

// Element types of halves, floats and doubles, told from integers.
static inline bool is_floating(const LadderTensor &tensor)
{
    return tensor.dtype <= CUDA_OPS_BFLOAT16;
}

static inline int64_t element_bytes(const LadderTensor &tensor)
{
    switch (tensor.dtype) {
    case CUDA_OPS_LADDER_UINT8:
        return 1;
    case CUDA_OPS_FLOAT16:
    case CUDA_OPS_BFLOAT16:
        return 2;
    case CUDA_OPS_FLOAT64:
    case CUDA_OPS_LADDER_INT64:
        return 8;
    default:
        return 4;
    }
}

#endif
