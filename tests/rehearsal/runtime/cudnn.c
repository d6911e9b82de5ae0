/* Attention's choice of kernels asks for cuDNN's version; a GPU of this capability takes none of its kernels. */
#include <stddef.h>
#define API __attribute__((visibility("default")))
API size_t cudnnGetVersion(void) { return 92000; }
