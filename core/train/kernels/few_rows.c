/* x·Wᵀ for a few rows of x and a weight of 16, 8 or 4 bits: what generation computes for every token.
 *
 * Such a product is bound by the bytes of the weight. Here each is read once, and is wide only in a register. Sums are
 * float32; the order of each depends on the width alone, so that a row of x has the same sums whatever rows are beside
 * it. Only for processors with AVX-512: elsewhere eft_few_rows is 0, and nothing here is to be called.
 */
#include "native.h"

#define LANES 16
#define AT_ONCE 8 /* rows of x of one pass over packed weights, which are unpacked once for all of them */

int eft_few_rows(void) {
#ifdef __AVX512F__
    return 1;
#else
    return 0;
#endif
}

#ifdef __AVX512F__
#define INLINE static inline __attribute__((always_inline))

INLINE __m512 wide(const uint16_t *at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16));
}

INLINE __m512 narrowed(__m512 values, int bf16) {
    __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return bf16 ? _mm512_castsi512_ps(_mm512_and_si512(rounded(values), upper)) : values;
}

/* `rows` rows of x by `columns` rows of W. */
INLINE void wide_tile(float *out, const float *x, const uint16_t *weight, int64_t n, int64_t k, int rows,
                      int columns) {
    __m512 sums[4][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            sums[i][j] = _mm512_setzero_ps();
    for (int64_t at = 0; at < k; at += LANES) {
        __m512 w[4];
        for (int j = 0; j < columns; j++)
            w[j] = wide(weight + j * k + at);
        for (int i = 0; i < rows; i++) {
            __m512 values = _mm512_loadu_ps(x + i * k + at);
            for (int j = 0; j < columns; j++)
                sums[i][j] = _mm512_fmadd_ps(values, w[j], sums[i][j]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            out[i * n + j] = _mm512_reduce_add_ps(sums[i][j]);
}

INLINE void wide_rows(float *out, const float *x, const uint16_t *weight, int64_t m, int64_t n, int64_t k,
                      int columns) {
    int64_t i = 0;
    for (; i + 4 <= m; i += 4)
        wide_tile(out + i * n, x + i * k, weight, n, k, 4, columns);
    for (; i < m; i++)
        wide_tile(out + i * n, x + i * k, weight, n, k, 1, columns);
}

/* 32 elements of W times each row of x, whose 32 are 16 even ones and 16 odd ones for NF4. */
INLINE void packed_32(__m512 *sums, const float *x, __m512 first, __m512 second, int64_t k, int rows) {
    for (int i = 0; i < rows; i++) {
        sums[i] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i * k), first, sums[i]);
        sums[i] = _mm512_fmadd_ps(_mm512_loadu_ps(x + i * k + LANES), second, sums[i]);
    }
}

/* One row of W, times `rows` rows of x. */
INLINE void nf4_row(float *out, const float *x, const uint8_t *packed, int64_t row, int64_t n, int64_t k, int64_t block,
                    __m512 table, const uint8_t *absmax8, const float *nested, const float *map, float offset,
                    const float *absmax, int bf16, int rows) {
    __m512 sums[AT_ONCE];
    for (int i = 0; i < rows; i++)
        sums[i] = _mm512_setzero_ps();
    for (int64_t start = 0; start < k; start += block) {
        __m512 scale = _mm512_set1_ps(scale_of((row * k + start) / block, absmax8, nested, map, offset, absmax));
        for (int64_t at = start; at < start + block; at += 2 * LANES) {
            __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(packed + (row * k + at) / 2)));
            __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
            __m512 odd = _mm512_permutexvar_ps(bytes, table); /* looks at the low four bits only */
            even = narrowed(_mm512_mul_ps(even, scale), bf16);
            odd = narrowed(_mm512_mul_ps(odd, scale), bf16);
            packed_32(sums, x + at, even, odd, k, rows);
        }
    }
    for (int i = 0; i < rows; i++)
        out[i * n + row] = _mm512_reduce_add_ps(sums[i]);
}

INLINE void int8_row(float *out, const float *x, const int8_t *packed, int64_t row, int64_t n, int64_t k,
                     int64_t block, const float *absmax, int bf16, int rows) {
    __m512 sums[AT_ONCE];
    for (int i = 0; i < rows; i++)
        sums[i] = _mm512_setzero_ps();
    for (int64_t start = 0; start < k; start += block) {
        __m512 step = _mm512_set1_ps(absmax[(row * k + start) / block] * (float)(1.0 / 127.0));
        for (int64_t at = start; at < start + block; at += 2 * LANES) {
            const __m128i *from = (const __m128i *)(packed + row * k + at);
            __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
            __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
            first = narrowed(_mm512_mul_ps(first, step), bf16);
            second = narrowed(_mm512_mul_ps(second, step), bf16);
            packed_32(sums, x + at, first, second, k, rows);
        }
    }
    for (int i = 0; i < rows; i++)
        out[i * n + row] = _mm512_reduce_add_ps(sums[i]);
}

/* `call` with the number of rows as a constant, so that all sums are registers. */
#define WITH_ROWS(m, call)                                                                                             \
    switch (m) {                                                                                                       \
    case 1: { enum { ROWS = 1 }; call; } break;                                                                        \
    case 2: { enum { ROWS = 2 }; call; } break;                                                                        \
    case 3: { enum { ROWS = 3 }; call; } break;                                                                        \
    case 4: { enum { ROWS = 4 }; call; } break;                                                                        \
    case 5: { enum { ROWS = 5 }; call; } break;                                                                        \
    case 6: { enum { ROWS = 6 }; call; } break;                                                                        \
    case 7: { enum { ROWS = 7 }; call; } break;                                                                        \
    default: { enum { ROWS = 8 }; call; } break;                                                                       \
    }
#endif

/* out [m, n], x [m, k], both float32; weight [n, k] of bfloat16. k is a multiple of 16. */
void eft_few_bf16(float *out, const float *x, const uint16_t *weight, int64_t m, int64_t n, int64_t k, int threads) {
#ifdef __AVX512F__
    int64_t whole = n / 4;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tile = 0; tile < whole; tile++)
        wide_rows(out + 4 * tile, x, weight + 4 * tile * k, m, n, k, 4);
    for (int64_t j = 4 * whole; j < n; j++)
        wide_rows(out + j, x, weight + j * k, m, n, k, 1);
#endif
}

/* The same with a packed weight, in blocks of a multiple of 32 elements that divides k; m is at most 8. `bf16`: the
 * unpacked weight is rounded to bfloat16, as a dense copy would be. `aside` [m, k]: room for x in another order. */
void eft_few_nf4(float *out, const float *x, float *aside, const uint8_t *packed, int64_t m, int64_t n, int64_t k,
                 int64_t block, const float *table, const uint8_t *absmax8, const float *nested, const float *map,
                 const float *offset, const float *absmax, int bf16, int threads) {
#ifdef __AVX512F__
    float shift = offset ? *offset : 0.0f;
    __m512 values = _mm512_loadu_ps(table);
    for (int64_t at = 0; at < m * k; at += 2 * LANES)
        for (int i = 0; i < LANES; i++) {
            aside[at + i] = x[at + 2 * i];
            aside[at + LANES + i] = x[at + 2 * i + 1];
        }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < n; row++)
        WITH_ROWS(m, nf4_row(out, aside, packed, row, n, k, block, values, absmax8, nested, map, shift, absmax, bf16,
                             ROWS))
#endif
}

void eft_few_int8(float *out, const float *x, const int8_t *packed, int64_t m, int64_t n, int64_t k, int64_t block,
                  const float *absmax, int bf16, int threads) {
#ifdef __AVX512F__
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < n; row++)
        WITH_ROWS(m, int8_row(out, x, packed, row, n, k, block, absmax, bf16, ROWS))
#endif
}
