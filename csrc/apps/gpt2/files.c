#include "gpt2/files.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "app.h"
#include "output.h"

enum { HEADER_INTS = 256, HEADER_BYTES = 4 * HEADER_INTS, PADDING = 128 };
enum { CHECKPOINT_MAGIC = 20240326, FLOAT32_VERSION = 3, BFLOAT16_VERSION = 5 };
enum { TOKENS_MAGIC = 20240520, TOKENS_VERSION = 1, LAST_CODE_POINT = 0x10ffff };
/* Of a file, at a time. */
enum { CHUNK_BYTES = 1 << 16 };

int gpt2_is_bias(gpt2_tensor tensor)
{
    /* Weights and biases take turns after the two embeddings. */
    return tensor >= GPT2_NORM1_WEIGHT && (tensor - GPT2_NORM1_WEIGHT) % 2 == 1;
}

int gpt2_is_matrix(gpt2_tensor tensor)
{
    return tensor == GPT2_TOKENS || tensor == GPT2_POSITIONS || tensor == GPT2_ATTENTION_WEIGHT ||
           tensor == GPT2_ATTENTION_OUT_WEIGHT || tensor == GPT2_MLP_WEIGHT || tensor == GPT2_MLP_OUT_WEIGHT;
}

int gpt2_has(const gpt2_config *config, gpt2_tensor tensor)
{
    return config->bias || !gpt2_is_bias(tensor);
}

void gpt2_shape(const gpt2_config *config, gpt2_tensor tensor, int64_t *rows, int64_t *columns)
{
    const int64_t size = config->features;
    *columns = 1;
    switch (tensor) {
    case GPT2_TOKENS:
        *rows = config->vocab_size, *columns = size;
        break;
    case GPT2_POSITIONS:
        *rows = config->block_size, *columns = size;
        break;
    case GPT2_ATTENTION_WEIGHT:
        *rows = 3 * size, *columns = size;
        break;
    case GPT2_ATTENTION_BIAS:
        *rows = 3 * size;
        break;
    case GPT2_ATTENTION_OUT_WEIGHT:
        *rows = size, *columns = size;
        break;
    case GPT2_MLP_WEIGHT:
        *rows = 4 * size, *columns = size;
        break;
    case GPT2_MLP_BIAS:
        *rows = 4 * size;
        break;
    case GPT2_MLP_OUT_WEIGHT:
        *rows = size, *columns = 4 * size;
        break;
    default:
        *rows = size;
    }
}

int64_t gpt2_count(const gpt2_config *config, gpt2_tensor tensor)
{
    int64_t rows, columns;
    gpt2_shape(config, tensor, &rows, &columns);
    return rows * columns;
}

int64_t gpt2_layers(const gpt2_config *config, gpt2_tensor tensor)
{
    return tensor < GPT2_NORM1_WEIGHT || tensor >= GPT2_NORM_WEIGHT ? 1 : config->layers;
}

int64_t gpt2_count_all(const gpt2_config *config, gpt2_tensor tensor)
{
    return gpt2_layers(config, tensor) * gpt2_count(config, tensor);
}

int64_t gpt2_parameter_count(const gpt2_config *config)
{
    int64_t count = 0;
    for (int t = 0; t < GPT2_TENSORS; t++)
        if (gpt2_has(config, t))
            count += gpt2_count_all(config, t);
    return count;
}

int gpt2_is_config(const gpt2_config *c)
{
    const int64_t sizes[] = {c->vocab_size, c->block_size, c->layers, c->heads, c->features};
    for (int i = 0; i < 5; i++)
        if (sizes[i] < 1 || sizes[i] > INT32_MAX)
            return 0;
    return c->features % c->heads == 0;
}

gpt2_weights gpt2_layout(const gpt2_config *config)
{
    gpt2_weights w = {.config = *config};
    for (int t = 0; t < GPT2_TENSORS; t++) {
        w.offset[t] = w.count;
        w.count += (gpt2_count_all(config, t) + 15) / 16 * 16;
    }
    return w;
}

/* Two at a time, by Box and Muller. */
static void fill_normal(float *values, int64_t count, double deviation, uint64_t *state)
{
    for (int64_t i = 0; i < count; i += 2) {
        const double radius = deviation * sqrt(-2.0 * log(1.0 - app_random_uniform(state)));
        const double angle = 6.283185307179586 * app_random_uniform(state);
        values[i] = (float)(radius * cos(angle));
        if (i + 1 < count)
            values[i + 1] = (float)(radius * sin(angle));
    }
}

gpt2_weights gpt2_first_weights(const gpt2_config *config, uint64_t seed)
{
    gpt2_weights w = gpt2_layout(config);
    w.values = app_allocate(w.count, sizeof(float));
    for (int t = 0; t < GPT2_TENSORS; t++) {
        float *const values = w.values + w.offset[t];
        const int64_t count = gpt2_count_all(config, t);
        const int added = t == GPT2_ATTENTION_OUT_WEIGHT || t == GPT2_MLP_OUT_WEIGHT;
        if (t == GPT2_NORM1_WEIGHT || t == GPT2_NORM2_WEIGHT || t == GPT2_NORM_WEIGHT)
            for (int64_t i = 0; i < count; i++)
                values[i] = 1.0f;
        else if (!gpt2_is_bias(t))
            fill_normal(values, count, 0.02 / (added ? sqrt(2.0 * (double)config->layers) : 1.0), &seed);
    }
    return w;
}

/* A file that is open, and how long it is. */
typedef struct reader {
    const char *path;
    FILE *file;
    int64_t bytes;
} reader;

static reader open_reader(const char *what, const char *path)
{
    reader r = {.path = path};
    const int descriptor = app_open_file(path);
    struct stat facts;
    if (descriptor >= 0 && fstat(descriptor, &facts) == 0)
        r.file = fdopen(descriptor, "rb");
    if (!r.file)
        app_fail("%s %s cannot be read (%s)", what, path, strerror(errno));
    r.bytes = (int64_t)facts.st_size;
    return r;
}

static void read_exactly(reader *r, void *target, int64_t bytes)
{
    if (fread(target, 1, (size_t)bytes, r->file) == (size_t)bytes)
        return;
    const int error = ferror(r->file) ? errno : 0;
    fclose(r->file);
    app_fail("file %s %s", r->path, error ? strerror(error) : "is shorter than it was when it was opened");
}

/* The first numbers of a header of 256 int32. */
static void read_header(reader *r, const char *what, int32_t *numbers, int count)
{
    uint8_t header[HEADER_BYTES];
    if (r->bytes < HEADER_BYTES) {
        fclose(r->file);
        app_fail("file %s is no %s of llm.c's: it has %lld bytes, and its header alone %d", r->path, what,
                 (long long)r->bytes, HEADER_BYTES);
    }
    read_exactly(r, header, sizeof header);
    for (int i = 0; i < count; i++)
        numbers[i] = (int32_t)app_little_endian(header + 4 * i);
}

/* With `fclose` before, since app_fail frees memory, and no files. */
#define REFUSE(r, ...)                                                                                                 \
    do {                                                                                                               \
        fclose((r)->file);                                                                                             \
        app_fail(__VA_ARGS__);                                                                                         \
    } while (0)

static void check_length(reader *r, double estimate, int64_t expected)
{
    if (estimate < 1e18 && expected == r->bytes)
        return;
    char number[32];
    snprintf(number, sizeof number, estimate < 1e18 ? "%.0f" : "%.1e", estimate < 1e18 ? (double)expected : estimate);
    REFUSE(r, "file %s %s: its header calls for %s bytes, and it has %lld", r->path,
           estimate < (double)r->bytes ? "has bytes past its end" : "is damaged or truncated", number,
           (long long)r->bytes);
}

/* `count` elements of the file into `target`, or checks that they are zeros where that is NULL. */
static void read_values(reader *r, float *target, int64_t count, int bfloat16, const char *expected_zeros)
{
    uint8_t chunk[CHUNK_BYTES];
    const int64_t width = bfloat16 ? 2 : 4;
    for (int64_t done = 0; done < count;) {
        const int64_t part = count - done < CHUNK_BYTES / width ? count - done : CHUNK_BYTES / width;
        read_exactly(r, chunk, part * width);
        for (int64_t i = 0; i < part; i++) {
            const uint8_t *p = chunk + i * width;
            const uint32_t bits = bfloat16 ? (uint32_t)p[1] << 24 | (uint32_t)p[0] << 16 : app_little_endian(p);
            float value;
            memcpy(&value, &bits, sizeof value);
            if (!isfinite(value))
                REFUSE(r, "file %s holds a number that is not finite", r->path);
            if (expected_zeros && value != 0.0f)
                REFUSE(r, "%s", expected_zeros);
            if (target)
                target[done + i] = value;
        }
        done += part;
    }
}

gpt2_weights gpt2_read_checkpoint(const char *path, int bias)
{
    reader r = open_reader("--init", path);
    int32_t header[8];
    read_header(&r, "checkpoint", header, 8);
    if (header[0] != CHECKPOINT_MAGIC)
        REFUSE(&r, "file %s is no checkpoint of llm.c's: it begins with %d, expected %d", path, header[0],
               CHECKPOINT_MAGIC);
    if (header[1] != FLOAT32_VERSION && header[1] != BFLOAT16_VERSION)
        REFUSE(&r, "file %s: expected version 3 (float32) or 5 (bfloat16) of llm.c's checkpoints, got %d", path,
               header[1]);
    const int bfloat16 = header[1] == BFLOAT16_VERSION;
    gpt2_config config = {.block_size = header[2],
                          .vocab_size = header[3],
                          .layers = header[4],
                          .heads = header[5],
                          .features = header[6],
                          .bias = 1};
    const int64_t padded = header[7];
    if (!gpt2_is_config(&config) || padded < config.vocab_size)
        REFUSE(&r,
               "file %s is damaged: a block size of %d, a vocabulary of %d padded to %d, %d layers, %d heads and %d "
               "features are those of no model",
               path, header[2], header[3], header[7], header[4], header[5], header[6]);
    /* First as numbers that do not overflow. */
    const double size = (double)config.features, width = bfloat16 ? 2.0 : 4.0;
    const double elements = ((double)padded + (double)config.block_size) * size +
                            (double)config.layers * (12.0 * size * size + 13.0 * size) + 2.0 * size;
    const double estimate = HEADER_BYTES + width * elements;
    const int64_t padding = (padded - config.vocab_size) * config.features;
    check_length(&r, estimate,
                 estimate < 1e18 ? HEADER_BYTES + (int64_t)width * (gpt2_parameter_count(&config) + padding) : 0);
    config.bias = bias;
    gpt2_weights w = gpt2_layout(&config);
    w.values = app_allocate(w.count, sizeof(float));
    char not_zero[4200];
    snprintf(not_zero, sizeof not_zero, "--no-bias: file %.4096s has biases that are not zero", path);
    for (int t = 0; t < GPT2_TENSORS; t++) {
        const int64_t count = gpt2_count_all(&config, t);
        read_values(&r, w.values + w.offset[t], count, bfloat16, gpt2_is_bias(t) && !bias ? not_zero : NULL);
        if (t == GPT2_TOKENS)
            read_values(&r, NULL, padding, bfloat16, NULL);
    }
    fclose(r.file);
    return w;
}

static void put_little_endian(uint8_t *target, uint32_t number, int bytes)
{
    for (int i = 0; i < bytes; i++)
        target[i] = (uint8_t)(number >> 8 * i);
}

static uint8_t *put_values(uint8_t *target, const float *values, int64_t count, int bfloat16)
{
    const int width = bfloat16 ? 2 : 4;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        if (bfloat16) /* to nearest, ties to even */
            bits = isnan(values[i]) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        put_little_endian(target + i * width, bits, width);
    }
    return target + count * width;
}

const char *gpt2_write_checkpoint(const char *path, const gpt2_weights *weights, int bfloat16)
{
    gpt2_config config = weights->config;
    config.bias = 1; /* the format has them */
    const int64_t padded = (config.vocab_size + PADDING - 1) / PADDING * PADDING;
    const int64_t padding = (padded - config.vocab_size) * config.features;
    const int64_t bytes = HEADER_BYTES + (gpt2_parameter_count(&config) + padding) * (bfloat16 ? 2 : 4);
    uint8_t *content = app_allocate(bytes, 1), *next = content + HEADER_BYTES;
    const int64_t header[] = {CHECKPOINT_MAGIC,  bfloat16 ? BFLOAT16_VERSION : FLOAT32_VERSION,
                              config.block_size, config.vocab_size,
                              config.layers,     config.heads,
                              config.features,   padded};
    for (int i = 0; i < 8; i++)
        put_little_endian(content + 4 * i, (uint32_t)header[i], 4);
    for (int t = 0; t < GPT2_TENSORS; t++) {
        const int64_t count = gpt2_count_all(&config, t);
        next = put_values(next, weights->values + weights->offset[t], count, bfloat16);
        if (t == GPT2_TOKENS)
            next += padding * (bfloat16 ? 2 : 4);
    }
    const char *problem = output_write(path, content, (size_t)bytes);
    app_free(content);
    return problem;
}

gpt2_text gpt2_read_tokens(const char *path)
{
    reader r = open_reader("token file", path);
    int32_t header[3];
    read_header(&r, "token file", header, 3);
    if (header[0] != TOKENS_MAGIC)
        REFUSE(&r, "file %s is no token file of llm.c's: it begins with %d, expected %d", path, header[0],
               TOKENS_MAGIC);
    if (header[1] != TOKENS_VERSION)
        REFUSE(&r, "file %s: expected version %d (uint16) of llm.c's token files, got %d", path, TOKENS_VERSION,
               header[1]);
    if (header[2] < 1)
        REFUSE(&r, "file %s is damaged: its header counts %d tokens", path, header[2]);
    gpt2_text text = {.count = header[2]};
    const int64_t expected = HEADER_BYTES + 2 * text.count;
    check_length(&r, (double)expected, expected);
    text.tokens = app_allocate(text.count, sizeof *text.tokens);
    read_exactly(&r, text.tokens, 2 * text.count);
    fclose(r.file);
    for (int64_t i = 0; i < text.count; i++) {
        const uint8_t *p = (const uint8_t *)&text.tokens[i];
        text.tokens[i] = (uint16_t)(p[1] << 8 | p[0]);
    }
    return text;
}

void gpt2_check_tokens(const gpt2_text *text, int64_t vocab_size, const char *path)
{
    for (int64_t i = 0; i < text->count; i++)
        if (text->tokens[i] >= vocab_size)
            app_fail("file %s has token %d, and the model knows %lld: it is of another vocabulary", path,
                     text->tokens[i], (long long)vocab_size);
}

const char *gpt2_write_tokens(const char *path, const gpt2_text *text)
{
    if (text->count > INT32_MAX)
        return "it has more tokens than the file's header can count";
    const int64_t bytes = HEADER_BYTES + 2 * text->count;
    uint8_t *content = app_allocate(bytes, 1);
    put_little_endian(content, TOKENS_MAGIC, 4);
    put_little_endian(content + 4, TOKENS_VERSION, 4);
    put_little_endian(content + 8, (uint32_t)text->count, 4);
    for (int64_t i = 0; i < text->count; i++)
        put_little_endian(content + HEADER_BYTES + 2 * i, text->tokens[i], 2);
    const char *problem = output_write(path, content, (size_t)bytes);
    app_free(content);
    return problem;
}

/* The code point that begins at `text`, of which `bytes` are left, and how many it takes; 0: it is none. Overlong forms
 * and surrogates are none. */
static int code_point(const uint8_t *text, int64_t bytes, uint32_t *point)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const uint8_t first = text[0];
    const int length = first < 0x80             ? 1
                       : (first & 0xe0) == 0xc0 ? 2
                       : (first & 0xf0) == 0xe0 ? 3
                       : (first & 0xf8) == 0xf0 ? 4
                                                : 0;
    if (length == 0 || length > bytes)
        return 0;
    uint32_t value = length == 1 ? first : first & (0x7fu >> length);
    for (int i = 1; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
        value = value << 6 | (text[i] & 0x3f);
    }
    if (value < least[length] || value > LAST_CODE_POINT || (value >= 0xd800 && value < 0xe000))
        return 0;
    *point = value;
    return length;
}

int gpt2_decode(const gpt2_text *text, int64_t token, char *target)
{
    const uint32_t point = text->characters[token];
    if (point < 0x80) {
        target[0] = (char)point;
        return 1;
    }
    const int length = point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
    for (int i = length - 1; i > 0; i--)
        target[i] = (char)(0x80 | (point >> 6 * (length - 1 - i) & 0x3f));
    target[0] = (char)((0xf00u >> length & 0xff) | point >> 6 * (length - 1));
    return length;
}

gpt2_text gpt2_read_text(const char *path)
{
    reader r = open_reader("text file", path);
    if (r.bytes == 0)
        REFUSE(&r, "text file %s is empty", path);
    uint8_t *bytes = app_allocate(r.bytes, 1);
    read_exactly(&r, bytes, r.bytes);
    fclose(r.file);
    int64_t kept = 0;
    for (int64_t i = 0; i < r.bytes; i++)
        if (bytes[i] != '\r')
            bytes[kept++] = bytes[i];
        else if (i + 1 == r.bytes || bytes[i + 1] != '\n')
            bytes[kept++] = '\n';
    gpt2_text text = {0};
    /* The number of each character among those that there are, from 1 on. */
    uint32_t *numbers = app_allocate(LAST_CODE_POINT + 1, sizeof *numbers);
    uint32_t point = 0;
    for (int64_t i = 0; i < kept; text.count++) {
        const int length = code_point(bytes + i, kept - i, &point);
        if (length == 0)
            app_fail("text file %s is no text in UTF-8; tokens go by --tokens", path);
        numbers[point] = 1;
        i += length;
    }
    for (uint32_t p = 0; p <= LAST_CODE_POINT; p++)
        if (numbers[p])
            numbers[p] = (uint32_t)++text.character_count;
    if (text.character_count > UINT16_MAX + 1)
        app_fail("text file %s has %lld different characters: expected at most %d, which tokens of 16 bits can count",
                 path, (long long)text.character_count, UINT16_MAX + 1);
    text.characters = app_allocate(text.character_count, sizeof *text.characters);
    for (uint32_t p = 0; p <= LAST_CODE_POINT; p++)
        if (numbers[p])
            text.characters[numbers[p] - 1] = p;
    text.tokens = app_allocate(text.count, sizeof *text.tokens);
    for (int64_t i = 0, n = 0; i < kept; n++) {
        i += code_point(bytes + i, kept - i, &point);
        text.tokens[n] = (uint16_t)(numbers[point] - 1);
    }
    app_free(numbers);
    app_free(bytes);
    return text;
}

int64_t gpt2_encode(const gpt2_text *text, const char *option, const char *string, int64_t **tokens)
{
    const int64_t bytes = (int64_t)strlen(string);
    if (bytes == 0)
        app_fail("%s: expected at least one character", option);
    *tokens = app_allocate(bytes, sizeof **tokens);
    int64_t count = 0;
    for (int64_t i = 0; i < bytes; count++) {
        uint32_t point = 0;
        const int length = code_point((const uint8_t *)string + i, bytes - i, &point);
        if (length == 0)
            app_fail("%s: expected a text in UTF-8", option);
        int64_t number = 0;
        while (number < text->character_count && text->characters[number] != point)
            number++;
        if (number == text->character_count)
            app_fail("%s: the text has no '%.*s': begin with what it has", option, length, string + i);
        (*tokens)[count] = number;
        i += length;
    }
    return count;
}
