/* Devices and memory. Device memory is an address range that the host cannot touch (a read or write of the host ends in
   SIGSEGV); the same pages are mapped a second time, for this library and for what computes in the kernels' place. */
#include "rehearsal.h"
#include <sys/mman.h>
#include <unistd.h>

#define GRANULE ((size_t)2 << 20)
#define MAX_BLOCKS (1 << 20)
#define MAX_HOST 65536

typedef struct { size_t at, bytes; int device; } block;
typedef struct { char *begin; size_t bytes; int registered; } host_range;

static int physical, visible[MAX_DEVICES], visible_count, capability = 80, poison;
static size_t total = (size_t)80 << 30, span, room;
static char *device_base, *alias_base;
static block *blocks;
static int block_count;
static size_t used[MAX_DEVICES];
static host_range hosts[MAX_HOST];
static int host_count;
static int64_t register_limit = -1;
static pthread_mutex_t memory = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int current;
static _Thread_local int last_error;

void fatal(const char *words, const char *about) {
    fprintf(stderr, "rehearsal: %s%s\n", words, about);
    fflush(stderr);
    abort();
}

static int64_t setting(const char *name, int64_t otherwise) {
    const char *value = getenv(name);
    return value && *value ? strtoll(value, 0, 10) : otherwise;
}

/* At the first call and not when the library is loaded: a process may choose its device until then. */
static void begin(void) {
    physical = (int)setting("REHEARSAL_DEVICES", 1);
    total = (size_t)setting("REHEARSAL_BYTES", (int64_t)total);
    capability = (int)setting("REHEARSAL_SM", capability);
    poison = (int)setting("REHEARSAL_POISON", 0);
    register_limit = setting("REHEARSAL_REGISTER_LIMIT", -1);
    if (physical < 0 || physical > MAX_DEVICES) fatal("REHEARSAL_DEVICES is out of range", "");
    const char *mask = getenv("HIP_VISIBLE_DEVICES");
    if (!getenv("REHEARSAL_HIP") || !mask) mask = getenv("CUDA_VISIBLE_DEVICES");
    if (!mask) {
        for (int i = 0; i < physical; i++) visible[visible_count++] = i;
    } else {  /* the first entry that names no device ends the list (CUDA C++ Programming Guide) */
        for (char *rest = (char *)mask; *rest && visible_count < physical;) {
            char *end;
            long number;
            if (!strncmp(rest, "GPU-", 4)) {  /* ours differ in the last number alone */
                char *last = rest + strcspn(rest, ",");
                while (last > rest && last[-1] != '-') last--;
                number = strtol(last, &end, 16) - 1;
                if (end == last) break;
            } else {
                number = strtol(rest, &end, 10);
                if (end == rest) break;
            }
            if (number < 0 || number >= physical) break;
            visible[visible_count++] = (int)number;
            rest = *end == ',' ? end + 1 : end;
        }
    }
    room = (total + GRANULE - 1) / GRANULE * GRANULE * 2;  /* twice: addresses may be fragmented, bytes are counted */
    span = room * (size_t)(visible_count ? visible_count : 1);
    int file = memfd_create("rehearsal", 0);
    if (file < 0 || ftruncate(file, (off_t)span)) fatal("no address space for device memory", "");
    device_base = mmap(0, span, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    alias_base = mmap(0, span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    blocks = mmap(0, sizeof(block) * MAX_BLOCKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (device_base == MAP_FAILED || alias_base == MAP_FAILED || blocks == MAP_FAILED)
        fatal("no address space for device memory", "");
    close(file);
}

int rehearsal_devices(void) { pthread_once(&once, begin); return visible_count; }
int rehearsal_current(void) { return current; }
int rehearsal_error(int code) { if (code) last_error = code; return code; }
int on_device(const void *pointer) {
    return device_base && (const char *)pointer >= device_base && (const char *)pointer < device_base + span;
}
void *reachable(const void *pointer) {
    return on_device(pointer) ? alias_base + ((const char *)pointer - device_base) : (void *)pointer;
}
static host_range *host_at(const void *pointer) {
    for (int i = 0; i < host_count; i++)
        if ((const char *)pointer >= hosts[i].begin && (const char *)pointer < hosts[i].begin + hosts[i].bytes)
            return &hosts[i];
    return 0;
}
int page_locked(const void *pointer) {
    pthread_mutex_lock(&memory);
    int found = host_at(pointer) != 0;
    pthread_mutex_unlock(&memory);
    return found;
}

API void *rehearsal_alias(void *pointer) { return reachable(pointer); }
API int64_t rehearsal_used(int device) { return (int64_t)used[device]; }
API int rehearsal_locked_ranges(void) { return host_count; }

/* --- devices */

API int cudaGetDeviceCount(int *count) {
    *count = rehearsal_devices();
    return *count ? OK : rehearsal_error(NO_DEVICE);
}
API int cudaGetDevice(int *device) { rehearsal_devices(); *device = current; return OK; }
API int cudaSetDevice(int device) {
    if (device < 0 || device >= rehearsal_devices()) return rehearsal_error(INVALID_DEVICE);
    current = device;
    return OK;
}
API int cudaDriverGetVersion(int *version) { *version = 13000; return OK; }
API int cudaRuntimeGetVersion(int *version) { *version = 13000; return OK; }
API int cudaGetLastError(void) { int code = last_error; last_error = OK; return code; }
API int cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorName(int code) {
    return code == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : code == ALREADY_REGISTERED
        ? "cudaErrorHostMemoryAlreadyRegistered" : code == INVALID_DEVICE ? "cudaErrorInvalidDevice" : "cudaError";
}
API const char *cudaGetErrorString(int code) {
    switch (code) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_READY: return "device not ready";
    case ALREADY_REGISTERED: return "part or all of the requested memory range is already mapped";
    case NOT_REGISTERED: return "pointer does not correspond to a registered memory region";
    default: return "operation not supported";
    }
}

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (device < 0 || device >= rehearsal_devices()) return rehearsal_error(INVALID_DEVICE);
    switch (attribute) {
    case 1: case 2: case 3: *value = 1024; break;      /* threads of a block, and in x and y */
    case 4: *value = 64; break;
    case 5: *value = INT32_MAX; break;                 /* a grid's x, y, z */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;                     /* shared memory of a block */
    case 10: *value = 32; break;                       /* threads of a warp */
    case 12: *value = 65536; break;                    /* registers of a block */
    case 16: *value = 108; break;                      /* multiprocessors */
    case 39: *value = 2048; break;                     /* threads of a multiprocessor */
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 97: *value = 166912; break;                   /* shared memory of a block that asks for more */
    default: *value = 1;
    }
    return OK;
}

/* The device's entry in REHEARSAL_NAMES, a list with commas: torch's CUDA build also shows it as its `gcnArchName`. */
static void name_of(int device, char *into, size_t room_for) {
    const char *rest = getenv("REHEARSAL_NAMES");
    for (int i = 0; rest && *rest && i < visible[device]; i++) {
        rest += strcspn(rest, ",");
        if (*rest) rest++;
    }
    if (!rest || !*rest) rest = "Rehearsal (no GPU)";
    snprintf(into, room_for, "%.*s", (int)strcspn(rest, ","), rest);
}

static void put32(char *at, int32_t value) { memcpy(at, &value, sizeof value); }
static void put64(char *at, int64_t value) { memcpy(at, &value, sizeof value); }

API int cudaGetDeviceProperties(char *found, int device) {
    if (device < 0 || device >= rehearsal_devices()) return rehearsal_error(INVALID_DEVICE);
    memset(found, 0, 1008);
    name_of(device, found, 256);
    found[256 + 15] = (char)(visible[device] + 1);     /* uuid */
    put64(found + 288, (int64_t)total);
    put64(found + 296, 49152);                         /* shared memory of a block */
    put32(found + 304, 65536);                         /* registers of a block */
    put32(found + 308, 32);                            /* threads of a warp */
    put64(found + 312, INT32_MAX);
    put32(found + 320, 1024);                          /* threads of a block */
    put32(found + 324, 1024); put32(found + 328, 1024); put32(found + 332, 64);
    put32(found + 336, INT32_MAX); put32(found + 340, 65535); put32(found + 344, 65535);
    put64(found + 352, 65536);
    put32(found + 360, capability / 10); put32(found + 364, capability % 10);
    put64(found + 368, 512);                           /* alignment of textures */
    put32(found + 384, 108);                           /* multiprocessors */
    put32(found + 392, 1);                             /* maps host memory */
    put32(found + 560, 1);                             /* runs kernels beside one another */
    put32(found + 568, visible[device]);               /* PCI bus */
    put32(found + 584, 2);                             /* copy engines */
    put32(found + 588, 1);                             /* one address space with the host */
    put32(found + 592, 5120); put32(found + 596, 40 << 20);  /* memory bus, L2 */
    put32(found + 604, 2048);                          /* threads of a multiprocessor */
    put64(found + 624, 167936); put32(found + 632, 65536);
    put64(found + 672, 166912);
    put32(found + 688, 32);                            /* blocks of a multiprocessor */
    put32(found + 704, 1);                             /* registers host memory */
    return OK;
}
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
API int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; (void)device; (void)peer; return OK; }
API int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (device < 0 || device >= rehearsal_devices()) return rehearsal_error(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02x:00.0", visible[device]);
    return OK;
}

/* --- device memory */

static int by_address(const void *a, const void *b) {
    size_t first = ((const block *)a)->at, second = ((const block *)b)->at;
    return first < second ? -1 : first > second;
}

API int cudaMalloc(void **pointer, size_t bytes) {
    if (!rehearsal_devices()) return rehearsal_error(NO_DEVICE);
    size_t size = (bytes + GRANULE - 1) / GRANULE * GRANULE, at = room * (size_t)current, end = at + room;
    *pointer = 0;
    pthread_mutex_lock(&memory);
    if (used[current] + size > total || block_count == MAX_BLOCKS) {
        pthread_mutex_unlock(&memory);
        return rehearsal_error(OUT_OF_MEMORY);
    }
    for (int i = 0; i < block_count; i++) {
        if (blocks[i].device != current) continue;
        if (at + size <= blocks[i].at) break;
        at = blocks[i].at + blocks[i].bytes;
    }
    if (at + size > end) { pthread_mutex_unlock(&memory); return rehearsal_error(OUT_OF_MEMORY); }
    blocks[block_count++] = (block){at, size, current};
    qsort(blocks, (size_t)block_count, sizeof(block), by_address);
    used[current] += size;
    pthread_mutex_unlock(&memory);
    if (poison) memset(alias_base + at, 0xff, size);   /* NaN in every format of floats: nobody may count on zeros */
    *pointer = device_base + at;
    return OK;
}

API int cudaFree(void *pointer) {
    if (!pointer) return OK;
    finish_all();
    pthread_mutex_lock(&memory);
    for (int i = 0; i < block_count; i++) {
        if (device_base + blocks[i].at != (char *)pointer) continue;
        used[blocks[i].device] -= blocks[i].bytes;
        madvise(alias_base + blocks[i].at, blocks[i].bytes, MADV_REMOVE);
        memmove(blocks + i, blocks + i + 1, sizeof(block) * (size_t)(block_count - i - 1));
        block_count--;
        pthread_mutex_unlock(&memory);
        return OK;
    }
    pthread_mutex_unlock(&memory);
    return rehearsal_error(INVALID_VALUE);
}
API int cudaMemGetInfo(size_t *free_bytes, size_t *all) {
    rehearsal_devices();
    *all = total;
    *free_bytes = total - used[current];
    return OK;
}
API int cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static void *symbols;
    (void)symbol;
    if (!symbols && cudaMalloc(&symbols, GRANULE)) return OUT_OF_MEMORY;
    *pointer = symbols;
    return OK;
}

/* --- host memory */

API int cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    if (posix_memalign(pointer, 4096, bytes ? bytes : 1)) return rehearsal_error(OUT_OF_MEMORY);
    pthread_mutex_lock(&memory);
    if (host_count == MAX_HOST) fatal("too many ranges of locked host memory", "");
    hosts[host_count++] = (host_range){*pointer, bytes, 0};
    pthread_mutex_unlock(&memory);
    return OK;
}
API int cudaFreeHost(void *pointer) {
    finish_all();
    pthread_mutex_lock(&memory);
    for (int i = 0; i < host_count; i++)
        if (hosts[i].begin == pointer && !hosts[i].registered) { hosts[i] = hosts[--host_count]; break; }
    pthread_mutex_unlock(&memory);
    free(pointer);
    return OK;
}
API int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    rehearsal_devices();
    if (!pointer || !bytes) return rehearsal_error(INVALID_VALUE);
    size_t registered = 0;
    pthread_mutex_lock(&memory);
    for (int i = 0; i < host_count; i++) {
        if (hosts[i].registered) registered += hosts[i].bytes;
        if ((char *)pointer < hosts[i].begin + hosts[i].bytes && hosts[i].begin < (char *)pointer + bytes) {
            pthread_mutex_unlock(&memory);
            return rehearsal_error(ALREADY_REGISTERED);
        }
    }
    if (host_count == MAX_HOST || (register_limit >= 0 && registered + bytes > (size_t)register_limit)) {
        pthread_mutex_unlock(&memory);
        return rehearsal_error(OUT_OF_MEMORY);
    }
    hosts[host_count++] = (host_range){pointer, bytes, 1};
    pthread_mutex_unlock(&memory);
    return OK;
}
API int cudaHostUnregister(void *pointer) {
    pthread_mutex_lock(&memory);
    for (int i = 0; i < host_count; i++) {
        if (hosts[i].begin != pointer || !hosts[i].registered) continue;
        host_range gone = hosts[i];
        hosts[i] = hosts[--host_count];
        pthread_mutex_unlock(&memory);
        if (queued_for(gone.begin, gone.begin + gone.bytes))
            fatal("host memory is unregistered while a copy from or to it is queued", "");
        return OK;
    }
    pthread_mutex_unlock(&memory);
    return rehearsal_error(NOT_REGISTERED);
}
API int cudaPointerGetAttributes(char *found, const void *pointer) {
    memset(found, 0, 88);
    if (on_device(pointer)) {
        put32(found, 2);
        put32(found + 4, (int32_t)((size_t)((const char *)pointer - device_base) / room));
        put64(found + 8, (int64_t)pointer);
    } else if (page_locked(pointer)) {
        put32(found, 1);
        put32(found + 4, current);
        put64(found + 8, (int64_t)pointer);
        put64(found + 16, (int64_t)pointer);
    }
    return OK;
}
