#include "cuda.h"

_Noreturn void app_fail_without_cuda(void)
{
    app_fail("--device cuda: this program was built without CUDA: take --device cpu, or build it with nvcc there and "
             "CUDA_OPS_CUDA=1");
}

#ifdef CUDA_OPS_WITH_CUDA

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of uploads on their way: some steps' batches. */
enum { STAGED_BYTES = 16 << 20, STAGED_ALIGNMENT = 64 };

void app_cuda_check(const char *what, cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "%s: %s: %s\n", app_name, what, cudaGetErrorString(error));
        exit(1);
    }
}

void app_cuda_check_status(const char *op, cuda_ops_status status)
{
    if (status >= CUDA_OPS_CUDA_ERROR)
        app_cuda_check(op, (cudaError_t)(status - CUDA_OPS_CUDA_ERROR));
    if (status != CUDA_OPS_SUCCESS) {
        fprintf(stderr, "%s: %s: %s\n", app_name, op, cuda_ops_status_string(status));
        exit(1);
    }
}

void app_cuda_open(app_cuda *cuda, char *name, size_t name_size, int64_t *allocated_bytes)
{
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        app_fail("--device cuda: %s: check nvidia-smi and CUDA_VISIBLE_DEVICES, or take --device cpu",
                 error == cudaSuccess ? "there is no GPU" : cudaGetErrorString(error));
    struct cudaDeviceProp properties;
    app_cuda_check("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, 0));
    snprintf(name, name_size, "%s", properties.name);
    *cuda = (app_cuda){.allocated_bytes = allocated_bytes};
    app_cuda_check("cudaStreamCreate", cudaStreamCreate(&cuda->stream));
    app_cuda_check("cudaMallocHost", cudaMallocHost((void **)&cuda->staged, STAGED_BYTES));
    for (int i = 0; i < APP_MOST_MARKS; i++)
        app_cuda_check("cudaEventCreate", cudaEventCreate(&cuda->marks[i]));
}

/* Waits for all that was issued. */
static void synchronize(app_cuda *cuda)
{
    app_cuda_check("cudaStreamSynchronize", cudaStreamSynchronize(cuda->stream));
    cuda->staged_bytes = 0;
}

void app_cuda_close(app_cuda *cuda)
{
    synchronize(cuda);
    for (int i = 0; i < cuda->allocation_count; i++)
        cudaFree(cuda->allocations[i]);
    cudaFree(cuda->workspace);
    cudaFreeHost(cuda->staged);
    for (int i = 0; i < APP_MOST_MARKS; i++)
        cudaEventDestroy(cuda->marks[i]);
    cudaStreamDestroy(cuda->stream);
}

void *app_cuda_allocate(app_cuda *cuda, int64_t bytes)
{
    if (cuda->allocation_count == APP_MOST_ALLOCATIONS)
        app_fail("more than %d allocations", APP_MOST_ALLOCATIONS);
    void *memory;
    app_cuda_check("cudaMalloc", cudaMalloc(&memory, (size_t)bytes));
    app_cuda_check("cudaMemset", cudaMemsetAsync(memory, 0, (size_t)bytes, cuda->stream));
    *cuda->allocated_bytes += bytes;
    return cuda->allocations[cuda->allocation_count++] = memory;
}

void *app_cuda_workspace(app_cuda *cuda, int64_t bytes)
{
    if (bytes > cuda->workspace_bytes) {
        app_cuda_check("cudaFree", cudaFree(cuda->workspace)); /* waits for what still uses it */
        app_cuda_check("cudaMalloc", cudaMalloc(&cuda->workspace, (size_t)bytes));
        *cuda->allocated_bytes += bytes - cuda->workspace_bytes;
        cuda->workspace_bytes = bytes;
    }
    return cuda->workspace;
}

static void copy(app_cuda *cuda, void *target, const void *source, int64_t bytes, enum cudaMemcpyKind kind)
{
    app_cuda_check("copy", cudaMemcpyAsync(target, source, (size_t)bytes, kind, cuda->stream));
}

void app_cuda_upload(app_cuda *cuda, void *target, const void *source, int64_t bytes)
{
    if (bytes > STAGED_BYTES) {
        copy(cuda, target, source, bytes, cudaMemcpyHostToDevice);
        synchronize(cuda);
        return;
    }
    if (bytes > STAGED_BYTES - cuda->staged_bytes)
        synchronize(cuda);
    char *const staged = cuda->staged + cuda->staged_bytes;
    memcpy(staged, source, (size_t)bytes);
    copy(cuda, target, staged, bytes, cudaMemcpyHostToDevice);
    cuda->staged_bytes += (bytes + STAGED_ALIGNMENT - 1) / STAGED_ALIGNMENT * STAGED_ALIGNMENT;
}

void app_cuda_copy(app_cuda *cuda, void *target, const void *source, int64_t bytes)
{
    copy(cuda, target, source, bytes, cudaMemcpyDeviceToDevice);
}

void app_cuda_download(app_cuda *cuda, void *target, const void *source, int64_t bytes)
{
    copy(cuda, target, source, bytes, cudaMemcpyDeviceToHost);
    synchronize(cuda);
}

void app_cuda_mark(app_cuda *cuda)
{
    if (cuda->mark_count < APP_MOST_MARKS)
        app_cuda_check("cudaEventRecord", cudaEventRecord(cuda->marks[cuda->mark_count++], cuda->stream));
}

int64_t app_cuda_collect(app_cuda *cuda, double *milliseconds, int64_t room)
{
    synchronize(cuda);
    const int64_t count = cuda->mark_count - 1 < room ? cuda->mark_count - 1 : room;
    for (int64_t i = 0; i < count; i++) {
        float elapsed;
        app_cuda_check("cudaEventElapsedTime", cudaEventElapsedTime(&elapsed, cuda->marks[i], cuda->marks[i + 1]));
        milliseconds[i] = elapsed;
    }
    cuda->mark_count = 0;
    return count;
}

#endif
