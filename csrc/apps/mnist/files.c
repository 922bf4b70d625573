#include "mnist/files.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef MNIST_WITH_ZLIB
#include <zlib.h>
#endif

#include "app.h"

const mnist_tensor mnist_tensors[MNIST_TENSORS] = {
    {"conv1.weight", 32 * 1 * 3 * 3, 1 * 3 * 3, 1, 0},
    {"conv1.bias", 32, 1 * 3 * 3, 1, 0},
    {"norm1.weight", 32, 0, 1, 1},
    {"norm1.bias", 32, 0, 1, 0},
    {"norm1.running_mean", 32, 0, 0, 0},
    {"norm1.running_var", 32, 0, 0, 1},
    {"conv2.weight", 64 * 32 * 3 * 3, 32 * 3 * 3, 1, 0},
    {"conv2.bias", 64, 32 * 3 * 3, 1, 0},
    {"norm2.weight", 64, 0, 1, 1},
    {"norm2.bias", 64, 0, 1, 0},
    {"norm2.running_mean", 64, 0, 0, 0},
    {"norm2.running_var", 64, 0, 0, 1},
    {"linear1.weight", 128 * 3136, 3136, 1, 0},
    {"linear1.bias", 128, 3136, 1, 0},
    {"linear2.weight", 10 * 128, 128, 1, 0},
    {"linear2.bias", 10, 128, 1, 0},
};

/* More than any file here should ask for; below it no product of sizes overflows. */
enum { MOST_IMAGES = 1 << 20 };
static const uint64_t MOST_INDICES = (uint64_t)1 << 36;

/* A file that is read from its beginning to its end, compressed or not. */
typedef struct reader {
    char path[4096];
    FILE *plain;
#ifdef MNIST_WITH_ZLIB
    gzFile compressed;
#endif
} reader;

static void set_path(reader *r, const char *directory, const char *name, const char *ending)
{
    const int length = snprintf(r->path, sizeof r->path, "%s/MNIST/raw/%s%s", directory, name, ending);
    if (length < 0 || (size_t)length >= sizeof r->path)
        app_fail("--data-dir: the name of the folder is too long");
}

static void open_plain(reader *r, int file)
{
    r->plain = fdopen(file, "rb");
    if (!r->plain)
        app_fail("file %s cannot be read (%s)", r->path, strerror(errno));
}

static void open_data(reader *r, const char *directory, const char *name)
{
    memset(r, 0, sizeof *r);
    set_path(r, directory, name, "");
    const int plain = app_open_file(r->path);
    if (plain >= 0) {
        open_plain(r, plain);
        return;
    }
    const int plain_error = errno;
    if (plain_error != ENOENT && plain_error != ENOTDIR)
        app_fail("data file %s cannot be read (%s)", r->path, strerror(plain_error));
    set_path(r, directory, name, ".gz");
    const int compressed = app_open_file(r->path);
#ifdef MNIST_WITH_ZLIB
    r->compressed = compressed >= 0 ? gzdopen(compressed, "rb") : NULL;
    if (r->compressed)
        return;
    app_fail("data file %s cannot be read (%s): give the folder above MNIST/ as --data-dir", r->path, strerror(errno));
#else
    if (compressed >= 0) {
        close(compressed);
        app_fail("data file %s is compressed, and this program was built without zlib: run `gunzip -k` on it, or "
                 "install zlib's headers (Debian, Ubuntu: apt install zlib1g-dev) and build again",
                 r->path);
    }
    app_fail("data file %s is missing, with and without .gz: give the folder above MNIST/ as --data-dir", r->path);
#endif
}

static void close_reader(reader *r)
{
    if (r->plain)
        fclose(r->plain);
#ifdef MNIST_WITH_ZLIB
    if (r->compressed)
        gzclose(r->compressed);
#endif
}

#ifdef MNIST_WITH_ZLIB
/* zlib's messages begin with the name that it was given, which for a descriptor is "<fd:3>", and a colon. */
static const char *without_name(const char *message)
{
    const char *end = strstr(message, ">: ");
    return end ? end + 3 : message;
}
#endif

/* Reads up to `bytes`, and returns how many there were. */
static int64_t read_some(reader *r, void *target, int64_t bytes)
{
    int64_t done = 0;
#ifdef MNIST_WITH_ZLIB
    while (r->compressed && done < bytes) {
        const unsigned chunk = bytes - done < (1 << 20) ? (unsigned)(bytes - done) : 1u << 20;
        const int got = gzread(r->compressed, (char *)target + done, chunk);
        int error = Z_OK;
        const char *message = gzerror(r->compressed, &error);
        if (got < 0 || (error != Z_OK && error != Z_STREAM_END))
            app_fail("data file %s is damaged or truncated (%s)", r->path,
                     error == Z_ERRNO ? strerror(errno) : without_name(message));
        if (gzdirect(r->compressed))
            app_fail("data file %s is not compressed by gzip, as its name says", r->path);
        if (got == 0)
            return done;
        done += got;
    }
    if (r->compressed)
        return done;
#endif
    done = (int64_t)fread(target, 1, (size_t)bytes, r->plain);
    if (ferror(r->plain))
        app_fail("file %s cannot be read (%s)", r->path, strerror(errno));
    return done;
}

static void read_exactly(reader *r, void *target, int64_t bytes, const char *what)
{
    const int64_t got = read_some(r, target, bytes);
    if (got != bytes)
        app_fail("file %s is truncated: expected %s to have %lld bytes, got %lld", r->path, what, (long long)bytes,
                 (long long)got);
}

static void expect_end(reader *r)
{
    char more;
    if (read_some(r, &more, 1) != 0)
        app_fail("file %s has bytes past its end: its sizes do not match its header", r->path);
}

static uint32_t big_endian(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/* An IDX file of bytes: 0, 0, the element type 8, the number of dimensions, each dimension in four bytes, the data. */
static uint8_t *read_idx(const char *directory, const char *name, int dimensions, const uint32_t *expected,
                         int64_t *count)
{
    reader r;
    open_data(&r, directory, name);
    uint8_t header[4 + 4 * 3];
    read_exactly(&r, header, 4, "the magic number");
    const uint32_t magic = 0x800u + (uint32_t)dimensions;
    if (big_endian(header) != magic)
        app_fail("file %s is no IDX file of bytes with %d dimensions: expected it to begin with %08x, got %08x", r.path,
                 dimensions, magic, big_endian(header));
    read_exactly(&r, header + 4, 4 * dimensions, "the sizes");
    int64_t element_bytes = 1;
    for (int d = 1; d < dimensions; d++) {
        const uint32_t size = big_endian(header + 4 + 4 * d);
        if (size != expected[d])
            app_fail("file %s: expected dimension %d to be %u, got %u", r.path, d, expected[d], size);
        element_bytes *= size;
    }
    const int64_t all = big_endian(header + 4);
    if (all < 1 || all > MOST_IMAGES)
        app_fail("file %s: expected 1 to %d images, got %lld", r.path, MOST_IMAGES, (long long)all);
    uint8_t *data = app_allocate(all, element_bytes);
    read_exactly(&r, data, all * element_bytes, "the data");
    expect_end(&r);
    close_reader(&r);
    *count = all;
    return data;
}

mnist_set mnist_read_set(const char *directory, const char *prefix, int64_t limit)
{
    static const uint32_t shape[] = {0, MNIST_SIDE, MNIST_SIDE};
    char images[64], labels[64];
    snprintf(images, sizeof images, "%s-images-idx3-ubyte", prefix);
    snprintf(labels, sizeof labels, "%s-labels-idx1-ubyte", prefix);
    mnist_set set;
    int64_t label_count;
    set.images = read_idx(directory, images, 3, shape, &set.count);
    set.labels = read_idx(directory, labels, 1, shape, &label_count);
    if (set.count != label_count)
        app_fail("in %s/MNIST/raw, %s holds %lld images and %s %lld labels", directory, images, (long long)set.count,
                 labels, (long long)label_count);
    for (int64_t i = 0; i < set.count; i++)
        if (set.labels[i] >= MNIST_CLASSES)
            app_fail("in %s/MNIST/raw/%s, label %lld is %d: expected a digit", directory, labels, (long long)i,
                     set.labels[i]);
    if (limit && limit < set.count)
        set.count = limit;
    return set;
}

static void check_start_sizes(const char *path, uint64_t images, uint64_t batch_size, uint64_t epochs)
{
    if (images < 1 || images > MOST_IMAGES || batch_size < 1 || batch_size > images || epochs < 1 ||
        epochs > MOST_INDICES / images)
        app_fail("file %s: invalid sizes in its header: %llu images, batches of %llu, %llu epochs", path,
                 (unsigned long long)images, (unsigned long long)batch_size, (unsigned long long)epochs);
}

static void read_tensor(reader *r, const mnist_tensor *tensor, float *target)
{
    uint8_t header[32 + 8];
    char expected[32] = {0};
    read_exactly(r, header, sizeof header, tensor->name);
    memcpy(expected, tensor->name, strlen(tensor->name));
    if (memcmp(header, expected, sizeof expected) != 0)
        app_fail("file %s: expected the tensor %s, got %.32s", r->path, tensor->name, (const char *)header);
    const uint64_t count = app_little_endian_64(header + 32);
    if (count != (uint64_t)tensor->count)
        app_fail("file %s: expected %s to have %lld elements, got %llu", r->path, tensor->name,
                 (long long)tensor->count, (unsigned long long)count);
    read_exactly(r, target, tensor->count * 4, tensor->name);
    for (int64_t i = 0; i < tensor->count; i++) {
        uint8_t bytes[4];
        memcpy(bytes, &target[i], 4);
        const uint32_t bits = app_little_endian(bytes);
        memcpy(&target[i], &bits, 4);
        if (!isfinite(target[i]))
            app_fail("file %s: %s holds a number that is not finite", r->path, tensor->name);
    }
}

/* Each epoch's indices are below `images` and appear once. */
static void read_order(reader *r, mnist_start *start)
{
    const int64_t used = start->images / start->batch_size * start->batch_size;
    uint8_t *seen = app_allocate(start->images, 1);
    for (int64_t epoch = 0; epoch < start->epochs; epoch++) {
        uint32_t *order = start->order + epoch * used;
        read_exactly(r, order, used * 4, "an epoch's order of images");
        memset(seen, 0, (size_t)start->images);
        for (int64_t i = 0; i < used; i++) {
            uint8_t bytes[4];
            memcpy(bytes, &order[i], 4);
            order[i] = app_little_endian(bytes);
            if (order[i] >= start->images || seen[order[i]]) {
                app_fail("file %s: in epoch %lld, index %u of a image is %s", r->path, (long long)epoch, order[i],
                         order[i] >= start->images ? "beyond the training set" : "repeated");
            }
            seen[order[i]] = 1;
        }
    }
    app_free(seen);
}

static mnist_start allocate_start(int64_t images, int64_t batch_size, int64_t epochs)
{
    mnist_start start = {images, batch_size, epochs, epochs * (images / batch_size), {NULL}, NULL};
    for (int i = 0; i < MNIST_TENSORS; i++)
        start.tensors[i] = app_allocate(mnist_tensors[i].count, sizeof(float));
    start.order = app_allocate(start.steps * batch_size, sizeof(uint32_t));
    return start;
}

mnist_start mnist_read_start(const char *path)
{
    reader r;
    memset(&r, 0, sizeof r);
    if (strlen(path) >= sizeof r.path)
        app_fail("--weights: the name of the file is too long");
    memcpy(r.path, path, strlen(path));
    const int file = app_open_file(path);
    if (file < 0)
        app_fail("--weights %s cannot be read (%s)", path, strerror(errno));
    open_plain(&r, file);
    uint8_t header[40];
    read_exactly(&r, header, sizeof header, "the header");
    if (memcmp(header, "CUOPSTRT", 8) != 0)
        app_fail("file %s is not one that `python -m cuda_ops mnist --save-start` writes: its magic is wrong", path);
    if (app_little_endian(header + 8) != 1 || app_little_endian(header + 12) != MNIST_TENSORS)
        app_fail("file %s: expected version 1 with %d tensors, got version %u with %u", path, MNIST_TENSORS,
                 app_little_endian(header + 8), app_little_endian(header + 12));
    const uint64_t images = app_little_endian_64(header + 16), batch_size = app_little_endian_64(header + 24);
    const uint64_t epochs = app_little_endian_64(header + 32);
    check_start_sizes(path, images, batch_size, epochs);
    /* The length first: a wrong header must not make the program allocate. */
    const uint64_t order_bytes = epochs * (images / batch_size * batch_size) * 4;
    uint64_t expected = sizeof header + order_bytes;
    for (int i = 0; i < MNIST_TENSORS; i++)
        expected += 32 + 8 + 4 * (uint64_t)mnist_tensors[i].count;
    if (fseek(r.plain, 0, SEEK_END) != 0)
        app_fail("file %s cannot be read (%s)", path, strerror(errno));
    const long length = ftell(r.plain);
    if (length < 0 || (uint64_t)length != expected)
        app_fail("file %s %s: by its header it has %llu bytes, and in fact %ld", path,
                 length >= 0 && (uint64_t)length < expected ? "is truncated" : "has bytes past its end",
                 (unsigned long long)expected, length);
    if (fseek(r.plain, sizeof header, SEEK_SET) != 0)
        app_fail("file %s cannot be read (%s)", path, strerror(errno));
    mnist_start start = allocate_start((int64_t)images, (int64_t)batch_size, (int64_t)epochs);
    for (int i = 0; i < MNIST_TENSORS; i++)
        read_tensor(&r, &mnist_tensors[i], start.tensors[i]);
    read_order(&r, &start);
    expect_end(&r);
    close_reader(&r);
    return start;
}

mnist_start mnist_make_start(int64_t images, int64_t batch_size, int64_t epochs, uint64_t seed)
{
    if ((uint64_t)epochs > MOST_INDICES / (uint64_t)images)
        app_fail("--epochs %lld: expected at most %llu for %lld images, whose order is made beforehand",
                 (long long)epochs, (unsigned long long)(MOST_INDICES / (uint64_t)images), (long long)images);
    mnist_start start = allocate_start(images, batch_size, epochs);
    uint64_t state = seed;
    for (int i = 0; i < MNIST_TENSORS; i++) {
        const mnist_tensor *tensor = &mnist_tensors[i];
        const double bound = tensor->fan_in ? 1.0 / sqrt((double)tensor->fan_in) : 0.0;
        for (int64_t j = 0; j < tensor->count; j++) {
            const double uniform = app_random_uniform(&state);
            start.tensors[i][j] = tensor->fan_in ? (float)((2.0 * uniform - 1.0) * bound) : tensor->first;
        }
    }
    uint32_t *shuffled = app_allocate(images, sizeof(uint32_t));
    const int64_t used = images / batch_size * batch_size;
    for (int64_t i = 0; i < images; i++)
        shuffled[i] = (uint32_t)i;
    for (int64_t epoch = 0; epoch < epochs; epoch++) {
        for (int64_t i = images - 1; i > 0; i--) {
            /* 32 random bits map to i + 1 indices not quite uniformly: to within 2^-8 of an index's probability. */
            const int64_t j = (int64_t)((app_random(&state) >> 32) * (uint64_t)(i + 1) >> 32);
            const uint32_t kept = shuffled[i];
            shuffled[i] = shuffled[j];
            shuffled[j] = kept;
        }
        memcpy(start.order + epoch * used, shuffled, (size_t)used * sizeof(uint32_t));
    }
    app_free(shuffled);
    return start;
}

void mnist_free_set(mnist_set *set)
{
    app_free(set->images);
    app_free(set->labels);
}

void mnist_free_start(mnist_start *start)
{
    for (int i = 0; i < MNIST_TENSORS; i++)
        app_free(start->tensors[i]);
    app_free(start->order);
}
