/* x·Wᵀ for a few rows of x and a weight of 32, 16, 8 or 4 bits: what generation computes for every token.
 *
 * Such a product is bound by the bytes of the weight. Here each is read once, and is wide only in a register. Sums are
 * float32; the order of each depends on the width alone, so that a row of x has the same sums whatever rows are beside
 * it. Only for processors with AVX-512: elsewhere eft_few_rows is 0, and nothing here is to be called.
 */
#include "native.h"

#define LANES 16
#define SIDE 4 /* rows of x and of W whose sums are in registers at once */
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

/* 16 elements of a weight of float32, or of bfloat16, from its element `at` on. */
INLINE __m512 dense(const void *weight, int64_t at, int bf16) {
    if (!bf16)
        return _mm512_loadu_ps((const float *)weight + at);
    __m256i narrow = _mm256_loadu_si256((const __m256i *)((const uint16_t *)weight + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

INLINE __m512 narrowed(__m512 values, int bf16) {
    __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    return bf16 ? _mm512_castsi512_ps(_mm512_and_si512(rounded(values), upper)) : values;
}

/* What every tile of a product needs: W [n, k] with a bias [n] or none, and an adapter's B [n, r] beside x·Aᵀ [m, r],
 * with r = 0 for none. `narrow`: the product is rounded to bfloat16;
 * `low_narrow`: the adapter's are. */
struct dense_product {
    float *out;
    const float *x;
    const void *weight;
    const float *bias, *low, *b;
    float scale;
    int64_t m, n, k, r;
    int narrow, low_narrow;
};

INLINE float rounded_to(float value, int bf16) {
    return bf16 ? _mm512_cvtss_f32(narrowed(_mm512_set1_ps(value), 1)) : value;
}

INLINE void multiplied(__m512 sums[SIDE][SIDE], const float *x, int64_t k, const __m512 *w, int rows, int columns) {
    for (int i = 0; i < rows; i++) {
        __m512 values = _mm512_loadu_ps(x + i * k);
        for (int j = 0; j < columns; j++)
            sums[i][j] = _mm512_fmadd_ps(values, w[j], sums[i][j]);
    }
}

/* `rows` rows of x from `row` on, by `columns` rows of W from `from` on. Meanwhile the `fetched` rows of W that begin at
 * `next` are brought into the cache: a product waits for memory, and its arithmetic for nothing, unless both happen at
 * once. */
INLINE void dense_tile(const struct dense_product *p, int bf16, int64_t row, int rows, int64_t from, int columns,
                       int64_t next, int fetched) {
    int64_t k = p->k, r = p->r;
    const float *x = p->x + row * k, *low = p->low + row * r;
    const char *ahead = (const char *)p->weight + next * k * (bf16 ? 2 : 4);
    __m512 sums[SIDE][SIDE], w[SIDE];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++)
            sums[i][j] = _mm512_setzero_ps();
    for (int64_t at = 0; at < k; at += LANES) {
        for (int j = 0; j < fetched; j++)
            _mm_prefetch(ahead + (j * k + at) * (bf16 ? 2 : 4), _MM_HINT_T0);
        for (int j = 0; j < columns; j++)
            w[j] = dense(p->weight, (from + j) * k + at, bf16);
        multiplied(sums, x + at, k, w, rows, columns);
    }
    float *out = p->out + row * p->n + from;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float sum = _mm512_reduce_add_ps(sums[i][j]) + (p->bias ? p->bias[from + j] : 0.0f);
            out[i * p->n + j] = rounded_to(sum, p->narrow);
            sums[i][j] = _mm512_setzero_ps();
        }
    if (!r)
        return;
    for (int64_t at = 0; at < r; at += LANES) {
        for (int j = 0; j < columns; j++)
            w[j] = _mm512_loadu_ps(p->b + (from + j) * r + at);
        multiplied(sums, low + at, r, w, rows, columns);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float sum = rounded_to(_mm512_reduce_add_ps(sums[i][j]), p->low_narrow);
            out[i * p->n + j] += rounded_to(sum * p->scale, p->low_narrow);
        }
}

/* All rows of x by `columns` rows of W, SIDE rows at a time; the SIDE rows of W from `next` on are fetched meanwhile, a
 * share by each, unless `next` is negative. */
INLINE void dense_rows(const struct dense_product *p, int bf16, int64_t from, int columns, int64_t next) {
    int64_t parts = (p->m + SIDE - 1) / SIDE, fetched = 0;
    for (int64_t row = 0; row < p->m; row += SIDE) {
        int share = next < 0 || fetched >= SIDE ? 0 : parts == 1 ? 4 : parts < SIDE ? 2 : 1;
        int64_t ahead = next < 0 ? 0 : next + fetched;
        /* Numbers of rows are constants of a tile, so that all its sums are registers. */
        switch (p->m - row) {
        case 1: dense_tile(p, bf16, row, 1, from, columns, ahead, share); break;
        case 2: dense_tile(p, bf16, row, 2, from, columns, ahead, share); break;
        case 3: dense_tile(p, bf16, row, 3, from, columns, ahead, share); break;
        default:
            switch (share) {
            case 0: dense_tile(p, bf16, row, SIDE, from, columns, ahead, 0); break;
            case 1: dense_tile(p, bf16, row, SIDE, from, columns, ahead, 1); break;
            case 2: dense_tile(p, bf16, row, SIDE, from, columns, ahead, 2); break;
            default: dense_tile(p, bf16, row, SIDE, from, columns, ahead, SIDE); break;
            }
        }
        fetched += share;
    }
}

static void dense_product(const struct dense_product *p, int bf16, int threads) {
    int64_t whole = p->n / SIDE;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t tile = 0; tile < whole; tile++) {
        int64_t from = SIDE * tile, next = tile + 1 < whole ? from + SIDE : -1;
        if (bf16)
            dense_rows(p, 1, from, SIDE, next);
        else
            dense_rows(p, 0, from, SIDE, next);
    }
    for (int64_t j = SIDE * whole; j < p->n; j++)
        dense_rows(p, bf16, j, 1, -1);
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

/* out [m, n] = x·Wᵀ + bias + scale · (x·Aᵀ)·Bᵀ: x [m, k], bias [n], an adapter's a [r, k] and b [n, r] float32, weight
 * [n, k] of bfloat16 or float32. r is 0 for a weight alone. k and r are multiples of 16. `low` [m, r]: room for x·Aᵀ.
 * `narrow`: x·Wᵀ + bias is rounded to bfloat16; `low_narrow`: x·Aᵀ is, its product with Bᵀ, and that times scale. */
void eft_few_dense(float *out, const float *x, const void *weight, const float *bias, const float *a, const float *b,
                   float *low, float scale, int64_t m, int64_t n, int64_t k, int64_t r, int bf16, int narrow,
                   int low_narrow, int threads) {
#ifdef __AVX512F__
    struct dense_product down = {.out = low, .x = x, .weight = a, .low = low, .m = m, .n = r, .k = k, .narrow = low_narrow};
    struct dense_product whole = {out, x, weight, bias, low, b, scale, m, n, k, r, narrow, low_narrow};
    if (r)
        dense_product(&down, 0, 1);
    dense_product(&whole, bf16, threads);
#endif
}

/* x·Wᵀ with a packed weight, in blocks of a multiple of 32 elements that divides k; m is at most 8. `bf16`: the
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
