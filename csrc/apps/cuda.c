#include "cuda.h"

_Noreturn void app_fail_without_cuda(void)
{
    app_fail("--device cuda: this program was built without CUDA: take --device cpu, or build it with nvcc there and "
             "CUDA_OPS_CUDA=1");
}

#ifdef CUDA_OPS_WITH_CUDA

#include <stdio.h>
#include <stdlib.h>

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
    for (int i = 0; i < APP_MOST_MARKS; i++)
        app_cuda_check("cudaEventCreate", cudaEventCreate(&cuda->marks[i]));
}

void app_cuda_close(app_cuda *cuda)
{
    app_cuda_check("cudaStreamSynchronize", cudaStreamSynchronize(cuda->stream));
    for (int i = 0; i < cuda->allocation_count; i++)
        cudaFree(cuda->allocations[i]);
    cudaFree(cuda->workspace);
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

void app_cuda_upload(app_cuda *cuda, void *target, const void *source, int64_t bytes)
{
    app_cuda_check("copy", cudaMemcpyAsync(target, source, (size_t)bytes, cudaMemcpyHostToDevice, cuda->stream));
    app_cuda_check("copy", cudaStreamSynchronize(cuda->stream));
}

void app_cuda_download(app_cuda *cuda, void *target, const void *source, int64_t bytes)
{
    app_cuda_check("copy", cudaMemcpyAsync(target, source, (size_t)bytes, cudaMemcpyDeviceToHost, cuda->stream));
    app_cuda_check("copy", cudaStreamSynchronize(cuda->stream));
}

void app_cuda_mark(app_cuda *cuda)
{
    if (cuda->mark_count < APP_MOST_MARKS)
        app_cuda_check("cudaEventRecord", cudaEventRecord(cuda->marks[cuda->mark_count++], cuda->stream));
}

int64_t app_cuda_collect(app_cuda *cuda, double *milliseconds, int64_t room)
{
    app_cuda_check("cudaStreamSynchronize", cudaStreamSynchronize(cuda->stream));
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
