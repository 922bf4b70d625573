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

/* The parameters, their gradients and AdamW's state, four arrays of one layout. */
typedef struct gpt2_state {
    const gpt2_weights *layout;
    float *parameters, *gradients, *mean, *square;
} gpt2_state;

typedef struct gpt2_update {
    int64_t step; /* from 1 on */
    double lr, beta2, weight_decay, clip;
} gpt2_update;

/* Those of AdamW that no recipe changes. */
static const double ADAM_BETA1 = 0.9, ADAM_EPS = 1e-8;

/* Memory that nobody else needs during a call. */
typedef struct gpt2_room {
    void *memory;
    int64_t bytes;
} gpt2_room;

/* The parts of a training step that a device may record, to run them again by itself. */
typedef enum gpt2_part { GPT2_FORWARD, GPT2_BACKWARD, GPT2_UPDATE, GPT2_PARTS } gpt2_part;

/* The implementation's own data follow `public` in its struct. */
struct gpt2_device {
    char name[256];           /* of the processor */
    const char *measured_by;  /* the clock */
    int64_t activation_bytes; /* of an element: 4 is float32, 2 bfloat16 */
    int64_t allocated_bytes;
    int records; /* whether `begin` below ever returns 0 */

    void *(*allocate)(gpt2_device *, int64_t bytes); /* zeroed, freed by `close` */
    /* From the host's memory, to it, and within the device's. On return `source` of the first may change. */
    void (*upload)(gpt2_device *, void *target, const void *source, int64_t bytes);
    void (*download)(gpt2_device *, void *target, const void *source, int64_t bytes);
    void (*copy)(gpt2_device *, void *target, const void *source, int64_t bytes);
    void (*close)(gpt2_device *);

    /* The calls of a part, which are the same in each step, are made between these two; but where `begin` returns 0, the
     * device has them on record and runs them: then neither they nor `end` are to be called. */
    int (*begin)(gpt2_device *, gpt2_part);
    void (*end)(gpt2_device *);

    /* The parameters have new values: what the device keeps of them in another dtype is made anew. */
    void (*follow)(gpt2_device *, const float *parameters, const gpt2_weights *layout);

    /* The sum of the rows of the two tables, for each of the span's tokens. */
    void (*embed_forward)(gpt2_device *, void *output, const float *token_table, const float *position_table,
                          const int64_t *tokens, int64_t vocab_size, int64_t features, const gpt2_span *);
    /* Adds to grad_tokens; of grad_positions the rows beyond the span get zeros. The span begins at 0. */
    void (*embed_backward)(gpt2_device *, float *grad_tokens, float *grad_positions, const void *grad_output,
                           const int64_t *tokens, int64_t vocab_size, int64_t block_size, int64_t features,
                           const gpt2_span *);

    /* Layer norm of input, or with a residual of sum = input + residual. */
    void (*norm_forward)(gpt2_device *, void *output, void *sum, const void *input, const void *residual,
                         const gpt2_norm *);
    /* input: what was normalised. grad_sum (or NULL) is added to grad_input, whose sums over rows (or NULL) are the
     * gradient of the bias that was added to it last. */
    void (*norm_backward)(gpt2_device *, void *grad_input, float *grad_weight, float *grad_bias, float *grad_input_sums,
                          const void *grad_output, const void *grad_sum, const void *input, const gpt2_norm *);

    void (*linear_forward)(gpt2_device *, void *output, const void *input, const gpt2_linear *);
    /* The gradient of a layer's bias comes with what goes before it in backward: from the norm, from gelu, or by
     * attention_bias_backward. */
    void (*linear_backward_input)(gpt2_device *, void *grad_input, const void *grad_output, const gpt2_linear *);
    void (*linear_backward_weight)(gpt2_device *, float *grad_weight, const void *grad_output, const void *input,
                                   const gpt2_linear *);
    /* output = gelu(preactivation), by its approximation with tanh; preactivation = linear(input). */
    void (*linear_gelu_forward)(gpt2_device *, void *output, void *preactivation, const void *input,
                                const gpt2_linear *, gpt2_room);
    void (*gelu_forward)(gpt2_device *, void *output, const void *preactivation, int64_t elements);
    /* Through the layer behind gelu, and gelu: grad_preactivation = (grad_output * its weight) * gelu's slope; grad_bias
     * (or NULL): the sums of its rows. */
    void (*gelu_linear_backward)(gpt2_device *, void *grad_preactivation, float *grad_bias, const void *grad_output,
                                 const void *preactivation, const gpt2_linear *);

    /* Causal attention. projected: query, key and value of each token, [batch, end, 3 * features], of the sequences'
     * beginnings too; output: [batch, end - begin, features]; logsumexp: [batch, heads, end - begin]. */
    void (*attention_forward)(gpt2_device *, void *output, float *logsumexp, const void *projected, int64_t heads,
                              int64_t features, const gpt2_span *);
    /* The span begins at 0. */
    void (*attention_backward)(gpt2_device *, void *grad_projected, const void *grad_output, const void *projected,
                               const void *output, const float *logsumexp, int64_t heads, int64_t features,
                               const gpt2_span *, gpt2_room);
    /* The gradient of the bias of the layer that made `projected`. grad_next_bias: of `next`, which attention's output
     * went through. */
    void (*attention_bias_backward)(gpt2_device *, float *grad_bias, const void *grad_projected,
                                    const float *grad_next_bias, const gpt2_linear *next);

    /* The mean cross-entropy of linear(input, weight), and its gradients, unless grad_input is NULL. With a room of
     * head_bytes nothing more is allocated but products' workspaces. */
    int64_t (*head_bytes)(gpt2_device *, const gpt2_linear *);
    void (*head)(gpt2_device *, float *loss, void *grad_input, float *grad_weight, const void *input,
                 const int64_t *targets, const gpt2_linear *, gpt2_room);
    /* logits = linear(input, weight), of few rows. */
    void (*logits)(gpt2_device *, float *logits, const void *input, const gpt2_linear *, gpt2_room);

    /* Scales the gradients where the norm of all is larger than `clip`, takes a step of AdamW, and follows. Matrices
     * shrink by weight_decay, vectors do not. */
    void (*update)(gpt2_device *, const gpt2_state *, const gpt2_update *);

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
/* graphs: whether it records the parts of a step. */
gpt2_device *gpt2_open_cuda(gpt2_precision precision, int graphs);

#endif
