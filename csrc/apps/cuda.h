/* What the programs' CUDA devices share: a stream, memory, the clock. Without CUDA_OPS_WITH_CUDA there is only the message
 * that says so. */
#ifndef CUDA_OPS_APPS_CUDA_H
#define CUDA_OPS_APPS_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "app.h"

/* app_fail: the program was built without CUDA. */
_Noreturn void app_fail_without_cuda(void);

#ifdef CUDA_OPS_WITH_CUDA

#include <cuda_runtime_api.h>

#include "cuda_ops/core.h"

typedef struct app_cuda {
    cudaStream_t stream;
    void *allocations[APP_MOST_ALLOCATIONS];
    int allocation_count;
    void *workspace; /* grows in the first step, and stays */
    int64_t workspace_bytes;
    int64_t *allocated_bytes; /* where the sum of both is counted */
    char *staged;             /* in the host's memory, where the GPU takes it from: what is on its way */
    int64_t staged_bytes;
    cudaEvent_t marks[APP_MOST_MARKS];
    int64_t mark_count;
} app_cuda;

/* app_fail where there is no GPU. name: gets the GPU's. */
void app_cuda_open(app_cuda *cuda, char *name, size_t name_size, int64_t *allocated_bytes);
/* Waits for what runs. */
void app_cuda_close(app_cuda *cuda);
/* Zeroed, freed by app_cuda_close. */
void *app_cuda_allocate(app_cuda *cuda, int64_t bytes);
/* The next call's, which comes after on the stream, is the same memory. */
void *app_cuda_workspace(app_cuda *cuda, int64_t bytes);
/* On return `source` may change; what is not large is then still on its way, and nobody has waited. */
void app_cuda_upload(app_cuda *cuda, void *target, const void *source, int64_t bytes);
/* Within the GPU's memory. */
void app_cuda_copy(app_cuda *cuda, void *target, const void *source, int64_t bytes);
/* Waits until it is done. */
void app_cuda_download(app_cuda *cuda, void *target, const void *source, int64_t bytes);

/* Print "NAME: WHAT: ..." and exit with status 1, unless it is success. */
void app_cuda_check(const char *what, cudaError_t error);
void app_cuda_check_status(const char *op, cuda_ops_status status);

void app_cuda_mark(app_cuda *cuda);
/* Waits for the device. milliseconds[i]: from mark i to mark i + 1, since the last call; returns how many. */
int64_t app_cuda_collect(app_cuda *cuda, double *milliseconds, int64_t room);

#endif

#endif
