/* What a device provides: the layers, forward and backward, on the C API.
 *
 * gpt2/model.c calls them and knows no device; gpt2/cpu.c implements them on the CPU, gpt2/cuda.c on a GPU. Activations
 * and their gradients, void * below, are of the device's precision: float32, or bfloat16. All other tensors are of the
 * types below: parameters, their gradients and the optimizer's state float32. All are in the device's memory; outputs
 * are written, not added to; biases may be NULL, and then their gradients are. A layer that fails says why on stderr and
 * ends the program with status 1. */
#ifndef GPT2_LAYERS_H
#define GPT2_LAYERS_H

#include <stdint.h>

#include "cuda_ops/adam.h"
#include "gpt2/files.h"

typedef struct gpt2_device gpt2_device;

/* Of sequences, positions [begin, end): with a `begin` above 0 there is one sequence, of which those before are known.
 */
typedef struct gpt2_span {
    int64_t batch, begin, end;
} gpt2_span;

typedef struct gpt2_norm {
    int64_t rows, features;
    const float *weight, *bias;
    double *mean; /* what backward takes from forward: one of each row */
    float *rstd;
} gpt2_norm;

typedef struct gpt2_linear {
    int64_t rows, in_features, out_features;
    const float *weight, *bias;
} gpt2_linear;

/* The implementation's own data follow `public` in its struct. */
struct gpt2_device {
    char name[256];           /* of the processor */
    const char *measured_by;  /* the clock */
    int64_t activation_bytes; /* of an element: 4 is float32, 2 bfloat16 */
    int64_t allocated_bytes;

    void *(*allocate)(gpt2_device *, int64_t bytes); /* zeroed, freed by `close` */
    void (*upload)(gpt2_device *, void *target, const void *source, int64_t bytes);
    void (*download)(gpt2_device *, void *target, const void *source, int64_t bytes);
    void (*close)(gpt2_device *);
    /* The parameters have new values: what the device keeps of them in another dtype is made anew. */
    void (*follow)(gpt2_device *, const float *parameters, const gpt2_weights *layout);

    /* The sum of the rows of the two tables, for each of the span's tokens. */
    void (*embed_forward)(gpt2_device *, void *output, const float *token_table, const float *position_table,
                          const int64_t *tokens, int64_t vocab_size, int64_t features, const gpt2_span *);
    /* Adds to grad_tokens, on the CPU by way of `scratch`, of its size; of grad_positions the rows beyond the span get
     * zeros. The span begins at 0. */
    void (*embed_backward)(gpt2_device *, float *grad_tokens, float *grad_positions, float *scratch,
                           const void *grad_output, const int64_t *tokens, int64_t vocab_size, int64_t block_size,
                           int64_t features, const gpt2_span *);

    /* Layer norm of input, or with a residual of sum = input + residual. */
    void (*norm_forward)(gpt2_device *, void *output, void *sum, const void *input, const void *residual,
                         const gpt2_norm *);
    /* input: what was normalised. grad_sum (or NULL) is added to grad_input. */
    void (*norm_backward)(gpt2_device *, void *grad_input, float *grad_weight, float *grad_bias,
                          const void *grad_output, const void *grad_sum, const void *input, const gpt2_norm *);

    void (*linear_forward)(gpt2_device *, void *output, const void *input, const gpt2_linear *);
    void (*linear_backward)(gpt2_device *, void *grad_input, float *grad_weight, float *grad_bias,
                            const void *grad_output, const void *input, const gpt2_linear *);
    /* output = gelu(preactivation), by its approximation with tanh; preactivation = linear(input). */
    void (*linear_gelu_forward)(gpt2_device *, void *output, void *preactivation, const void *input,
                                const gpt2_linear *);
    /* In place; and the gradient of the bias, the sum of rows. */
    void (*gelu_backward)(gpt2_device *, void *grad, float *grad_bias, const void *preactivation, int64_t rows,
                          int64_t features);

    /* Causal attention. projected: query, key and value of each token, [batch, end, 3 * features], of the sequences'
     * beginnings too; output: [batch, end - begin, features]; logsumexp: [batch, heads, end - begin]. */
    void (*attention_forward)(gpt2_device *, void *output, float *logsumexp, const void *projected, int64_t heads,
                              int64_t features, const gpt2_span *);
    /* The span begins at 0. */
    void (*attention_backward)(gpt2_device *, void *grad_projected, const void *grad_output, const void *projected,
                               const void *output, const float *logsumexp, int64_t heads, int64_t features,
                               const gpt2_span *);

    /* The mean cross-entropy of linear(input, weight), whose logits are never stored as a whole; and the gradients in
     * the same go, unless grad_input is NULL. scratch_*: of the size of the gradients. */
    void (*head)(gpt2_device *, float *loss, void *grad_input, float *grad_weight, void *scratch_input,
                 float *scratch_weight, const void *input, const int64_t *targets, const gpt2_linear *);

    /* Scales all gradients where their norm is larger than max_norm. */
    void (*clip)(gpt2_device *, float *gradients, int64_t count, double max_norm);
    /* step: from 1 on. */
    void (*adamw)(gpt2_device *, float *parameters, float *gradients, float *mean, float *square, int64_t count,
                  int64_t step, const cuda_ops_adam_options *);

    /* Records the time at which all work issued so far is done. */
    void (*mark)(gpt2_device *);
    /* Waits for the device. milliseconds[i]: from mark i to mark i + 1, since the last call; returns how many. */
    int64_t (*collect)(gpt2_device *, double *milliseconds, int64_t most);
};

/* Marks between two calls of `collect`. */
enum { GPT2_MOST_MARKS = 128 };

/* threads: 0 for one a core. */
gpt2_device *gpt2_open_cpu(int threads);
/* Of activations; with TF32 they are float32, and products may round them. app_fail where there is no GPU, or the program
 * was built without CUDA. */
typedef enum gpt2_precision { GPT2_FP32, GPT2_TF32, GPT2_BF16 } gpt2_precision;
gpt2_device *gpt2_open_cuda(gpt2_precision precision);

#endif
