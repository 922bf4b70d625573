/* gemm: D = activation(alpha * op(A) op(B) + bias), on CUDA by one of several kernels; D = op(A) op(B) on the CPU.
 *
 *   op(A)  m x k   A is stored m x k, or k x m where transpose_a is set
 *   op(B)  k x n   B is stored k x n, or n x k where transpose_b is set
 *   D      m x n
 *   bias   n, added to every row; may be NULL
 *
 * All are row-major; lda, ldb and ldd are the distances in elements between the starts of two rows as they are stored.
 * With batch > 1, product i takes A + i * stride_a, B + i * stride_b, D + i * stride_d (in elements; a stride of zero
 * shares A or B among the products) and the same bias. k = 0 makes D activation(bias).
 * D overlaps none of the others. Every element is summed in an order that depends on the problem, the path and the
 * model of GPU alone, so that results repeat bit by bit.
 */
#ifndef CUDA_OPS_GEMM_H
#define CUDA_OPS_GEMM_H

#include "cuda_ops/core.h"
#include "cuda_ops/paths.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cuda_ops_gemm_activation {
    CUDA_OPS_GEMM_NONE = 0,
    CUDA_OPS_GEMM_RELU = 1,      /* NaN stays NaN */
    CUDA_OPS_GEMM_GELU = 2,      /* x / 2 * (1 + erf(x / sqrt(2))) */
    CUDA_OPS_GEMM_GELU_TANH = 3, /* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) */
    CUDA_OPS_GEMM_RELU6 = 4,
    CUDA_OPS_GEMM_SILU = 5,     /* x / (1 + exp(-x)) */
    CUDA_OPS_GEMM_HARDSWISH = 6 /* x * min(max(x + 3, 0), 6) / 6 */
} cuda_ops_gemm_activation;

/* To be zeroed before it is filled in. */
typedef struct cuda_ops_gemm_problem {
    int64_t m, n, k, batch;
    int64_t lda, ldb, ldd;
    int64_t stride_a, stride_b, stride_d;
    double alpha;
    int transpose_a, transpose_b;
    cuda_ops_dtype dtype;        /* of A and B; fp16, bf16 and TF32 are accumulated in float32 */
    cuda_ops_dtype output_dtype; /* of D: dtype, or float32 with fp16 and bf16 */
    cuda_ops_dtype bias_dtype;   /* dtype, or float32 with fp16 and bf16; of no meaning without a bias */
    cuda_ops_gemm_activation activation;
    int allow_tf32; /* float32 operands may be rounded to TF32; otherwise they are multiplied as they are, or (path 18)
                     * by numbers of TF32 that make up for each other's rounding */
    /* Nonzero where the address of A or B is no multiple of 16 bytes: the workspace may then be for a path that copies
     * it to one. Zero in spite of it: the product falls to a path that reads it where it is. */
    int unaligned_a, unaligned_b;
    /* NULL, or where the kernel leaves alpha * op(A) op(B) + bias besides, stored as D is (output_dtype, ldd, stride_d)
     * and apart from it; D is then the activation of what was stored there. The paths simt, sm90 and sm90_3xtf32
     * (with k whole), sm90_skinny and padded can; see cuda_ops_gemm_path_cuda. */
    void *preactivation;
} cuda_ops_gemm_problem;

/* Rows and columns [begin, end) of D, so that the caller spreads blocks over threads. */
typedef struct cuda_ops_gemm_block {
    int64_t row_begin, row_end, column_begin, column_end;
} cuda_ops_gemm_block;

/* Bytes of workspace of each call, aligned to 64. */
int64_t cuda_ops_matmul_workspace_cpu(void);

/* A block of product `index` of the batch. CUDA_OPS_INVALID_ARGUMENT unless alpha is 1, the output's dtype that of A
 * and B, and there is no activation. The cut into blocks makes no difference to the bits of the result. */
cuda_ops_status cuda_ops_matmul_cpu(void *d, const void *a, const void *b, void *workspace,
                                    const cuda_ops_gemm_problem *problem, int64_t index, cuda_ops_gemm_block block);

/* Paths by number, which is that of their rung in the ladder: 4 (naive) to 13 (sm90: clusters, persistent), 14
 * (sm90_skinny) and 15 (direct) for skinny and small products; and four that are no rungs: 16 (padded), 13 and 14 on
 * copies of operands whose rows are no multiple of 16 bytes, 17 (narrow), for long operands of few columns, 18
 * (sm90_3xtf32), float32 on Hopper's tensor cores with float32's accuracy, unless CUDA_OPS_3XTF32 is 0 in the
 * environment, and 19 (sm90_unaligned), for rows of multiples of 4 or 8 bytes in 16 bits. 62 is rung 6 with dynamic
 * shared memory, 71 rung 7 with one-dimensional tiles. Zero stands for the fastest known for the problem on the current
 * device. */
enum { CUDA_OPS_GEMM_FASTEST = 0, CUDA_OPS_GEMM_FIRST_PATH = 4, CUDA_OPS_GEMM_LAST_PATH = 19 };

/* The path that a call with `path` would take on the current device: `path` itself if it supports the problem, for
 * CUDA_OPS_GEMM_FASTEST the choice, and -1 if it does not (dtype, alignment, device) or there is none. */
int cuda_ops_gemm_path_cuda(const cuda_ops_gemm_problem *problem, int path);

/* The table for a call with `path` whose operands are aligned (paths.h): fills in at most `room` reports, and returns
 * how many rows there are. device: NULL for the current one. */
int cuda_ops_gemm_paths_cuda(cuda_ops_path_report *reports, int room, const cuda_ops_gemm_problem *problem, int path,
                             const cuda_ops_device_facts *device);

/* A path's name, such as "mma", which CUDA_OPS_GEMM_PATH takes; NULL for a number without one. */
const char *cuda_ops_gemm_path_name_cuda(int path);

/* Bytes of workspace for that call, on the current device; aligned to 256, for the call alone. Zero: may be NULL. */
int64_t cuda_ops_gemm_workspace_cuda(const cuda_ops_gemm_problem *problem, int path);

/* CUDA_OPS_INVALID_ARGUMENT where cuda_ops_gemm_path_cuda says -1. */
cuda_ops_status cuda_ops_gemm_cuda(void *d, const void *a, const void *b, const void *bias, void *workspace,
                                   const cuda_ops_gemm_problem *problem, int path, cuda_ops_stream stream);

/* How a path does a problem: the number of its tile, the splits of k, and whether A and B are exchanged so that the
 * kernel makes D transposed (sm90_skinny and some tiles of sm90). padded's tiles are sm90's, and from 32 on
 * sm90_skinny's. For tests and for tuning: a path's own choice is better. */
typedef struct cuda_ops_gemm_plan {
    int path, tile, splits, swapped;
} cuda_ops_gemm_plan;

/* The plan of a call with `path`. CUDA_OPS_INVALID_ARGUMENT where cuda_ops_gemm_path_cuda says -1. */
cuda_ops_status cuda_ops_gemm_plan_cuda(cuda_ops_gemm_plan *plan, const cuda_ops_gemm_problem *problem, int path);
int64_t cuda_ops_gemm_planned_workspace_cuda(const cuda_ops_gemm_problem *problem, const cuda_ops_gemm_plan *plan);
/* CUDA_OPS_INVALID_ARGUMENT where the path has no such tile, split or order. */
cuda_ops_status cuda_ops_gemm_planned_cuda(void *d, const void *a, const void *b, const void *bias, void *workspace,
                                           const cuda_ops_gemm_problem *problem, const cuda_ops_gemm_plan *plan,
                                           cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
