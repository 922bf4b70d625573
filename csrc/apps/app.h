/* What the programs of csrc/apps share: how they end, memory, options, files that they read, and their report. */
#ifndef CUDA_OPS_APPS_APP_H
#define CUDA_OPS_APPS_APP_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Each program's own: what its messages begin with. */
extern const char app_name[];

/* Prints "NAME: error: ..." and exits with status 2: the command cannot be done as asked. */
_Noreturn void app_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* malloc for `count` elements, zeroed, aligned to 64 bytes; fails as above. From the main thread alone. app_fail frees
 * what is left, so that whoever finds a mistake need not know what others have allocated. */
void *app_allocate(int64_t count, int64_t element_bytes);
void app_free(void *memory);
int app_all_is_freed(void);

/* The value of an option, or app_fail. */
int64_t app_whole_number(const char *option, const char *text, int64_t least, int64_t largest);
/* Above 0, or with `zero` at least 0; what float32 can hold. */
double app_number(const char *option, const char *text, int zero);

/* A descriptor, or -1 and errno; app_fail for what is no regular file. */
int app_open_file(const char *path);

uint32_t app_little_endian(const uint8_t *bytes);
uint64_t app_little_endian_64(const uint8_t *bytes);

/* SplitMix64: a hashed counter. */
uint64_t app_random(uint64_t *state);
/* From [0, 1), of 53 bits. */
double app_random_uniform(uint64_t *state);

typedef struct app_summary {
    double mean, p10, median, p90;
} app_summary;
/* Sorts the values; there is at least one. */
app_summary app_summarize(double *values, int64_t count);

/* Of a device: arrays, and marks between two calls that collect them. */
enum { APP_MOST_ALLOCATIONS = 64, APP_MOST_MARKS = 128 };

/* The phases of a training step, and after them the step as a whole. */
enum { APP_PHASES = 5 };
extern const char *const app_phase_names[APP_PHASES + 1];
/* Of one phase, or of the whole step (phase == APP_PHASES), over steps [begin, end); milliseconds: [steps, phases]. */
app_summary app_summarize_phase(const double *milliseconds, int64_t begin, int64_t end, int phase);
/* The members of a JSON object with the summaries of all. */
void app_write_phases(FILE *file, const double *milliseconds, int64_t begin, int64_t end);

/* JSON: a number that is not finite is null; `text` is UTF-8. */
void app_write_number(FILE *file, double value);
void app_write_string(FILE *file, const char *text, size_t bytes);

/* FOLDER/report.json (--out). The first makes the folder, and checks before the training that the file can be written;
 * a report of an earlier run stays. The second frees `content`, and prints the name of what it has written. */
void app_check_report(const char *folder);
void app_write_report(const char *folder, char *content, size_t bytes);

#endif
