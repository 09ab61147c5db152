/* Fails or ends the process at the n-th system call that changes a folder; loaded with LD_PRELOAD. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { END = -1, END_IN_WRITE = -2, SECTOR = 512 }; /* a kill does not divide a write within a sector */

static char folder[4096];
static long count, fatal;
static int action;

/* Count calls within a folder from 1; the given one fails with an error number, or ends the process. */
void faults_arm(const char *path, long number, int what) {
    snprintf(folder, sizeof folder, "%s", path);
    count = 0, fatal = number, action = what;
}

long faults_count(void) { return count; }

static int is_inside(const char *path) {
    return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int is_open_inside(int handle) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_inside(path);
}

static int fails(void) {
    if (++count != fatal) return 0;
    if (action < 0) _exit(99);
    errno = action;
    return 1;
}

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))
#define ON_PATH(type, name, parameters, path, ...) \
    type name parameters { return is_inside(path) && fails() ? -1 : REAL(name)(__VA_ARGS__); }
#define ON_HANDLE(type, name, parameters, handle, ...) \
    type name parameters { return is_open_inside(handle) && fails() ? -1 : REAL(name)(__VA_ARGS__); }
#define OPEN(name)                                                                  \
    int name(const char *path, int flags, ...) {                                    \
        va_list more;                                                               \
        va_start(more, flags);                                                      \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;     \
        va_end(more);                                                               \
        if ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && is_inside(path) && fails())  \
            return -1;                                                              \
        return REAL(name)(path, flags, mode);                                       \
    }
#define WRITE(name, parameters, ...)                                                \
    ssize_t name parameters {                                                       \
        if (is_open_inside(handle)) {                                               \
            if (count + 1 == fatal && action == END_IN_WRITE && size > SECTOR) {                     \
                size /= 2;                                                          \
                REAL(name)(__VA_ARGS__);                                            \
                _exit(99);                                                          \
            }                                                                       \
            if (fails()) return -1;                                                 \
        }                                                                           \
        return REAL(name)(__VA_ARGS__);                                             \
    }

OPEN(open)
OPEN(open64)
WRITE(write, (int handle, const void *data, size_t size), handle, data, size)
WRITE(pwrite64, (int handle, const void *data, size_t size, off64_t offset), handle, data, size, offset)
ON_HANDLE(int, fsync, (int handle), handle, handle)
ON_HANDLE(int, fdatasync, (int handle), handle, handle)
ON_HANDLE(int, ftruncate64, (int handle, off64_t length), handle, handle, length)
ON_PATH(int, truncate64, (const char *path, off64_t length), path, path, length)
ON_PATH(int, rename, (const char *path, const char *to), path, path, to)
ON_PATH(int, unlink, (const char *path), path, path)
ON_PATH(int, mkdir, (const char *path, mode_t mode), path, path, mode)
ON_PATH(int, chmod, (const char *path, mode_t mode), path, path, mode)
