/* The layers on a GPU: the launchers of the C API on one stream. Activations are float32, multiplied as they are or as
 * TF32, or bfloat16, as GPT("fused") has them under autocast: parameters, their gradients and the optimizer stay
 * float32, and products take a copy of the parameters in bfloat16, which every step makes anew. */
#include "cuda.h"

#include "gpt2/layers.h"

#ifndef CUDA_OPS_WITH_CUDA

gpt2_device *gpt2_open_cuda(gpt2_precision precision)
{
    (void)precision;
    app_fail_without_cuda();
}

#else

#include "cuda_ops/add2.h"
#include "cuda_ops/clip_grad_norm.h"
#include "cuda_ops/embedding.h"
#include "cuda_ops/gemm.h"
#include "cuda_ops/layer_norm.h"
#include "cuda_ops/linear_cross_entropy.h"
#include "cuda_ops/linear_gelu.h"
#include "cuda_ops/round_list.h"
#include "gpt2/attention_call.h"

static const cuda_ops_dtype F32 = CUDA_OPS_FLOAT32;
static const double NORM_EPS = 1e-5;
_Static_assert((int)GPT2_MOST_MARKS == (int)APP_MOST_MARKS, "the list of marks is the programs' common one");

typedef struct cuda {
    gpt2_device public;
    app_cuda base;
    cuda_ops_dtype dtype; /* of activations */
    int allow_tf32;
    float *one, *total_weight; /* one element each: the gradient of the loss by itself, and the number of targets */
    /* With bfloat16: the parameters, and a copy of them. */
    const float *parameters;
    uint16_t *copy;
} cuda;

static void check(const char *op, cuda_ops_status status)
{
    app_cuda_check_status(op, status);
}

static void *workspace(cuda *self, int64_t bytes)
{
    return app_cuda_workspace(&self->base, bytes);
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

static void cuda_close(gpt2_device *device)
{
    app_cuda_close(&((cuda *)device)->base);
    app_free(device);
}

/* ---- parameters beside bfloat16 ---- */

/* What linear layers take, weights and biases. */
static void cuda_follow(gpt2_device *device, const float *parameters, const gpt2_weights *layout)
{
    cuda *self = (cuda *)device;
    if (self->dtype == F32)
        return;
    const gpt2_config *const c = &layout->config;
    if (!self->copy)
        self->copy = cuda_allocate(device, layout->count * (int64_t)sizeof *self->copy);
    self->parameters = parameters;
    void *targets[GPT2_TENSORS];
    const float *sources[GPT2_TENSORS];
    int64_t counts[GPT2_TENSORS], tensors = 0;
    for (int t = 0; t < GPT2_TENSORS; t++) {
        const int is_norm = t == GPT2_NORM1_WEIGHT || t == GPT2_NORM1_BIAS || t == GPT2_NORM2_WEIGHT ||
                            t == GPT2_NORM2_BIAS || t == GPT2_NORM_WEIGHT || t == GPT2_NORM_BIAS;
        if (is_norm || t == GPT2_POSITIONS || (gpt2_is_bias(t) && !c->bias))
            continue;
        int64_t rows, columns;
        gpt2_shape(c, t, &rows, &columns);
        targets[tensors] = self->copy + layout->offset[t];
        sources[tensors] = parameters + layout->offset[t];
        counts[tensors++] = gpt2_layers(c, t) * rows * (gpt2_is_matrix(t) ? columns : 1);
    }
    check("parameters",
          cuda_ops_round_list_cuda(targets, sources, counts, tensors, CUDA_OPS_BFLOAT16, self->base.stream));
}

/* The parameter in the dtype of activations. */
static const void *as_activation(const cuda *self, const float *parameter)
{
    return !parameter || self->dtype == F32 ? (const void *)parameter : self->copy + (parameter - self->parameters);
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

static void cuda_embed_backward(gpt2_device *device, float *grad_tokens, float *grad_positions, float *scratch,
                                const void *grad_output, const int64_t *tokens, int64_t vocab_size, int64_t block_size,
                                int64_t features, const gpt2_span *s)
{
    cuda *self = (cuda *)device;
    const int64_t count = s->batch * s->end;
    (void)scratch;
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
                               const void *grad_output, const void *grad_sum, const void *input, const gpt2_norm *n)
{
    cuda *self = (cuda *)device;
    void *space = workspace(self, cuda_ops_layer_norm_workspace_cuda(n->rows, n->features, self->dtype));
    check("layer_norm backward",
          cuda_ops_layer_norm_backward_cuda(grad_input, grad_weight, grad_bias, NULL, space, grad_output, grad_sum,
                                            input, n->weight, n->mean, n->rstd, n->rows, n->features,
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
                                           .allow_tf32 = self->allow_tf32};
    void *space = workspace(self, cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST));
    check("linear", cuda_ops_gemm_cuda(d, a, b, bias, space, &problem, CUDA_OPS_GEMM_FASTEST, self->base.stream));
}

static void cuda_linear_forward(gpt2_device *device, void *output, const void *input, const gpt2_linear *l)
{
    cuda *self = (cuda *)device;
    multiply(self, output, self->dtype, input, 0, as_activation(self, l->weight), 1, as_activation(self, l->bias),
             l->rows, l->out_features, l->in_features);
}

static void cuda_linear_backward(gpt2_device *device, void *grad_input, float *grad_weight, float *grad_bias,
                                 const void *grad_output, const void *input, const gpt2_linear *l)
{
    cuda *self = (cuda *)device;
    multiply(self, grad_input, self->dtype, grad_output, 0, as_activation(self, l->weight), 0, NULL, l->rows,
             l->in_features, l->out_features);
    multiply(self, grad_weight, F32, grad_output, 1, input, 0, NULL, l->out_features, l->in_features, l->rows);
    if (!grad_bias)
        return;
    void *space = workspace(self, cuda_ops_linear_backward_bias_workspace_cuda(l->rows, l->out_features, self->dtype));
    check("linear backward", cuda_ops_linear_backward_bias_cuda(grad_bias, grad_output, space, l->rows, l->out_features,
                                                                self->dtype, F32, self->base.stream));
}

static void cuda_linear_gelu_forward(gpt2_device *device, void *output, void *preactivation, const void *input,
                                     const gpt2_linear *l)
{
    cuda *self = (cuda *)device;
    void *space = workspace(self, cuda_ops_linear_gelu_forward_workspace_cuda(l->rows, l->in_features, l->out_features,
                                                                              1, CUDA_OPS_GELU_TANH, self->allow_tf32,
                                                                              CUDA_OPS_GEMM_FASTEST, self->dtype));
    check("linear_gelu", cuda_ops_linear_gelu_forward_cuda(output, preactivation, input, as_activation(self, l->weight),
                                                           as_activation(self, l->bias), space, l->rows, l->in_features,
                                                           l->out_features, CUDA_OPS_GELU_TANH, self->allow_tf32,
                                                           CUDA_OPS_GEMM_FASTEST, self->dtype, self->base.stream));
}

static void cuda_gelu_backward(gpt2_device *device, void *grad, float *grad_bias, const void *preactivation,
                               int64_t rows, int64_t features)
{
    cuda *self = (cuda *)device;
    void *space = workspace(self, cuda_ops_linear_gelu_backward_workspace_cuda(rows, features, self->dtype));
    check("gelu backward",
          cuda_ops_linear_gelu_backward_cuda(grad, grad_bias, grad, preactivation, space, rows, features,
                                             CUDA_OPS_GELU_TANH, self->dtype, F32, self->base.stream));
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
                                    int64_t features, const gpt2_span *s)
{
    cuda *self = (cuda *)device;
    const cuda_ops_attention call = attention_call(heads, features, s);
    void *space = workspace(self, cuda_ops_attention_backward_workspace_cuda(&call, 0, self->dtype));
    check("attention backward",
          cuda_ops_attention_backward_cuda(grad_projected, (void *)on(self, grad_projected, features),
                                           (void *)on(self, grad_projected, 2 * features), NULL, grad_output, NULL,
                                           projected, on(self, projected, features), on(self, projected, 2 * features),
                                           output, logsumexp, space, &call, self->dtype, self->base.stream));
}

static void cuda_head(gpt2_device *device, float *loss, void *grad_input, float *grad_weight, void *scratch_input,
                      float *scratch_weight, const void *input, const int64_t *targets, const gpt2_linear *l)
{
    cuda *self = (cuda *)device;
    const char *const op = "linear_cross_entropy";
    const int64_t rows = l->rows, features = l->in_features, classes = l->out_features;
    const int with_gradient = grad_input != NULL;
    void *space = workspace(self, (int64_t)cuda_ops_linear_cross_entropy_workspace_cuda(
                                      rows, features, classes, 0.0, 0.0, 0.0, with_gradient, self->dtype, F32));
    check(op, cuda_ops_linear_cross_entropy_cuda(
                  loss, self->total_weight, with_gradient ? scratch_input : NULL, with_gradient ? scratch_weight : NULL,
                  NULL, space, NULL, input, l->weight, NULL, targets, NULL, rows, features, classes, -100, 0.0, 0.0,
                  0.0, CUDA_OPS_REDUCTION_MEAN, self->dtype, F32, self->base.stream));
    if (with_gradient)
        check(op, cuda_ops_linear_cross_entropy_scale_cuda(grad_input, grad_weight, NULL, scratch_input, scratch_weight,
                                                           NULL, self->one, self->total_weight, rows * features,
                                                           classes * features, 0, CUDA_OPS_REDUCTION_MEAN, self->dtype,
                                                           F32, self->base.stream));
}

static void cuda_clip(gpt2_device *device, float *gradients, int64_t count, double max_norm)
{
    cuda *self = (cuda *)device;
    const int64_t partials = cuda_ops_grad_norm_partials_cuda(&count, 1);
    double *const space = workspace(self, partials * (int64_t)sizeof *space);
    const void *const grads[] = {gradients};
    void *const in_place[] = {gradients};
    check("clip_grad_norm", cuda_ops_grad_norm_cuda(space, grads, &count, 1, 2.0, F32, self->base.stream));
    check("clip_grad_norm", cuda_ops_clip_grads_cuda(NULL, F32, in_place, &count, 1, space, partials, 2.0, max_norm,
                                                     F32, self->base.stream));
}

static void cuda_adamw(gpt2_device *device, float *parameters, float *gradients, float *mean, float *square,
                       int64_t count, int64_t step, const cuda_ops_adam_options *options)
{
    cuda *self = (cuda *)device;
    const double number = (double)step;
    void *const params[] = {parameters}, *const grads[] = {gradients}, *const means[] = {mean},
                *const squares[] = {square};
    const cuda_ops_adam_list list = {.params = params,
                                     .grads = grads,
                                     .exp_avgs = means,
                                     .exp_avg_sqs = squares,
                                     .counts = &count,
                                     .steps = &number,
                                     .tensors = 1};
    const cuda_ops_adam_device_scalars none = {0};
    check("adamw", cuda_ops_adam_cuda(&list, &none, NULL, options, F32, F32, self->base.stream));
}

static void cuda_mark(gpt2_device *device)
{
    app_cuda_mark(&((cuda *)device)->base);
}

static int64_t cuda_collect(gpt2_device *device, double *milliseconds, int64_t room)
{
    return app_cuda_collect(&((cuda *)device)->base, milliseconds, room);
}

gpt2_device *gpt2_open_cuda(gpt2_precision precision)
{
    cuda *self = app_allocate(1, sizeof *self);
    gpt2_device *d = &self->public;
    app_cuda_open(&self->base, d->name, sizeof d->name, &d->allocated_bytes);
    self->dtype = precision == GPT2_BF16 ? CUDA_OPS_BFLOAT16 : F32;
    self->allow_tf32 = precision == GPT2_TF32;
    d->measured_by = "CUDA events on the stream between the phases";
    d->activation_bytes = precision == GPT2_BF16 ? 2 : 4;
    d->allocate = cuda_allocate;
    d->upload = cuda_upload;
    d->download = cuda_download;
    d->close = cuda_close;
    d->follow = cuda_follow;
    d->embed_forward = cuda_embed_forward;
    d->embed_backward = cuda_embed_backward;
    d->norm_forward = cuda_norm_forward;
    d->norm_backward = cuda_norm_backward;
    d->linear_forward = cuda_linear_forward;
    d->linear_backward = cuda_linear_backward;
    d->linear_gelu_forward = cuda_linear_gelu_forward;
    d->gelu_backward = cuda_gelu_backward;
    d->attention_forward = cuda_attention_forward;
    d->attention_backward = cuda_attention_backward;
    d->head = cuda_head;
    d->clip = cuda_clip;
    d->adamw = cuda_adamw;
    d->mark = cuda_mark;
    d->collect = cuda_collect;
    const float one = 1.0f;
    self->one = cuda_allocate(d, sizeof one);
    self->total_weight = cuda_allocate(d, sizeof one);
    cuda_upload(d, self->one, &one, sizeof one);
    return d;
}

#endif
