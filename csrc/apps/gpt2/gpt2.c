/* Trains the GPT-2 of `python -m cuda_ops gpt` on the C API, without PyTorch and without Python, and prints the same
 * table. From the same weights (--init, a checkpoint of llm.c's) and the same batches (--in-order) the losses equal
 * Python's up to rounding: the same kernels in the same order, the same learning rates.
 *
 * exit status: 0 success; 1 training diverged, or a kernel failed; 2 invalid options or files, and one line on stderr
 * says why. */
#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "app.h"
#include "gpt2/model.h"
#include "output.h"

const char app_name[] = "gpt2";

enum { PHASES = APP_PHASES, MARKS = PHASES + 1, BLOCK = 10, WARMUP = 10, LAST_STEPS = 50, EVALUATIONS = 4 };
_Static_assert(BLOCK *MARKS <= GPT2_MOST_MARKS, "a block's marks fit the device's list");
/* The first part of a text is to train on, the rest to validate; the validation loss is over so many batches, and
 * tokens, at most (cuda_ops/data/text.py, cuda_ops/training/gpt/run.py). */
static const double TRAIN_SHARE = 0.9;
enum { EVALUATED_BATCHES = 150, EVALUATED_TOKENS = 1 << 17, GPT2_VOCABULARY = 50257, MOST_SAMPLED = 1000000 };
/* Of the text at the end. */
static const double TEMPERATURE = 0.8;
enum { TOP_K = 200 };

typedef struct recipe {
    const char *name;
    gpt2_config config;
    int64_t batch, length, steps, warmup;
    double lr, min_lr, beta2, weight_decay, clip;
    int64_t recomputed; /* of the first blocks */
} recipe;

/* Those of cuda_ops/training/gpt/settings.py, which says where they come from; those with dropout are not here. */
static const recipe RECIPES[] = {
    {"cpu-char", {65, 64, 4, 4, 128, 0}, 12, 64, 2000, 100, 2e-3, 2e-4, 0.99, 0.1, 1.0, 0},
    {"gpt2-124m", {50304, 1024, 12, 12, 768, 1}, 32, 1024, 100, 20, 6e-4, 6e-5, 0.95, 0.1, 1.0, 1},
    {"gpt2-350m", {50304, 1024, 24, 16, 1024, 1}, 16, 1024, 100, 20, 6e-4, 6e-5, 0.95, 0.1, 1.0, 0},
    {"gpt2-774m", {50304, 1024, 36, 20, 1280, 1}, 8, 1024, 100, 20, 6e-4, 6e-5, 0.95, 0.1, 1.0, 0},
    {"gpt2-1558m", {50304, 1024, 48, 25, 1600, 1}, 4, 1024, 100, 20, 6e-4, 6e-5, 0.95, 0.1, 1.0, 0},
};
enum { RECIPE_COUNT = sizeof RECIPES / sizeof *RECIPES };

typedef struct options {
    const char *model, *tokens, *val_tokens, *text, *data_dir, *prompt, *init, *export, *export_dtype, *export_tokens;
    const char *device, *precision, *out;
    int64_t steps, batch, length, warmup, seed, eval_every, sample, recompute, threads; /* -1: not given */
    double lr, min_lr, weight_decay, clip;                                              /* likewise */
    int64_t no_bias, in_order, no_graph;
} options;

static const char HELP[] =
    "usage: gpt2 [options]\n"
    "\n"
    "Trains GPT-2, or a small model of characters, on cuda_ops' C API, without PyTorch or Python.\n"
    "\n"
    "  --model M         cpu-char (nanoGPT's, of characters), gpt2-124m, gpt2-350m, gpt2-774m or gpt2-1558m\n"
    "                    (default: cpu-char)\n"
    "  --tokens FILE     train on a token file of llm.c's (uint16)\n"
    "  --val-tokens FILE validate by this one (default: the last tenth of --tokens)\n"
    "  --text FILE       train on a text, by characters (default: tiny Shakespeare)\n"
    "  --data-dir DIR    the folder of tinyshakespeare/input.txt (default: data)\n"
    "  --init FILE       begin with weights and sizes of a checkpoint of llm.c's\n"
    "  --no-bias         without biases (default: cpu-char has none, GPT-2 and --init have them)\n"
    "  --steps N         default: 2000 of characters, 100 of GPT-2\n"
    "  --batch N         sequences of a step\n"
    "  --length N        tokens of a sequence\n"
    "  --lr X            peak learning rate of AdamW: it rises in --warmup steps and falls along a cosine\n"
    "  --min-lr X        what it falls to (default: a tenth)\n"
    "  --warmup N\n"
    "  --weight-decay X  of matrices (default: 0.1)\n"
    "  --clip X          the norm that gradients are clipped at (default: 1)\n"
    "  --seed N          of the first weights, the batches and the generated text (default: 0)\n"
    "  --in-order        take the training data's stretches one after the other, not by chance\n"
    "  --eval-every N    steps between looks at the validation loss (default: a quarter)\n"
    "  --sample N        generate a text of N characters at the end (default: 500)\n"
    "  --prompt TEXT     what it begins with (default: a new line)\n"
    "  --export FILE     write the weights as a checkpoint of llm.c's\n"
    "  --export-dtype D  fp32 or bf16 (default: fp32)\n"
    "  --export-tokens FILE\n"
    "                    write the tokens of the text as a token file of llm.c's\n"
    "  --device D        cpu or cuda (default: cpu)\n"
    "  --precision P     fp32; with --device cuda also tf32, or bf16 with parameters in fp32 (default there: bf16)\n"
    "  --recompute N     do not keep gelu's output in the first N blocks: backward makes it again (default: 1 of\n"
    "                    gpt2-124m's, else 0)\n"
    "  --no-graph        with --device cuda, launch every kernel in every step, not recorded ones as CUDA graphs\n"
    "  --threads N       default: one a core\n"
    "  --out DIR         write report.json there\n"
    "  --help            this text\n"
    "\n"
    "exit status: 0 success; 1 training diverged, or a kernel failed; 2 invalid options or files.\n";

typedef enum kind { TEXT, WHOLE, ABOVE_ZERO, AT_LEAST_ZERO, FLAG } kind;

static gpt2_precision precision_of(const options *o)
{
    static const char *const NAMES[] = {[GPT2_FP32] = "fp32", [GPT2_TF32] = "tf32", [GPT2_BF16] = "bf16"};
    for (int i = 0; i < (int)(sizeof NAMES / sizeof *NAMES); i++)
        if (strcmp(o->precision, NAMES[i]) == 0)
            return i;
    app_fail("--precision %s is unknown: expected fp32, tf32 or bf16", o->precision);
}

static options parse(int count, char **arguments)
{
    static const struct {
        const char *name;
        kind kind;
        size_t offset;
        int64_t least, largest; /* of whole numbers */
    } KNOWN[] = {
        {"--model", TEXT, offsetof(options, model), 0, 0},
        {"--tokens", TEXT, offsetof(options, tokens), 0, 0},
        {"--val-tokens", TEXT, offsetof(options, val_tokens), 0, 0},
        {"--text", TEXT, offsetof(options, text), 0, 0},
        {"--data-dir", TEXT, offsetof(options, data_dir), 0, 0},
        {"--init", TEXT, offsetof(options, init), 0, 0},
        {"--no-bias", FLAG, offsetof(options, no_bias), 0, 0},
        {"--steps", WHOLE, offsetof(options, steps), 1, 10000000},
        {"--batch", WHOLE, offsetof(options, batch), 1, 1 << 20},
        {"--length", WHOLE, offsetof(options, length), 1, 1 << 20},
        {"--lr", ABOVE_ZERO, offsetof(options, lr), 0, 0},
        {"--min-lr", AT_LEAST_ZERO, offsetof(options, min_lr), 0, 0},
        {"--warmup", WHOLE, offsetof(options, warmup), 0, 100000000},
        {"--weight-decay", AT_LEAST_ZERO, offsetof(options, weight_decay), 0, 0},
        {"--clip", ABOVE_ZERO, offsetof(options, clip), 0, 0},
        {"--seed", WHOLE, offsetof(options, seed), 0, INT64_MAX},
        {"--in-order", FLAG, offsetof(options, in_order), 0, 0},
        {"--eval-every", WHOLE, offsetof(options, eval_every), 1, 100000000},
        {"--sample", WHOLE, offsetof(options, sample), 0, MOST_SAMPLED},
        {"--prompt", TEXT, offsetof(options, prompt), 0, 0},
        {"--export", TEXT, offsetof(options, export), 0, 0},
        {"--export-dtype", TEXT, offsetof(options, export_dtype), 0, 0},
        {"--export-tokens", TEXT, offsetof(options, export_tokens), 0, 0},
        {"--device", TEXT, offsetof(options, device), 0, 0},
        {"--precision", TEXT, offsetof(options, precision), 0, 0},
        {"--recompute", WHOLE, offsetof(options, recompute), 0, INT32_MAX},
        {"--no-graph", FLAG, offsetof(options, no_graph), 0, 0},
        {"--threads", WHOLE, offsetof(options, threads), 1, 1024},
        {"--out", TEXT, offsetof(options, out), 0, 0},
    };
    enum { KNOWN_COUNT = sizeof KNOWN / sizeof *KNOWN };
    options o = {.data_dir = "data",
                 .prompt = "\n",
                 .export_dtype = "fp32",
                 .device = "cpu",
                 .steps = -1,
                 .batch = -1,
                 .length = -1,
                 .warmup = -1,
                 .eval_every = -1,
                 .sample = 500,
                 .recompute = -1,
                 .lr = -1,
                 .min_lr = -1,
                 .weight_decay = -1,
                 .clip = -1};
    for (int i = 1; i < count; i++) {
        const char *const name = arguments[i];
        if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
            fputs(HELP, stdout);
            exit(0);
        }
        int which = 0;
        while (which < KNOWN_COUNT && strcmp(name, KNOWN[which].name) != 0)
            which++;
        if (which == KNOWN_COUNT)
            app_fail("unrecognized argument: %s (see --help)", name);
        void *const target = (char *)&o + KNOWN[which].offset;
        if (KNOWN[which].kind == FLAG) {
            *(int64_t *)target = 1;
            continue;
        }
        if (++i == count)
            app_fail("%s: expected a value after it (see --help)", name);
        if (KNOWN[which].kind == TEXT)
            *(const char **)target = arguments[i];
        else if (KNOWN[which].kind == WHOLE)
            *(int64_t *)target = app_whole_number(name, arguments[i], KNOWN[which].least, KNOWN[which].largest);
        else
            *(double *)target = app_number(name, arguments[i], KNOWN[which].kind == AT_LEAST_ZERO);
    }
    if (strcmp(o.device, "cpu") != 0 && strcmp(o.device, "cuda") != 0)
        app_fail("--device %s is unknown: expected cpu or cuda", o.device);
    if (!o.precision)
        o.precision = strcmp(o.device, "cuda") == 0 ? "bf16" : "fp32";
    if (precision_of(&o) != GPT2_FP32 && strcmp(o.device, "cpu") == 0)
        app_fail("--precision %s needs a GPU: on the CPU take --precision fp32", o.precision);
    if (o.no_graph && strcmp(o.device, "cpu") == 0)
        app_fail("--no-graph: the CPU has no graphs: it is for --device cuda");
    if (strcmp(o.export_dtype, "fp32") != 0 && strcmp(o.export_dtype, "bf16") != 0)
        app_fail("--export-dtype %s is unknown: expected fp32 or bf16", o.export_dtype);
    if (o.tokens && o.text)
        app_fail("--tokens and --text: expected one of them");
    if (o.val_tokens && !o.tokens)
        app_fail("--val-tokens needs --tokens");
    if (o.export_tokens && o.tokens)
        app_fail("--export-tokens writes the tokens of a text, and --tokens has them already: expected one of them");
    return o;
}

static recipe choose_recipe(const options *o)
{
    recipe r = RECIPES[0];
    if (o->model) {
        int which = 0;
        while (which < RECIPE_COUNT && strcmp(o->model, RECIPES[which].name) != 0)
            which++;
        if (which == RECIPE_COUNT)
            app_fail("--model %s is unknown: expected cpu-char, gpt2-124m, gpt2-350m, gpt2-774m or gpt2-1558m",
                     o->model);
        r = RECIPES[which];
    }
    r.min_lr = o->min_lr >= 0 ? o->min_lr : (o->lr > 0 ? o->lr : r.lr) * r.min_lr / r.lr;
    r.lr = o->lr > 0 ? o->lr : r.lr;
    r.weight_decay = o->weight_decay >= 0 ? o->weight_decay : r.weight_decay;
    r.clip = o->clip > 0 ? o->clip : r.clip;
    r.steps = o->steps > 0 ? o->steps : r.steps;
    r.batch = o->batch > 0 ? o->batch : r.batch;
    r.recomputed = o->recompute >= 0 ? o->recompute : r.recomputed;
    r.warmup = o->warmup >= 0 ? o->warmup : r.warmup < r.steps / 2 ? r.warmup : r.steps / 2;
    return r;
}

/* Sequences of tokens, each with the tokens that follow it by one. */
typedef struct windows {
    const uint16_t *tokens;
    int64_t count, length;
} windows;

typedef struct corpus {
    gpt2_text text, other; /* other: that of --val-tokens */
    windows train, validation;
    const char *name;
} corpus;

/* How many stretches there are that do not overlap. */
static int64_t stretches(const windows *w)
{
    return (w->count - w->length + w->length - 1) / w->length;
}

static void fill_rows(const windows *w, const int64_t *begins, int64_t batch, int64_t *inputs, int64_t *targets)
{
    for (int64_t b = 0; b < batch; b++)
        for (int64_t t = 0; t < w->length; t++) {
            inputs[b * w->length + t] = w->tokens[begins[b] + t];
            targets[b * w->length + t] = w->tokens[begins[b] + t + 1];
        }
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static corpus read_corpus(const options *o)
{
    corpus c = {0};
    if (o->tokens) {
        c.text = gpt2_read_tokens(o->tokens);
        c.name = base_name(o->tokens);
        if (o->val_tokens)
            c.other = gpt2_read_tokens(o->val_tokens);
        return c;
    }
    char path[4096];
    if (snprintf(path, sizeof path, "%s/tinyshakespeare/input.txt", o->data_dir) >= (int)sizeof path)
        app_fail("--data-dir: the name of the folder is too long");
    c.text = gpt2_read_text(o->text ? o->text : path);
    c.name = o->text ? base_name(o->text) : "tiny Shakespeare";
    return c;
}

static void check_vocabulary(const options *o, const corpus *c, const gpt2_config *config)
{
    if (o->tokens) {
        gpt2_check_tokens(&c->text, config->vocab_size, o->tokens);
        if (o->val_tokens)
            gpt2_check_tokens(&c->other, config->vocab_size, o->val_tokens);
        return;
    }
    if (config->vocab_size >= GPT2_VOCABULARY)
        app_fail("a text for GPT-2's vocabulary takes its tokenizer, which this program has not: give a file of tokens "
                 "as --tokens");
    if (c->text.character_count != config->vocab_size)
        app_fail("%s has %lld different characters, and the model knows %lld", c->name,
                 (long long)c->text.character_count, (long long)config->vocab_size);
}

static void divide_corpus(corpus *c, const recipe *r)
{
    const int64_t middle = c->other.tokens ? c->text.count : (int64_t)(TRAIN_SHARE * (double)c->text.count);
    c->train = (windows){c->text.tokens, middle, r->length};
    c->validation = c->other.tokens ? (windows){c->other.tokens, c->other.count, r->length}
                                    : (windows){c->text.tokens + middle, c->text.count - middle, r->length};
    const windows *const parts[] = {&c->train, &c->validation};
    for (int i = 0; i < 2; i++)
        if (parts[i]->count <= r->length)
            app_fail(
                "--length %lld: the %s data has %lld tokens, and a sequence takes one more than its length: take a "
                "shorter one or more data",
                (long long)r->length, i ? "validation" : "training", (long long)parts[i]->count);
}

static gpt2_config choose_config(const options *o, const recipe *r, const corpus *c)
{
    gpt2_config config = r->config;
    config.bias = config.bias && !o->no_bias;
    if (o->text && config.vocab_size < GPT2_VOCABULARY)
        config.vocab_size = c->text.character_count;
    return config;
}

static void check_lengths(const options *o, recipe *r)
{
    r->length = o->length > 0 ? o->length : r->length < r->config.block_size ? r->length : r->config.block_size;
    if (r->length > r->config.block_size)
        app_fail("--length %lld: the model sees at most %lld tokens", (long long)r->length,
                 (long long)r->config.block_size);
    if (r->batch * r->length > INT32_MAX)
        app_fail("--batch %lld: expected at most %d tokens in a step, %lld of them in a sequence", (long long)r->batch,
                 INT32_MAX, (long long)r->length);
}

/* Rises linearly over the first `warmup` steps, then falls along half a cosine. */
static double learning_rate(int64_t step, const recipe *r)
{
    if (step < r->warmup)
        return r->lr * (double)(step + 1) / (double)(r->warmup + 1);
    const int64_t falling = r->steps - r->warmup > 1 ? r->steps - r->warmup : 1;
    const double share = fmin(1.0, (double)(step - r->warmup) / (double)falling);
    return r->min_lr + 0.5 * (1.0 + cos(3.141592653589793 * share)) * (r->lr - r->min_lr);
}

typedef struct evaluation {
    int64_t step;
    double loss;
} evaluation;

typedef struct result {
    int64_t steps, warmup;
    double *milliseconds; /* steps x PHASES */
    float *losses;
    double train_loss;
    evaluation *validation;
    int64_t evaluations, evaluated_tokens;
    int diverged;
    char *sample; /* UTF-8; NULL: none */
    size_t sample_bytes;
} result;

typedef struct batch {
    int64_t *begins, *inputs, *targets;
} batch;

static int64_t evaluated_tokens(const windows *w, const recipe *r)
{
    const int64_t batches = EVALUATED_BATCHES * r->batch * r->length, all = w->count - w->length;
    const int64_t most = batches < EVALUATED_TOKENS ? batches : EVALUATED_TOKENS;
    return most < all ? most : all;
}

/* The mean loss over the first part of the validation data. Its losses go to the model's last place. */
static double evaluate(gpt2_model *model, const windows *w, const recipe *r, batch *b)
{
    int64_t sequences = evaluated_tokens(w, r) / r->length;
    sequences = sequences > r->batch ? sequences : r->batch;
    sequences = sequences < stretches(w) ? sequences : stretches(w);
    double total = 0;
    for (int64_t first = 0; first < sequences; first += r->batch) {
        const int64_t count = sequences - first < r->batch ? sequences - first : r->batch;
        for (int64_t i = 0; i < count; i++)
            b->begins[i] = (first + i) * r->length;
        fill_rows(w, b->begins, count, b->inputs, b->targets);
        gpt2_load(model, b->inputs, b->targets, count, r->length);
        gpt2_forward(model, r->steps, 0);
        float loss;
        gpt2_losses(model, &loss, r->steps, r->steps + 1);
        total += (double)loss * (double)count;
    }
    return total / (double)sequences;
}

static void choose_batch(const windows *w, const recipe *r, int64_t step, int in_order, uint64_t *state, batch *b)
{
    const uint64_t choices = (uint64_t)(w->count - w->length);
    for (int64_t i = 0; i < r->batch; i++)
        /* 32 random bits map to the places not quite uniformly: to within one part in 2^32 / choices. */
        b->begins[i] = in_order ? (step * r->batch + i) % stretches(w) * r->length
                                : (int64_t)((app_random(state) >> 32) * choices >> 32);
    fill_rows(w, b->begins, r->batch, b->inputs, b->targets);
}

static int64_t next_multiple(int64_t step, int64_t every)
{
    return (step / every + 1) * every;
}

static result train(gpt2_device *device, gpt2_model *model, const corpus *c, const recipe *r, const options *o)
{
    result result = {.steps = r->steps, .evaluated_tokens = evaluated_tokens(&c->validation, r)};
    const int64_t every = o->eval_every > 0 ? o->eval_every : r->steps / EVALUATIONS > 1 ? r->steps / EVALUATIONS : 1;
    result.milliseconds = app_allocate(r->steps * PHASES, sizeof(double));
    result.losses = app_allocate(r->steps, sizeof(float));
    result.validation = app_allocate(r->steps / every + 1, sizeof(evaluation));
    batch b = {app_allocate(r->batch, sizeof(int64_t)), app_allocate(r->batch * r->length, sizeof(int64_t)),
               app_allocate(r->batch * r->length, sizeof(int64_t))};
    uint64_t state = (uint64_t)o->seed ^ 0x6261746368657321u; /* not the stream of the first weights */
    for (int64_t first = 0, last; first < r->steps && !result.diverged; first = last) {
        last = next_multiple(first, BLOCK) < next_multiple(first, every) ? next_multiple(first, BLOCK)
                                                                         : next_multiple(first, every);
        last = last < r->steps ? last : r->steps;
        for (int64_t step = first; step < last; step++) {
            device->mark(device);
            choose_batch(&c->train, r, step, (int)o->in_order, &state, &b);
            gpt2_load(model, b.inputs, b.targets, r->batch, r->length);
            device->mark(device);
            gpt2_forward(model, step, 1);
            device->mark(device);
            gpt2_backward(model);
            device->mark(device);
            const gpt2_update update = {step + 1, learning_rate(step, r), r->beta2, r->weight_decay, r->clip};
            gpt2_step(model, &update);
            device->mark(device);
            /* zero_grad: kernels write gradients and add to none, so that there is nothing to do. */
            device->mark(device);
        }
        double times[GPT2_MOST_MARKS];
        device->collect(device, times, GPT2_MOST_MARKS);
        for (int64_t step = first; step < last; step++)
            memcpy(result.milliseconds + step * PHASES, times + (step - first) * MARKS, PHASES * sizeof(double));
        gpt2_losses(model, result.losses + first, first, last);
        for (int64_t step = first; step < last; step++)
            result.diverged |= !isfinite(result.losses[step]);
        if (result.diverged)
            result.steps = last;
        else if (last % every == 0 || last == r->steps) {
            const evaluation e = {last, evaluate(model, &c->validation, r, &b)};
            result.validation[result.evaluations++] = e;
            printf("step %lld: train loss %.4f, validation loss %.4f\n", (long long)last, result.losses[last - 1],
                   e.loss);
            fflush(stdout);
        }
    }
    result.warmup = result.steps / 2 < WARMUP ? result.steps / 2 : WARMUP;
    const int64_t averaged = result.steps < LAST_STEPS ? result.steps : LAST_STEPS;
    for (int64_t step = result.steps - averaged; step < result.steps; step++)
        result.train_loss += (double)result.losses[step] / (double)averaged;
    app_free(b.begins);
    app_free(b.inputs);
    app_free(b.targets);
    return result;
}

static int descending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* By the probabilities of the TOP_K most probable ones. `sorted` is room for as many logits. */
static int64_t draw(const float *logits, float *sorted, int64_t count, uint64_t *state)
{
    memcpy(sorted, logits, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, descending);
    const float most = sorted[0], least = sorted[count < TOP_K ? count - 1 : TOP_K - 1];
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += logits[i] >= least ? exp((double)(logits[i] - most) / TEMPERATURE) : 0.0;
    double left = app_random_uniform(state) * sum;
    int64_t last = 0;
    for (int64_t i = 0; i < count; i++) {
        if (logits[i] < least)
            continue;
        last = i;
        left -= exp((double)(logits[i] - most) / TEMPERATURE);
        if (left < 0)
            break;
    }
    return last;
}

/* A text that goes on from the prompt's tokens. As long as all of it fits into the model's context, keys and values of
 * what was seen are kept; beyond, the whole context is computed for every token. */
static void generate(result *r, gpt2_model *model, const gpt2_text *text, const gpt2_config *config,
                     const int64_t *prompt, int64_t prompt_count, int64_t count, uint64_t seed)
{
    const int64_t all = prompt_count + count, room = config->block_size;
    int64_t *tokens = app_allocate(all, sizeof *tokens);
    float *logits = app_allocate(2 * config->vocab_size, sizeof *logits);
    memcpy(tokens, prompt, (size_t)prompt_count * sizeof *tokens);
    uint64_t state = seed ^ 0x73616d706c652121u;
    int64_t known = 0;
    for (int64_t n = prompt_count; n < all; n++) {
        if (n <= room)
            gpt2_logits(model, logits, tokens, known, n);
        else
            gpt2_logits(model, logits, tokens + n - room, 0, room);
        known = n;
        tokens[n] = draw(logits, logits + config->vocab_size, config->vocab_size, &state);
    }
    r->sample = app_allocate(4 * all, 1);
    for (int64_t n = 0; n < all; n++)
        r->sample_bytes += (size_t)gpt2_decode(text, tokens[n], r->sample + r->sample_bytes);
    app_free(tokens);
    app_free(logits);
}

/* Of one phase, or of the whole step (phase == PHASES), over the steps after the warm-up. */
static app_summary summarize(const result *r, int phase)
{
    return app_summarize_phase(r->milliseconds, r->warmup, r->steps, phase);
}

static double tokens_per_second(const result *result, const recipe *r)
{
    return (double)(r->batch * r->length) / summarize(result, PHASES).median * 1e3;
}

static double last_validation(const result *r)
{
    return r->evaluations ? r->validation[r->evaluations - 1].loss : NAN;
}

static double best_validation(const result *r)
{
    double best = NAN;
    for (int64_t i = 0; i < r->evaluations; i++)
        best = fmin(best, r->validation[i].loss);
    return best;
}

static const char *model_name(const options *o, const recipe *r)
{
    return o->init ? base_name(o->init) : r->name;
}

static void print_table(const result *result, const gpt2_device *device, const recipe *r, const options *o,
                        const char *data)
{
    if (result->sample)
        printf("%.*s\n", (int)result->sample_bytes, result->sample);
    printf("GPT %s on %s, %s\n", model_name(o, r), device->name, o->precision);
    printf("%-22s %12s\n", "", "plain C");
    for (int p = 0; p <= PHASES; p++)
        printf("%s, ms%*s %12.3f\n", app_phase_names[p], 18 - (int)strlen(app_phase_names[p]), "",
               summarize(result, p).median);
    printf("%-22s %12.0f\n", "tokens/s", tokens_per_second(result, r));
    printf("%-22s %12.1f\n", "peak memory, MB", (double)device->allocated_bytes * 1e-6);
    printf("%-22s %12lld\n", "steps", (long long)result->steps);
    printf("%-22s %12.4f\n", "train loss", result->train_loss);
    printf("%-22s %12.4f\n", "validation loss", last_validation(result));
    printf("%-22s %12.4f\n", "best validation loss", best_validation(result));
    printf("Times are medians over %lld steps after %lld of warm-up, %lld x %lld tokens each; measured by %s.\n",
           (long long)(result->steps - result->warmup), (long long)result->warmup, (long long)r->batch,
           (long long)r->length, device->measured_by);
    printf("Peak memory is what the model holds, validation included, without the data.\n");
    printf("Validation loss is over %lld tokens of %s.\n", (long long)result->evaluated_tokens, data);
}

/* The keys are those of the report.json that Python writes. */
static void write_report(const result *result, const gpt2_device *device, const recipe *r, const options *o,
                         const char *data)
{
    char *content = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&content, &bytes);
    if (!file)
        app_fail("too little memory for a report");
    fprintf(file, "{\n \"device\": {\"type\": \"%s\", \"name\": ", o->device);
    app_write_string(file, device->name, strlen(device->name));
    fprintf(file, "},\n \"settings\": {\"model\": ");
    app_write_string(file, model_name(o, r), strlen(model_name(o, r)));
    fprintf(file,
            ", \"batch\": %lld, \"length\": %lld, \"steps\": %lld, \"lr\": %.17g, \"min_lr\": %.17g, \"warmup\": "
            "%lld, \"beta2\": %.17g, \"weight_decay\": %.17g, \"clip\": %.17g, \"precision\": \"%s\", "
            "\"recomputed_blocks\": %lld, \"graph\": %s, \"seed\": %lld,\n"
            "  \"config\": {\"vocab_size\": %lld, \"block_size\": %lld, \"n_layer\": %lld, \"n_head\": %lld, "
            "\"n_embd\": %lld, \"dropout\": 0.0, \"bias\": %s}, \"data\": ",
            (long long)r->batch, (long long)r->length, (long long)r->steps, r->lr, r->min_lr, (long long)r->warmup,
            r->beta2, r->weight_decay, r->clip, o->precision, (long long)r->recomputed,
            device->records ? "true" : "false", (long long)o->seed, (long long)r->config.vocab_size,
            (long long)r->config.block_size, (long long)r->config.layers, (long long)r->config.heads,
            (long long)r->config.features, r->config.bias ? "true" : "false");
    app_write_string(file, data, strlen(data));
    fprintf(file, "},\n \"parameters\": %lld,\n \"steps_planned\": %lld,\n \"steps_done\": %lld,\n \"ok\": %s,\n",
            (long long)gpt2_parameter_count(&r->config), (long long)r->steps, (long long)result->steps,
            result->diverged ? "false" : "true");
    fprintf(file, " \"validation_tokens\": %lld,\n \"backends\": {\"plain C\": {\n  \"milliseconds\": {",
            (long long)result->evaluated_tokens);
    app_write_phases(file, result->milliseconds, result->warmup, result->steps);
    fprintf(file, "\n  },\n  \"tokens_per_second\": %.6g,\n  \"peak_memory_bytes\": %lld,\n  \"steps\": %lld",
            tokens_per_second(result, r), (long long)device->allocated_bytes, (long long)result->steps);
    fprintf(file, ",\n  \"train_loss\": ");
    app_write_number(file, result->train_loss);
    fprintf(file, ",\n  \"validation_loss\": ");
    app_write_number(file, last_validation(result));
    fprintf(file, ",\n  \"best_validation_loss\": ");
    app_write_number(file, best_validation(result));
    fprintf(file, ",\n  \"losses\": [");
    for (int64_t step = 0; step < result->steps; step++) {
        fputs(step ? ", " : "", file);
        app_write_number(file, result->losses[step]);
    }
    fprintf(file, "],\n  \"validation\": [");
    for (int64_t i = 0; i < result->evaluations; i++) {
        fprintf(file, "%s[%lld, ", i ? ", " : "", (long long)result->validation[i].step);
        app_write_number(file, result->validation[i].loss);
        fputc(']', file);
    }
    fprintf(file, "]\n }},\n \"sample\": ");
    if (result->sample)
        app_write_string(file, result->sample, result->sample_bytes);
    else
        fputs("null", file);
    fprintf(file, "\n}\n");
    const int incomplete = ferror(file);
    if (fclose(file) != 0 || incomplete) {
        free(content);
        app_fail("too little memory for a report");
    }
    app_write_report(o->out, content, bytes);
}

static void check_output(const char *option, const char *path)
{
    const char *const problem = path ? output_check(path) : NULL;
    if (problem)
        app_fail("%s %s cannot be written (%s)", option, path, problem);
}

static void expect_written(const char *option, const char *path, const char *problem)
{
    if (problem)
        app_fail("%s %s cannot be written (%s)", option, path, problem);
    printf("%s: %s\n", option, path);
}

int main(int count, char **arguments)
{
    const options o = parse(count, arguments);
    recipe r = choose_recipe(&o);
    corpus c = read_corpus(&o);
    gpt2_weights weights = {0};
    if (o.init)
        weights = gpt2_read_checkpoint(o.init, !o.no_bias);
    r.config = o.init ? weights.config : choose_config(&o, &r, &c);
    check_vocabulary(&o, &c, &r.config);
    check_lengths(&o, &r);
    divide_corpus(&c, &r);
    int64_t *prompt = NULL;
    const int64_t prompt_count =
        c.text.characters && o.sample ? gpt2_encode(&c.text, "--prompt", o.prompt, &prompt) : 0;
    check_output("--export", o.export);
    check_output("--export-tokens", o.export_tokens);
    if (o.out)
        app_check_report(o.out);
    if (o.export_tokens)
        expect_written("--export-tokens", o.export_tokens, gpt2_write_tokens(o.export_tokens, &c.text));

    if (!o.init)
        weights = gpt2_first_weights(&r.config, (uint64_t)o.seed);
    gpt2_device *device =
        strcmp(o.device, "cpu") == 0 ? gpt2_open_cpu((int)o.threads) : gpt2_open_cuda(precision_of(&o), !o.no_graph);
    const int64_t trained = r.batch * r.length;
    gpt2_model *model =
        gpt2_make_model(device, &weights, prompt && trained < r.config.block_size ? r.config.block_size : trained,
                        r.steps + 1, r.recomputed);
    app_free(weights.values);
    result result = train(device, model, &c, &r, &o);
    if (prompt && !result.diverged)
        generate(&result, model, &c.text, &r.config, prompt, prompt_count, o.sample, (uint64_t)o.seed);
    print_table(&result, device, &r, &o, c.name);
    if (o.out)
        write_report(&result, device, &r, &o, c.name);
    if (o.export && !result.diverged) {
        weights = gpt2_weights_of(model);
        expect_written("--export", o.export,
                       gpt2_write_checkpoint(o.export, &weights, strcmp(o.export_dtype, "bf16") == 0));
        app_free(weights.values);
    }
    if (result.diverged)
        printf("FAILED: training diverged: the loss is no longer a finite number; take a smaller --lr\n");
    app_free(prompt);
    app_free(result.milliseconds);
    app_free(result.losses);
    app_free(result.validation);
    app_free(result.sample);
    app_free(model);
    device->close(device);
    void *const texts[] = {c.text.tokens, c.text.characters, c.other.tokens};
    for (int i = 0; i < 3; i++)
        app_free(texts[i]);
    assert(app_all_is_freed());
    return result.diverged;
}
