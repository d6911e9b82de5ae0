/* The calls of cuBLASLt that answer more than success. */
#include <stddef.h>
#include <string.h>
#define API __attribute__((visibility("default")))
#define RESULT 96  /* bytes of one heuristic result */

API int cublasLtCreate(void **handle) { *handle = (void *)16; return 0; }
API size_t cublasLtGetVersion(void) { return 130000; }
API int cublasLtMatmulDescCreate(void **made) { *made = (void *)32; return 0; }
API int cublasLtMatmulPreferenceCreate(void **made) { *made = (void *)32; return 0; }
API int cublasLtMatrixLayoutCreate(void **made) { *made = (void *)32; return 0; }
API int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *op, void *a, void *b, void *c, void *d, void *wish, int asked, char *results, int *found
) {
    (void)handle; (void)op; (void)a; (void)b; (void)c; (void)d; (void)wish;
    memset(results, 0, (size_t)asked * RESULT);
    *found = 1;
    return 0;
}
