/* Files that somebody asked for by name (--out), written whole or not at all; what cuda_ops/_files.py is in Python.
 *
 * What is written lies under a name of its own beside its target until its last byte is there, and is renamed then.
 * Otherwise it is as if the file were opened and written to: symbolic links are followed, a new file has the mode that
 * the umask leaves, an old one keeps its.
 */
#ifndef CUDA_OPS_APPS_OUTPUT_H
#define CUDA_OPS_APPS_OUTPUT_H

#include <stddef.h>

/* Returns NULL, or why `path` cannot be written, to be put behind its name; nothing has changed then. */
const char *output_write(const char *path, const void *content, size_t bytes);

/* What output_write would return, as far as it can be known beforehand; leaves nothing. */
const char *output_check(const char *path);

#endif
