// Preloaded into a process, this counts the calls that change what lies below one directory, whoever makes them (Python,
// TensorStore's threads), and has some of them fail or take long, as a disk would. `rig.py` is its interface.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define LOGGED 4096
#define NAME_SIZE 512

static char watched[PATH_MAX];
static char failing[32];  // the name of the function that is to fail; empty: none is
static atomic_long calls, failing_number, of_failing, failed, delay_us;
static atomic_int failing_code, failing_onwards;
static char names[LOGGED][NAME_SIZE];

void rig_watch(const char *directory) {
    watched[0] = 0;
    calls = 0;
    snprintf(watched, sizeof watched, "%s/", directory);
}

void rig_fail(const char *function, long number, int code, int onwards) {
    failing[0] = 0;
    of_failing = 0;
    failed = -1;
    failing_number = number;
    failing_code = code;
    failing_onwards = onwards;
    snprintf(failing, sizeof failing, "%s", function);
}

long rig_failed(void) { return failed; }

void rig_delay(long microseconds) { delay_us = microseconds; }

long rig_calls(void) { return calls; }

const char *rig_name(long number) { return number < LOGGED ? names[number] : "?"; }

// The errno that a call is to fail with, or 0.
static int verdict(const char *call, const char *path) {
    size_t length = strlen(watched);
    // The directory itself counts, too: a sync makes the names in it durable.
    if (!length || (strncmp(path, watched, length) && (strlen(path) != length - 1 || strncmp(path, watched, length - 1))))
        return 0;
    long number = atomic_fetch_add(&calls, 1);
    if (number < LOGGED) snprintf(names[number], NAME_SIZE, "%s %s", call, path);
    if (delay_us) {
        struct timespec wait = {delay_us / 1000000, delay_us % 1000000 * 1000};
        nanosleep(&wait, NULL);
    }
    if (!failing[0]) return 0;
    if (failed >= 0) return failing_onwards ? failing_code : 0;
    if (strcmp(call, failing) || atomic_fetch_add(&of_failing, 1) != failing_number) return 0;
    failed = number;
    return failing_code;
}

static int of_descriptor(const char *call, int descriptor) {
    int before = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return verdict(call, path);
}

static int of_path(const char *call, int directory, const char *path) {
    int before = errno;
    char link[64], full[2 * PATH_MAX];
    if (path[0] == '/' || directory == AT_FDCWD) return verdict(call, path);
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, full, PATH_MAX - 1);
    errno = before;
    if (length < 0) return 0;
    snprintf(full + length, sizeof full - length, "/%s", path);
    return verdict(call, full);
}

#define CALL(type, name, parameters, arguments, question)        \
    type name parameters {                                       \
        static type(*real) parameters;                           \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        int code = question;                                     \
        if (code) {                                              \
            errno = code;                                        \
            return -1;                                           \
        }                                                        \
        return real arguments;                                   \
    }

#define ON_DESCRIPTOR(type, name, parameters, arguments) CALL(type, name, parameters, arguments, of_descriptor(#name, fd))
#define ON_PATH(type, name, parameters, arguments, directory, path) \
    CALL(type, name, parameters, arguments, of_path(#name, directory, path))

ON_DESCRIPTOR(ssize_t, write, (int fd, const void *data, size_t n), (fd, data, n))
ON_DESCRIPTOR(ssize_t, writev, (int fd, const struct iovec *parts, int n), (fd, parts, n))
ON_DESCRIPTOR(ssize_t, pwrite, (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
ON_DESCRIPTOR(ssize_t, pwrite64, (int fd, const void *data, size_t n, off64_t at), (fd, data, n, at))
ON_DESCRIPTOR(ssize_t, pwritev, (int fd, const struct iovec *parts, int n, off_t at), (fd, parts, n, at))
ON_DESCRIPTOR(ssize_t, pwritev64, (int fd, const struct iovec *parts, int n, off64_t at), (fd, parts, n, at))
ON_DESCRIPTOR(ssize_t, pwritev2, (int fd, const struct iovec *parts, int n, off_t at, int how), (fd, parts, n, at, how))
ON_DESCRIPTOR(ssize_t, pwritev64v2, (int fd, const struct iovec *parts, int n, off64_t at, int how), (fd, parts, n, at, how))
ON_DESCRIPTOR(int, fsync, (int fd), (fd))
ON_DESCRIPTOR(int, fdatasync, (int fd), (fd))
ON_DESCRIPTOR(int, syncfs, (int fd), (fd))
ON_DESCRIPTOR(int, ftruncate, (int fd, off_t n), (fd, n))
ON_DESCRIPTOR(int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_DESCRIPTOR(int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n))
ON_DESCRIPTOR(int, fallocate64, (int fd, int mode, off64_t at, off64_t n), (fd, mode, at, n))
ON_PATH(int, mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, path)
ON_PATH(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode), at, path)
ON_PATH(int, rename, (const char *path, const char *to), (path, to), AT_FDCWD, path)
ON_PATH(int, renameat, (int at, const char *path, int to_at, const char *to), (at, path, to_at, to), at, path)
ON_PATH(int, renameat2, (int at, const char *path, int to_at, const char *to, unsigned flags), (at, path, to_at, to, flags),
        at, path)
ON_PATH(int, unlink, (const char *path), (path), AT_FDCWD, path)
ON_PATH(int, unlinkat, (int at, const char *path, int flags), (at, path, flags), at, path)
ON_PATH(int, rmdir, (const char *path), (path), AT_FDCWD, path)

// Only what makes a file counts among the ways to open one.
#define OPEN(name, parameters, last, arguments, directory)               \
    int name parameters {                                                \
        static int(*real) parameters;                                    \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name);    \
        mode_t mode = 0;                                                 \
        if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                            \
            va_list rest;                                                \
            va_start(rest, last);                                        \
            mode = va_arg(rest, mode_t);                                 \
            va_end(rest);                                                \
        }                                                                \
        int code = flags & O_CREAT ? of_path(#name, directory, path) : 0; \
        if (code) {                                                      \
            errno = code;                                                \
            return -1;                                                   \
        }                                                                \
        return real arguments;                                           \
    }

OPEN(open, (const char *path, int flags, ...), flags, (path, flags, mode), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), flags, (path, flags, mode), AT_FDCWD)
OPEN(openat, (int at, const char *path, int flags, ...), flags, (at, path, flags, mode), at)
OPEN(openat64, (int at, const char *path, int flags, ...), flags, (at, path, flags, mode), at)
