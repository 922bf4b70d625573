/* Trains the CNN of `python -m cuda_ops mnist` on the C API, without PyTorch and without Python, and prints the same
 * table. From the same start (--weights, a file that `python -m cuda_ops mnist --save-start` writes) the losses equal
 * Python's up to rounding: the same images in the same batches, the same kernels, the same learning rates.
 *
 * exit status: 0 success; 1 training diverged, or a kernel failed; 2 invalid options or files, and one line on stderr
 * says why. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "app.h"
#include "mnist/network.h"

const char app_name[] = "mnist";

enum { PHASES = APP_PHASES, MARKS = PHASES + 1, BLOCK = 10, WARMUP = 10, LAST_STEPS = 50, TEST_BATCH = 500 };
_Static_assert(BLOCK *MARKS <= MNIST_MOST_MARKS, "a block's marks fit the device's list");
/* Part of the run in which the learning rate rises (cuda_ops/training/loop.py says why). */
static const double WARMUP_SHARE = 0.3;

typedef struct options {
    int64_t epochs, batch_size, limit, threads, seed; /* 0: not given, but for seed */
    double lr;
    const char *data_dir, *weights, *device, *out;
} options;

static const char HELP[] =
    "usage: mnist [options]\n"
    "\n"
    "Trains the MNIST CNN on cuda_ops' C API, without PyTorch or Python.\n"
    "\n"
    "  --epochs N        default: 1 on the CPU, 3 on a GPU\n"
    "  --batch-size N    default: 64 on the CPU, 128 on a GPU\n"
    "  --lr X            peak learning rate of plain SGD: it rises linearly over the first three tenths of the run\n"
    "                    and falls to zero at the end (default: 0.07)\n"
    "  --seed N          of the first weights and the order of the batches (default: 0)\n"
    "  --weights FILE    first weights and batches from a file that `python -m cuda_ops mnist --save-start` wrote\n"
    "  --data-dir DIR    the folder that holds MNIST/raw (default: data)\n"
    "  --limit N         for a quick try: only the first N training images and the first N test images\n"
    "  --device D        cpu or cuda (default: cpu)\n"
    "  --threads N       on the CPU (default: one a core)\n"
    "  --out DIR         write report.json there\n"
    "  --help            this text\n"
    "\n"
    "exit status: 0 success; 1 training diverged, or a kernel failed; 2 invalid options or files.\n";

static options parse(int count, char **arguments)
{
    options o = {.lr = 0.07, .data_dir = "data", .device = "cpu"};
    for (int i = 1; i < count; i++) {
        const char *name = arguments[i];
        if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
            fputs(HELP, stdout);
            exit(0);
        }
        static const char *const NAMES[] = {"--epochs",   "--batch-size", "--lr",     "--seed",    "--weights",
                                            "--data-dir", "--limit",      "--device", "--threads", "--out"};
        const int known = (int)(sizeof NAMES / sizeof *NAMES);
        int which = 0;
        while (which < known && strcmp(name, NAMES[which]) != 0)
            which++;
        if (which == known)
            app_fail("unrecognized argument: %s (see --help)", name);
        if (++i == count)
            app_fail("%s: expected a value after it (see --help)", name);
        const char *value = arguments[i];
        switch (which) {
        case 0:
            o.epochs = app_whole_number(name, value, 1, 1000000);
            break;
        case 1:
            o.batch_size = app_whole_number(name, value, 1, 1 << 20);
            break;
        case 2:
            o.lr = app_number(name, value, 0);
            break;
        case 3:
            o.seed = app_whole_number(name, value, 0, INT64_MAX);
            break;
        case 4:
            o.weights = value;
            break;
        case 5:
            o.data_dir = value;
            break;
        case 6:
            o.limit = app_whole_number(name, value, 1, INT32_MAX);
            break;
        case 7:
            if (strcmp(value, "cpu") != 0 && strcmp(value, "cuda") != 0)
                app_fail("%s %s is unknown: expected cpu or cuda", name, value);
            o.device = value;
            break;
        case 8:
            o.threads = app_whole_number(name, value, 1, 1024);
            break;
        default:
            o.out = value;
        }
    }
    return o;
}

static void expect_equal(const char *option, int64_t given, int64_t in_file, const char *path)
{
    if (given && given != in_file)
        app_fail("%s %lld: %s was written for %lld; leave the option out", option, (long long)given, path,
                 (long long)in_file);
}

static mnist_start choose_start(options *o, const mnist_set *train)
{
    const int on_cpu = strcmp(o->device, "cpu") == 0;
    if (o->weights) {
        const mnist_start start = mnist_read_start(o->weights);
        expect_equal("--epochs", o->epochs, start.epochs, o->weights);
        expect_equal("--batch-size", o->batch_size, start.batch_size, o->weights);
        if (start.images != train->count)
            app_fail("file %s was written for %lld training images, and there are %lld: take the same --limit",
                     o->weights, (long long)start.images, (long long)train->count);
        return start;
    }
    const int64_t epochs = o->epochs ? o->epochs : on_cpu ? 1 : 3;
    const int64_t batch_size = o->batch_size ? o->batch_size : on_cpu ? 64 : 128;
    if (batch_size > train->count)
        app_fail("--batch-size %lld is larger than the training set of %lld images", (long long)batch_size,
                 (long long)train->count);
    return mnist_make_start(train->count, batch_size, epochs, (uint64_t)o->seed);
}

/* Rises linearly to `peak` over the first three tenths of the run, then falls linearly to zero. */
static double learning_rate(int64_t step, int64_t steps, double peak)
{
    const double rising = (double)(step + 1) / (WARMUP_SHARE * (double)steps);
    const double falling = (double)(steps - step) / ((double)steps - WARMUP_SHARE * (double)steps);
    return peak * fmin(fmin(rising, falling), 1.0);
}

typedef struct result {
    int64_t steps, warmup, right;
    double *milliseconds; /* steps x PHASES */
    float *losses;
    double train_loss, accuracy;
    int diverged;
} result;

static result train(mnist_device *device, mnist_network *network, const mnist_start *start, const mnist_set *set,
                    double lr)
{
    result r = {.steps = start->steps};
    r.warmup = r.steps / 2 < WARMUP ? r.steps / 2 : WARMUP;
    r.milliseconds = app_allocate(r.steps * PHASES, sizeof(double));
    r.losses = app_allocate(r.steps, sizeof(float));
    for (int64_t first = 0; first < r.steps && !r.diverged; first += BLOCK) {
        const int64_t last = first + BLOCK < r.steps ? first + BLOCK : r.steps;
        for (int64_t step = first; step < last; step++) {
            device->mark(device);
            mnist_load(network, set, start->order + step * start->batch_size, start->batch_size);
            device->mark(device);
            mnist_forward(network, step);
            device->mark(device);
            mnist_backward(network);
            device->mark(device);
            mnist_update(network, learning_rate(step, r.steps, lr));
            device->mark(device);
            /* zero_grad: kernels write gradients and add to none, so that there is nothing to do. */
            device->mark(device);
        }
        double times[MNIST_MOST_MARKS];
        device->collect(device, times, MNIST_MOST_MARKS);
        for (int64_t step = first; step < last; step++)
            memcpy(r.milliseconds + step * PHASES, times + (step - first) * MARKS, PHASES * sizeof(double));
        mnist_losses(network, r.losses + first, first, last);
        for (int64_t step = first; step < last; step++)
            r.diverged |= !isfinite(r.losses[step]);
        if (r.diverged)
            r.steps = last;
    }
    r.warmup = r.steps / 2 < r.warmup ? r.steps / 2 : r.warmup; /* some steps are left to be averaged */
    const int64_t averaged = r.steps < LAST_STEPS ? r.steps : LAST_STEPS;
    for (int64_t step = r.steps - averaged; step < r.steps; step++)
        r.train_loss += (double)r.losses[step] / (double)averaged;
    return r;
}

/* Of one phase, or of the whole step (phase == PHASES), over the steps after the warm-up. */
static app_summary summarize(const result *r, int phase)
{
    return app_summarize_phase(r->milliseconds, r->warmup, r->steps, phase);
}

static void print_table(const result *r, const mnist_device *device, const mnist_start *start)
{
    printf("MNIST CNN on %s\n", device->name);
    printf("%-18s %12s\n", "", "plain C");
    for (int p = 0; p <= PHASES; p++)
        printf("%s, ms%*s %12.3f\n", app_phase_names[p], 14 - (int)strlen(app_phase_names[p]), "",
               summarize(r, p).mean);
    printf("%-18s %12.0f\n", "samples/s", (double)start->batch_size / summarize(r, PHASES).mean * 1e3);
    printf("%-18s %12.1f\n", "peak memory, MB", (double)device->allocated_bytes * 1e-6);
    printf("%-18s %12.4f\n", "train loss", r->train_loss);
    printf("%-18s %12.2f\n", "test accuracy, %", r->accuracy * 100);
    printf("Times are means over %lld steps after %lld of warm-up, of %lld images each; measured by %s.\n",
           (long long)(r->steps - r->warmup), (long long)r->warmup, (long long)start->batch_size, device->measured_by);
    printf("Peak memory is what the network holds, testing included, without the data set.\n");
}

/* The keys are those of the report.json that Python writes. */
static void write_report(const char *folder, const result *r, const mnist_device *device, const mnist_start *start,
                         const options *o)
{
    char *content = NULL;
    size_t bytes = 0;
    FILE *file = open_memstream(&content, &bytes);
    if (!file)
        app_fail("too little memory for a report");
    fprintf(file, "{\n \"device\": {\"type\": \"%s\", \"name\": \"%s\"},\n", o->device, device->name);
    fprintf(file, " \"settings\": {\"epochs\": %lld, \"batch_size\": %lld, \"lr\": %.17g, \"dtype\": \"float32\"},\n",
            (long long)start->epochs, (long long)start->batch_size, o->lr);
    fprintf(file, " \"steps_planned\": %lld,\n \"steps_done\": %lld,\n \"ok\": %s,\n", (long long)start->steps,
            (long long)r->steps, r->diverged ? "false" : "true");
    fprintf(file, " \"backends\": {\"plain C\": {\n  \"milliseconds\": {");
    app_write_phases(file, r->milliseconds, r->warmup, r->steps);
    fprintf(file, "\n  },\n  \"samples_per_second\": %.6g,\n  \"peak_memory_bytes\": %lld,\n  \"train_loss\": ",
            (double)start->batch_size / summarize(r, PHASES).mean * 1e3, (long long)device->allocated_bytes);
    app_write_number(file, r->train_loss);
    fprintf(file, ",\n  \"test_accuracy\": %.9g,\n  \"losses\": [", r->accuracy);
    for (int64_t step = 0; step < r->steps; step++) {
        fputs(step ? ", " : "", file);
        app_write_number(file, r->losses[step]);
    }
    fprintf(file, "]\n }}\n}\n");
    const int incomplete = ferror(file);
    if (fclose(file) != 0 || incomplete)
        app_fail("too little memory for a report");
    app_write_report(folder, content, bytes);
}

int main(int count, char **arguments)
{
    options o = parse(count, arguments);
    mnist_set train_set = mnist_read_set(o.data_dir, "train", o.limit);
    mnist_set test_set = mnist_read_set(o.data_dir, "t10k", o.limit);
    mnist_start start = choose_start(&o, &train_set);
    if (start.steps > INT32_MAX)
        app_fail("--epochs %lld with batches of %lld make too many steps", (long long)start.epochs,
                 (long long)start.batch_size);
    if (o.out)
        app_check_report(o.out);
    mnist_device *device = strcmp(o.device, "cpu") == 0 ? mnist_open_cpu((int)o.threads) : mnist_open_cuda();
    const int64_t test_batch = test_set.count < TEST_BATCH ? test_set.count : TEST_BATCH;
    mnist_network *network =
        mnist_make_network(device, &start, start.batch_size > test_batch ? start.batch_size : test_batch);
    result r = train(device, network, &start, &train_set, o.lr);
    r.right = mnist_count_right(network, &test_set, test_batch);
    r.accuracy = (double)r.right / (double)test_set.count;
    print_table(&r, device, &start);
    if (o.out)
        write_report(o.out, &r, device, &start, &o);
    if (r.diverged)
        printf("FAILED: training diverged: the loss is no longer a finite number; take a smaller --lr\n");
    app_free(r.milliseconds);
    app_free(r.losses);
    app_free(network);
    device->close(device);
    mnist_free_start(&start);
    mnist_free_set(&train_set);
    mnist_free_set(&test_set);
    assert(app_all_is_freed());
    return r.diverged;
}
