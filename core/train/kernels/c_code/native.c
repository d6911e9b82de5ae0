/* What torch's own operators do slowly on a CPU, as plain C; build.py compiles it, calls.py calls it.
 *
 * Every function is held to the portable arithmetic before it is used. The dequantisations are equal to it to the bit:
 * products and sums are rounded one by one (-ffp-contract=off), and bfloat16 is rounded to nearest even. Pointers are
 * to contiguous memory; `threads` is torch's number of threads.
 */
#include "native.h"

/* --- NF4 ------------------------------------------------------------------------------------------ */

static void nf4_elements_bf16(uint16_t *out, const uint8_t *packed, int64_t count, const float *table, float scale) {
    for (int64_t i = 0; i < count; i++) {
        int code = i % 2 ? packed[i / 2] & 15 : packed[i / 2] >> 4;
        out[i] = to_bf16(table[code] * scale);
    }
}

#ifdef __AVX512F__
/* 16 bytes are 32 elements: the high nibbles are the even ones, and come first in each pair of bfloat16. */
static inline void nf4_32_bf16(uint16_t *out, const uint8_t *packed, __m512 table, __m512 scale) {
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)packed));
    __m512 even = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), table);
    __m512 odd = _mm512_permutexvar_ps(bytes, table); /* looks at the low four bits only */
    __m512i low = _mm512_srli_epi32(rounded(_mm512_mul_ps(even, scale)), 16);
    __m512i high = _mm512_and_si512(rounded(_mm512_mul_ps(odd, scale)), _mm512_set1_epi32((int)0xffff0000u));
    _mm512_storeu_si512(out, _mm512_or_si512(low, high));
}
#endif

static void nf4_block_bf16(uint16_t *out, const uint8_t *packed, int64_t count, const float *table, float scale) {
    int64_t done = 0;
#ifdef __AVX512F__
    __m512 values = _mm512_loadu_ps(table), scales = _mm512_set1_ps(scale);
    for (; done + 32 <= count; done += 32)
        nf4_32_bf16(out + done, packed + done / 2, values, scales);
#endif
    nf4_elements_bf16(out + done, packed + done / 2, count - done, table, scale);
}

static void nf4_block_f32(float *out, const uint8_t *packed, int64_t count, const float *table, float scale) {
    for (int64_t i = 0; i + 1 < count; i += 2) {
        out[i] = table[packed[i / 2] >> 4] * scale;
        out[i + 1] = table[packed[i / 2] & 15] * scale;
    }
    if (count % 2)
        out[count - 1] = table[packed[count / 2] >> 4] * scale;
}

void eft_nf4(void *out, int bf16, const uint8_t *packed, int64_t n, int64_t block, const float *table,
             const uint8_t *absmax8, const float *nested, const float *map, const float *offset, const float *absmax,
             int threads) {
    int64_t blocks = (n + block - 1) / block;
    float shift = offset ? *offset : 0.0f;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t at = 0; at < blocks; at++) {
        int64_t start = at * block, count = n - start < block ? n - start : block;
        float scale = scale_of(at, absmax8, nested, map, shift, absmax);
        if (bf16)
            nf4_block_bf16((uint16_t *)out + start, packed + start / 2, count, table, scale);
        else
            nf4_block_f32((float *)out + start, packed + start / 2, count, table, scale);
    }
}

/* --- int8 ----------------------------------------------------------------------------------------- */

void eft_int8(void *out, int bf16, const int8_t *packed, int64_t n, int64_t block, const float *absmax, int threads) {
    int64_t blocks = (n + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t at = 0; at < blocks; at++) {
        int64_t start = at * block, end = start + block < n ? start + block : n;
        float step = absmax[at] * (float)(1.0 / 127.0);
        if (bf16) {
            uint16_t *to = (uint16_t *)out;
            for (int64_t i = start; i < end; i++)
                to[i] = to_bf16((float)packed[i] * step);
        } else {
            float *to = (float *)out;
            for (int64_t i = start; i < end; i++)
                to[i] = (float)packed[i] * step;
        }
    }
}

/* --- the loss of a chunk of logits ---------------------------------------------------------------- */

/* e to the power of x for x <= 0, within 2 units in the last place (a polynomial on [-ln 2 / 2, ln 2 / 2]). */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504088896341f + 12582912.0f; /* rounds to the nearest whole number */
    float whole = shifted - 12582912.0f;
    float r = x - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * of_bits((uint32_t)((int32_t)whole + 127) << 23);
}

#define LANES 64 /* sums run in this many lanes: one after the other would lose digits, and time */

/* For each row of bfloat16 logits [rows, width]: the largest, and the sum of exp(z - largest). */
void eft_softmax_stats(float *top, float *total, const uint16_t *logits, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const uint16_t *z = logits + row * width;
        float best[LANES], sum[LANES];
        for (int j = 0; j < LANES; j++) {
            best[j] = -3.0e38f;
            sum[j] = 0.0f;
        }
        int64_t full = width / LANES * LANES;
        for (int64_t i = 0; i < full; i += LANES)
            for (int j = 0; j < LANES; j++) {
                float value = from_bf16(z[i + j]);
                best[j] = value > best[j] ? value : best[j];
            }
        float largest = best[0];
        for (int j = 1; j < LANES; j++)
            largest = best[j] > largest ? best[j] : largest;
        for (int64_t i = full; i < width; i++)
            largest = from_bf16(z[i]) > largest ? from_bf16(z[i]) : largest;
        for (int64_t i = 0; i < full; i += LANES)
            for (int j = 0; j < LANES; j++)
                sum[j] += exponential(from_bf16(z[i + j]) - largest);
        float all = 0.0f;
        for (int j = 0; j < LANES; j++)
            all += sum[j];
        for (int64_t i = full; i < width; i++)
            all += exponential(from_bf16(z[i]) - largest);
        top[row] = largest;
        total[row] = all;
    }
}

/* Logits become, in place, factor[row] · exp(z - top[row]). */
void eft_softmax_scale(uint16_t *logits, const float *top, const float *factor, int64_t rows, int64_t width,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        uint16_t *z = logits + row * width;
        float largest = top[row], by = factor[row];
        for (int64_t i = 0; i < width; i++)
            z[i] = to_bf16(exponential(from_bf16(z[i]) - largest) * by);
    }
}

#define LARGEST_BLOCK 256

/* Codes of a block as values: table[code] · scale. Codes of 4 bits share a byte, the first in the high half. */
static inline void unpack_block(float *values, const uint8_t *codes, float scale, const float *table, int bits,
                                int64_t n) {
    if (bits == 8)
        for (int64_t i = 0; i < n; i++)
            values[i] = table[codes[i]] * scale;
    else
        for (int64_t i = 0; i < n; i++)
            values[i] = table[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4] * scale;
}

/* The other way round; returns the scale. A code is the number of bounds that are below the value. */
static inline float pack_block(uint8_t *codes, const float *values, const float *bounds, int bits, int64_t n) {
    float largest = 0.0f, scaled[LARGEST_BLOCK];
    int32_t place[LARGEST_BLOCK];
    for (int64_t i = 0; i < n; i++) {
        float size = of_bits(bits_of(values[i]) & 0x7fffffffu);
        largest = size > largest ? size : largest;
    }
    float by = largest > 0.0f ? largest : 1.0f;
    for (int64_t i = 0; i < n; i++) {
        scaled[i] = values[i] / by;
        place[i] = 0;
    }
    for (int32_t half = 1 << (bits - 1); half; half >>= 1)
        for (int64_t i = 0; i < n; i++)
            place[i] += bounds[place[i] + half - 1] < scaled[i] ? half : 0;
    if (bits == 8)
        for (int64_t i = 0; i < n; i++)
            codes[i] = (uint8_t)place[i];
    else
        for (int64_t i = 0; i < n; i += 2)
            codes[i / 2] = (uint8_t)(place[i] << 4 | (i + 1 < n ? place[i + 1] : 0));
    return largest;
}

/* AdamW over means of 8 or 4 bits; core/train/kernels/adamw.py has the arithmetic. `block` is even and at most 256. */
void eft_adamw(float *parameter, const float *gradient, uint8_t *mean, float *mean_scale, uint8_t *root,
               float *root_scale, const float *mean_table, const float *root_table, const float *mean_bounds,
               const float *root_bounds, int64_t n, int64_t block, int bits, const float *numbers, int threads) {
    float keep = numbers[0], first = numbers[1], first_rest = numbers[2], second = numbers[3];
    float second_rest = numbers[4], correction = numbers[5], eps = numbers[6], rate = numbers[7];
    int64_t blocks = (n + block - 1) / block;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t at = 0; at < blocks; at++) {
        int64_t start = at * block, here = n - start < block ? n - start : block;
        float m[LARGEST_BLOCK], r[LARGEST_BLOCK];
        float *p = parameter + start;
        const float *g = gradient + start;
        uint8_t *mean_codes = mean + start * bits / 8, *root_codes = root + start * bits / 8;
        unpack_block(m, mean_codes, mean_scale[at], mean_table, bits, here);
        unpack_block(r, root_codes, root_scale[at], root_table, bits, here);
        for (int64_t i = 0; i < here; i++) {
            m[i] = m[i] * first + g[i] * first_rest;
            r[i] = __builtin_sqrtf(r[i] * r[i] * second + g[i] * g[i] * second_rest);
            float below = r[i] * correction + eps;
            p[i] = p[i] * keep - m[i] / below * rate;
        }
        mean_scale[at] = pack_block(mean_codes, m, mean_bounds, bits, here);
        root_scale[at] = pack_block(root_codes, r, root_bounds, bits, here);
    }
}

/* --- parts of a block beside its products ---------------------------------------------------------- */

/* As to_bf16, and what is not a number stays that: a loss that diverges has to show. */
static inline uint16_t to_bf16_any(float value) {
    return (bits_of(value) & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : to_bf16(value);
}

static inline float rounded_to(float value, int bf16) { return bf16 ? from_bf16(to_bf16_any(value)) : value; }

static inline float element(const void *from, int64_t i, int bf16) {
    return bf16 ? from_bf16(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

static inline void put(void *to, int64_t i, float value, int bf16) {
    if (bf16)
        ((uint16_t *)to)[i] = to_bf16_any(value);
    else
        ((float *)to)[i] = value;
}

static inline const void *row_of(const void *from, int64_t row, int64_t width, int bf16) {
    return (const char *)from + row * width * (bf16 ? 2 : 4);
}

/* What a normalised value is multiplied by, and whether it is rounded before that. */
static inline float gain(const void *weight, int64_t i, int bf16, int from_one) {
    return from_one ? 1.0f + element(weight, i, bf16) : element(weight, i, bf16);
}

static inline __attribute__((always_inline)) void norm_row(void *out, float *scale, const void *x, const void *weight,
                                                           float eps, int64_t width, int bf16, int from_one) {
    float sum[LANES] = {0}, all = 0.0f;
    int64_t full = width / LANES * LANES;
    for (int64_t i = 0; i < full; i += LANES)
        for (int j = 0; j < LANES; j++)
            sum[j] += element(x, i + j, bf16) * element(x, i + j, bf16);
    for (int j = 0; j < LANES; j++)
        all += sum[j];
    for (int64_t i = full; i < width; i++)
        all += element(x, i, bf16) * element(x, i, bf16);
    float by = 1.0f / __builtin_sqrtf(all / (float)width + eps);
    *scale = by;
    for (int64_t i = 0; i < width; i++) {
        float normed = element(x, i, bf16) * by;
        put(out, i, (from_one ? normed : rounded_to(normed, bf16)) * gain(weight, i, bf16, from_one), bf16);
    }
}

static inline __attribute__((always_inline)) void norm_grad_row(void *grad_x, const void *grad, const void *x,
                                                                const void *weight, float by, int64_t width, int bf16,
                                                                int from_one) {
    float sum[LANES] = {0}, all = 0.0f;
    int64_t full = width / LANES * LANES;
    for (int64_t i = 0; i < full; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float g = element(grad, i + j, bf16) * gain(weight, i + j, bf16, from_one);
            sum[j] += (from_one ? g : rounded_to(g, bf16)) * element(x, i + j, bf16);
        }
    for (int j = 0; j < LANES; j++)
        all += sum[j];
    for (int64_t i = full; i < width; i++) {
        float g = element(grad, i, bf16) * gain(weight, i, bf16, from_one);
        all += (from_one ? g : rounded_to(g, bf16)) * element(x, i, bf16);
    }
    float along = all * by * by * by / (float)width;
    for (int64_t i = 0; i < width; i++) {
        float g = element(grad, i, bf16) * gain(weight, i, bf16, from_one);
        put(grad_x, i, (from_one ? g : rounded_to(g, bf16)) * by - element(x, i, bf16) * along, bf16);
    }
}

/* Rows of x [rows, width] over the root of their mean square, times the weight [width] (or 1 + weight, `from_one`,
 * without a rounding in between). `scale` [rows] is kept for the gradient. */
void eft_norm(void *out, float *scale, const void *x, const void *weight, float eps, int bf16, int from_one,
              int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        void *to = (void *)row_of(out, row, width, bf16);
        const void *from = row_of(x, row, width, bf16);
        if (bf16 && from_one)
            norm_row(to, scale + row, from, weight, eps, width, 1, 1);
        else if (bf16)
            norm_row(to, scale + row, from, weight, eps, width, 1, 0);
        else
            norm_row(to, scale + row, from, weight, eps, width, 0, from_one);
    }
}

/* The gradient of x in eft_norm; the weight has none. */
void eft_norm_grad(void *grad_x, const void *grad, const void *x, const void *weight, const float *scale, int bf16,
                   int from_one, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        void *to = (void *)row_of(grad_x, row, width, bf16);
        const void *g = row_of(grad, row, width, bf16), *from = row_of(x, row, width, bf16);
        if (bf16 && from_one)
            norm_grad_row(to, g, from, weight, scale[row], width, 1, 1);
        else if (bf16)
            norm_grad_row(to, g, from, weight, scale[row], width, 1, 0);
        else
            norm_grad_row(to, g, from, weight, scale[row], width, 0, from_one);
    }
}

#ifdef __FMA__
#define MULTIPLY_ADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

/* 1 / (1 + exp(-x)), by `exponential` with fewer roundings. Without branches, which would keep the loops from being
 * vectorised. */
static inline float sigmoid(float x) {
    float below = of_bits(bits_of(x) | 0x80000000u);
    below = below < -87.0f ? -87.0f : below;
    float whole = MULTIPLY_ADD(below, 1.44269504088896341f, 12582912.0f) - 12582912.0f;
    float r = MULTIPLY_ADD(whole, -0.693359375f, below);
    r = MULTIPLY_ADD(whole, 2.12194440e-4f, r);
    float p = MULTIPLY_ADD(1.9875691500e-4f, r, 1.3981999507e-3f);
    p = MULTIPLY_ADD(p, r, 8.3334519073e-3f);
    p = MULTIPLY_ADD(p, r, 4.1665795894e-2f);
    p = MULTIPLY_ADD(p, r, 1.6666665459e-1f);
    p = MULTIPLY_ADD(p, r, 5.0000001201e-1f);
    p = MULTIPLY_ADD(p * r, r, r) + 1.0f;
    float e = p * of_bits((uint32_t)((int32_t)whole + 127) << 23);
    uint32_t negative = (uint32_t)((int32_t)bits_of(x) >> 31);
    return of_bits((bits_of(e) & negative) | (0x3f800000u & ~negative)) / (1.0f + e);
}

static inline __attribute__((always_inline)) void gate_part(void *out, const void *gate, const void *up, int64_t start,
                                                            int64_t end, int bf16) {
    for (int64_t i = start; i < end; i++) {
        float g = element(gate, i, bf16);
        put(out, i, rounded_to(g * sigmoid(g), bf16) * element(up, i, bf16), bf16);
    }
}

static inline __attribute__((always_inline)) void gate_grad_part(void *grad_gate, void *grad_up, const void *grad,
                                                                 const void *gate, const void *up, int64_t start,
                                                                 int64_t end, int bf16) {
    for (int64_t i = start; i < end; i++) {
        float g = element(gate, i, bf16), from = element(grad, i, bf16), s = sigmoid(g);
        float inner = rounded_to(from * element(up, i, bf16), bf16);
        put(grad_up, i, from * rounded_to(g * s, bf16), bf16);
        put(grad_gate, i, inner * (s * (1.0f + g * (1.0f - s))), bf16);
    }
}

#define PIECE 4096

/* silu(gate) · up, element by element. */
void eft_gate(void *out, const void *gate, const void *up, int bf16, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < n; start += PIECE) {
        int64_t end = start + PIECE < n ? start + PIECE : n;
        if (bf16)
            gate_part(out, gate, up, start, end, 1);
        else
            gate_part(out, gate, up, start, end, 0);
    }
}

/* The gradients of both. */
void eft_gate_grad(void *grad_gate, void *grad_up, const void *grad, const void *gate, const void *up, int bf16,
                   int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < n; start += PIECE) {
        int64_t end = start + PIECE < n ? start + PIECE : n;
        if (bf16)
            gate_grad_part(grad_gate, grad_up, grad, gate, up, start, end, 1);
        else
            gate_grad_part(grad_gate, grad_up, grad, gate, up, start, end, 0);
    }
}

/* A row of x [width] turned by its angles: cos and sin [width], the second half of x beside its first. `back`: the
 * gradient. Every product is rounded, as the eager formula's are. */
static inline __attribute__((always_inline)) void turn_row(void *out, const void *x, const void *cosine,
                                                           const void *sine, int64_t width, int bf16, int back) {
    int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        float low = element(x, i, bf16), high = element(x, half + i, bf16);
        float low_sine = element(sine, back ? half + i : i, bf16), high_sine = element(sine, back ? i : half + i, bf16);
        float from_high = rounded_to(high * low_sine, bf16), from_low = rounded_to(low * high_sine, bf16);
        float first = rounded_to(low * element(cosine, i, bf16), bf16);
        float second = rounded_to(high * element(cosine, half + i, bf16), bf16);
        put(out, i, back ? first + from_high : first - from_high, bf16);
        put(out, half + i, back ? second - from_low : second + from_low, bf16);
    }
}

/* Rotary embedding of x [lines, tokens, heads, width], by cos and sin [one or `lines`, tokens, width]. */
void eft_turn(void *out, const void *x, const void *cosine, const void *sine, int back, int bf16, int64_t lines,
              int64_t lines_of_angles, int64_t tokens, int64_t heads, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < lines * tokens; token++) {
        int64_t angles = lines_of_angles == 1 ? token % tokens : token;
        const void *c = row_of(cosine, angles, width, bf16), *s = row_of(sine, angles, width, bf16);
        for (int64_t head = 0; head < heads; head++) {
            int64_t row = token * heads + head;
            void *to = (void *)row_of(out, row, width, bf16);
            const void *from = row_of(x, row, width, bf16);
            if (bf16 && back)
                turn_row(to, from, c, s, width, 1, 1);
            else if (bf16)
                turn_row(to, from, c, s, width, 1, 0);
            else
                turn_row(to, from, c, s, width, 0, back);
        }
    }
}
