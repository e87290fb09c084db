/*
 * A stand-in for the CUDA driver, for tests on hosts without a GPU. Never shipped.
 *
 * It keeps the driver's promises that the engine and UCX rest on, and catches those who break them:
 *  - Device memory cannot be touched by the processor. Addresses that are handed out lie in a range without access
 *    (the front); the bytes lie in a twin range (the back) that only this file knows. A load or store kills the process, a
 *    system call on it fails.
 *  - Functions that need a current context of the calling thread refuse without one, and count that.
 *  - Asynchronous copies happen later: when their event or stream is looked at often enough, or when a test lets them.
 *
 * Environment, read by cuInit:
 *    STANDIN_DEVICES=n   how many devices (2)
 *    STANDIN_DELAY=n     a copy happens when its event has been looked at n times (0: at once)
 *    STANDIN_STRICT=1    whatever names a stream or an event needs a current context too
 *
 * Only the public interface (names, argument order, numbers) is NVIDIA's; the declarations are our own. x86-64 only: see
 * HOOKED.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int Result;
typedef uint64_t Address;
typedef struct Context *ContextRef;
typedef struct Stream *StreamRef;
typedef struct Event *EventRef;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801
};

#define EXPORT __attribute__((visibility("default")))
#define API EXPORT Result

/*
 * UCX patches the entries of the functions that allocate. It can move an entry only if it knows the instructions there:
 * loads of a constant are among them.
 */
#define HOOKED(name)                                                                            \
    __asm__(".text\n.balign 16\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"       \
            "  movl $1, %eax\n  movl $2, %eax\n  movl $3, %eax\n  jmp " #name "_behind\n"         \
            ".size " #name ", . - " #name "\n");                                                \
    __attribute__((visibility("hidden"), used)) Result name##_behind

/* ---- memory ------------------------------------------------------------------------------- */

#define ARENA (1ull << 38)
#define PAGE 4096ull
#define BLOCKS 65536
#define DEVICES 8

struct Context {
    int device;
    int users;
    int destroyed;
    uint64_t number;
};

enum Sort { FREED, ON_DEVICE, MANAGED, PINNED };

/* Addresses are given out in ascending order and never again, so the table is sorted and no stale one is valid. */
struct Block {
    uintptr_t start;
    size_t length;
    enum Sort sort;
    int device;
    ContextRef context;
    uint64_t number;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Block blocks[BLOCKS];
static unsigned block_count;
static struct Block pinned[BLOCKS];
static unsigned pinned_count;
static char *front, *back;
static uintptr_t next_free;
static int devices = -1;
static unsigned delay, strict;
static atomic_int held;
static struct Context primaries[DEVICES];
static atomic_ullong numbers = 1;
static atomic_ullong context_errors, copied_in, copied_out;
static __thread ContextRef stack[32];
static __thread int depth;

#define CURRENT (depth ? stack[depth - 1] : NULL)

static Result no_context(void)
{
    context_errors++;
    return INVALID_CONTEXT;
}
#define NEED_CONTEXT                                        \
    do {                                                    \
        if (!CURRENT || CURRENT->destroyed) return no_context(); \
    } while (0)
#define NEED_CONTEXT_IF_STRICT  \
    do {                        \
        if (strict) NEED_CONTEXT; \
    } while (0)
#define NEED_DEVICE(d)                                        \
    do {                                                      \
        if (devices < 0) return NOT_INITIALIZED;              \
        if ((d) < 0 || (d) >= devices) return INVALID_DEVICE; \
    } while (0)

/* The block that holds an address; with the lock held. */
static struct Block *block_of(uintptr_t at)
{
    unsigned low = 0, high = block_count;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (blocks[middle].start <= at) low = middle + 1; else high = middle;
    }
    if (low > 0) {
        struct Block *b = &blocks[low - 1];
        if (b->sort != FREED && at - b->start < b->length) return b;
    }
    for (unsigned i = 0; i < pinned_count; i++)
        if (pinned[i].sort == PINNED && at - pinned[i].start < pinned[i].length) return &pinned[i];
    return NULL;
}

/* Where the bytes of an address are; NULL if the range leaves its block. */
static char *bytes_of(uintptr_t at, size_t length, int *on_device)
{
    struct Block *b;
    char *bytes = (char *)at;
    pthread_mutex_lock(&lock);
    b = block_of(at);
    *on_device = b && b->sort != PINNED;
    if (*on_device) {
        if (length > b->length - (at - b->start)) bytes = NULL;
        else if (b->sort == ON_DEVICE) bytes = back + (at - (uintptr_t)front);
    } else if (front && at >= (uintptr_t)front && at < (uintptr_t)front + ARENA) {
        bytes = NULL; /* freed device memory */
    }
    pthread_mutex_unlock(&lock);
    return bytes;
}

static Result allocate(Address *out, size_t length, enum Sort sort, ContextRef context, int device)
{
    size_t room = (length + 2 * PAGE - 1) & ~(PAGE - 1); /* one page that belongs to nobody between blocks */
    Result result = OUT_OF_MEMORY;
    if (!length) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (!front) {
        front = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        back = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        next_free = (uintptr_t)front;
    }
    if (front != MAP_FAILED && back != MAP_FAILED && block_count < BLOCKS
        && length < ARENA - (next_free - (uintptr_t)front) - 2 * PAGE) {
        /* Both processors may touch managed memory. */
        if (sort != MANAGED || mprotect((void *)next_free, room - PAGE, PROT_READ | PROT_WRITE) == 0) {
            blocks[block_count++] = (struct Block){ next_free, length, sort, device, context, numbers++ };
            *out = next_free;
            next_free += room;
            result = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static Result release(Address at)
{
    struct Block *b;
    pthread_mutex_lock(&lock);
    b = block_of(at);
    if (b && b->start == at && b->sort != PINNED) {
        size_t room = (b->length + PAGE - 1) & ~(PAGE - 1);
        if (b->sort == MANAGED) {
            madvise((void *)b->start, room, MADV_DONTNEED);
            mprotect((void *)b->start, room, PROT_NONE);
        } else {
            madvise(back + (b->start - (uintptr_t)front), room, MADV_DONTNEED);
        }
        b->sort = FREED;
    } else {
        b = NULL;
    }
    pthread_mutex_unlock(&lock);
    return b ? SUCCESS : INVALID_VALUE;
}

HOOKED(cuMemAlloc_v2)(Address *out, size_t length)
{
    NEED_CONTEXT;
    return allocate(out, length, ON_DEVICE, CURRENT, CURRENT->device);
}
HOOKED(cuMemAllocManaged)(Address *out, size_t length, unsigned flags)
{
    (void)flags;
    NEED_CONTEXT;
    return allocate(out, length, MANAGED, CURRENT, CURRENT->device);
}
/* Stream-ordered memory belongs to a device, not to a context. */
HOOKED(cuMemAllocAsync)(Address *out, size_t length, StreamRef stream)
{
    (void)stream;
    NEED_CONTEXT;
    return allocate(out, length, ON_DEVICE, NULL, CURRENT->device);
}
HOOKED(cuMemFree_v2)(Address at)
{
    NEED_CONTEXT;
    return at ? release(at) : SUCCESS;
}
HOOKED(cuMemFreeAsync)(Address at, StreamRef stream)
{
    (void)stream;
    NEED_CONTEXT;
    return release(at);
}

API cuMemHostRegister_v2(void *at, size_t length, unsigned flags)
{
    struct Block *slot = NULL;
    Result result = SUCCESS;
    (void)flags;
    NEED_CONTEXT;
    pthread_mutex_lock(&lock);
    if (block_of((uintptr_t)at)) {
        result = ALREADY_REGISTERED;
    } else {
        for (unsigned i = 0; i < pinned_count && !slot; i++)
            if (pinned[i].sort == FREED) slot = &pinned[i];
        if (!slot && pinned_count < BLOCKS) slot = &pinned[pinned_count++];
        if (slot)
            *slot = (struct Block){ (uintptr_t)at, length, PINNED, CURRENT->device, CURRENT, numbers++ };
        else
            result = OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
static Result unregister(void *at, size_t *length)
{
    Result result = NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < pinned_count; i++) {
        if (pinned[i].sort == PINNED && pinned[i].start == (uintptr_t)at) {
            *length = pinned[i].length;
            pinned[i].sort = FREED;
            result = SUCCESS;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}
API cuMemHostUnregister(void *at)
{
    size_t length;
    NEED_CONTEXT;
    return unregister(at, &length);
}
API cuMemHostAlloc(void **out, size_t length, unsigned flags)
{
    Result result;
    NEED_CONTEXT;
    *out = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return OUT_OF_MEMORY;
    result = cuMemHostRegister_v2(*out, length, flags);
    if (result) munmap(*out, length);
    return result;
}
HOOKED(cuMemFreeHost)(void *at)
{
    size_t length;
    NEED_CONTEXT;
    if (unregister(at, &length)) return INVALID_VALUE;
    munmap(at, length);
    return SUCCESS;
}

static Result attribute(void *out, int which, Address at, int unknown)
{
    struct Block found = { 0 }, *b;
    pthread_mutex_lock(&lock);
    b = block_of(at);
    if (b) found = *b;
    pthread_mutex_unlock(&lock);
    if (!b) {
        if (unknown) return unknown;
        found.device = -2;
    }
    switch (which) {
    case 1: *(ContextRef *)out = found.context; return SUCCESS;
    case 2: *(unsigned *)out = !b ? 0 : found.sort == PINNED ? 1 : 2; return SUCCESS;
    case 3: *(Address *)out = at; return SUCCESS;
    case 4: *(void **)out = found.sort == ON_DEVICE ? NULL : (void *)at; return SUCCESS;
    case 7: *(uint64_t *)out = found.number; return SUCCESS;
    case 8: *(unsigned *)out = found.sort == MANAGED; return SUCCESS;
    case 9: *(int *)out = found.device; return SUCCESS;
    case 10: *(int *)out = 0; return SUCCESS;
    case 11: *(void **)out = (void *)found.start; return SUCCESS;
    case 12: *(size_t *)out = found.length; return SUCCESS;
    case 13: *(int *)out = b != NULL; return SUCCESS;
    case 14: *(uint64_t *)out = 0; return SUCCESS;
    case 17: *(void **)out = NULL; return SUCCESS;
    default: return INVALID_VALUE;
    }
}
API cuPointerGetAttribute(void *out, int which, Address at)
{
    return devices < 0 ? NOT_INITIALIZED : attribute(out, which, at, INVALID_VALUE);
}
API cuPointerGetAttributes(unsigned n, int *which, void **out, Address at)
{
    if (devices < 0) return NOT_INITIALIZED;
    for (unsigned i = 0; i < n; i++) {
        Result result = attribute(out[i], which[i], at, SUCCESS);
        if (result) return result;
    }
    return SUCCESS;
}
API cuPointerSetAttribute(const void *value, int which, Address at)
{
    (void)value; (void)which; (void)at;
    NEED_CONTEXT;
    return SUCCESS;
}
API cuMemGetAddressRange_v2(Address *start, size_t *length, Address at)
{
    struct Block *b;
    NEED_CONTEXT;
    pthread_mutex_lock(&lock);
    b = block_of(at);
    if (b && start) *start = b->start;
    if (b && length) *length = b->length;
    pthread_mutex_unlock(&lock);
    return b ? SUCCESS : NOT_FOUND;
}
API cuMemRangeGetAttribute(void *out, size_t size, int which, Address at, size_t length)
{
    (void)which; (void)at; (void)length;
    NEED_CONTEXT;
    if (size != 4) return INVALID_VALUE;
    *(int *)out = -2;
    return SUCCESS;
}

/* ---- devices and contexts ------------------------------------------------------------------ */

static unsigned number_from(const char *name, unsigned otherwise)
{
    const char *text = getenv(name);
    return text && *text ? (unsigned)strtoul(text, NULL, 10) : otherwise;
}

API cuInit(unsigned flags)
{
    if (flags) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (devices < 0) {
        unsigned n = number_from("STANDIN_DEVICES", 2);
        delay = number_from("STANDIN_DELAY", 0);
        strict = number_from("STANDIN_STRICT", 0);
        devices = n > DEVICES ? DEVICES : (int)n;
        for (int i = 0; i < devices; i++) primaries[i].device = i;
    }
    pthread_mutex_unlock(&lock);
    return devices ? SUCCESS : NO_DEVICE;
}
API cuDriverGetVersion(int *version) { *version = 12060; return SUCCESS; }
API cuDeviceGetCount(int *n)
{
    if (devices < 0) return NOT_INITIALIZED;
    *n = devices;
    return SUCCESS;
}
API cuDeviceGet(int *device, int ordinal) { NEED_DEVICE(ordinal); *device = ordinal; return SUCCESS; }
API cuDeviceGetName(char *name, int size, int device)
{
    NEED_DEVICE(device);
    snprintf(name, (size_t)size, "stand-in %d", device);
    return SUCCESS;
}
API cuDeviceGetUuid(char *uuid, int device)
{
    NEED_DEVICE(device);
    memset(uuid, 's', 16);
    uuid[15] = (char)device;
    return SUCCESS;
}
API cuDeviceTotalMem_v2(size_t *bytes, int device) { NEED_DEVICE(device); *bytes = ARENA; return SUCCESS; }
API cuDeviceGetAttribute(int *value, int which, int device)
{
    NEED_DEVICE(device);
    switch (which) {
    case 33: *value = 0x40 + device; break; /* PCI bus */
    case 40: *value = 2; break;             /* copy engines */
    case 41: case 83: *value = 1; break;    /* one address space; managed memory */
    case 75: *value = 8; break;             /* compute capability */
    default: *value = 0;
    }
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(ContextRef *out, int device)
{
    NEED_DEVICE(device);
    pthread_mutex_lock(&lock);
    if (primaries[device].users++ == 0) {
        primaries[device].destroyed = 0;
        primaries[device].number = numbers++;
    }
    pthread_mutex_unlock(&lock);
    *out = &primaries[device];
    return SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(int device)
{
    int known;
    NEED_DEVICE(device);
    pthread_mutex_lock(&lock);
    known = primaries[device].users > 0;
    if (known && --primaries[device].users == 0) primaries[device].destroyed = 1;
    pthread_mutex_unlock(&lock);
    return known ? SUCCESS : INVALID_CONTEXT;
}
API cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    NEED_DEVICE(device);
    *flags = 0;
    *active = primaries[device].users > 0;
    return SUCCESS;
}
API cuCtxCreate_v2(ContextRef *out, unsigned flags, int device)
{
    (void)flags;
    NEED_DEVICE(device);
    if (depth == 32) return OUT_OF_MEMORY;
    *out = calloc(1, sizeof(**out));
    (*out)->device = device;
    (*out)->number = numbers++;
    stack[depth++] = *out;
    return SUCCESS;
}
/* The record stays: who goes on using the context is told so. */
API cuCtxDestroy_v2(ContextRef context)
{
    if (!context || context->destroyed) return INVALID_CONTEXT;
    context->destroyed = 1;
    if (CURRENT == context) depth--;
    return SUCCESS;
}
API cuCtxGetCurrent(ContextRef *out)
{
    if (devices < 0) return NOT_INITIALIZED;
    *out = CURRENT;
    return SUCCESS;
}
API cuCtxSetCurrent(ContextRef context)
{
    if (context && context->destroyed) return INVALID_CONTEXT;
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return SUCCESS;
}
API cuCtxPushCurrent_v2(ContextRef context)
{
    if (!context || context->destroyed || depth == 32) return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}
API cuCtxPopCurrent_v2(ContextRef *out)
{
    if (!depth) return no_context();
    depth--;
    if (out) *out = stack[depth];
    return SUCCESS;
}
API cuCtxGetDevice(int *device) { NEED_CONTEXT; *device = CURRENT->device; return SUCCESS; }
API cuCtxGetId(ContextRef context, uint64_t *number)
{
    if (!context) {
        NEED_CONTEXT;
        context = CURRENT;
    }
    *number = context->number;
    return SUCCESS;
}
API cuCtxGetApiVersion(ContextRef context, unsigned *version)
{
    if (!context) NEED_CONTEXT;
    *version = 3020;
    return SUCCESS;
}
API cuCtxSetFlags(unsigned flags) { (void)flags; NEED_CONTEXT; return SUCCESS; }
API cuCtxGetFlags(unsigned *flags) { NEED_CONTEXT; *flags = 0; return SUCCESS; }
API cuCtxSynchronize(void) { NEED_CONTEXT; return SUCCESS; }

/* ---- streams, events, copies ----------------------------------------------------------------- */

/* What waits in a stream: a copy, or the mark of an event. */
struct Work {
    struct Work *next;
    char *to;
    const char *from;
    size_t length;
    EventRef event;
    uint64_t mark;
};
struct Stream {
    ContextRef context;
    struct Work *first, *last;
    unsigned looks;
};
struct Event {
    ContextRef context;
    StreamRef stream;
    uint64_t wanted, happened;
    unsigned looks;
};

/* With the lock held. */
static void append(StreamRef stream, struct Work *work)
{
    if (stream->first) stream->last->next = work; else stream->first = work;
    stream->last = work;
    stream->looks = 0;
}
/* Does what a stream has, as far as an event (NULL: all); with the lock held. */
static void perform(StreamRef stream, EventRef until)
{
    struct Work *work;
    while ((work = stream->first) && !(until && until->happened >= until->wanted)) {
        stream->first = work->next;
        if (work->event) {
            if (work->event->happened < work->mark) work->event->happened = work->mark;
        } else if (work->length) {
            memmove(work->to, work->from, work->length);
        }
        free(work);
    }
}
/* Whether copies on streams happen later than they are asked for. */
static int later(StreamRef stream) { return stream && (delay || held); }

static Result copy(uintptr_t to, uintptr_t from, size_t length, int to_device, int from_device, StreamRef stream)
{
    int to_is, from_is;
    char *target, *source;
    if (!length) return SUCCESS;
    target = bytes_of(to, length, &to_is);
    source = bytes_of(from, length, &from_is);
    if (!target || !source || (to_device >= 0 && to_is != to_device) || (from_device >= 0 && from_is != from_device))
        return INVALID_VALUE;
    if (to_is) copied_in += length;
    if (from_is) copied_out += length;
    pthread_mutex_lock(&lock);
    if (later(stream) || (stream && stream->first)) {
        struct Work *work = calloc(1, sizeof(*work));
        work->to = target;
        work->from = source;
        work->length = length;
        append(stream, work);
    } else {
        memmove(target, source, length);
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

API cuMemcpy(Address to, Address from, size_t n) { NEED_CONTEXT; return copy(to, from, n, -1, -1, NULL); }
API cuMemcpyHtoD_v2(Address to, const void *from, size_t n)
{
    NEED_CONTEXT;
    return copy(to, (uintptr_t)from, n, 1, -1, NULL);
}
API cuMemcpyDtoH_v2(void *to, Address from, size_t n)
{
    NEED_CONTEXT;
    return copy((uintptr_t)to, from, n, -1, 1, NULL);
}
API cuMemcpyDtoD_v2(Address to, Address from, size_t n) { NEED_CONTEXT; return copy(to, from, n, 1, 1, NULL); }
API cuMemcpyAsync(Address to, Address from, size_t n, StreamRef s) { NEED_CONTEXT; return copy(to, from, n, -1, -1, s); }
API cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t n, StreamRef s)
{
    NEED_CONTEXT;
    return copy(to, (uintptr_t)from, n, 1, -1, s);
}
API cuMemcpyDtoHAsync_v2(void *to, Address from, size_t n, StreamRef s)
{
    NEED_CONTEXT;
    return copy((uintptr_t)to, from, n, -1, 1, s);
}
API cuMemcpyDtoDAsync_v2(Address to, Address from, size_t n, StreamRef s)
{
    NEED_CONTEXT;
    return copy(to, from, n, 1, 1, s);
}

API cuStreamCreate(StreamRef *out, unsigned flags)
{
    (void)flags;
    NEED_CONTEXT;
    *out = calloc(1, sizeof(**out));
    (*out)->context = CURRENT;
    return SUCCESS;
}
API cuStreamSynchronize(StreamRef stream)
{
    NEED_CONTEXT_IF_STRICT;
    if (!stream) return SUCCESS;
    pthread_mutex_lock(&lock);
    perform(stream, NULL);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
API cuStreamQuery(StreamRef stream)
{
    Result result = SUCCESS;
    NEED_CONTEXT_IF_STRICT;
    if (!stream) return SUCCESS;
    pthread_mutex_lock(&lock);
    if (stream->first && (held || stream->looks++ < delay)) result = NOT_READY; else perform(stream, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}
API cuStreamDestroy_v2(StreamRef stream)
{
    if (!stream) return INVALID_HANDLE;
    NEED_CONTEXT_IF_STRICT;
    pthread_mutex_lock(&lock);
    perform(stream, NULL);
    pthread_mutex_unlock(&lock);
    free(stream);
    return SUCCESS;
}
API cuStreamAddCallback(StreamRef stream, void (*call)(StreamRef, Result, void *), void *argument, unsigned flags)
{
    Result result = cuStreamSynchronize(stream);
    (void)flags;
    if (result == SUCCESS) call(stream, SUCCESS, argument);
    return result;
}
API cuLaunchHostFunc(StreamRef stream, void (*call)(void *), void *argument)
{
    Result result = cuStreamSynchronize(stream);
    if (result == SUCCESS) call(argument);
    return result;
}
API cuEventCreate(EventRef *out, unsigned flags)
{
    (void)flags;
    NEED_CONTEXT;
    *out = calloc(1, sizeof(**out));
    (*out)->context = CURRENT;
    return SUCCESS;
}
API cuEventDestroy_v2(EventRef event)
{
    if (!event) return INVALID_HANDLE;
    NEED_CONTEXT_IF_STRICT;
    pthread_mutex_lock(&lock);
    if (event->stream && event->happened < event->wanted) perform(event->stream, NULL);
    pthread_mutex_unlock(&lock);
    free(event);
    return SUCCESS;
}
API cuEventRecord(EventRef event, StreamRef stream)
{
    if (!event || (stream && stream->context != event->context)) return INVALID_HANDLE;
    NEED_CONTEXT_IF_STRICT;
    pthread_mutex_lock(&lock);
    event->stream = stream;
    event->looks = 0;
    event->wanted++;
    if (stream && stream->first) {
        struct Work *work = calloc(1, sizeof(*work));
        work->event = event;
        work->mark = event->wanted;
        append(stream, work);
    } else {
        event->happened = event->wanted;
    }
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
API cuEventQuery(EventRef event)
{
    Result result = SUCCESS;
    if (!event) return INVALID_HANDLE;
    NEED_CONTEXT_IF_STRICT;
    pthread_mutex_lock(&lock);
    if (event->happened < event->wanted) {
        if (held || event->looks++ < delay) result = NOT_READY; else perform(event->stream, event);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
API cuEventSynchronize(EventRef event)
{
    if (!event) return INVALID_HANDLE;
    NEED_CONTEXT_IF_STRICT;
    pthread_mutex_lock(&lock);
    if (event->happened < event->wanted) perform(event->stream, event);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
API cuStreamWaitEvent(StreamRef stream, EventRef event, unsigned flags)
{
    (void)stream; (void)flags;
    return cuEventSynchronize(event);
}

/* ---- not there: sharing between processes, virtual memory, pools ---------------------------------- */

#define MISSING(name) API name(void) { return NOT_SUPPORTED; }
MISSING(cuIpcGetMemHandle) MISSING(cuIpcOpenMemHandle_v2) MISSING(cuIpcCloseMemHandle)
MISSING(cuDeviceCanAccessPeer)
MISSING(cuMemCreate) MISSING(cuMemRelease) MISSING(cuMemAddressReserve) MISSING(cuMemAddressFree) MISSING(cuMemSetAccess)
MISSING(cuMemGetAllocationGranularity) MISSING(cuMemGetAllocationPropertiesFromHandle)
MISSING(cuMemExportToShareableHandle) MISSING(cuMemImportFromShareableHandle)
MISSING(cuMemPoolDestroy) MISSING(cuMemPoolSetAccess) MISSING(cuMemPoolExportPointer) MISSING(cuMemPoolImportPointer)
MISSING(cuMemPoolExportToShareableHandle) MISSING(cuMemPoolImportFromShareableHandle)
HOOKED(cuMemMap)(void) { return NOT_SUPPORTED; }
HOOKED(cuMemUnmap)(void) { return NOT_SUPPORTED; }
/* Memory of cuMemAlloc has no such handle. */
API cuMemRetainAllocationHandle(void *handle, void *at) { (void)handle; (void)at; return INVALID_VALUE; }

/* ---- the rest ------------------------------------------------------------------------------------ */

API cuGetErrorString(Result result, const char **text)
{
    static const struct { Result result; const char *text; } known[] = {
        { SUCCESS, "no error" }, { INVALID_VALUE, "invalid argument" }, { OUT_OF_MEMORY, "out of memory" },
        { NOT_INITIALIZED, "initialization error" }, { NO_DEVICE, "no CUDA-capable device is detected" },
        { INVALID_DEVICE, "invalid device ordinal" }, { INVALID_CONTEXT, "invalid device context" },
        { INVALID_HANDLE, "invalid resource handle" }, { NOT_READY, "device not ready" },
        { NOT_SUPPORTED, "operation not supported" },
    };
    for (unsigned i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].result == result) {
            *text = known[i].text;
            return SUCCESS;
        }
    }
    *text = "unknown error";
    return SUCCESS;
}
API cuGetErrorName(Result result, const char **text) { return cuGetErrorString(result, text); }
API cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status)
{
    static const char *const endings[] = { "_v3", "_v2", "" };
    Dl_info self;
    void *library = NULL;
    char name[128];
    (void)version; (void)flags;
    if (dladdr((void *)cuInit, &self)) library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *out = NULL;
    for (unsigned i = 0; library && !*out && i < 3; i++) {
        snprintf(name, sizeof(name), "%s%s", symbol, endings[i]);
        *out = dlsym(library, name);
    }
    if (status) *status = *out ? 0 : 1;
    return *out ? SUCCESS : NOT_FOUND;
}

/* ---- for tests ------------------------------------------------------------------------------------ */

/* Asynchronous copies wait (1) or go on (0). */
EXPORT void standin_hold(int on) { held = on; }
/* How many calls found no current context where one is needed. */
EXPORT uint64_t standin_context_errors(void) { return context_errors; }
/* Bytes copied to and from devices. */
EXPORT uint64_t standin_copied(int to_device) { return to_device ? copied_in : copied_out; }
