/* Kernels: taken and not run. What they compute is computed in their place, operation by operation (numbers.py). */
#include "rehearsal.h"

typedef struct { unsigned x, y, z; } dim3;

static atomic_long launches;
static _Thread_local struct { dim3 grid, block; size_t shared; void *stream; } configuration;
API int64_t rehearsal_launches(void) { return launches; }

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid; configuration.block = block;
    configuration.shared = shared; configuration.stream = stream;
    return OK;
}
API int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = configuration.grid; *block = configuration.block;
    *shared = configuration.shared; *stream = configuration.stream;
    return OK;
}
/* As the real runtime: an earlier error that nobody has asked for is what a check after a launch finds. */
static int launched(void) { launches++; return OK; }
API int cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    (void)f; (void)grid; (void)block; (void)arguments; (void)shared; (void)stream;
    return launched();
}
API int cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
API int __cudaLaunchKernel(void *f, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return cudaLaunchKernel(f, grid, block, arguments, shared, stream);
}
API int cudaLaunchKernelExC(const void *configured, const void *f, void **arguments) {
    (void)configured; (void)f; (void)arguments;
    return launched();
}
API int __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return OK; }
API void **__cudaRegisterFatBinary(void *binary) { (void)binary; static void *handle; return &handle; }
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API char __cudaInitModule(void **handle) { (void)handle; return 1; }
API void __cudaRegisterFunction(void) {}
API void __cudaRegisterVar(void) {}

API int cudaFuncGetAttributes(char *found, const void *f) {
    (void)f;
    const int32_t threads = 1024, registers = 64, version = 80, shared = 49152;
    memset(found, 0, 144);
    memcpy(found + 24, &threads, 4); memcpy(found + 28, &registers, 4);
    memcpy(found + 32, &version, 4); memcpy(found + 36, &version, 4); memcpy(found + 44, &shared, 4);
    return OK;
}
API int cudaFuncSetAttribute(const void *f, int attribute, int value) { (void)f; (void)attribute; (void)value; return OK; }
API int cudaKernelSetAttributeForDevice(void *k, int attribute, int value, int device) {
    (void)k; (void)attribute; (void)value; (void)device;
    return OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int threads, size_t shared) {
    (void)f; (void)threads; (void)shared;
    *count = 2;
    return OK;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int threads, size_t shared, unsigned flags) {
    (void)flags;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, f, threads, shared);
}
API int cudaLibraryLoadData(void **library) { *library = (void *)16; return OK; }
API int cudaLibraryGetKernel(void **kernel) { *kernel = (void *)16; return OK; }

/* --- entry points of the driver that torch asks the runtime for */

static int context_state(int device, unsigned *flags, int *active) {
    (void)device;
    if (flags) *flags = 0;
    if (active) *active = 1;
    return OK;
}
static int error_string(int code, const char **text) { *text = cudaGetErrorString(code); return OK; }
static int current_context(void **context) { *context = (void *)16; return OK; }
static int unsupported(void) { return NOT_SUPPORTED; }
API int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, uint64_t flags, int *result) {
    (void)version; (void)flags;
    *found = !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)context_state
        : !strcmp(name, "cuGetErrorString") ? (void *)error_string
        : !strcmp(name, "cuCtxGetCurrent") ? (void *)current_context : (void *)unsupported;
    if (result) *result = 0;
    return OK;
}
