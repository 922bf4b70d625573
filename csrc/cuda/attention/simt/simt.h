// attention's simt path: its instances, a file each.
#ifndef CUDA_OPS_ATTENTION_SIMT_SIMT_H
#define CUDA_OPS_ATTENTION_SIMT_SIMT_H

#include "attention/paths.h"

cuda_ops_status attention_simt_float32(const AttentionCall &call);
cuda_ops_status attention_simt_float64(const AttentionCall &call);
cuda_ops_status attention_simt_float16(const AttentionCall &call);
cuda_ops_status attention_simt_bfloat16(const AttentionCall &call);

#endif
