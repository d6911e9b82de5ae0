/* NCCL's collectives over shared memory, for ranks that are processes of one machine. Every rank has a mailbox in a file of
   /dev/shm that all have mapped; a collective goes through the mailboxes piece by piece, with two barriers a piece. It runs
   at its place in the stream that it is called for, and the caller waits for it. */
#include "rehearsal.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)1 << 20)
#define MAX_RANKS 16
#define SECONDS 300
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };
typedef struct { char bytes[128]; } id;
typedef struct { atomic_int arrived, round, left; char boxes[MAX_RANKS][PIECE]; } shared;
typedef struct { shared *memory; int rank, ranks; char name[64]; } comm;

extern int rehearsal_enter_stream(void *stream);
static atomic_long collectives;
API int64_t rehearsal_collectives(void) { return collectives; }

API int ncclGetVersion(int *version) { *version = 22907; return SUCCESS; }
API const char *ncclGetErrorString(int code) { return code ? "a collective failed" : "no error"; }
API const char *ncclGetLastError(comm *c) { (void)c; return "none"; }
API int ncclGetUniqueId(id *made) {
    memset(made, 0, sizeof *made);
    int random = open("/dev/urandom", O_RDONLY);
    uint64_t number = 0;
    if (random < 0 || read(random, &number, sizeof number) != sizeof number) return SYSTEM_ERROR;
    close(random);
    snprintf(made->bytes, sizeof made->bytes, "/dev/shm/rehearsal-%016llx", (unsigned long long)number);
    return SUCCESS;
}
static void barrier(comm *c) {
    const int round = c->memory->round;
    const time_t begun = time(0);
    if (atomic_fetch_add(&c->memory->arrived, 1) + 1 == c->ranks) {
        c->memory->arrived = 0;
        c->memory->round = round + 1;
        return;
    }
    while (c->memory->round == round) {
        const struct timespec pause = {0, 50000};
        nanosleep(&pause, 0);
        if (time(0) - begun > SECONDS) fatal("a collective waited too long for another rank", "");
    }
}
API int ncclCommInitRankConfig(comm **made, int ranks, id unique, int rank, void *config) {
    (void)config;
    if (ranks > MAX_RANKS || rank < 0 || rank >= ranks) return INVALID_ARGUMENT;
    comm *c = calloc(1, sizeof *c);
    if (!c) return SYSTEM_ERROR;
    c->rank = rank; c->ranks = ranks;
    snprintf(c->name, sizeof c->name, "%.63s", unique.bytes);
    int file = open(c->name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(shared))) return SYSTEM_ERROR;
    c->memory = mmap(0, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (c->memory == MAP_FAILED) return SYSTEM_ERROR;
    barrier(c);
    if (rank == 0) unlink(c->name);  /* all have it mapped: nothing is left, however they end */
    *made = c;
    return SUCCESS;
}
API int ncclCommInitRank(comm **made, int ranks, id unique, int rank) {
    return ncclCommInitRankConfig(made, ranks, unique, rank, 0);
}
API int ncclCommDestroy(comm *c) { munmap(c->memory, sizeof(shared)); free(c); return SUCCESS; }
API int ncclCommAbort(comm *c) { return ncclCommDestroy(c); }
API int ncclCommFinalize(comm *c) { (void)c; return SUCCESS; }
API int ncclCommGetAsyncError(comm *c, int *code) { (void)c; *code = SUCCESS; return SUCCESS; }
API int ncclCommCount(const comm *c, int *count) { *count = c->ranks; return SUCCESS; }
API int ncclCommUserRank(const comm *c, int *rank) { *rank = c->rank; return SUCCESS; }
API int ncclGroupStart(void) { return SUCCESS; }
API int ncclGroupEnd(void) { return SUCCESS; }
API int ncclCommRegister(comm *c, void *at, size_t n, void **handle) { (void)c; (void)at; (void)n; *handle = 0; return SUCCESS; }
API int ncclCommDeregister(comm *c, void *handle) { (void)c; (void)handle; return SUCCESS; }

static size_t width(int type) {
    switch (type) {
    case 0: case 1: return 1;            /* int8, uint8 */
    case 6: case 9: return 2;            /* float16, bfloat16 */
    case 2: case 3: case 7: return 4;    /* int32, uint32, float32 */
    case 4: case 5: case 8: return 8;    /* int64, uint64, float64 */
    default: fatal("a type that collectives here have no form for", ""); return 0;
    }
}
static float narrow_to_float(uint16_t bits, int type) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    if (type == 6) { _Float16 half; memcpy(&half, &bits, 2); return (float)half; }
    memcpy(&value, &word, 4);
    return value;
}
static uint16_t float_to_narrow(float value, int type) {
    uint32_t word;
    uint16_t bits;
    if (type == 6) { _Float16 half = (_Float16)value; memcpy(&bits, &half, 2); return bits; }
    memcpy(&word, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}
#define FOLD(T, convert)                                                                             \
    for (size_t i = 0; i < n; i++) {                                                                 \
        T a = ((T *)into)[i], b = ((const T *)with)[i];                                              \
        ((T *)into)[i] = how == MAXIMUM ? (a > b ? a : b) : how == MINIMUM ? (a < b ? a : b)         \
            : how == PRODUCT ? (T)(a * b) : (T)(a + b);                                              \
    }                                                                                                \
    break;
static void fold(void *into, const void *with, size_t n, int type, int how) {
    switch (type) {
    case 0: FOLD(int8_t, )
    case 1: FOLD(uint8_t, )
    case 2: FOLD(int32_t, )
    case 3: FOLD(uint32_t, )
    case 4: FOLD(int64_t, )
    case 5: FOLD(uint64_t, )
    case 7: FOLD(float, )
    case 8: FOLD(double, )
    default:
        for (size_t i = 0; i < n; i++) {
            float a = narrow_to_float(((uint16_t *)into)[i], type), b = narrow_to_float(((const uint16_t *)with)[i], type);
            float c = how == MAXIMUM ? (a > b ? a : b) : how == MINIMUM ? (a < b ? a : b) : how == PRODUCT ? a * b : a + b;
            ((uint16_t *)into)[i] = float_to_narrow(c, type);
        }
    }
}
static void divide(void *values, size_t n, int type, int by) {
    for (size_t i = 0; i < n; i++) {
        if (type == 7) ((float *)values)[i] /= (float)by;
        else if (type == 8) ((double *)values)[i] /= by;
        else fatal("an average of a type that collectives here have no form for", "");
    }
}

/* All ranks add up in the order of their numbers, so that every one has the same bits. */
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int how, comm *c, void *stream) {
    const size_t wide = width(type), step = PIECE / wide;
    rehearsal_enter_stream(stream);
    const char *source = reachable(from);
    char *target = reachable(to);
    for (size_t at = 0; at < count; at += step) {
        const size_t n = count - at < step ? count - at : step;
        memcpy(c->memory->boxes[c->rank], source + at * wide, n * wide);
        barrier(c);
        memcpy(target + at * wide, c->memory->boxes[0], n * wide);
        for (int rank = 1; rank < c->ranks; rank++) fold(target + at * wide, c->memory->boxes[rank], n, type, how);
        if (how == AVERAGE) divide(target + at * wide, n, type, c->ranks);
        barrier(c);
    }
    collectives++;
    return SUCCESS;
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, comm *c, void *stream) {
    const size_t bytes = count * width(type);
    rehearsal_enter_stream(stream);
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        if (c->rank == root) memcpy(c->memory->boxes[root], (const char *)reachable(from) + at, n);
        barrier(c);
        memmove((char *)reachable(to) + at, c->memory->boxes[root], n);
        barrier(c);
    }
    collectives++;
    return SUCCESS;
}
API int ncclBcast(void *at, size_t count, int type, int root, comm *c, void *stream) {
    return ncclBroadcast(at, at, count, type, root, c, stream);
}
API int ncclAllGather(const void *from, void *to, size_t count, int type, comm *c, void *stream) {
    const size_t bytes = count * width(type);
    rehearsal_enter_stream(stream);
    for (size_t at = 0; at < bytes; at += PIECE) {
        const size_t n = bytes - at < PIECE ? bytes - at : PIECE;
        memcpy(c->memory->boxes[c->rank], (const char *)reachable(from) + at, n);
        barrier(c);
        for (int rank = 0; rank < c->ranks; rank++)
            memcpy((char *)reachable(to) + (size_t)rank * bytes + at, c->memory->boxes[rank], n);
        barrier(c);
    }
    collectives++;
    return SUCCESS;
}
