#include "gpt2/model.h"

#include <stddef.h>
#include <string.h>

#include "app.h"

/* What backward takes from forward, one of each layer, and the gradients of activations. void *: of the device's
 * precision. */
struct gpt2_model {
    gpt2_device *device;
    gpt2_weights layout;
    int64_t rows; /* room */
    gpt2_span span;
    float *parameters, *gradients, *mean, *square;
    int64_t *tokens, *targets;
    void *embedded;                                /* [rows, features], which the first block adds to */
    void *normed1, *projected, *mixed;             /* [layers, rows, ...] */
    void *sum1, *normed2, *preactivation, *hidden; /* likewise */
    void *sum2;                                    /* likewise */
    float *logsumexp;                              /* likewise */
    double *mean1, *mean2, *mean_last;             /* of the norms' rows */
    float *rstd1, *rstd2, *rstd_last;
    void *normed_last, *branch;     /* [rows, features] */
    void *grad_a, *grad_b, *grad_c; /* [rows, features] */
    void *grad_wide;                /* [rows, 4 * features] */
    float *scratch_weight;          /* [vocab_size, features] */
    float *losses;
    void *logits;
};

static float *floats(gpt2_device *device, int64_t count)
{
    return device->allocate(device, count * (int64_t)sizeof(float));
}

static void *activations(gpt2_device *device, int64_t count)
{
    return device->allocate(device, count * device->activation_bytes);
}

gpt2_model *gpt2_make_model(gpt2_device *device, const gpt2_weights *weights, int64_t rows, int64_t losses)
{
    const gpt2_config *c = &weights->config;
    const int64_t size = rows * c->features, all = c->layers * size;
    gpt2_model *m = app_allocate(1, sizeof *m);
    m->device = device;
    m->layout = *weights;
    m->layout.values = NULL;
    m->rows = rows;
    m->parameters = floats(device, weights->count);
    device->upload(device, m->parameters, weights->values, weights->count * (int64_t)sizeof(float));
    device->follow(device, m->parameters, &m->layout);
    m->gradients = floats(device, weights->count);
    m->mean = floats(device, weights->count);
    m->square = floats(device, weights->count);
    m->tokens = device->allocate(device, rows * (int64_t)sizeof(int64_t));
    m->targets = device->allocate(device, rows * (int64_t)sizeof(int64_t));
    m->embedded = activations(device, size);
    m->normed1 = activations(device, all);
    m->projected = activations(device, 3 * all);
    m->mixed = activations(device, all);
    m->logsumexp = floats(device, c->layers * rows * c->heads);
    m->sum1 = activations(device, all);
    m->normed2 = activations(device, all);
    m->preactivation = activations(device, 4 * all);
    m->hidden = activations(device, 4 * all);
    m->sum2 = activations(device, all);
    m->mean1 = device->allocate(device, c->layers * rows * (int64_t)sizeof(double));
    m->mean2 = device->allocate(device, c->layers * rows * (int64_t)sizeof(double));
    m->mean_last = device->allocate(device, rows * (int64_t)sizeof(double));
    m->rstd1 = floats(device, c->layers * rows);
    m->rstd2 = floats(device, c->layers * rows);
    m->rstd_last = floats(device, rows);
    m->normed_last = activations(device, size);
    m->branch = activations(device, size);
    m->grad_a = activations(device, size);
    m->grad_b = activations(device, size);
    m->grad_c = activations(device, size);
    m->grad_wide = activations(device, 4 * size);
    m->scratch_weight = floats(device, c->vocab_size * c->features);
    m->losses = floats(device, losses);
    m->logits = activations(device, c->vocab_size);
    return m;
}

/* Of a layer, in the parameters or their gradients; NULL for a bias that the model has not. */
static float *tensor(const gpt2_model *m, float *values, gpt2_tensor t, int64_t layer)
{
    if (gpt2_is_bias(t) && !m->layout.config.bias)
        return NULL;
    return values + m->layout.offset[t] + layer * gpt2_count(&m->layout.config, t);
}

static float *parameter(const gpt2_model *m, gpt2_tensor t, int64_t layer)
{
    return tensor(m, m->parameters, t, layer);
}

static float *gradient(const gpt2_model *m, gpt2_tensor t, int64_t layer)
{
    return tensor(m, m->gradients, t, layer);
}

static int64_t span_rows(const gpt2_model *m)
{
    return m->span.batch * (m->span.end - m->span.begin);
}

/* Where a layer's rows of the span begin in a buffer of [layers, rows, width]. */
static int64_t at(const gpt2_model *m, int64_t layer, int64_t width)
{
    return (layer * m->rows + m->span.begin) * width;
}

/* `elements` of an activation on. */
static void *on(const gpt2_model *m, void *activation, int64_t elements)
{
    return (char *)activation + elements * m->device->activation_bytes;
}

/* The bias follows its weight. */
static gpt2_linear linear(const gpt2_model *m, gpt2_tensor weight, int64_t layer)
{
    gpt2_linear l = {.rows = span_rows(m), .weight = parameter(m, weight, layer)};
    gpt2_shape(&m->layout.config, weight, &l.out_features, &l.in_features);
    l.bias = weight == GPT2_TOKENS ? NULL : parameter(m, weight + 1, layer);
    return l;
}

/* Number 0 and 1 of a layer, or with layer == layers the last one. */
static gpt2_norm norm(const gpt2_model *m, int64_t layer, int number)
{
    const int last = layer == m->layout.config.layers;
    const gpt2_tensor weight = last ? GPT2_NORM_WEIGHT : number ? GPT2_NORM2_WEIGHT : GPT2_NORM1_WEIGHT;
    const int64_t place = last ? 0 : layer;
    double *const mean = last ? m->mean_last : number ? m->mean2 : m->mean1;
    float *const rstd = last ? m->rstd_last : number ? m->rstd2 : m->rstd1;
    return (gpt2_norm){.rows = span_rows(m),
                       .features = m->layout.config.features,
                       .weight = parameter(m, weight, place),
                       .bias = parameter(m, weight + 1, place),
                       .mean = mean + at(m, place, 1),
                       .rstd = rstd + at(m, place, 1)};
}

/* Up to the last norm. */
static void hidden_states(gpt2_model *m)
{
    gpt2_device *const d = m->device;
    const gpt2_config *const c = &m->layout.config;
    const int64_t size = c->features;
    void *x = on(m, m->embedded, at(m, 0, size));
    d->embed_forward(d, x, parameter(m, GPT2_TOKENS, 0), parameter(m, GPT2_POSITIONS, 0), m->tokens + m->span.begin,
                     c->vocab_size, size, &m->span);
    const gpt2_norm first = norm(m, 0, 0);
    d->norm_forward(d, on(m, m->normed1, at(m, 0, size)), NULL, x, NULL, &first);
    for (int64_t layer = 0; layer < c->layers; layer++) {
        const int64_t narrow = at(m, layer, size), wide = at(m, layer, 4 * size);
        const gpt2_linear attention = linear(m, GPT2_ATTENTION_WEIGHT, layer);
        const gpt2_linear attention_out = linear(m, GPT2_ATTENTION_OUT_WEIGHT, layer);
        const gpt2_linear mlp = linear(m, GPT2_MLP_WEIGHT, layer), mlp_out = linear(m, GPT2_MLP_OUT_WEIGHT, layer);
        const gpt2_norm second = norm(m, layer, 1), next = norm(m, layer + 1, 0);
        void *const mixed = on(m, m->mixed, narrow), *const sum1 = on(m, m->sum1, narrow);
        void *const normed2 = on(m, m->normed2, narrow), *const hidden = on(m, m->hidden, wide);
        void *const normed =
            layer + 1 < c->layers ? on(m, m->normed1, at(m, layer + 1, size)) : on(m, m->normed_last, at(m, 0, size));
        d->linear_forward(d, on(m, m->projected, at(m, layer, 3 * size)), on(m, m->normed1, narrow), &attention);
        d->attention_forward(d, mixed, m->logsumexp + at(m, layer, c->heads),
                             on(m, m->projected, layer * m->rows * 3 * size), c->heads, size, &m->span);
        d->linear_forward(d, m->branch, mixed, &attention_out);
        d->norm_forward(d, normed2, sum1, m->branch, x, &second);
        d->linear_gelu_forward(d, hidden, on(m, m->preactivation, wide), normed2, &mlp);
        d->linear_forward(d, m->branch, hidden, &mlp_out);
        x = on(m, m->sum2, narrow);
        d->norm_forward(d, normed, x, m->branch, sum1, &next);
    }
}

void gpt2_load(gpt2_model *m, const int64_t *tokens, const int64_t *targets, int64_t batch, int64_t length)
{
    const int64_t bytes = batch * length * (int64_t)sizeof(int64_t);
    m->span = (gpt2_span){batch, 0, length};
    m->device->upload(m->device, m->tokens, tokens, bytes);
    m->device->upload(m->device, m->targets, targets, bytes);
}

void gpt2_forward(gpt2_model *m, int64_t loss, int with_gradient)
{
    gpt2_device *const d = m->device;
    const gpt2_linear head = linear(m, GPT2_TOKENS, 0);
    hidden_states(m);
    d->head(d, m->losses + loss, with_gradient ? m->grad_a : NULL, gradient(m, GPT2_TOKENS, 0), m->grad_b,
            m->scratch_weight, m->normed_last, m->targets, &head);
}

/* But for the MLP's first layer, whose bias has its gradient from gelu's. */
static void linear_backward(gpt2_model *m, void *grad_input, const void *grad_output, const void *input,
                            gpt2_tensor weight, int64_t layer)
{
    const gpt2_linear l = linear(m, weight, layer);
    m->device->linear_backward(m->device, grad_input, gradient(m, weight, layer),
                               weight == GPT2_MLP_WEIGHT ? NULL : gradient(m, weight + 1, layer), grad_output, input,
                               &l);
}

static void norm_backward(gpt2_model *m, void *grad_input, const void *grad_output, const void *grad_sum,
                          const void *input, int64_t layer, int number)
{
    const gpt2_norm n = norm(m, layer, number);
    const int last = layer == m->layout.config.layers;
    const gpt2_tensor weight = last ? GPT2_NORM_WEIGHT : number ? GPT2_NORM2_WEIGHT : GPT2_NORM1_WEIGHT;
    m->device->norm_backward(m->device, grad_input, gradient(m, weight, last ? 0 : layer),
                             gradient(m, weight + 1, last ? 0 : layer), grad_output, grad_sum, input, &n);
}

void gpt2_backward(gpt2_model *m)
{
    gpt2_device *const d = m->device;
    const gpt2_config *const c = &m->layout.config;
    const int64_t size = c->features, last = c->layers - 1;
    /* grad_a has the gradient of the last norm's output; from here on `grad` is that of the sum between the blocks, and
     * `other` is free. */
    void *const grad = m->grad_b, *const other = m->grad_c, *const branch = m->grad_a;
    norm_backward(m, grad, branch, NULL, on(m, m->sum2, at(m, last, size)), c->layers, 0);
    for (int64_t layer = last; layer >= 0; layer--) {
        const int64_t narrow = at(m, layer, size), wide = at(m, layer, 4 * size);
        const void *const x = layer > 0 ? on(m, m->sum2, at(m, layer - 1, size)) : m->embedded;
        void *const mixed = on(m, m->mixed, narrow);
        linear_backward(m, m->grad_wide, grad, on(m, m->hidden, wide), GPT2_MLP_OUT_WEIGHT, layer);
        d->gelu_backward(d, m->grad_wide, gradient(m, GPT2_MLP_BIAS, layer), on(m, m->preactivation, wide),
                         span_rows(m), 4 * size);
        linear_backward(m, branch, m->grad_wide, on(m, m->normed2, narrow), GPT2_MLP_WEIGHT, layer);
        norm_backward(m, other, branch, grad, on(m, m->sum1, narrow), layer, 1);
        linear_backward(m, branch, other, mixed, GPT2_ATTENTION_OUT_WEIGHT, layer);
        d->attention_backward(d, m->grad_wide, branch, on(m, m->projected, at(m, layer, 3 * size)), mixed,
                              m->logsumexp + at(m, layer, c->heads), c->heads, size, &m->span);
        linear_backward(m, branch, m->grad_wide, on(m, m->normed1, narrow), GPT2_ATTENTION_WEIGHT, layer);
        norm_backward(m, grad, branch, other, x, layer, 0);
    }
    d->embed_backward(d, gradient(m, GPT2_TOKENS, 0), gradient(m, GPT2_POSITIONS, 0), m->scratch_weight, grad,
                      m->tokens, c->vocab_size, c->block_size, size, &m->span);
}

void gpt2_step(gpt2_model *m, const gpt2_update *update)
{
    gpt2_device *const d = m->device;
    cuda_ops_adam_options options = {
        .lr = update->lr, .beta1 = 0.9, .beta2 = update->beta2, .eps = 1e-8, .decoupled = 1};
    d->clip(d, m->gradients, m->layout.count, update->clip);
    for (int t = 0; t < GPT2_TENSORS; t++) {
        if (gpt2_is_bias(t) && !m->layout.config.bias)
            continue;
        options.weight_decay = gpt2_is_matrix(t) ? update->weight_decay : 0.0;
        const int64_t offset = m->layout.offset[t];
        d->adamw(d, m->parameters + offset, m->gradients + offset, m->mean + offset, m->square + offset,
                 gpt2_layers(&m->layout.config, t) * gpt2_count(&m->layout.config, t), update->step, &options);
    }
    d->follow(d, m->parameters, &m->layout);
}

void gpt2_losses(gpt2_model *m, float *losses, int64_t begin, int64_t end)
{
    m->device->download(m->device, losses, m->losses + begin, (end - begin) * (int64_t)sizeof(float));
}

void gpt2_logits(gpt2_model *m, float *logits, const int64_t *tokens, int64_t begin, int64_t end)
{
    gpt2_device *const d = m->device;
    const gpt2_config *const c = &m->layout.config;
    m->span = (gpt2_span){1, begin, end};
    d->upload(d, m->tokens + begin, tokens + begin, (end - begin) * (int64_t)sizeof *tokens);
    hidden_states(m);
    gpt2_linear head = linear(m, GPT2_TOKENS, 0);
    head.rows = 1;
    d->linear_forward(d, m->logits, on(m, m->normed_last, (end - 1) * c->features), &head);
    d->download(d, logits, m->logits, c->vocab_size * d->activation_bytes);
    if (d->activation_bytes == sizeof(float))
        return;
    /* From the last on, in place: bfloat16 is the upper half of a float32. */
    for (int64_t i = c->vocab_size - 1; i >= 0; i--) {
        uint16_t upper;
        memcpy(&upper, (const char *)logits + i * (int64_t)sizeof upper, sizeof upper);
        const uint32_t bits = (uint32_t)upper << 16;
        memcpy(logits + i, &bits, sizeof bits);
    }
}

gpt2_weights gpt2_weights_of(gpt2_model *m)
{
    gpt2_weights w = m->layout;
    w.values = app_allocate(w.count, sizeof(float));
    m->device->download(m->device, w.values, m->parameters, w.count * (int64_t)sizeof(float));
    return w;
}
