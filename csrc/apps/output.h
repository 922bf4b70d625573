/* Output files that the user names (--out), written whole or not at all; cuda_ops/_files.py is the same in Python.
 *
 * The content is written under a temporary name beside the target, which is renamed once it is complete. Otherwise it
 * is as if the file were opened and written to: symbolic links are followed, a new file has the mode that the umask
 * leaves, an existing one keeps its mode. */
#ifndef CUDA_OPS_APPS_OUTPUT_H
#define CUDA_OPS_APPS_OUTPUT_H

#include <stddef.h>

/* Returns NULL, or why `path` cannot be written, for a message that names it; then nothing has changed. */
const char *output_write(const char *path, const void *content, size_t bytes);

/* What output_write would return, as far as that can be known beforehand; it leaves no file. */
const char *output_check(const char *path);

#endif
