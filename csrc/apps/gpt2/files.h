/* The files of the GPT-2 program: texts, and llm.c's token files and checkpoints, which Python reads and writes too
 * (cuda_ops/data/text.py, cuda_ops/models/gpt_files.py).
 *
 * All that is read is untrusted. What is wrong with a file is said in one line on stderr, and the program ends with
 * status 2; nothing is allocated for what a file claims before its size has been compared with that. */
#ifndef GPT2_FILES_H
#define GPT2_FILES_H

#include <stdint.h>

typedef struct gpt2_config {
    int64_t vocab_size, block_size, layers, heads, features;
    int bias; /* 0: linear layers and layer norms have none */
} gpt2_config;

/* The parameters, in the order of llm.c's checkpoint; but for the first two and the last two, those of all layers one
 * after the other. Weights of linear layers are (out, in). */
typedef enum gpt2_tensor {
    GPT2_TOKENS,
    GPT2_POSITIONS,
    GPT2_NORM1_WEIGHT,
    GPT2_NORM1_BIAS,
    GPT2_ATTENTION_WEIGHT, /* c_attn: query, key and value */
    GPT2_ATTENTION_BIAS,
    GPT2_ATTENTION_OUT_WEIGHT,
    GPT2_ATTENTION_OUT_BIAS,
    GPT2_NORM2_WEIGHT,
    GPT2_NORM2_BIAS,
    GPT2_MLP_WEIGHT, /* c_fc */
    GPT2_MLP_BIAS,
    GPT2_MLP_OUT_WEIGHT,
    GPT2_MLP_OUT_BIAS,
    GPT2_NORM_WEIGHT,
    GPT2_NORM_BIAS,
    GPT2_TENSORS
} gpt2_tensor;

/* Rows and columns of one layer's; a vector has 1 column. */
void gpt2_shape(const gpt2_config *config, gpt2_tensor tensor, int64_t *rows, int64_t *columns);
int64_t gpt2_count(const gpt2_config *config, gpt2_tensor tensor); /* of one layer's elements */
int64_t gpt2_layers(const gpt2_config *config, gpt2_tensor tensor);
int64_t gpt2_count_all(const gpt2_config *config, gpt2_tensor tensor); /* of all layers' */
int gpt2_is_bias(gpt2_tensor tensor);
int gpt2_is_matrix(gpt2_tensor tensor); /* else a vector: what weight decay leaves alone */
int gpt2_has(const gpt2_config *config, gpt2_tensor tensor);
/* Of all parameters; biases count only where the model has them. */
int64_t gpt2_parameter_count(const gpt2_config *config);
/* Whether the sizes can be those of a model: 1 to 2^31 - 1, heads that divide the features. */
int gpt2_is_config(const gpt2_config *config);

/* Weights in one array, each tensor aligned to 64 bytes, with zeros between them. */
typedef struct gpt2_weights {
    gpt2_config config;
    int64_t offset[GPT2_TENSORS]; /* in elements */
    int64_t count;                /* of the array */
    float *values;                /* NULL where they are elsewhere */
} gpt2_weights;

/* Without values. */
gpt2_weights gpt2_layout(const gpt2_config *config);
/* As GPT-2 begins: normal with a deviation of 0.02, less for what is added to the sum of all blocks. By another
 * generator than PyTorch's, hence with other numbers. */
gpt2_weights gpt2_first_weights(const gpt2_config *config, uint64_t seed);
/* Of a checkpoint of llm.c's, version 3 (float32) or 5 (bfloat16). `bias` 0: the model is to have none, and those of
 * the file have to be zeros. */
gpt2_weights gpt2_read_checkpoint(const char *path, int bias);
/* Returns NULL, or why the file cannot be written. The vocabulary is padded by zeros to a multiple of 128. */
const char *gpt2_write_checkpoint(const char *path, const gpt2_weights *weights, int bfloat16);

typedef struct gpt2_text {
    int64_t count;
    uint16_t *tokens;
    /* Where a token is a character: the code points, in their order; else NULL. */
    uint32_t *characters;
    int64_t character_count;
} gpt2_text;

/* A token file of llm.c's. */
gpt2_text gpt2_read_tokens(const char *path);
/* A text in UTF-8. "\r\n" and "\r" are read as "\n", as by Python. */
gpt2_text gpt2_read_text(const char *path);
/* app_fail where the model does not know all tokens. */
void gpt2_check_tokens(const gpt2_text *text, int64_t vocab_size, const char *path);
const char *gpt2_write_tokens(const char *path, const gpt2_text *text);

/* The tokens of a string's characters (app_allocate), or app_fail where `text` has not all of them; their number. */
int64_t gpt2_encode(const gpt2_text *text, const char *option, const char *string, int64_t **tokens);
/* Writes the UTF-8 of a character there, which takes up to 4 bytes; returns how many. */
int gpt2_decode(const gpt2_text *text, int64_t token, char *target);

#endif
