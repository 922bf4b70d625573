#include "app.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output.h"

/* In front of each buffer that app_allocate returns, which is aligned to ALIGNMENT all the same. */
typedef struct block {
    struct block *previous, *next;
} block;
enum { ALIGNMENT = 64 };
_Static_assert(sizeof(block) <= ALIGNMENT, "a block's links fit in front of it");
static block *newest;

void *app_allocate(int64_t count, int64_t element_bytes)
{
    block *b = NULL;
    if (count <= INT64_MAX / 2 / element_bytes) {
        const size_t bytes = (size_t)(count * element_bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT + ALIGNMENT;
        b = aligned_alloc(ALIGNMENT, bytes);
        if (b)
            memset(b, 0, bytes);
    }
    if (!b)
        app_fail("too little memory for %lld elements of %lld bytes", (long long)count, (long long)element_bytes);
    b->next = newest;
    if (newest)
        newest->previous = b;
    newest = b;
    return (char *)b + ALIGNMENT;
}

void app_free(void *memory)
{
    if (!memory)
        return;
    block *b = (block *)((char *)memory - ALIGNMENT);
    if (b->next)
        b->next->previous = b->previous;
    if (b->previous)
        b->previous->next = b->next;
    else
        newest = b->next;
    free(b);
}

int app_all_is_freed(void)
{
    return newest == NULL;
}

void app_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s: error: ", app_name);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    while (newest)
        app_free((char *)newest + ALIGNMENT);
    exit(2);
}

int64_t app_whole_number(const char *option, const char *text, int64_t least, int64_t largest)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end || errno || value < least || value > largest)
        app_fail("%s %s: expected a whole number from %lld to %lld", option, text, (long long)least,
                 (long long)largest);
    return value;
}

double app_number(const char *option, const char *text, int zero)
{
    char *end;
    const double value = strtod(text, &end);
    if (end == text || *end || !(zero ? value >= 0 : value > 0) || value > FLT_MAX)
        app_fail("%s %s: expected a number %s 0, and at most %g, the largest of float32", option, text,
                 zero ? "of at least" : "above", FLT_MAX);
    return value;
}

/* Without O_NONBLOCK, to open a named pipe that nobody writes to takes for ever. */
int app_open_file(const char *path)
{
    const int file = open(path, O_RDONLY | O_NONBLOCK);
    struct stat what;
    if (file >= 0 && (fstat(file, &what) != 0 || !S_ISREG(what.st_mode)))
        app_fail("file %s is a folder, a pipe or a device, not a regular file", path);
    return file;
}

uint32_t app_little_endian(const uint8_t *bytes)
{
    return (uint32_t)bytes[3] << 24 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[1] << 8 | bytes[0];
}

uint64_t app_little_endian_64(const uint8_t *bytes)
{
    return (uint64_t)app_little_endian(bytes + 4) << 32 | app_little_endian(bytes);
}

uint64_t app_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double app_random_uniform(uint64_t *state)
{
    return (double)(app_random(state) >> 11) * 0x1p-53;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(const double *sorted, int64_t count, double share)
{
    const double position = share * (double)(count - 1);
    const int64_t below = (int64_t)position;
    const double above = below + 1 < count ? sorted[below + 1] : sorted[below];
    return sorted[below] + (position - (double)below) * (above - sorted[below]);
}

app_summary app_summarize(double *values, int64_t count)
{
    app_summary s = {0};
    for (int64_t i = 0; i < count; i++)
        s.mean += values[i] / (double)count;
    qsort(values, (size_t)count, sizeof *values, by_size);
    s.p10 = quantile(values, count, 0.1);
    s.median = quantile(values, count, 0.5);
    s.p90 = quantile(values, count, 0.9);
    return s;
}

const char *const app_phase_names[APP_PHASES + 1] = {"batch load", "forward",   "backward",
                                                     "update",     "zero_grad", "whole step"};

app_summary app_summarize_phase(const double *milliseconds, int64_t begin, int64_t end, int phase)
{
    double *times = app_allocate(end - begin, sizeof(double));
    for (int64_t step = begin; step < end; step++)
        for (int p = 0; p < APP_PHASES; p++)
            times[step - begin] += phase == APP_PHASES || phase == p ? milliseconds[step * APP_PHASES + p] : 0.0;
    const app_summary s = app_summarize(times, end - begin);
    app_free(times);
    return s;
}

void app_write_phases(FILE *file, const double *milliseconds, int64_t begin, int64_t end)
{
    for (int p = 0; p <= APP_PHASES; p++) {
        const app_summary s = app_summarize_phase(milliseconds, begin, end, p);
        fprintf(file, "%s\n   \"%s\": {\"mean\": %.6g, \"p10\": %.6g, \"median\": %.6g, \"p90\": %.6g}", p ? "," : "",
                app_phase_names[p], s.mean, s.p10, s.median, s.p90);
    }
}

void app_write_number(FILE *file, double value)
{
    if (isfinite(value))
        fprintf(file, "%.9g", value);
    else
        fputs("null", file); /* JSON has no other word for it */
}

void app_write_string(FILE *file, const char *text, size_t bytes)
{
    fputc('"', file);
    for (size_t i = 0; i < bytes; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\')
            fprintf(file, "\\%c", c);
        else if (c < 0x20)
            fprintf(file, "\\u%04x", c);
        else
            fputc(c, file);
    }
    fputc('"', file);
}

static const char *report_path(const char *folder, char *path, size_t size)
{
    if (snprintf(path, size, "%s/report.json", folder) >= (int)size)
        app_fail("--out: the name of the folder is too long");
    return path;
}

void app_check_report(const char *folder)
{
    char path[4096];
    if (mkdir(folder, 0777) != 0 && errno != EEXIST)
        app_fail("--out %s cannot be made (%s)", folder, strerror(errno));
    const char *problem = output_check(report_path(folder, path, sizeof path));
    if (problem)
        app_fail("%s cannot be written (%s)", path, problem);
}

void app_write_report(const char *folder, char *content, size_t bytes)
{
    char path[4096];
    const char *problem = output_write(report_path(folder, path, sizeof path), content, bytes);
    free(content);
    if (problem)
        app_fail("%s cannot be written (%s)", path, problem);
    printf("Report: %s\n", path);
}
