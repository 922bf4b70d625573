/* The layers on a GPU: the launchers of the C API on one stream. Activations are float32, multiplied as they are or as
 * TF32, or bfloat16, as GPT("fused") has them under autocast: parameters, their gradients and the optimizer stay
 * float32, and products take a copy of the parameters in bfloat16, which every step makes anew.
 *
 * The parts of a step are CUDA graphs: launched once each, not kernel by kernel. Hence what changes from step to step is
 * in the GPU's memory: tokens, the learning rate, the number of the step. */
#include "cuda.h"

#include "gpt2/layers.h"

#ifndef CUDA_OPS_WITH_CUDA

gpt2_device *gpt2_open_cuda(gpt2_precision precision, int graphs)
{
    (void)precision, (void)graphs;
    app_fail_without_cuda();
}

#else

#include "cuda_ops/activation.h"
#include "cuda_ops/adam.h"
#include "cuda_ops/attention_packed_bias.h"
#include "cuda_ops/clip_grad_norm.h"
#include "cuda_ops/cross_entropy.h"
#include "cuda_ops/embedding.h"
#include "cuda_ops/gemm.h"
#include "cuda_ops/layer_norm.h"
#include "cuda_ops/linear_cross_entropy.h"
#include "cuda_ops/linear_gelu.h"
#include "cuda_ops/round_list.h"
#include "gpt2/attention_call.h"

static const cuda_ops_dtype F32 = CUDA_OPS_FLOAT32;
static const double NORM_EPS = 1e-5;
enum { ALIGNMENT = 256 }; /* of workspaces */
/* As in cuda_ops/models/_gpt_ops.py; and what cross_entropy's backward knows of each row. */
enum { MOST_FUSED_CLASSES = 1024, STATISTICS = 3 };
_Static_assert((int)GPT2_MOST_MARKS == (int)APP_MOST_MARKS, "the list of marks is the programs' common one");

/* A part of the step: its calls are made in the first step, for which the workspace grows, recorded in the second, and
 * launched as a graph from then on. */
typedef struct cuda_part {
    int steps;
    cudaGraphExec_t graph;
} cuda_part;

typedef struct cuda {
    gpt2_device public;
    app_cuda base;
    cuda_ops_dtype dtype; /* of activations */
    int allow_tf32;
    float *one, *total_weight; /* one element each: the gradient of the loss by itself, and the number of targets */
    float *learning_rate, *grad_norm;       /* likewise */
    double *steps;                          /* one for each tensor: how many steps of AdamW it has taken */
    cuda_part parts[GPT2_PARTS], *recorded; /* recorded: the one that is being recorded, or NULL */
    /* With bfloat16: the parameters behind the two tables, and a copy of them. */
    const float *parameters;
    uint16_t *rounded;
} cuda;

static void check(const char *op, cuda_ops_status status)
{
    app_cuda_check_status(op, status);
}

/* The graphs have the workspace's address. */
static void forget_graphs(cuda *self)
{
    for (int i = 0; i < GPT2_PARTS; i++)
        if (self->parts[i].graph) {
            app_cuda_check("cudaStreamSynchronize", cudaStreamSynchronize(self->base.stream));
            app_cuda_check("cudaGraphExecDestroy", cudaGraphExecDestroy(self->parts[i].graph));
            self->parts[i].graph = NULL;
        }
}

static void *workspace(cuda *self, int64_t bytes)
{
    if (bytes > self->base.workspace_bytes)
        forget_graphs(self);
    return app_cuda_workspace(&self->base, bytes);
}

/* `bytes` of the room, or the workspace where it has not so many. */
static void *workspace_in(cuda *self, gpt2_room room, int64_t bytes)
{
    const int64_t skipped = (int64_t)((ALIGNMENT - (uintptr_t)room.memory % ALIGNMENT) % ALIGNMENT);
    return skipped + bytes <= room.bytes ? (char *)room.memory + skipped : workspace(self, bytes);
}

static void *cuda_allocate(gpt2_device *device, int64_t bytes)
{
    return app_cuda_allocate(&((cuda *)device)->base, bytes);
}

static void cuda_upload(gpt2_device *device, void *target, const void *source, int64_t bytes)
{
    app_cuda_upload(&((cuda *)device)->base, target, source, bytes);
}

static void cuda_download(gpt2_device *device, void *target, const void *source, int64_t bytes)
{
    app_cuda_download(&((cuda *)device)->base, target, source, bytes);
}

static void cuda_copy(gpt2_device *device, void *target, const void *source, int64_t bytes)
{
    app_cuda_copy(&((cuda *)device)->base, target, source, bytes);
}

static void cuda_close(gpt2_device *device)
{
    forget_graphs((cuda *)device);
    app_cuda_close(&((cuda *)device)->base);
    app_free(device);
}

/* ---- graphs ---- */

static int cuda_begin(gpt2_device *device, gpt2_part which)
{
    cuda *self = (cuda *)device;
    cuda_part *const part = &self->parts[which];
    if (!self->public.records)
        return 1;
    if (part->graph) {
        app_cuda_check("cudaGraphLaunch", cudaGraphLaunch(part->graph, self->base.stream));
        return 0;
    }
    if (part->steps++ > 0) {
        self->recorded = part;
        app_cuda_check("cudaStreamBeginCapture",
                       cudaStreamBeginCapture(self->base.stream, cudaStreamCaptureModeThreadLocal));
    }
    return 1;
}

static void cuda_end(gpt2_device *device)
{
    cuda *self = (cuda *)device;
    cuda_part *const part = self->recorded;
    if (!part)
        return;
    self->recorded = NULL;
    cudaGraph_t graph;
    app_cuda_check("cudaStreamEndCapture", cudaStreamEndCapture(self->base.stream, &graph));
    app_cuda_check("cudaGraphInstantiate", cudaGraphInstantiate(&part->graph, graph, 0));
    app_cuda_check("cudaGraphDestroy", cudaGraphDestroy(graph));
    app_cuda_check("cudaGraphLaunch", cudaGraphLaunch(part->graph, self->base.stream));
}

/* ---- parameters beside bfloat16 ---- */

static void round_parameters(cuda *self, void *const *targets, const float *const *sources, const int64_t *counts,
                             int64_t tensors)
{
    check("round_list",
          cuda_ops_round_list_cuda(targets, sources, counts, tensors, CUDA_OPS_BFLOAT16, self->base.stream));
}

/* What linear layers take, weights and biases. */
static void cuda_follow(gpt2_device *device, const float *parameters, const gpt2_weights *layout)
{
    cuda *self = (cuda *)device;
    const gpt2_config *const c = &layout->config;
    const int64_t first = layout->offset[GPT2_NORM1_WEIGHT];
    if (self->dtype == F32)
        return;
    if (!self->rounded)
        self->rounded = cuda_allocate(device, (layout->count - first) * (int64_t)sizeof *self->rounded);
    self->parameters = parameters + first;
    void *targets[GPT2_TENSORS];
    const float *sources[GPT2_TENSORS];
    int64_t counts[GPT2_TENSORS], tensors = 0;
    for (int t = GPT2_ATTENTION_WEIGHT; t <= GPT2_MLP_OUT_BIAS; t++) {
        if (t == GPT2_NORM2_WEIGHT || t == GPT2_NORM2_BIAS || !gpt2_has(c, t))
            continue;
        targets[tensors] = self->rounded + layout->offset[t] - first;
        sources[tensors] = parameters + layout->offset[t];
        counts[tensors++] = gpt2_count_all(c, t);
    }
    round_parameters(self, targets, sources, counts, tensors);
}

/* The parameter of a linear layer in the dtype of activations. */
static const void *as_activation(const cuda *self, const float *parameter)
{
    return !parameter || self->dtype == F32 ? (const void *)parameter : self->rounded + (parameter - self->parameters);
}

/* ---- layers ---- */

static void cuda_embed_forward(gpt2_device *device, void *output, const float *token_table, const float *position_table,
                               const int64_t *tokens, int64_t vocab_size, int64_t features, const gpt2_span *s)
{
    cuda *self = (cuda *)device;
    /* Tokens were checked when their file was read, so that no record of bad ones is given. */
    check("token_position_embedding",
          cuda_ops_token_position_embedding_forward_cuda(
              output, NULL, token_table, position_table + s->begin * features, tokens, sizeof *tokens, s->batch,
              s->end - s->begin, vocab_size, features, F32, self->dtype, self->base.stream));
}

static void cuda_embed_backward(gpt2_device *device, float *grad_tokens, float *grad_positions, const void *grad_output,
                                const int64_t *tokens, int64_t vocab_size, int64_t block_size, int64_t features,
                                const gpt2_span *s)
{
    cuda *self = (cuda *)device;
    const int64_t count = s->batch * s->end;
    void *space =
        workspace(self, (int64_t)cuda_ops_embedding_backward_workspace_cuda(count, vocab_size, features, F32));
    check("embedding backward",
          cuda_ops_embedding_backward_cuda(grad_tokens, space, grad_output, tokens, sizeof *tokens, count, vocab_size,
                                           features, -1, 0, 1, F32, self->dtype, self->base.stream));
    space =
        workspace(self, (int64_t)cuda_ops_position_embedding_backward_workspace_cuda(s->batch, s->end, features, F32));
    check("embedding backward",
          cuda_ops_position_embedding_backward_cuda(grad_positions, space, grad_output, s->batch, s->end, block_size,
                                                    features, F32, self->dtype, self->base.stream));
}

static void cuda_norm_forward(gpt2_device *device, void *output, void *sum, const void *input, const void *residual,
                              const gpt2_norm *n)
{
    cuda *self = (cuda *)device;
    const cuda_ops_philox_state none = {0};
    if (residual)
        check("add_layer_norm",
              cuda_ops_add_layer_norm_forward_cuda(output, sum, n->mean, n->rstd, NULL, input, residual, n->weight,
                                                   n->bias, n->rows, n->features, NORM_EPS, CUDA_OPS_LAYER_NORM, 0.0,
                                                   none, self->dtype, F32, self->base.stream));
    else
        check("layer_norm", cuda_ops_layer_norm_forward_cuda(output, n->mean, n->rstd, input, n->weight, n->bias,
                                                             n->rows, n->features, NORM_EPS, CUDA_OPS_LAYER_NORM,
                                                             self->dtype, F32, self->base.stream));
}

static void cuda_norm_backward(gpt2_device *device, void *grad_input, float *grad_weight, float *grad_bias,
                               float *grad_input_sums, const void *grad_output, const void *grad_sum, const void *input,
                               const gpt2_norm *n)
{
    cuda *self = (cuda *)device;
    void *space = workspace(self, cuda_ops_layer_norm_workspace_cuda(n->rows, n->features, self->dtype));
    check("layer_norm backward",
          cuda_ops_layer_norm_backward_cuda(grad_input, grad_weight, grad_bias, grad_input_sums, space, grad_output,
                                            grad_sum, input, n->weight, n->mean, n->rstd, n->rows, n->features,
                                            CUDA_OPS_LAYER_NORM, self->dtype, F32, self->base.stream));
}

/* d (m x n) = op(a) op(b) + bias; a and b of the dtype of activations, d of `output_dtype`. */
static void multiply(cuda *self, void *d, cuda_ops_dtype output_dtype, const void *a, int transpose_a, const void *b,
                     int transpose_b, const void *bias, int64_t m, int64_t n, int64_t k)
{
    const cuda_ops_gemm_problem problem = {.m = m,
                                           .n = n,
                                           .k = k,
                                           .batch = 1,
                                           .lda = transpose_a ? m : k,
                                           .ldb = transpose_b ? k : n,
                                           .ldd = n,
                                           .alpha = 1.0,
                                           .transpose_a = transpose_a,
                                           .transpose_b = transpose_b,
                                           .dtype = self->dtype,
                                           .output_dtype = output_dtype,
                                           .bias_dtype = self->dtype,
                                           .activation = CUDA_OPS_GEMM_NONE,
                                           .allow_tf32 = self->allow_tf32,
                                           .unaligned_a = (uintptr_t)a % 16 != 0,
                                           .unaligned_b = (uintptr_t)b % 16 != 0};
    /* By its plan: without one, the workspace is for what the product of operands elsewhere in memory may come to need,
     * some hundreds of megabytes in GPT-2. */
    cuda_ops_gemm_plan plan;
    cuda_ops_status status = cuda_ops_gemm_plan_cuda(&plan, &problem, CUDA_OPS_GEMM_FASTEST);
    if (status == CUDA_OPS_SUCCESS) {
        void *const space = workspace(self, cuda_ops_gemm_planned_workspace_cuda(&problem, &plan));
        status = cuda_ops_gemm_planned_cuda(d, a, b, bias, space, &problem, &plan, self->base.stream);
    }
    if (status == CUDA_OPS_INVALID_ARGUMENT) { /* these operands are such */
        void *const space = workspace(self, cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST));
        status = cuda_ops_gemm_cuda(d, a, b, bias, space, &problem, CUDA_OPS_GEMM_FASTEST, self->base.stream);
    }
    check("linear", status);
}

static void cuda_linear_forward(gpt2_device *device, void *output, const void *input, const gpt2_linear *l)
{
    cuda *self = (cuda *)device;
    multiply(self, output, self->dtype, input, 0, as_activation(self, l->weight), 1, as_activation(self, l->bias),
             l->rows, l->out_features, l->in_features);
}

static void cuda_linear_backward_input(gpt2_device *device, void *grad_input, const void *grad_output,
                                       const gpt2_linear *l)
{
    cuda *self = (cuda *)device;
    multiply(self, grad_input, self->dtype, grad_output, 0, as_activation(self, l->weight), 0, NULL, l->rows,
             l->in_features, l->out_features);
}

static void cuda_linear_backward_weight(gpt2_device *device, float *grad_weight, const void *grad_output,
                                        const void *input, const gpt2_linear *l)
{
    multiply((cuda *)device, grad_weight, F32, grad_output, 1, input, 0, NULL, l->out_features, l->in_features,
             l->rows);
}

static void cuda_linear_gelu_forward(gpt2_device *device, void *output, void *preactivation, const void *input,
                                     const gpt2_linear *l, gpt2_room room)
{
    cuda *self = (cuda *)device;
    void *space = workspace_in(self, room,
                               cuda_ops_linear_gelu_forward_workspace_cuda(l->rows, l->in_features, l->out_features, 1,
                                                                           CUDA_OPS_GELU_TANH, self->allow_tf32,
                                                                           CUDA_OPS_GEMM_FASTEST, self->dtype));
    check("linear_gelu", cuda_ops_linear_gelu_forward_cuda(output, preactivation, input, as_activation(self, l->weight),
                                                           as_activation(self, l->bias), space, l->rows, l->in_features,
                                                           l->out_features, CUDA_OPS_GELU_TANH, self->allow_tf32,
                                                           CUDA_OPS_GEMM_FASTEST, self->dtype, self->base.stream));
}

static void cuda_gelu_forward(gpt2_device *device, void *output, const void *preactivation, int64_t elements)
{
    cuda *self = (cuda *)device;
    check("gelu", cuda_ops_activation_forward_cuda(output, preactivation, elements, CUDA_OPS_ACTIVATION_GELU_TANH, 0.0,
                                                   0.0, self->dtype, self->base.stream));
}

static void cuda_gelu_linear_backward(gpt2_device *device, void *grad_preactivation, float *grad_bias,
                                      const void *grad_output, const void *preactivation, const gpt2_linear *l)
{
    cuda *self = (cuda *)device;
    void *space = workspace(self, cuda_ops_gelu_linear_backward_workspace_cuda(l->rows, l->in_features, l->out_features,
                                                                               self->allow_tf32, CUDA_OPS_GEMM_FASTEST,
                                                                               self->dtype));
    check("gelu_linear backward",
          cuda_ops_gelu_linear_backward_cuda(grad_preactivation, grad_bias, grad_output, as_activation(self, l->weight),
                                             preactivation, space, l->rows, l->in_features, l->out_features,
                                             CUDA_OPS_GELU_TANH, self->allow_tf32, CUDA_OPS_GEMM_FASTEST, self->dtype,
                                             F32, self->base.stream));
}

/* `elements` of an activation on. */
static const void *on(const cuda *self, const void *activation, int64_t elements)
{
    return (const char *)activation + elements * self->public.activation_bytes;
}

static void cuda_attention_forward(gpt2_device *device, void *output, float *logsumexp, const void *projected,
                                   int64_t heads, int64_t features, const gpt2_span *s)
{
    cuda *self = (cuda *)device;
    const cuda_ops_attention call = attention_call(heads, features, s);
    void *space = workspace(self, cuda_ops_attention_forward_workspace_cuda(&call, self->dtype));
    check("attention",
          cuda_ops_attention_forward_cuda(output, logsumexp, NULL, on(self, projected, s->begin * 3 * features),
                                          on(self, projected, features), on(self, projected, 2 * features), space,
                                          &call, self->dtype, self->base.stream));
}

static void cuda_attention_backward(gpt2_device *device, void *grad_projected, const void *grad_output,
                                    const void *projected, const void *output, const float *logsumexp, int64_t heads,
                                    int64_t features, const gpt2_span *s, gpt2_room room)
{
    cuda *self = (cuda *)device;
    const cuda_ops_attention call = attention_call(heads, features, s);
    void *space = workspace_in(self, room, cuda_ops_attention_backward_workspace_cuda(&call, 0, self->dtype));
    check("attention backward",
          cuda_ops_attention_backward_cuda(grad_projected, (void *)on(self, grad_projected, features),
                                           (void *)on(self, grad_projected, 2 * features), NULL, grad_output, NULL,
                                           projected, on(self, projected, features), on(self, projected, 2 * features),
                                           output, logsumexp, space, &call, self->dtype, self->base.stream));
}

/* In float32 from the sums of all rows, as in Python. */
static void cuda_attention_bias_backward(gpt2_device *device, float *grad_bias, const void *grad_projected,
                                         const float *grad_next_bias, const gpt2_linear *next)
{
    cuda *self = (cuda *)device;
    const int64_t rows = next->rows, features = next->in_features;
    void *space;
    if (self->dtype == F32) {
        space = workspace(self, cuda_ops_linear_backward_bias_workspace_cuda(rows, 3 * features, F32));
        check("linear backward", cuda_ops_linear_backward_bias_cuda(grad_bias, grad_projected, space, rows,
                                                                    3 * features, F32, F32, self->base.stream));
        return;
    }
    space = workspace(self, cuda_ops_attention_packed_bias_workspace_cuda(rows, features, self->dtype));
    check("attention_packed_bias", cuda_ops_attention_packed_bias_cuda(
                                       grad_bias, grad_projected, grad_next_bias, as_activation(self, next->weight),
                                       space, rows, features, next->out_features, self->dtype, self->base.stream));
}

static int64_t padded(int64_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Whether the head's logits are stored: linear_cross_entropy's own products of float32 are slower than gemm's and what
 * that costs, and know no TF32. */
static int stores_logits(const cuda *self, const gpt2_linear *l)
{
    return self->dtype == F32 && l->out_features > MOST_FUSED_CLASSES;
}

static int64_t head_workspace(const cuda *self, const gpt2_linear *l, int with_gradient)
{
    if (stores_logits(self, l))
        return padded(l->rows * l->out_features * (int64_t)sizeof(float)) +
               padded(STATISTICS * l->rows * (int64_t)sizeof(float)) +
               (int64_t)cuda_ops_cross_entropy_workspace_cuda(l->rows, l->out_features, 1);
    return (int64_t)cuda_ops_linear_cross_entropy_workspace_cuda(l->rows, l->in_features, l->out_features, 0.0, 0.0,
                                                                 0.0, with_gradient, self->dtype, F32);
}

/* Of the weight in bfloat16, which cuda_logits takes. */
static int64_t rounded_bytes(const cuda *self, const gpt2_linear *l)
{
    return self->dtype == F32 ? 0 : l->out_features * l->in_features * (int64_t)sizeof(uint16_t);
}

static int64_t cuda_head_bytes(gpt2_device *device, const gpt2_linear *l)
{
    const int64_t head = head_workspace((cuda *)device, l, 1), rounded = rounded_bytes((cuda *)device, l);
    return (head > rounded ? head : rounded) + ALIGNMENT;
}

/* By a product, cross_entropy, whose gradient takes the place of the logits, and two products. */
static void head_of_logits(cuda *self, float *loss, void *grad_input, float *grad_weight, const void *input,
                           const int64_t *targets, const gpt2_linear *l, char *space)
{
    const int64_t rows = l->rows, features = l->in_features, classes = l->out_features;
    void *const logits = space;
    float *const statistics = (float *)(space + padded(rows * classes * (int64_t)sizeof(float)));
    void *const rest = (char *)statistics + padded(STATISTICS * rows * (int64_t)sizeof(float));
    multiply(self, logits, F32, input, 0, l->weight, 1, NULL, rows, classes, features);
    check("cross_entropy", cuda_ops_cross_entropy_forward_cuda(loss, statistics, self->total_weight, rest, NULL, logits,
                                                               targets, NULL, NULL, rows, classes, 1, -100, 0.0,
                                                               CUDA_OPS_REDUCTION_MEAN, F32, self->base.stream));
    if (!grad_input)
        return;
    check("cross_entropy backward", cuda_ops_cross_entropy_backward_cuda(
                                        logits, self->one, logits, targets, NULL, NULL, statistics, self->total_weight,
                                        rows, classes, 1, -100, 0.0, CUDA_OPS_REDUCTION_MEAN, F32, self->base.stream));
    multiply(self, grad_input, F32, logits, 0, l->weight, 0, NULL, rows, features, classes);
    multiply(self, grad_weight, F32, logits, 1, input, 0, NULL, classes, features, rows);
}

static void cuda_head(gpt2_device *device, float *loss, void *grad_input, float *grad_weight, const void *input,
                      const int64_t *targets, const gpt2_linear *l, gpt2_room room)
{
    cuda *self = (cuda *)device;
    const char *const op = "linear_cross_entropy";
    const int64_t rows = l->rows, features = l->in_features, classes = l->out_features;
    const int with_gradient = grad_input != NULL;
    void *space = workspace_in(self, room, head_workspace(self, l, with_gradient));
    if (stores_logits(self, l)) {
        head_of_logits(self, loss, grad_input, grad_weight, input, targets, l, space);
        return;
    }
    check(op, cuda_ops_linear_cross_entropy_cuda(
                  loss, self->total_weight, grad_input, with_gradient ? grad_weight : NULL, NULL, space, NULL, input,
                  l->weight, NULL, targets, NULL, rows, features, classes, -100, 0.0, 0.0, 0.0, CUDA_OPS_REDUCTION_MEAN,
                  self->dtype, F32, self->base.stream));
    if (with_gradient)
        check(op, cuda_ops_linear_cross_entropy_scale_cuda(grad_input, grad_weight, NULL, grad_input, grad_weight, NULL,
                                                           self->one, self->total_weight, rows * features,
                                                           classes * features, 0, CUDA_OPS_REDUCTION_MEAN, self->dtype,
                                                           F32, self->base.stream));
}

/* No step needs the token table in bfloat16: it is rounded here, into the room, which cuda_head_bytes has counted. */
static void cuda_logits(gpt2_device *device, float *logits, const void *input, const gpt2_linear *l, gpt2_room room)
{
    cuda *self = (cuda *)device;
    const void *table = l->weight;
    if (self->dtype != F32) {
        void *const rounded = workspace_in(self, room, rounded_bytes(self, l));
        const int64_t count = l->out_features * l->in_features;
        round_parameters(self, &rounded, &l->weight, &count, 1);
        table = rounded;
    }
    multiply(self, logits, F32, input, 0, table, 1, NULL, l->rows, l->out_features, l->in_features);
}

/* ---- the update ---- */

/* Pointers to the tensors that a model has: matrices (1), vectors (0), or both (-1). */
typedef struct cuda_list {
    void *parameters[GPT2_TENSORS], *gradients[GPT2_TENSORS], *means[GPT2_TENSORS], *squares[GPT2_TENSORS];
    void *steps[GPT2_TENSORS];
    int64_t counts[GPT2_TENSORS], tensors;
} cuda_list;

static cuda_list list_of(const cuda *self, const gpt2_state *state, int matrices)
{
    const gpt2_weights *const layout = state->layout;
    cuda_list list = {.tensors = 0};
    for (int t = 0; t < GPT2_TENSORS; t++) {
        if (!gpt2_has(&layout->config, t) || (matrices >= 0 && gpt2_is_matrix(t) != matrices))
            continue;
        const int64_t at = layout->offset[t], place = list.tensors++;
        list.parameters[place] = state->parameters + at;
        list.gradients[place] = state->gradients + at;
        list.means[place] = state->mean + at;
        list.squares[place] = state->square + at;
        list.steps[place] = self->steps + t;
        list.counts[place] = gpt2_count_all(&layout->config, t);
    }
    return list;
}

/* The norm of all gradients, by which AdamW's step clips them. */
static void find_norm(cuda *self, const gpt2_state *state, double max_norm)
{
    const cuda_list list = list_of(self, state, -1);
    const int64_t partials = cuda_ops_grad_norm_partials_cuda(list.counts, list.tensors);
    double *const space = workspace(self, partials * (int64_t)sizeof *space);
    check("clip_grad_norm", cuda_ops_grad_norm_cuda(space, (const void *const *)list.gradients, list.counts,
                                                    list.tensors, 2.0, F32, self->base.stream));
    check("clip_grad_norm", cuda_ops_clip_grads_cuda(self->grad_norm, F32, NULL, NULL, 0, space, partials, 2.0,
                                                     max_norm, F32, self->base.stream));
}

static void adamw(cuda *self, const gpt2_state *state, int matrices, const gpt2_update *update)
{
    const cuda_list list = list_of(self, state, matrices);
    const cuda_ops_adam_list tensors = {.params = list.parameters,
                                        .grads = list.gradients,
                                        .exp_avgs = list.means,
                                        .exp_avg_sqs = list.squares,
                                        .counts = list.counts,
                                        .device_steps = list.steps,
                                        .tensors = list.tensors};
    const cuda_ops_adam_device_scalars scalars = {.lr = self->learning_rate,
                                                  .lr_dtype = F32,
                                                  .step_dtype = CUDA_OPS_FLOAT64,
                                                  .grad_norm = self->grad_norm,
                                                  .max_grad_norm = update->clip};
    const cuda_ops_adam_options options = {.beta1 = ADAM_BETA1,
                                           .beta2 = update->beta2,
                                           .eps = ADAM_EPS,
                                           .weight_decay = matrices ? update->weight_decay : 0.0,
                                           .decoupled = 1};
    void *const space = workspace(self, (int64_t)cuda_ops_adam_workspace_cuda(list.tensors, 1));
    check("adamw", cuda_ops_adam_cuda(&tensors, &scalars, space, &options, F32, F32, self->base.stream));
}

static void cuda_update(gpt2_device *device, const gpt2_state *state, const gpt2_update *update)
{
    cuda *self = (cuda *)device;
    const float learning_rate = (float)update->lr;
    cuda_upload(device, self->learning_rate, &learning_rate, sizeof learning_rate);
    if (!cuda_begin(device, GPT2_UPDATE))
        return;
    find_norm(self, state, update->clip);
    adamw(self, state, 1, update);
    adamw(self, state, 0, update);
    cuda_follow(device, state->parameters, state->layout);
    cuda_end(device);
}

static void cuda_mark(gpt2_device *device)
{
    app_cuda_mark(&((cuda *)device)->base);
}

static int64_t cuda_collect(gpt2_device *device, double *milliseconds, int64_t room)
{
    return app_cuda_collect(&((cuda *)device)->base, milliseconds, room);
}

gpt2_device *gpt2_open_cuda(gpt2_precision precision, int graphs)
{
    cuda *self = app_allocate(1, sizeof *self);
    gpt2_device *d = &self->public;
    app_cuda_open(&self->base, d->name, sizeof d->name, &d->allocated_bytes);
    self->dtype = precision == GPT2_BF16 ? CUDA_OPS_BFLOAT16 : F32;
    self->allow_tf32 = precision == GPT2_TF32;
    d->measured_by = "CUDA events on the stream between the phases";
    d->activation_bytes = precision == GPT2_BF16 ? 2 : 4;
    d->records = graphs;
    d->allocate = cuda_allocate;
    d->upload = cuda_upload;
    d->download = cuda_download;
    d->copy = cuda_copy;
    d->close = cuda_close;
    d->begin = cuda_begin;
    d->end = cuda_end;
    d->follow = cuda_follow;
    d->embed_forward = cuda_embed_forward;
    d->embed_backward = cuda_embed_backward;
    d->norm_forward = cuda_norm_forward;
    d->norm_backward = cuda_norm_backward;
    d->linear_forward = cuda_linear_forward;
    d->linear_backward_input = cuda_linear_backward_input;
    d->linear_backward_weight = cuda_linear_backward_weight;
    d->linear_gelu_forward = cuda_linear_gelu_forward;
    d->gelu_forward = cuda_gelu_forward;
    d->gelu_linear_backward = cuda_gelu_linear_backward;
    d->attention_forward = cuda_attention_forward;
    d->attention_backward = cuda_attention_backward;
    d->attention_bias_backward = cuda_attention_bias_backward;
    d->head_bytes = cuda_head_bytes;
    d->head = cuda_head;
    d->logits = cuda_logits;
    d->update = cuda_update;
    d->mark = cuda_mark;
    d->collect = cuda_collect;
    const float one = 1.0f;
    self->one = cuda_allocate(d, sizeof one);
    self->total_weight = cuda_allocate(d, sizeof one);
    self->learning_rate = cuda_allocate(d, sizeof *self->learning_rate);
    self->grad_norm = cuda_allocate(d, sizeof *self->grad_norm);
    self->steps = cuda_allocate(d, GPT2_TENSORS * (int64_t)sizeof *self->steps);
    cuda_upload(d, self->one, &one, sizeof one);
    return d;
}

#endif
