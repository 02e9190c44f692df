// Quantised weights: int8 with a scale for each output; int4 with a step and an offset for each 32.
//
// The weights of a target become floats, and sums stay as exact as those of any matrix. A draft may
// also round x, to int8 with a scale for each 64 numbers. Then whole numbers are multiplied, four
// pairs in one instruction, and a product takes as long as reading its bytes: half in int8, a third in int4.
#include <math.h>
#include "rows.cpp"

typedef VECTOR(int8_t, LANES) vb;
typedef VECTOR(int16_t, LANES) vs;
typedef VECTOR(int32_t, 8) eight;

INLINE float wide(uint16_t h) {         // bfloat16 is the upper half of a float32
    uint32_t bits = (uint32_t)h << 16;
    return get<float>(&bits);
}

INLINE uint16_t bfloat16(float f) {     // the nearest, and of two the even one
    uint32_t bits = get<uint32_t>(&f);
    return f == f ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

INLINE vf all(float f) { return f - vf{}; }

INLINE vi integers(const char *p) {     // in two steps, as the compiler has an instruction for each
    return __builtin_convertvector(__builtin_convertvector(*(const vb *)p, vs), vi);
}

template <> vf weights_of<INT8>(At w, int i) {
    return __builtin_convertvector(integers(w.data + i * LANES), vf);
}

template <> vf weights_of<INT4>(At w, int i) {      // byte j: weight j below, weight 32 + j above
    int group = i * LANES / 32;
    vi codes = integers(w.data + i * LANES % 32) >> 4 * group & 15;
    return __builtin_convertvector(codes, vf) * wide(w.steps[group]) + wide(w.offsets[group]);
}

// Each lane: the sum of four products of neighbours, of a (0 to 255) and b (-128 to 127).
INLINE vi products(vi a, vi b) {
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)a, (__m512i)b);
#else
    vi sum = (a & 255) * (b << 24 >> 24);
    sum += (a >> 8 & 255) * (b << 16 >> 24);
    sum += (a >> 16 & 255) * (b << 8 >> 24);
    return sum + (a >> 24 & 255) * (b >> 24);
#endif
}

// The i-th vector of an int4 step: its codes, and for each lane its group's step or offset.
INLINE vi codes_of(const char *data, int i) {
    eight bytes = *(const eight *)data;
#if LANES == 16
    __m512i twice = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)bytes),
                                       _mm256_srli_epi32((__m256i)bytes, 4), 1);
    return (vi)twice & 0x0f0f0f0f;
#else
    return bytes >> 4 * i & 0x0f0f0f0f;
#endif
}

// For each lane its group's step.
INLINE vf steps_of(const uint16_t *pair, int i) {
    vu bits = get<uint32_t>(pair) - vu{};
#if LANES == 16
    bits <<= vu{16, 16, 16, 16, 16, 16, 16, 16};
#else
    bits <<= i ? 0 : 16;
#endif
    return (vf)(bits & 0xffff0000);
}

// x rounded: K numbers in int8; the scale of each 64; the sum of each 32. A weight is step * code
// + offset. In int8 the step is 1 here, codes are moved to 0 .. 255, and all offsets are -128.
template <Kind kind> struct Rounded {
    static const long bits = BITS[kind];
    static const bool cut = true;
    static size_t row(size_t K) { return K + K / 16 + K / 8; }
    template <int M> INLINE void add(vf (*sum)[2], At w, const char *x, size_t k, size_t K) {
        #pragma GCC unroll 2
        for (int i = 0; i < 16 / LANES; i++) {
            vi codes;
            vf step = all(1);
            if constexpr (kind == INT8_ROUNDED) {
                codes = ((const vi *)w.data)[i] ^ (int32_t)0x80808080;
            } else {
                codes = codes_of(w.data, i);
                step = steps_of(w.steps, i);
            }
            #pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const char *in = x + m * row(K);
                vf dots = __builtin_convertvector(products(codes, ((const vi *)(in + k))[i]), vf);
                sum[m][i] += dots * (step * get<float>(in + K + k / 16));
            }
        }
    }
    // The offsets, once per output: each times the sum of its numbers.
    template <int M>
    INLINE void end(vf (*sum)[2], const uint16_t *offsets, const char *x, size_t K) {
        const char *sums = x + K + K / 16;
        size_t g = 0;
        for (; g + LANES <= K / 32; g += LANES) {
            vf offset = all(-128);
            if constexpr (kind == INT4_ROUNDED)
                offset = (vf)(__builtin_convertvector(*(const vh *)(offsets + g), vu) << 16);
            #pragma GCC unroll 8
            for (int m = 0; m < M; m++) sum[m][1] += offset * floats(sums + m * row(K) + 4 * g);
        }
        for (; g < K / 32; g++) {
            float offset = kind == INT4_ROUNDED ? wide(offsets[g]) : -128;
            #pragma GCC unroll 8
            for (int m = 0; m < M; m++)
                sum[m][1][0] += offset * get<float>(sums + m * row(K) + 4 * g);
        }
    }
};

static void round_row(const float *x, long count, char *to) {
    long K = pad(count);
    for (long k = 0; k < count; k += STEP) {
        long n = count - k < STEP ? count - k : STEP;
        float largest = 0;
        #pragma omp simd reduction(max : largest)
        for (long i = 0; i < n; i++) {
            float size = fabsf(x[k + i]);
            largest = size > largest ? size : largest;
        }
        float scale = largest / 127;
        float inverse = scale > 0 ? 1 / scale : 0;
        int8_t *codes = (int8_t *)to + k;
        #pragma omp simd
        for (long i = 0; i < n; i++) codes[i] = (int8_t)(int32_t)nearbyintf(x[k + i] * inverse);
        memcpy(to + K + k / 16, &scale, 4);
        for (long half = 0; half < STEP; half += 32) {
            int whole = 0;
            #pragma omp simd reduction(+ : whole)
            for (int i = 0; i < 32; i++) whole += codes[half + i];
            float sum = scale * whole;
            memcpy(to + K + K / 16 + (k + half) / 8, &sum, 4);
        }
    }
}

// --- for all kinds

static void multiply(const Weight &w, const char *x, float *y, long M) {
    switch (w.kind) {
        case FLOAT32: return loop<Floats<FLOAT32>>(w, x, y, M);
        case BFLOAT16: return loop<Pairs>(w, x, y, M);
        case FLOAT16: return loop<Floats<FLOAT16>>(w, x, y, M);
        case INT8: return loop<Floats<INT8>>(w, x, y, M);
        case INT4: return loop<Floats<INT4>>(w, x, y, M);
        case INT8_ROUNDED: return loop<Rounded<INT8_ROUNDED>>(w, x, y, M);
        case INT4_ROUNDED: return loop<Rounded<INT4_ROUNDED>>(w, x, y, M);
    }
}

static long row_bytes(const Weight &w) {        // of a row of x, in the form that `multiply` takes
    long K = pad(w.k);
    if (w.kind >= INT8_ROUNDED) return Rounded<INT8_ROUNDED>::row(K);
    return w.kind == BFLOAT16 ? Pairs::row(K) : Floats<FLOAT32>::row(K);
}

static void prepare(const Weight &w, const float *x, char *to) {
    memset(to, 0, row_bytes(w));
    if (w.kind >= INT8_ROUNDED) round_row(x, w.k, to);
    else if (row_bytes(w) == 4 * pad(w.k)) memcpy(to, x, 4 * w.k);
    else for (long k = 0; k < w.k; k++) ((uint16_t *)to)[k] = bfloat16(x[k]);
}
