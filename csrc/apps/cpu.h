/* What the programs' CPU devices share: threads, memory, the clock, and linear layers.
 *
 * The C API's functions work on ranges, and OpenMP spreads the ranges over threads. */
#ifndef CUDA_OPS_APPS_CPU_H
#define CUDA_OPS_APPS_CPU_H

#include <stdint.h>
#include <time.h>

#include "app.h"
#include "cuda_ops/linear.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* Elements below which another thread does not pay. */
enum { APP_ELEMENT_GRAIN = 32768 };

typedef struct app_cpu {
    int threads;
    void *allocations[APP_MOST_ALLOCATIONS];
    int allocation_count;
    char *workspace; /* grown in the first step, and kept */
    int64_t workspace_bytes;
    int64_t *allocated_bytes; /* where the sum of both is counted */
    struct timespec marks[APP_MOST_MARKS];
    int64_t mark_count;
} app_cpu;

/* threads: 0 for one a core. name: gets the processor's. */
void app_cpu_open(app_cpu *cpu, int threads, char *name, size_t name_size, int64_t *allocated_bytes);
void app_cpu_close(app_cpu *cpu);
/* Zeroed, freed by app_cpu_close. */
void *app_cpu_allocate(app_cpu *cpu, int64_t bytes);
/* One for each thread, of `bytes` each, which the next call may take away: thread t's begins at t * bytes rounded up to
 * 64. */
char *app_cpu_workspace(app_cpu *cpu, int64_t bytes);
int64_t app_cpu_padded(int64_t bytes);

/* Prints "NAME: OP: ..." and exits with status 1, unless the status is success. */
void app_check(const char *op, cuda_ops_status status);

void app_cpu_mark(app_cpu *cpu);
/* milliseconds[i]: from mark i to mark i + 1, since the last call; returns how many. */
int64_t app_cpu_collect(app_cpu *cpu, double *milliseconds, int64_t room);

/* Shapes as in cuda_ops/linear.h; bias, and any of the gradients, may be NULL. */
void app_cpu_linear_forward(app_cpu *cpu, float *output, const float *input, const float *weight, const float *bias,
                            int64_t rows, int64_t in_features, int64_t out_features);
void app_cpu_linear_backward(app_cpu *cpu, float *grad_input, float *grad_weight, float *grad_bias,
                             const float *grad_output, const float *input, const float *weight, int64_t rows,
                             int64_t in_features, int64_t out_features);

/* The block of a rows x columns result that range [begin, end) of its longer side is. */
cuda_ops_linear_block app_split_longer_side(int64_t rows, int64_t columns, int64_t begin, int64_t end);
/* The least that a thread takes of that side, with `depth` products an element. */
int64_t app_product_grain(int64_t rows, int64_t columns, int64_t depth);

static inline int64_t app_most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t app_threads_for(const app_cpu *cpu, int64_t count, int64_t grain)
{
    const int64_t ranges = (count + grain - 1) / grain;
    return ranges < cpu->threads ? app_most(1, ranges) : cpu->threads;
}

static inline int app_thread_number(void)
{
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static inline int app_thread_count(void)
{
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

/* Splits [0, count) into ranges of at least `grain`, at most one a thread, and evaluates `call` in a thread for each.
 * `call` is a status, and may use the names begin, end and thread. */
#define APP_SPREAD(cpu, op, count, grain, call)                                                                        \
    do {                                                                                                               \
        const int64_t spread_count = (count);                                                                          \
        const int spread_threads = (int)app_threads_for((cpu), spread_count, (grain));                                 \
        cuda_ops_status spread_status = CUDA_OPS_SUCCESS;                                                              \
        (void)spread_threads;                                                                                          \
        _Pragma("omp parallel num_threads(spread_threads) reduction(max : spread_status)")                             \
        {                                                                                                              \
            const int64_t thread = app_thread_number(), threads = app_thread_count();                                  \
            const int64_t begin = spread_count * thread / threads, end = spread_count * (thread + 1) / threads;        \
            (void)thread;                                                                                              \
            spread_status = (call);                                                                                    \
        }                                                                                                              \
        app_check((op), spread_status);                                                                                \
    } while (0)

#endif
