/* Counts the bytes of all memory blocks of a process that are large enough to be tensors or buffers.

   Loaded before libc (LD_PRELOAD), so that torch, Python, gRPC and all threads are counted alike. The counters are in a
   file, WG_ALLOCATIONS/<pid>, which other processes may read, and in which they may forget the peak. A forked process
   gets a file of its own. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEAST 1024 /* smaller blocks are objects of the interpreter */

struct counters {
    _Atomic int64_t now;
    _Atomic int64_t peak;
};

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static struct counters before_start;
static struct counters *shared = &before_start;

static void count(int64_t bytes) {
    int64_t now = atomic_fetch_add(&shared->now, bytes) + bytes;
    int64_t peak = atomic_load(&shared->peak);
    while (now > peak && !atomic_compare_exchange_weak(&shared->peak, &peak, now)) {
    }
}

static size_t size_of(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    return size < LEAST ? 0 : size;
}

static void *counted(void *block) {
    size_t size = size_of(block);
    if (size)
        count((int64_t)size);
    return block;
}

static void open_file(void) {
    const char *directory = getenv("WG_ALLOCATIONS");
    char path[4096];
    if (!directory || snprintf(path, sizeof path, "%s/%d", directory, (int)getpid()) >= (int)sizeof path)
        return;
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0)
        return;
    if (ftruncate(file, sizeof(struct counters)) == 0) {
        void *found = mmap(NULL, sizeof(struct counters), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (found != MAP_FAILED) {
            struct counters *fresh = found;
            atomic_store(&fresh->now, atomic_load(&shared->now));
            atomic_store(&fresh->peak, atomic_load(&shared->now));
            shared = fresh;
        }
    }
    close(file);
}

__attribute__((constructor)) static void start(void) {
    open_file();
    pthread_atfork(NULL, NULL, open_file);
}

void *malloc(size_t size) { return counted(__libc_malloc(size)); }

void *calloc(size_t many, size_t size) { return counted(__libc_calloc(many, size)); }

void *memalign(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }

void *aligned_alloc(size_t alignment, size_t size) { return counted(__libc_memalign(alignment, size)); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || (alignment & (alignment - 1)) || !alignment)
        return EINVAL;
    void *block = counted(__libc_memalign(alignment, size));
    if (!block)
        return ENOMEM;
    *out = block;
    return 0;
}

void *realloc(void *block, size_t size) {
    int64_t old = (int64_t)size_of(block);
    void *found = __libc_realloc(block, size);
    if (!found && size)
        return NULL; /* the old block is still there */
    int64_t change = (int64_t)size_of(found) - old;
    if (change)
        count(change);
    return found;
}

void *reallocarray(void *block, size_t many, size_t size) {
    size_t whole;
    if (__builtin_mul_overflow(many, size, &whole)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, whole);
}

void free(void *block) {
    int64_t size = (int64_t)size_of(block);
    __libc_free(block);
    if (size)
        count(-size);
}
