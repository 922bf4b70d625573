#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MOST_LINKS = 40, MOST_PATH = 4096, MOST_DRAFTS = 100 };

static size_t folder_length(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* The file that the name refers to after all symbolic links; the system follows those among its folders. */
static int follow(const char *path, char target[MOST_PATH])
{
    if (strlen(path) >= MOST_PATH) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(target, path);
    for (int links = 0; links < MOST_LINKS; links++) {
        char next[MOST_PATH];
        const ssize_t length = readlink(target, next, sizeof next);
        if (length < 0)
            return errno == EINVAL || errno == ENOENT ? 0 : -1; /* EINVAL: it is no link */
        const size_t folder = next[0] == '/' ? 0 : folder_length(target);
        if (folder + (size_t)length >= MOST_PATH) {
            errno = ENAMETOOLONG;
            return -1;
        }
        memcpy(target + folder, next, (size_t)length);
        target[folder + (size_t)length] = '\0';
    }
    errno = ELOOP;
    return -1;
}

static const char *refusal(mode_t mode)
{
    return S_ISREG(mode)    ? NULL
           : S_ISDIR(mode)  ? "it is a folder, not a regular file"
           : S_ISFIFO(mode) ? "it is a named pipe, not a regular file"
           : S_ISSOCK(mode) ? "it is a socket, not a regular file"
                            : "it is a device, not a regular file";
}

/* Opens a new file in the folder of `target`, of the mode that `target` has or would get. */
static int open_draft(const char *target, char draft[MOST_PATH])
{
    const size_t folder = folder_length(target);
    for (int number = 0; number < MOST_DRAFTS; number++) {
        const int length =
            snprintf(draft, MOST_PATH, "%.*s.%ld-%d.partial", (int)folder, target, (long)getpid(), number);
        if (length >= MOST_PATH) {
            errno = ENAMETOOLONG;
            return -1;
        }
        const int file = open(draft, O_WRONLY | O_CREAT | O_EXCL, 0666);
        if (file >= 0 || errno != EEXIST)
            return file;
    }
    return -1;
}

static int write_all(int file, const char *content, size_t bytes)
{
    while (bytes > 0) {
        const ssize_t written = write(file, content, bytes);
        if (written < 0 && errno != EINTR)
            return -1;
        if (written > 0) {
            content += written;
            bytes -= (size_t)written;
        }
    }
    return fsync(file); /* on some file systems only this reports that there is no space */
}

/* With `keep` the draft replaces the target; without, it is removed. */
static const char *put(const char *path, const void *content, size_t bytes, int keep)
{
    char target[MOST_PATH], draft[MOST_PATH];
    if (follow(path, target) != 0)
        return strerror(errno);
    struct stat there;
    const int replaces = stat(target, &there) == 0;
    if (!replaces && errno != ENOENT)
        return strerror(errno);
    if (replaces && refusal(there.st_mode))
        return refusal(there.st_mode);
    if (replaces && access(target, W_OK) != 0) /* a rename would not ask */
        return strerror(errno);
    const int file = open_draft(target, draft);
    if (file < 0)
        return strerror(errno);
    int error = 0;
    if ((replaces && fchmod(file, there.st_mode & 07777) != 0) || write_all(file, content, bytes) != 0)
        error = errno;
    if (close(file) != 0 && !error)
        error = errno;
    if (keep && !error && rename(draft, target) != 0)
        error = errno;
    if (!keep || error)
        unlink(draft);
    return error ? strerror(error) : NULL;
}

const char *output_write(const char *path, const void *content, size_t bytes)
{
    return put(path, content, bytes, 1);
}

const char *output_check(const char *path)
{
    return put(path, "", 0, 0);
}
