#include "cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "app.h"

static const cuda_ops_dtype F32 = CUDA_OPS_FLOAT32;
/* Multiply-adds of a matrix product, below which another thread does not pay. */
enum { PRODUCT_GRAIN = 1 << 17 };

static void name_processor(char *name, size_t size, int threads)
{
    char line[256], model[200] = "CPU";
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon && colon[1]) {
            snprintf(model, sizeof model, "%.*s", (int)strcspn(colon + 2, "\n\"\\"), colon + 2);
            break;
        }
    }
    if (file)
        fclose(file);
    snprintf(name, size, "%s, %d thread%s", model, threads, threads == 1 ? "" : "s");
}

void app_cpu_open(app_cpu *cpu, int threads, char *name, size_t name_size, int64_t *allocated_bytes)
{
#ifdef _OPENMP
    cpu->threads = threads ? threads : omp_get_num_procs();
#else
    if (threads > 1)
        app_fail("--threads %d: this program was built without OpenMP", threads);
    cpu->threads = 1;
#endif
    cpu->allocated_bytes = allocated_bytes;
    name_processor(name, name_size, cpu->threads);
}

void app_cpu_close(app_cpu *cpu)
{
    for (int i = 0; i < cpu->allocation_count; i++)
        app_free(cpu->allocations[i]);
    app_free(cpu->workspace);
}

void *app_cpu_allocate(app_cpu *cpu, int64_t bytes)
{
    if (cpu->allocation_count == APP_MOST_ALLOCATIONS)
        app_fail("more than %d allocations", APP_MOST_ALLOCATIONS);
    *cpu->allocated_bytes += bytes;
    return cpu->allocations[cpu->allocation_count++] = app_allocate(bytes, 1);
}

int64_t app_cpu_padded(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

char *app_cpu_workspace(app_cpu *cpu, int64_t bytes)
{
    const int64_t all = cpu->threads * app_cpu_padded(bytes);
    if (all > cpu->workspace_bytes) {
        *cpu->allocated_bytes += all - cpu->workspace_bytes;
        app_free(cpu->workspace);
        cpu->workspace = app_allocate(all, 1);
        cpu->workspace_bytes = all;
    }
    return cpu->workspace;
}

void app_check(const char *op, cuda_ops_status status)
{
    if (status != CUDA_OPS_SUCCESS) {
        fprintf(stderr, "%s: %s: %s\n", app_name, op, cuda_ops_status_string(status));
        exit(1);
    }
}

void app_cpu_mark(app_cpu *cpu)
{
    if (cpu->mark_count < APP_MOST_MARKS)
        clock_gettime(CLOCK_MONOTONIC, &cpu->marks[cpu->mark_count++]);
}

int64_t app_cpu_collect(app_cpu *cpu, double *milliseconds, int64_t room)
{
    const int64_t count = cpu->mark_count - 1 < room ? cpu->mark_count - 1 : room;
    for (int64_t i = 0; i < count; i++)
        milliseconds[i] = (double)(cpu->marks[i + 1].tv_sec - cpu->marks[i].tv_sec) * 1e3 +
                          (double)(cpu->marks[i + 1].tv_nsec - cpu->marks[i].tv_nsec) * 1e-6;
    cpu->mark_count = 0;
    return count;
}

/* The longer side is split over threads, since each of them packs all of the other operand. */
cuda_ops_linear_block app_split_longer_side(int64_t rows, int64_t columns, int64_t begin, int64_t end)
{
    return rows >= columns ? (cuda_ops_linear_block){begin, end, 0, columns}
                           : (cuda_ops_linear_block){0, rows, begin, end};
}

int64_t app_product_grain(int64_t rows, int64_t columns, int64_t depth)
{
    return app_most(1, PRODUCT_GRAIN / app_most(1, (rows < columns ? rows : columns) * depth));
}

void app_cpu_linear_forward(app_cpu *cpu, float *output, const float *input, const float *weight, const float *bias,
                            int64_t rows, int64_t in_features, int64_t out_features)
{
    const int64_t bytes = cuda_ops_linear_workspace_cpu(), stride = app_cpu_padded(bytes);
    char *const workspace = app_cpu_workspace(cpu, bytes);
    APP_SPREAD(cpu, "linear", app_most(rows, out_features), app_product_grain(rows, out_features, in_features),
               cuda_ops_linear_forward_cpu(output, input, weight, bias, workspace + thread * stride, rows, in_features,
                                           out_features, app_split_longer_side(rows, out_features, begin, end), F32));
}

void app_cpu_linear_backward(app_cpu *cpu, float *grad_input, float *grad_weight, float *grad_bias,
                             const float *grad_output, const float *input, const float *weight, int64_t rows,
                             int64_t in_features, int64_t out_features)
{
    const char *const op = "linear backward";
    const int64_t bytes = cuda_ops_linear_workspace_cpu(), stride = app_cpu_padded(bytes);
    char *const workspace = app_cpu_workspace(cpu, bytes);
    if (grad_input)
        APP_SPREAD(cpu, op, app_most(rows, in_features), app_product_grain(rows, in_features, out_features),
                   cuda_ops_linear_backward_input_cpu(grad_input, grad_output, weight, workspace + thread * stride,
                                                      rows, in_features, out_features,
                                                      app_split_longer_side(rows, in_features, begin, end), F32));
    if (grad_weight)
        APP_SPREAD(cpu, op, app_most(out_features, in_features), app_product_grain(out_features, in_features, rows),
                   cuda_ops_linear_backward_weight_cpu(
                       grad_weight, grad_output, input, workspace + thread * stride, rows, in_features, out_features,
                       app_split_longer_side(out_features, in_features, begin, end), F32));
    if (grad_bias)
        APP_SPREAD(cpu, op, out_features, app_most(1, APP_ELEMENT_GRAIN / app_most(1, rows)),
                   cuda_ops_linear_backward_bias_cpu(grad_bias, grad_output, rows, out_features, begin, end, F32));
}
