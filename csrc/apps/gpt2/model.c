#include "gpt2/model.h"

#include <stddef.h>

#include "app.h"

/* What backward takes from forward, one of each layer, and the gradients of activations. void *: of the device's
 * precision. Where a buffer's content has been used up, something else takes its place:
 *
 *   preactivation   of a layer, once gelu's gradient is there: the gradient of `projected`
 *   hidden          likewise, once the gradient of the weight behind it is there: the gradient of `preactivation`; then
 *                   the gradient of `sum1`, and room for attention's backward
 *   gradients       but in backward: room for products, the head, which makes that of the token table, and the logits
 */
struct gpt2_model {
    gpt2_device *device;
    gpt2_weights layout;
    int64_t rows;       /* room */
    int64_t recomputed; /* of the first blocks, whose gelu's output backward makes again: they share one place */
    gpt2_span span;
    float *parameters, *gradients, *mean, *square;
    gpt2_room room;
    int64_t *tokens, *targets;
    void *embedded;                              /* [rows, features], which the first block adds to */
    void *normed1, *projected, *mixed;           /* [layers, rows, ...] */
    void *sum1, *normed2, *preactivation, *sum2; /* likewise */
    void *hidden;                                /* likewise, of the layers that keep it */
    float *logsumexp;                            /* [layers, rows, heads] */
    double *mean1, *mean2, *mean_last;           /* of the norms' rows */
    float *rstd1, *rstd2, *rstd_last;
    void *temporary[2]; /* [rows, features], of many uses */
    float *loss;        /* the last one */
    float *losses;
    float *logits; /* [vocab_size] */
};

static float *floats(gpt2_device *device, int64_t count)
{
    return device->allocate(device, count * (int64_t)sizeof(float));
}

static void *activations(gpt2_device *device, int64_t count)
{
    return device->allocate(device, count * device->activation_bytes);
}

static void set_room(gpt2_model *m);

gpt2_model *gpt2_make_model(gpt2_device *device, const gpt2_weights *weights, int64_t rows, int64_t losses,
                            int64_t recomputed)
{
    const gpt2_config *c = &weights->config;
    const int64_t size = rows * c->features, all = c->layers * size;
    gpt2_model *m = app_allocate(1, sizeof *m);
    m->device = device;
    m->layout = *weights;
    m->layout.values = NULL;
    m->rows = rows;
    m->recomputed = recomputed < c->layers ? recomputed : c->layers;
    m->parameters = floats(device, weights->count);
    device->upload(device, m->parameters, weights->values, weights->count * (int64_t)sizeof(float));
    device->follow(device, m->parameters, &m->layout);
    set_room(m);
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
    m->hidden = activations(device, 4 * size * (m->recomputed < c->layers ? c->layers - m->recomputed : 1));
    m->sum2 = activations(device, all);
    m->mean1 = device->allocate(device, c->layers * rows * (int64_t)sizeof(double));
    m->mean2 = device->allocate(device, c->layers * rows * (int64_t)sizeof(double));
    m->mean_last = device->allocate(device, rows * (int64_t)sizeof(double));
    m->rstd1 = floats(device, c->layers * rows);
    m->rstd2 = floats(device, c->layers * rows);
    m->rstd_last = floats(device, rows);
    for (int i = 0; i < 2; i++)
        m->temporary[i] = activations(device, size);
    m->loss = floats(device, 1);
    m->losses = floats(device, losses);
    m->logits = floats(device, c->vocab_size);
    return m;
}

/* Of a layer, in the parameters or their gradients; NULL for a bias that the model has not. */
static float *tensor(const gpt2_model *m, float *values, gpt2_tensor t, int64_t layer)
{
    if (!gpt2_has(&m->layout.config, t))
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

/* The gradients, and the room behind those of the token table: of what the head asks for, or of the other gradients. */
static void set_room(gpt2_model *m)
{
    gpt2_linear head = linear(m, GPT2_TOKENS, 0);
    head.rows = m->rows;
    const int64_t first = m->layout.offset[GPT2_POSITIONS], bytes = m->device->head_bytes(m->device, &head);
    const int64_t wanted = (bytes + (int64_t)sizeof(float) - 1) / (int64_t)sizeof(float);
    const int64_t others = m->layout.count - first, count = wanted > others ? wanted : others;
    m->gradients = floats(m->device, first + count);
    m->room = (gpt2_room){m->gradients + first, count * (int64_t)sizeof(float)};
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

/* A layer's rows of gelu's output. */
static void *hidden_of(const gpt2_model *m, int64_t layer)
{
    const int64_t place = layer < m->recomputed ? 0 : layer - m->recomputed;
    return on(m, m->hidden, at(m, place, 4 * m->layout.config.features));
}

/* Up to the last norm, whose output it returns. */
static void *hidden_states(gpt2_model *m)
{
    gpt2_device *const d = m->device;
    const gpt2_config *const c = &m->layout.config;
    const int64_t size = c->features;
    void *x = on(m, m->embedded, at(m, 0, size)), *normed = on(m, m->normed1, at(m, 0, size));
    void *const branch = m->temporary[0], *const last = m->temporary[1];
    d->embed_forward(d, x, parameter(m, GPT2_TOKENS, 0), parameter(m, GPT2_POSITIONS, 0), m->tokens + m->span.begin,
                     c->vocab_size, size, &m->span);
    const gpt2_norm first = norm(m, 0, 0);
    d->norm_forward(d, normed, NULL, x, NULL, &first);
    for (int64_t layer = 0; layer < c->layers; layer++) {
        const int64_t narrow = at(m, layer, size), wide = at(m, layer, 4 * size);
        const gpt2_linear attention = linear(m, GPT2_ATTENTION_WEIGHT, layer);
        const gpt2_linear attention_out = linear(m, GPT2_ATTENTION_OUT_WEIGHT, layer);
        const gpt2_linear mlp = linear(m, GPT2_MLP_WEIGHT, layer), mlp_out = linear(m, GPT2_MLP_OUT_WEIGHT, layer);
        const gpt2_norm second = norm(m, layer, 1), next = norm(m, layer + 1, 0);
        void *const mixed = on(m, m->mixed, narrow), *const sum1 = on(m, m->sum1, narrow);
        void *const normed2 = on(m, m->normed2, narrow), *const hidden = hidden_of(m, layer);
        d->linear_forward(d, on(m, m->projected, at(m, layer, 3 * size)), normed, &attention);
        d->attention_forward(d, mixed, m->logsumexp + at(m, layer, c->heads),
                             on(m, m->projected, layer * m->rows * 3 * size), c->heads, size, &m->span);
        d->linear_forward(d, branch, mixed, &attention_out);
        d->norm_forward(d, normed2, sum1, branch, x, &second);
        d->linear_gelu_forward(d, hidden, on(m, m->preactivation, wide), normed2, &mlp, m->room);
        d->linear_forward(d, branch, hidden, &mlp_out);
        x = on(m, m->sum2, narrow);
        normed = layer + 1 < c->layers ? on(m, m->normed1, at(m, layer + 1, size)) : last;
        d->norm_forward(d, normed, x, branch, sum1, &next);
    }
    return normed;
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
    if (!with_gradient || d->begin(d, GPT2_FORWARD)) {
        const gpt2_linear head = linear(m, GPT2_TOKENS, 0);
        const void *const input = hidden_states(m);
        d->head(d, m->loss, with_gradient ? m->temporary[0] : NULL, gradient(m, GPT2_TOKENS, 0), input, m->targets,
                &head, m->room);
        if (with_gradient)
            d->end(d);
    }
    d->copy(d, m->losses + loss, m->loss, sizeof *m->loss);
}

/* grad_bias_before: of the bias that was added to `input` last. */
static void norm_backward(gpt2_model *m, void *grad_input, const void *grad_output, const void *grad_sum,
                          const void *input, int64_t layer, int number, float *grad_bias_before)
{
    const gpt2_norm n = norm(m, layer, number);
    const int last = layer == m->layout.config.layers;
    const gpt2_tensor weight = last ? GPT2_NORM_WEIGHT : number ? GPT2_NORM2_WEIGHT : GPT2_NORM1_WEIGHT;
    m->device->norm_backward(m->device, grad_input, gradient(m, weight, last ? 0 : layer),
                             gradient(m, weight + 1, last ? 0 : layer), grad_bias_before, grad_output, grad_sum, input,
                             &n);
}

/* grad: of the block's output, and then of its input; in branch is room. */
static void block_backward(gpt2_model *m, int64_t layer, void *grad, void *branch)
{
    gpt2_device *const d = m->device;
    const gpt2_config *const c = &m->layout.config;
    const int64_t size = c->features, narrow = at(m, layer, size);
    const gpt2_linear attention = linear(m, GPT2_ATTENTION_WEIGHT, layer);
    const gpt2_linear attention_out = linear(m, GPT2_ATTENTION_OUT_WEIGHT, layer);
    const gpt2_linear mlp = linear(m, GPT2_MLP_WEIGHT, layer), mlp_out = linear(m, GPT2_MLP_OUT_WEIGHT, layer);
    const void *const x = layer > 0 ? on(m, m->sum2, at(m, layer - 1, size)) : m->embedded;
    const void *const normed1 = on(m, m->normed1, narrow), *const normed2 = on(m, m->normed2, narrow);
    const void *const mixed = on(m, m->mixed, narrow);
    void *const hidden = hidden_of(m, layer), *const preactivation = on(m, m->preactivation, at(m, layer, 4 * size));
    float *const grad_mixed_bias = gradient(m, GPT2_ATTENTION_OUT_BIAS, layer);

    if (layer < m->recomputed)
        d->gelu_forward(d, hidden, preactivation, mlp.rows * mlp.out_features);
    d->linear_backward_weight(d, gradient(m, GPT2_MLP_OUT_WEIGHT, layer), grad, hidden, &mlp_out);
    void *const grad_preactivation = hidden; /* from here on */
    d->gelu_linear_backward(d, grad_preactivation, gradient(m, GPT2_MLP_BIAS, layer), grad, preactivation, &mlp_out);
    d->linear_backward_input(d, branch, grad_preactivation, &mlp);
    d->linear_backward_weight(d, gradient(m, GPT2_MLP_WEIGHT, layer), grad_preactivation, normed2, &mlp);
    /* The last quarter of what is free now; the rest is room. */
    const int64_t three_quarters = mlp.rows * 3 * size;
    const gpt2_room free_room = {hidden, three_quarters * d->activation_bytes};
    void *const grad_sum1 = on(m, hidden, three_quarters);
    norm_backward(m, grad_sum1, branch, grad, on(m, m->sum1, narrow), layer, 1, grad_mixed_bias);

    d->linear_backward_input(d, branch, grad_sum1, &attention_out);
    d->linear_backward_weight(d, gradient(m, GPT2_ATTENTION_OUT_WEIGHT, layer), grad_sum1, mixed, &attention_out);
    void *const grad_projected = preactivation; /* from here on */
    d->attention_backward(d, grad_projected, branch, on(m, m->projected, at(m, layer, 3 * size)), mixed,
                          m->logsumexp + at(m, layer, c->heads), c->heads, size, &m->span, free_room);
    if (c->bias)
        d->attention_bias_backward(d, gradient(m, GPT2_ATTENTION_BIAS, layer), grad_projected, grad_mixed_bias,
                                   &attention_out);
    d->linear_backward_input(d, branch, grad_projected, &attention);
    d->linear_backward_weight(d, gradient(m, GPT2_ATTENTION_WEIGHT, layer), grad_projected, normed1, &attention);
    norm_backward(m, grad, branch, grad_sum1, x, layer, 0,
                  layer > 0 ? gradient(m, GPT2_MLP_OUT_BIAS, layer - 1) : NULL);
}

void gpt2_backward(gpt2_model *m)
{
    gpt2_device *const d = m->device;
    const gpt2_config *const c = &m->layout.config;
    if (!d->begin(d, GPT2_BACKWARD))
        return;
    /* The first has the gradient of the last norm's output, and is free from then on. */
    void *const branch = m->temporary[0], *const grad = m->temporary[1];
    norm_backward(m, grad, branch, NULL, on(m, m->sum2, at(m, c->layers - 1, c->features)), c->layers, 0,
                  gradient(m, GPT2_MLP_OUT_BIAS, c->layers - 1));
    for (int64_t layer = c->layers - 1; layer >= 0; layer--)
        block_backward(m, layer, grad, branch);
    d->embed_backward(d, gradient(m, GPT2_TOKENS, 0), gradient(m, GPT2_POSITIONS, 0), grad, m->tokens, c->vocab_size,
                      c->block_size, c->features, &m->span);
    d->end(d);
}

void gpt2_step(gpt2_model *m, const gpt2_update *update)
{
    const gpt2_state state = {&m->layout, m->parameters, m->gradients, m->mean, m->square};
    m->device->update(m->device, &state, update);
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
    void *const states = hidden_states(m);
    gpt2_linear head = linear(m, GPT2_TOKENS, 0);
    head.rows = 1;
    d->logits(d, m->logits, on(m, states, (end - begin - 1) * c->features), &head, m->room);
    d->download(d, logits, m->logits, c->vocab_size * (int64_t)sizeof *logits);
}

gpt2_weights gpt2_weights_of(gpt2_model *m)
{
    gpt2_weights w = m->layout;
    w.values = app_allocate(w.count, sizeof(float));
    m->device->download(m->device, w.values, m->parameters, w.count * (int64_t)sizeof(float));
    return w;
}
