/* Streams, events and copies. A stream is a queue, and REHEARSAL_ORDER says which streams are behind: with `late` what is
   queued beside the default stream runs when an event or a synchronisation forces it and not before; with `early` it is
   the default stream that is behind, and what is queued beside it runs as soon as the events that it waits for allow.
   A wait that is missing gives stale numbers in one of the two. `prompt` runs everything at once. */
#include "rehearsal.h"
#include <dlfcn.h>
#include <time.h>

typedef enum { COPY, SET, RUN, WAIT } kind;
typedef struct item {
    kind kind;
    void *target;
    const void *source;
    size_t bytes;
    int value;
    void *staged;              /* the source's bytes, where that memory may change at once */
    work run;
    int64_t about, serial, until;
    stream *awaited;
    struct item *next;
} item;

struct stream { item *head, *tail; int64_t last, done; int asked, side; stream *all; };
typedef struct { stream *on; int64_t serial; int recorded, asked; struct timespec at; } event;

static stream defaults[MAX_DEVICES];
static stream *all_streams;
static enum { LATE, EARLY, PROMPT } order;
static pthread_mutex_t gate;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_long deferred;
static size_t largest = SIZE_MAX;  /* bytes of a copy or set to a device beyond which it is left out */

static int (*gil_held)(void);
static void *(*release_gil)(void);
static void (*take_gil)(void *);

static void begin(void) {
    const char *wanted = getenv("REHEARSAL_ORDER");
    order = !wanted || !strcmp(wanted, "late") ? LATE : !strcmp(wanted, "early") ? EARLY : PROMPT;
    const char *limit = getenv("REHEARSAL_LARGEST");
    if (limit && *limit) largest = strtoull(limit, 0, 10);
    pthread_mutexattr_t again;
    pthread_mutexattr_init(&again);
    pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&gate, &again);
    for (int i = 0; i < MAX_DEVICES; i++) { defaults[i].all = all_streams; all_streams = &defaults[i]; }
    gil_held = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    release_gil = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    take_gil = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
}

/* What runs in a kernel's place is Python's. Whoever holds the gate may take the interpreter's lock; so nobody waits for
   the gate and keeps that lock. */
void enter(void) {
    pthread_once(&once, begin);
    if (!pthread_mutex_trylock(&gate)) return;
    if (gil_held && gil_held()) {
        void *state = release_gil();
        pthread_mutex_lock(&gate);
        take_gil(state);
    } else {
        pthread_mutex_lock(&gate);
    }
}
void leave(void) { pthread_mutex_unlock(&gate); }

stream *stream_of(void *handle) {
    pthread_once(&once, begin);
    return (size_t)handle > 2 ? handle : &defaults[rehearsal_current()];
}
static int prompt(const stream *one) { return order == PROMPT || one->side == (order == EARLY); }

static void run(item *one) {
    if (one->bytes > largest && on_device(one->target)) return;
    switch (one->kind) {
    case COPY: memmove(reachable(one->target), one->staged ? one->staged : reachable(one->source), one->bytes); break;
    case SET: memset(reachable(one->target), one->value, one->bytes); break;
    case RUN: one->run(one->about); break;
    case WAIT: finish(one->awaited, one->until); break;
    }
}
void finish(stream *of, int64_t serial) {
    enter();
    while (of->head && of->head->serial <= serial) {
        item *one = of->head;
        of->head = one->next;
        if (!of->head) of->tail = 0;
        run(one);
        of->done = one->serial;
        free(one->staged);
        free(one);
    }
    leave();
}
void finish_all(void) {
    enter();
    for (stream *one = all_streams; one; one = one->all) finish(one, FOREVER);
    leave();
}
static void put(stream *on, item about) {
    enter();
    item *one = malloc(sizeof *one);
    if (!one) fatal("no memory", "");
    *one = about;
    one->serial = ++on->last;
    one->next = 0;
    if (on->tail) on->tail->next = one; else on->head = one;
    on->tail = one;
    if (prompt(on)) finish(on, FOREVER); else deferred++;
    leave();
}
void enqueue(stream *on, work run, int64_t about) { put(on, (item){.kind = RUN, .run = run, .about = about}); }
static int within(const void *at, size_t bytes, const char *begin, const char *end) {
    return (const char *)at < end && begin < (const char *)at + bytes;
}
int queued_for(const char *begin, const char *end) {
    int found = 0;
    enter();
    for (stream *one = all_streams; one; one = one->all)
        for (item *each = one->head; each; each = each->next)
            found |= each->kind == COPY && ((!each->staged && within(each->source, each->bytes, begin, end))
                                            || within(each->target, each->bytes, begin, end));
    leave();
    return found;
}

API void rehearsal_order(int wanted) { finish_all(); order = wanted; }
API int rehearsal_prompt(void *handle) { stream *one = stream_of(handle); return prompt(one) && !one->head; }
API void rehearsal_enqueue(void *handle, work run, int64_t about) { enqueue(stream_of(handle), run, about); }
API void rehearsal_finish(void *handle) { finish(stream_of(handle), FOREVER); }
API int rehearsal_enter_stream(void *handle) { finish(stream_of(handle), FOREVER); return OK; }
API int64_t rehearsal_deferred(void) { return deferred; }

/* --- copies */

static int copy(void *target, const void *source, size_t bytes, stream *on, int host_waits) {
    if (!bytes) return OK;
    item one = {.kind = COPY, .target = target, .source = source, .bytes = bytes};
    int to_host = !on_device(target), from_host = !on_device(source);
    if (bytes > largest && !to_host) return OK;
    if (from_host && !page_locked(source)) {  /* ordinary memory is staged before the call returns */
        if (!(one.staged = malloc(bytes))) return rehearsal_error(OUT_OF_MEMORY);
        memcpy(one.staged, source, bytes);
    }
    put(on, one);
    if (host_waits || (to_host && !page_locked(target))) finish(on, FOREVER);
    return OK;
}
API int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int direction, void *handle) {
    (void)direction;
    return copy(target, source, bytes, stream_of(handle), 0);
}
API int cudaMemcpy(void *target, const void *source, size_t bytes, int direction) {
    (void)direction;
    return copy(target, source, bytes, stream_of(0), 1);
}
API int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t bytes, void *handle) {
    (void)to; (void)from;
    return copy(target, source, bytes, stream_of(handle), 0);
}
API int cudaMemcpyToSymbol(const void *symbol, const void *source, size_t bytes, size_t offset, int direction) {
    (void)symbol; (void)source; (void)bytes; (void)offset; (void)direction;
    return OK;  /* constants of kernels, which do not run */
}
API int cudaMemsetAsync(void *target, int value, size_t bytes, void *handle) {
    put(stream_of(handle), (item){.kind = SET, .target = target, .value = value, .bytes = bytes});
    return OK;
}
API int cudaMemset(void *target, int value, size_t bytes) {
    put(stream_of(0), (item){.kind = SET, .target = target, .value = value, .bytes = bytes});
    return OK;
}

/* --- streams */

static int make(void **handle) {
    stream *one = calloc(1, sizeof *one);  /* never freed: events and waits may outlive it */
    if (!one) return rehearsal_error(OUT_OF_MEMORY);
    one->side = 1;
    enter();
    one->all = all_streams;
    all_streams = one;
    leave();
    *handle = one;
    return OK;
}
API int cudaStreamCreate(void **handle) { return make(handle); }
API int cudaStreamCreateWithFlags(void **handle, unsigned flags) { (void)flags; return make(handle); }
API int cudaStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    (void)flags; (void)priority;
    return make(handle);
}
API int cudaStreamDestroy(void *handle) { finish(stream_of(handle), FOREVER); return OK; }
API int cudaStreamSynchronize(void *handle) { finish(stream_of(handle), FOREVER); return OK; }
API int cudaDeviceSynchronize(void) { finish_all(); return OK; }
API int cudaStreamQuery(void *handle) {
    stream *one = stream_of(handle);
    if (one->done < one->last && ++one->asked % 3) return rehearsal_error(NOT_READY);
    finish(one, FOREVER);
    return OK;
}
API int cudaStreamGetPriority(void *handle, int *priority) { (void)handle; *priority = 0; return OK; }
API int cudaStreamIsCapturing(void *handle, int *status) { (void)handle; *status = 0; return OK; }
API int cudaStreamGetCaptureInfo(void *handle, int *status, void *id, void *graph, void *nodes, void *edges, size_t *n) {
    (void)handle; (void)id; (void)graph; (void)nodes; (void)edges; (void)n;
    *status = 0;
    return OK;
}
API int cudaThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return OK; }
API int cudaLaunchHostFunc(void *handle, void (*call)(void *), void *about) {
    stream *on = stream_of(handle);
    finish(on, FOREVER);
    call(about);
    return OK;
}

/* --- events */

API int cudaEventCreateWithFlags(void **handle, unsigned flags) {
    (void)flags;
    *handle = calloc(1, sizeof(event));
    return *handle ? OK : rehearsal_error(OUT_OF_MEMORY);
}
API int cudaEventCreate(void **handle) { return cudaEventCreateWithFlags(handle, 0); }
API int cudaEventDestroy(void *handle) { free(handle); return OK; }
API int cudaEventRecord(void *handle, void *on) {
    event *one = handle;
    enter();
    one->on = stream_of(on);
    one->serial = one->on->last;
    leave();
    one->recorded = 1;
    one->asked = 0;
    clock_gettime(CLOCK_MONOTONIC, &one->at);
    return OK;
}
API int cudaEventRecordWithFlags(void *handle, void *on, unsigned flags) { (void)flags; return cudaEventRecord(handle, on); }
API int cudaStreamWaitEvent(void *handle, void *awaited, unsigned flags) {
    (void)flags;
    event *one = awaited;
    stream *on = stream_of(handle);
    if (!one->recorded || one->on == on) return OK;
    enter();
    if (one->on->done < one->serial) put(on, (item){.kind = WAIT, .awaited = one->on, .until = one->serial});
    leave();
    return OK;
}
API int cudaEventSynchronize(void *handle) {
    event *one = handle;
    if (one->recorded) finish(one->on, one->serial);
    return OK;
}
/* The third question is answered by having it done: a program may ask until it is. */
API int cudaEventQuery(void *handle) {
    event *one = handle;
    if (!one->recorded) return OK;
    if (one->on->done < one->serial && ++one->asked < 3) return rehearsal_error(NOT_READY);
    return cudaEventSynchronize(handle);
}
API int cudaEventElapsedTime(float *milliseconds, void *earlier, void *later) {
    event *from = earlier, *to = later;
    if (!from->recorded || !to->recorded) return rehearsal_error(INVALID_HANDLE);
    if (to->on->done < to->serial) return rehearsal_error(NOT_READY);
    *milliseconds = (float)(to->at.tv_sec - from->at.tv_sec) * 1e3f + (float)(to->at.tv_nsec - from->at.tv_nsec) / 1e6f;
    return OK;
}
