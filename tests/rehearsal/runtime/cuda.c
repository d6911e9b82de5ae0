/* The driver's own library: torch links it, and asks little of it. */
#define API __attribute__((visibility("default")))
API int cuGetErrorString(int code, const char **text) { (void)code; *text = "an error of the driver"; return 0; }
API int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
API int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    (void)device;
    *flags = 0;
    *active = 1;
    return 0;
}
