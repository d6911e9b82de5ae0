/* The calls of cuBLAS that answer more than success; products are taken and not run, as kernels are. */
#include <stddef.h>
#include <string.h>
#define API __attribute__((visibility("default")))

API int cublasCreate_v2(void **handle) { *handle = (void *)16; return 0; }
API int cublasGetMathMode(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
API int cublasGetPointerMode_v2(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
