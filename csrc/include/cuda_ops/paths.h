/* Paths: the ways that an op with several CUDA kernels can make a product, and which one takes a call.
 *
 * Each such op has a table of paths, in order. A call goes to the first that supports it and is fast at its size; its
 * launcher and its query for the workspace ask the same table, so that a C program gets what PyTorch gets. The op's
 * `cuda_ops_<op>_paths_cuda` tells of every row why it takes the call or not; it launches nothing, and needs no GPU
 * where the facts about a device are given.
 *
 * CUDA_OPS_<OP>_PATH=<name> in the environment forces a path, such as CUDA_OPS_LINEAR_RELU_PATH=gemm. The op's
 * launchers then return CUDA_OPS_UNKNOWN_PATH where it has none of that name, and CUDA_OPS_PATH_CANNOT where that one
 * cannot do the call.
 */
#ifndef CUDA_OPS_PATHS_H
#define CUDA_OPS_PATHS_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All that the choice of a path asks of a device. */
typedef struct cuda_ops_device_facts {
    int capability; /* 75, 80, 90 */
    int multiprocessors;
    int shared_bytes; /* the most that a block may have */
} cuda_ops_device_facts;

/* Of the current device; all zero, and an error, without one. */
cuda_ops_status cuda_ops_device_facts_cuda(cuda_ops_device_facts *facts);

/* A row of a table, for one call. All strings are static. */
typedef struct cuda_ops_path_report {
    const char *name;    /* as in CUDA_OPS_<OP>_PATH */
    const char *file;    /* where its launcher is, below csrc/cuda */
    const char *kernels; /* the names of those that make its products, with spaces between them */
    const char *reason;  /* why it does not take the call; NULL where it could */
    int supports, is_fast, chosen;
} cuda_ops_path_report;

/* The environment is read at the first call of each op; this makes the next call read it again. */
void cuda_ops_reload_paths_cuda(void);

#ifdef __cplusplus
}
#endif

#endif
