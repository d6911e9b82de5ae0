/* What the C kernels of the CPU backend share: conversions to and from bfloat16, and the scales of NF4's blocks. */
#ifndef EFT_NATIVE_H
#define EFT_NATIVE_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float from_bf16(uint16_t value) { return of_bits((uint32_t)value << 16); }

/* Of finite values: nearest, ties to even. */
static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* The scale of one block: given, or by double quantisation (nested is not null). */
static inline float scale_of(int64_t at, const uint8_t *absmax8, const float *nested, const float *map, float offset,
                             const float *absmax) {
    if (!nested)
        return absmax[at];
    float product = map[absmax8[at]] * nested[at / 256];
    return product + offset;
}

#ifdef __AVX512F__
/* Finite values as bfloat16 in the upper halves; the lower halves are to be cleared. */
static inline __m512i rounded(__m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}
#endif

#endif
