/* The layers on the CPU: the C API's functions work on ranges, and OpenMP spreads the ranges over threads. Partial sums
 * are cut by the sizes alone, so that the result does not depend on how many there are. */
#include "cpu.h"

#include <string.h>

#include "app.h"
#include "cuda_ops/activation.h"
#include "cuda_ops/adam.h"
#include "cuda_ops/add2.h"
#include "cuda_ops/clip_grad_norm.h"
#include "cuda_ops/embedding.h"
#include "cuda_ops/layer_norm.h"
#include "cuda_ops/linear_cross_entropy.h"
#include "cuda_ops/linear_gelu.h"
#include "gpt2/attention_call.h"
#include "gpt2/layers.h"

static const cuda_ops_dtype F32 = CUDA_OPS_FLOAT32;
static const double NORM_EPS = 1e-5;
/* Elements of a norm's partial sum, and of logits in a task of the loss. */
enum { GRADIENT_TASK = 32768, LOSS_TASK = 8192 };
/* Multiply-adds of attention below which another thread does not pay. */
enum { ATTENTION_GRAIN = 1 << 17 };
_Static_assert((int)GPT2_MOST_MARKS == (int)APP_MOST_MARKS, "the list of marks is the programs' common one");

typedef struct cpu {
    gpt2_device public;
    app_cpu base;
    /* What grows in the first step, and is kept. */
    float *logits, *grad_table;
    double *partials;
    int64_t *starts, *slots;
    int64_t logits_count, grad_table_count, partials_count, starts_count, slots_count;
} cpu;

#define SPREAD(...) APP_SPREAD(&self->base, __VA_ARGS__)

static void *grown(cpu *self, void *buffer, int64_t *count, int64_t wanted, int64_t element_bytes)
{
    if (wanted <= *count)
        return buffer;
    app_free(buffer);
    self->public.allocated_bytes += (wanted - *count) * element_bytes;
    *count = wanted;
    return app_allocate(wanted, element_bytes);
}

static void *cpu_allocate(gpt2_device *device, int64_t bytes)
{
    return app_cpu_allocate(&((cpu *)device)->base, bytes);
}

static void cpu_copy(gpt2_device *device, void *target, const void *source, int64_t bytes)
{
    (void)device;
    memcpy(target, source, (size_t)bytes);
}

static int cpu_begin(gpt2_device *device, gpt2_part part)
{
    (void)device, (void)part; /* nothing is recorded */
    return 1;
}

static void cpu_end(gpt2_device *device)
{
    (void)device;
}

static void cpu_follow(gpt2_device *device, const float *parameters, const gpt2_weights *layout)
{
    (void)device, (void)parameters, (void)layout; /* the layers take the parameters as they are */
}

static void cpu_close(gpt2_device *device)
{
    cpu *self = (cpu *)device;
    app_cpu_close(&self->base);
    app_free(self->logits);
    app_free(self->grad_table);
    app_free(self->partials);
    app_free(self->starts);
    app_free(self->slots);
    app_free(self);
}

static int64_t row_grain(int64_t features)
{
    return app_most(1, APP_ELEMENT_GRAIN / 4 / features);
}

static void cpu_embed_forward(gpt2_device *device, void *output, const float *token_table, const float *position_table,
                              const int64_t *tokens, int64_t vocab_size, int64_t features, const gpt2_span *s)
{
    cpu *self = (cpu *)device;
    const int64_t length = s->end - s->begin;
    SPREAD("token_position_embedding", s->batch * length, row_grain(features),
           cuda_ops_token_position_embedding_forward_cpu(output, token_table, position_table + s->begin * features,
                                                         tokens, sizeof *tokens, vocab_size, features, length, begin,
                                                         end, F32));
}

static void cpu_embed_backward(gpt2_device *device, float *grad_tokens, float *grad_positions, const void *grad_output,
                               const int64_t *tokens, int64_t vocab_size, int64_t block_size, int64_t features,
                               const gpt2_span *s)
{
    cpu *self = (cpu *)device;
    const char *const op = "embedding backward";
    const int64_t count = s->batch * s->end;
    self->starts = grown(self, self->starts, &self->starts_count, vocab_size + 2, sizeof *self->starts);
    self->slots = grown(self, self->slots, &self->slots_count, count, sizeof *self->slots);
    self->grad_table =
        grown(self, self->grad_table, &self->grad_table_count, vocab_size * features, sizeof *self->grad_table);
    float *const table = self->grad_table;
    app_check(op,
              cuda_ops_embedding_sort_cpu(self->starts, self->slots, tokens, sizeof *tokens, count, vocab_size, -1));
    SPREAD(
        op, vocab_size, row_grain(features),
        cuda_ops_embedding_backward_cpu(table, grad_output, self->starts, self->slots, features, 0, begin, end, F32));
    SPREAD("add2", vocab_size * features, APP_ELEMENT_GRAIN,
           cuda_ops_add2_forward_cpu(grad_tokens, grad_tokens, table, begin, end, F32));
    SPREAD(op, block_size, row_grain(features),
           cuda_ops_position_embedding_backward_cpu(grad_positions, grad_output, s->batch, s->end, features, begin, end,
                                                    F32));
}

static void cpu_norm_forward(gpt2_device *device, void *output, void *sum, const void *input, const void *residual,
                             const gpt2_norm *n)
{
    cpu *self = (cpu *)device;
    const cuda_ops_philox_state none = {0};
    if (residual)
        SPREAD("add_layer_norm", n->rows, row_grain(n->features),
               cuda_ops_add_layer_norm_forward_cpu(output, sum, n->mean, n->rstd, input, residual, n->weight, n->bias,
                                                   n->features, NORM_EPS, CUDA_OPS_LAYER_NORM, 0.0, none, begin, end,
                                                   F32));
    else
        SPREAD("layer_norm", n->rows, row_grain(n->features),
               cuda_ops_layer_norm_forward_cpu(output, n->mean, n->rstd, input, n->weight, n->bias, n->features,
                                               NORM_EPS, CUDA_OPS_LAYER_NORM, begin, end, F32));
}

/* grad_bias (or NULL): the sums of the rows. */
static void sum_rows(cpu *self, float *grad_bias, const void *grad_output, int64_t rows, int64_t features)
{
    app_cpu_linear_backward(&self->base, NULL, NULL, grad_bias, grad_output, NULL, NULL, rows, 0, features);
}

static void cpu_norm_backward(gpt2_device *device, void *grad_input, float *grad_weight, float *grad_bias,
                              float *grad_input_sums, const void *grad_output, const void *grad_sum, const void *input,
                              const gpt2_norm *n)
{
    cpu *self = (cpu *)device;
    const char *const op = "layer_norm backward";
    const int64_t chunks = cuda_ops_layer_norm_chunks_cpu(n->rows, n->features);
    const int64_t elements = app_most(1, n->rows * n->features / chunks);
    char *const workspace = app_cpu_workspace(&self->base, cuda_ops_layer_norm_workspace_cpu(n->rows, n->features));
    SPREAD(op, chunks, app_most(1, APP_ELEMENT_GRAIN / 4 / elements),
           cuda_ops_layer_norm_backward_cpu(grad_input, workspace, grad_output, grad_sum, input, n->weight, n->mean,
                                            n->rstd, n->rows, n->features, CUDA_OPS_LAYER_NORM, begin, end, F32));
    SPREAD(op, n->features, app_most(1, APP_ELEMENT_GRAIN / 4 / chunks),
           cuda_ops_layer_norm_backward_sums_cpu(grad_weight, grad_bias, workspace, n->rows, n->features, begin, end,
                                                 F32));
    sum_rows(self, grad_input_sums, grad_input, n->rows, n->features);
}

static void cpu_linear_forward(gpt2_device *device, void *output, const void *input, const gpt2_linear *l)
{
    app_cpu_linear_forward(&((cpu *)device)->base, output, input, l->weight, l->bias, l->rows, l->in_features,
                           l->out_features);
}

static void cpu_linear_backward_input(gpt2_device *device, void *grad_input, const void *grad_output,
                                      const gpt2_linear *l)
{
    app_cpu_linear_backward(&((cpu *)device)->base, grad_input, NULL, NULL, grad_output, NULL, l->weight, l->rows,
                            l->in_features, l->out_features);
}

static void cpu_linear_backward_weight(gpt2_device *device, float *grad_weight, const void *grad_output,
                                       const void *input, const gpt2_linear *l)
{
    app_cpu_linear_backward(&((cpu *)device)->base, NULL, grad_weight, NULL, grad_output, input, NULL, l->rows,
                            l->in_features, l->out_features);
}

static void cpu_linear_gelu_forward(gpt2_device *device, void *output, void *preactivation, const void *input,
                                    const gpt2_linear *l, gpt2_room room)
{
    cpu *self = (cpu *)device;
    (void)room;
    const int64_t bytes = cuda_ops_linear_workspace_cpu(), stride = app_cpu_padded(bytes);
    char *const workspace = app_cpu_workspace(&self->base, bytes);
    SPREAD("linear_gelu", app_most(l->rows, l->out_features),
           app_product_grain(l->rows, l->out_features, l->in_features),
           cuda_ops_linear_gelu_forward_cpu(
               output, preactivation, input, l->weight, l->bias, workspace + thread * stride, l->rows, l->in_features,
               l->out_features, app_split_longer_side(l->rows, l->out_features, begin, end), CUDA_OPS_GELU_TANH, F32));
}

static void cpu_gelu_forward(gpt2_device *device, void *output, const void *preactivation, int64_t elements)
{
    cpu *self = (cpu *)device;
    SPREAD("gelu", elements, APP_ELEMENT_GRAIN / 4,
           cuda_ops_activation_forward_cpu(output, preactivation, begin, end, CUDA_OPS_ACTIVATION_GELU_TANH, 0.0, 0.0,
                                           F32));
}

static void cpu_gelu_linear_backward(gpt2_device *device, void *grad_preactivation, float *grad_bias,
                                     const void *grad_output, const void *preactivation, const gpt2_linear *l)
{
    cpu *self = (cpu *)device;
    cpu_linear_backward_input(device, grad_preactivation, grad_output, l);
    SPREAD("gelu backward", l->rows * l->in_features, APP_ELEMENT_GRAIN,
           cuda_ops_linear_gelu_backward_cpu(grad_preactivation, grad_preactivation, preactivation, begin, end,
                                             CUDA_OPS_GELU_TANH, F32));
    sum_rows(self, grad_bias, grad_preactivation, l->rows, l->in_features);
}

static int64_t attention_grain(const cuda_ops_attention *call, int64_t parts, int64_t products)
{
    const double all = (double)(call->batch * call->heads * call->queries) * (double)(call->keys * call->head_dim);
    const double grain = ATTENTION_GRAIN / (all * (double)products / (double)app_most(1, parts) + 1.0);
    return app_most(1, (int64_t)grain);
}

static void cpu_attention_forward(gpt2_device *device, void *output, float *logsumexp, const void *projected,
                                  int64_t heads, int64_t features, const gpt2_span *s)
{
    cpu *self = (cpu *)device;
    const cuda_ops_attention call = attention_call(heads, features, s);
    const float *const query = (const float *)projected + s->begin * 3 * features, *const key =
                                                                                       (const float *)projected +
                                                                                       features;
    const int64_t parts = cuda_ops_attention_forward_parts_cpu(&call);
    const int64_t bytes = cuda_ops_attention_forward_workspace_cpu(&call, F32), stride = app_cpu_padded(bytes);
    char *const workspace = app_cpu_workspace(&self->base, bytes);
    SPREAD("attention", parts, attention_grain(&call, parts, 2),
           cuda_ops_attention_forward_cpu(output, logsumexp, query, key, key + features, workspace + thread * stride,
                                          &call, begin, end, F32));
}

static void cpu_attention_backward(gpt2_device *device, void *grad_projected, const void *grad_output,
                                   const void *projected, const void *output, const float *logsumexp, int64_t heads,
                                   int64_t features, const gpt2_span *s, gpt2_room room)
{
    cpu *self = (cpu *)device;
    (void)room;
    const cuda_ops_attention call = attention_call(heads, features, s);
    float *const grad_query = grad_projected;
    const float *const query = projected;
    const int64_t parts = cuda_ops_attention_backward_parts_cpu(&call);
    const int64_t bytes = cuda_ops_attention_backward_workspace_cpu(&call, F32), stride = app_cpu_padded(bytes);
    char *const workspace = app_cpu_workspace(&self->base, bytes);
    SPREAD("attention backward", parts, attention_grain(&call, parts, 5),
           cuda_ops_attention_backward_cpu(grad_query, grad_query + features, grad_query + 2 * features, NULL,
                                           grad_output, NULL, query, query + features, query + 2 * features, output,
                                           logsumexp, workspace + thread * stride, &call, begin, end, F32));
}

static void cpu_attention_bias_backward(gpt2_device *device, float *grad_bias, const void *grad_projected,
                                        const float *grad_next_bias, const gpt2_linear *next)
{
    (void)grad_next_bias;
    sum_rows((cpu *)device, grad_bias, grad_projected, next->rows, 3 * next->in_features);
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Rows whose logits are made at a time: a part of the last-level cache with few classes, 32 MB with very many. */
static int64_t chunk_rows(int64_t classes)
{
    return app_most(smaller((1 << 19) / classes, 4096), app_most(1, smaller((1 << 23) / classes, 256)));
}

/* Tasks [begin, end), of `task` rows each, of a chunk. */
static cuda_ops_status loss_tasks(float *logits, double *partials, const int64_t *targets, int64_t rows, int64_t task,
                                  int64_t classes, int with_gradient, int64_t begin, int64_t end)
{
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    for (int64_t t = begin; t < end && status == CUDA_OPS_SUCCESS; t++)
        status = cuda_ops_linear_cross_entropy_rows_cpu(logits, NULL, partials + 2 * t, targets, NULL, classes,
                                                        t * task, smaller((t + 1) * task, rows), -100, 0.0, 0.0, 0.0,
                                                        with_gradient, F32);
    return status;
}

static int64_t cpu_head_bytes(gpt2_device *device, const gpt2_linear *l)
{
    (void)device, (void)l; /* its chunks of logits are its own */
    return 0;
}

static void cpu_head(gpt2_device *device, float *loss, void *grad_input, float *grad_weight, const void *input,
                     const int64_t *targets, const gpt2_linear *l, gpt2_room room)
{
    cpu *self = (cpu *)device;
    (void)room;
    const char *const op = "linear_cross_entropy";
    const int64_t classes = l->out_features, features = l->in_features;
    const int64_t chunk = smaller(l->rows, chunk_rows(classes)), chunks = (l->rows + chunk - 1) / chunk;
    const int64_t task = app_most(1, smaller(LOSS_TASK / classes, 4096)), tasks = (chunk + task - 1) / task;
    self->logits = grown(self, self->logits, &self->logits_count, chunk * classes, sizeof(float));
    self->partials = grown(self, self->partials, &self->partials_count, 2 * tasks * chunks, sizeof(double));
    memset(self->partials, 0, (size_t)(2 * tasks * chunks) * sizeof(double));
    const int64_t bytes = cuda_ops_linear_workspace_cpu(), stride = app_cpu_padded(bytes);
    char *const workspace = app_cpu_workspace(&self->base, bytes);
    for (int64_t c = 0; c < chunks; c++) {
        const int64_t first = c * chunk, rows = smaller(chunk, l->rows - first);
        const float *const x = (const float *)input + first * features;
        app_cpu_linear_forward(&self->base, self->logits, x, l->weight, NULL, rows, features, classes);
        SPREAD(op, (rows + task - 1) / task, 1,
               loss_tasks(self->logits, self->partials + 2 * c * tasks, targets + first, rows, task, classes,
                          grad_input != NULL, begin, end));
        if (!grad_input)
            continue;
        app_cpu_linear_backward(&self->base, (float *)grad_input + first * features, NULL, NULL, self->logits, x,
                                l->weight, rows, features, classes);
        SPREAD(op, app_most(classes, features), app_product_grain(classes, features, rows),
               cuda_ops_linear_cross_entropy_weight_cpu(
                   grad_weight, NULL, self->logits, x, workspace + thread * stride, rows, features, classes,
                   app_split_longer_side(classes, features, begin, end), c > 0, F32));
    }
    float total_weight;
    const float one = 1.0f;
    app_check(op, cuda_ops_loss_reduce_cpu(loss, &total_weight, self->partials, tasks * chunks, CUDA_OPS_REDUCTION_MEAN,
                                           F32));
    if (!grad_input)
        return;
    SPREAD(op, l->rows * features, APP_ELEMENT_GRAIN,
           cuda_ops_linear_cross_entropy_scale_cpu(grad_input, grad_input, &one, &total_weight, begin, end,
                                                   CUDA_OPS_REDUCTION_MEAN, F32));
    SPREAD(op, classes * features, APP_ELEMENT_GRAIN,
           cuda_ops_linear_cross_entropy_scale_cpu(grad_weight, grad_weight, &one, &total_weight, begin, end,
                                                   CUDA_OPS_REDUCTION_MEAN, F32));
}

static void cpu_logits(gpt2_device *device, float *logits, const void *input, const gpt2_linear *l, gpt2_room room)
{
    (void)room;
    cpu_linear_forward(device, logits, input, l);
}

static cuda_ops_status norm_tasks(double *partials, const float *gradients, int64_t count, int64_t begin, int64_t end)
{
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    for (int64_t t = begin; t < end && status == CUDA_OPS_SUCCESS; t++)
        status = cuda_ops_grad_norm_partial_cpu(partials + t, gradients, 2.0, t * GRADIENT_TASK,
                                                smaller((t + 1) * GRADIENT_TASK, count), F32);
    return status;
}

static void clip(cpu *self, float *gradients, int64_t count, double max_norm)
{
    const int64_t tasks = (count + GRADIENT_TASK - 1) / GRADIENT_TASK;
    self->partials = grown(self, self->partials, &self->partials_count, tasks, sizeof(double));
    SPREAD("clip_grad_norm", tasks, 1, norm_tasks(self->partials, gradients, count, begin, end));
    const double factor = cuda_ops_clip_factor_cpu(cuda_ops_grad_norm_cpu(self->partials, tasks, 2.0), max_norm);
    SPREAD("clip_grad_norm", count, APP_ELEMENT_GRAIN, cuda_ops_clip_grad_cpu(gradients, factor, begin, end, F32));
}

static void cpu_update(gpt2_device *device, const gpt2_state *state, const gpt2_update *update)
{
    cpu *self = (cpu *)device;
    const gpt2_weights *const layout = state->layout;
    cuda_ops_adam_options options = {
        .lr = update->lr, .beta1 = ADAM_BETA1, .beta2 = update->beta2, .eps = ADAM_EPS, .decoupled = 1};
    clip(self, state->gradients, layout->count, update->clip); /* zeros lie between the tensors */
    for (int t = 0; t < GPT2_TENSORS; t++) {
        if (!gpt2_has(&layout->config, t))
            continue;
        const int64_t at = layout->offset[t];
        options.weight_decay = gpt2_is_matrix(t) ? update->weight_decay : 0.0;
        SPREAD("adamw", gpt2_count_all(&layout->config, t), APP_ELEMENT_GRAIN,
               cuda_ops_adam_cpu(state->parameters + at, state->gradients + at, state->mean + at, state->square + at,
                                 NULL, (double)update->step, 1.0, &options, begin, end, F32));
    }
}

static void cpu_mark(gpt2_device *device)
{
    app_cpu_mark(&((cpu *)device)->base);
}

static int64_t cpu_collect(gpt2_device *device, double *milliseconds, int64_t room)
{
    return app_cpu_collect(&((cpu *)device)->base, milliseconds, room);
}

gpt2_device *gpt2_open_cpu(int threads)
{
    cpu *self = app_allocate(1, sizeof *self);
    gpt2_device *d = &self->public;
    app_cpu_open(&self->base, threads, d->name, sizeof d->name, &d->allocated_bytes);
    d->measured_by = "the host's clock between the phases";
    d->activation_bytes = sizeof(float);
    d->allocate = cpu_allocate;
    d->upload = cpu_copy;
    d->download = cpu_copy;
    d->copy = cpu_copy;
    d->close = cpu_close;
    d->begin = cpu_begin;
    d->end = cpu_end;
    d->follow = cpu_follow;
    d->embed_forward = cpu_embed_forward;
    d->embed_backward = cpu_embed_backward;
    d->norm_forward = cpu_norm_forward;
    d->norm_backward = cpu_norm_backward;
    d->linear_forward = cpu_linear_forward;
    d->linear_backward_input = cpu_linear_backward_input;
    d->linear_backward_weight = cpu_linear_backward_weight;
    d->linear_gelu_forward = cpu_linear_gelu_forward;
    d->gelu_forward = cpu_gelu_forward;
    d->gelu_linear_backward = cpu_gelu_linear_backward;
    d->attention_forward = cpu_attention_forward;
    d->attention_backward = cpu_attention_backward;
    d->attention_bias_backward = cpu_attention_bias_backward;
    d->head_bytes = cpu_head_bytes;
    d->head = cpu_head;
    d->logits = cpu_logits;
    d->update = cpu_update;
    d->mark = cpu_mark;
    d->collect = cpu_collect;
    return d;
}
