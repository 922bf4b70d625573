// The mma path's kernel that finds remainders of logsumexp (attention.h), for other paths too.
#ifndef CUDA_OPS_ATTENTION_MMA_REMAINDER_H
#define CUDA_OPS_ATTENTION_MMA_REMAINDER_H

#include "attention/paths.h"

// remainder[b][h][i], and large: of each 64 queries of a head, whether one of them has one; may be NULL. For calls that
// attention_mma_supports.
cuda_ops_status attention_mma_remainder(float *remainder, int *large, const AttentionCall &call);

#endif
