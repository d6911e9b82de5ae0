/* What the files of this runtime share. The declarations are our own, for the ABI of CUDA 13: layouts are written as
   byte offsets, and enumerations as the numbers that torch's wheel was compiled with. */
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 64
#define FOREVER INT64_MAX

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_HANDLE = 400,
    NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801
};

typedef struct stream stream;
typedef void (*work)(int64_t);

/* device.c */
extern int rehearsal_devices(void);           /* visible to this process */
extern int rehearsal_current(void);
extern int rehearsal_error(int code);         /* remembers it as the thread's last error, and returns it */
extern const char *cudaGetErrorString(int code);
extern int on_device(const void *pointer);
extern int page_locked(const void *pointer);
extern void *reachable(const void *pointer);  /* where the library reaches what the host may not touch */
extern void fatal(const char *words, const char *about);

/* stream.c */
extern stream *stream_of(void *handle);       /* the handle 0 is the current device's default stream */
extern void enqueue(stream *on, work run, int64_t about);
extern void finish(stream *of, int64_t serial);
extern void finish_all(void);
extern void enter(void);
extern void leave(void);
extern int queued_for(const char *begin, const char *end);  /* whether a queued copy reads or writes host memory there */
