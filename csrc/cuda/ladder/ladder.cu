// The table of all teaching ladders but gemm's, and the C API's functions that look a rung up in it.
#include "ladder/ladder.h"

#include "adamw/ladder/rungs.h"
#include "attention/ladder/rungs.h"
#include "histogram/ladder/rungs.h"
#include "layer_norm/ladder/rungs.h"
#include "reduce/ladder/rungs.h"
#include "softmax/ladder/rungs.h"
#include "transpose/ladder/rungs.h"

#define CUDA_OPS_LADDER(name, check, rungs) {name, check, rungs, (int)(sizeof(rungs) / sizeof(rungs[0]))}

static const Ladder LADDERS[] = {
    CUDA_OPS_LADDER("adamw", adamw_check, ADAMW_RUNGS),
    CUDA_OPS_LADDER("attention", attention_check, ATTENTION_RUNGS),
    CUDA_OPS_LADDER("histogram", histogram_check, HISTOGRAM_RUNGS),
    CUDA_OPS_LADDER("layer_norm", layer_norm_check, LAYER_NORM_RUNGS),
    CUDA_OPS_LADDER("reduce", reduce_check, REDUCE_RUNGS),
    CUDA_OPS_LADDER("softmax", softmax_check, SOFTMAX_RUNGS),
    CUDA_OPS_LADDER("transpose", transpose_check, TRANSPOSE_RUNGS),
};

static const Ladder *find_ladder(const char *name)
{
    for (const Ladder &ladder : LADDERS)
        if (strcmp(ladder.name, name) == 0)
            return &ladder;
    return nullptr;
}

static const LadderRung *find_rung(const Ladder *ladder, int number)
{
    for (int i = 0; ladder && i < ladder->count; i++)
        if (ladder->rungs[i].number == number)
            return &ladder->rungs[i];
    return nullptr;
}

static LadderCall with_stream(const cuda_ops_ladder_call *call, cudaStream_t stream)
{
    LadderCall full;
    static_cast<cuda_ops_ladder_call &>(full) = *call;
    full.stream = stream;
    return full;
}

extern "C" const char *cuda_ops_ladder_refusal_cuda(const char *ladder, int rung, const cuda_ops_ladder_call *call)
{
    const Ladder *const found = find_ladder(ladder);
    if (!found)
        return "there is no such ladder";
    const LadderRung *const row = find_rung(found, rung);
    if (!row)
        return "the ladder has no rung of that number";
    const LadderCall full = with_stream(call, nullptr);
    const Answer answer = found->check(full);
    return !answer || !row->supports ? answer.why_not : row->supports(full, current_device()).why_not;
}

extern "C" int64_t cuda_ops_ladder_workspace_cuda(const char *ladder, int rung, const cuda_ops_ladder_call *call)
{
    if (cuda_ops_ladder_refusal_cuda(ladder, rung, call))
        return 0;
    const LadderRung *const row = find_rung(find_ladder(ladder), rung);
    return row->workspace ? row->workspace(with_stream(call, nullptr)) : 0;
}

extern "C" cuda_ops_status cuda_ops_ladder_cuda(const char *ladder, int rung, const cuda_ops_ladder_call *call,
                                                cuda_ops_stream stream)
{
    if (cuda_ops_ladder_refusal_cuda(ladder, rung, call))
        return CUDA_OPS_INVALID_ARGUMENT;
    return find_rung(find_ladder(ladder), rung)->launch(with_stream(call, stream));
}
