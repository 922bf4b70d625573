/* GPT-2 on a device: token and position embeddings, blocks of causal attention and MLP, a layer norm, and a head whose
 * weight is the token embedding's. Forward is made of the calls that GPT("fused") makes in Python. */
#ifndef GPT2_MODEL_H
#define GPT2_MODEL_H

#include "gpt2/files.h"
#include "gpt2/layers.h"

typedef struct gpt2_model gpt2_model;

/* With room for `rows` tokens at a time (batch times length), and losses of `losses` calls. `weights` are copied. The
 * first `recomputed` blocks do not keep gelu's output for backward, which makes it again. */
gpt2_model *gpt2_make_model(gpt2_device *device, const gpt2_weights *weights, int64_t rows, int64_t losses,
                            int64_t recomputed);

/* The phases of a step, to be called in this order; batch and length are the same in all steps. Tokens
 * and targets are [batch, length], in the host's memory. */
void gpt2_load(gpt2_model *model, const int64_t *tokens, const int64_t *targets, int64_t batch, int64_t length);
void gpt2_forward(gpt2_model *model, int64_t loss, int with_gradient);
void gpt2_backward(gpt2_model *model);
void gpt2_step(gpt2_model *model, const gpt2_update *update);

/* Of calls [begin, end), into the host's memory. */
void gpt2_losses(gpt2_model *model, float *losses, int64_t begin, int64_t end);

/* The logits of what follows tokens [0, end) of one sequence, of which [0, begin) were in the call before, whose keys
 * and values are still there. */
void gpt2_logits(gpt2_model *model, float *logits, const int64_t *tokens, int64_t begin, int64_t end);

/* Into values (app_allocate). */
gpt2_weights gpt2_weights_of(gpt2_model *model);

#endif
