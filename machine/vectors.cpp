// What a processor's vectors can do. No other file asks for which processor it is compiled.
#include <stdint.h>
#include <string.h>
#if defined __x86_64__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif
#ifdef __AVX512F__
#define LANES 16        // of a vector, in floats
#define TILE 8          // rows of x at a time: their accumulators must fit into the registers
#else
#define LANES 8
#define TILE 4
#endif
#define LINE 64         // bytes of a cache line
#define INLINE static inline __attribute__((always_inline))

// Vectors, which the compiler turns into the processor's own.
#define VECTOR(type, n) type __attribute__((vector_size(sizeof(type) * n), may_alias))
typedef VECTOR(float, LANES) vf;
typedef VECTOR(int32_t, LANES) vi;
typedef VECTOR(uint32_t, LANES) vu;
typedef VECTOR(uint16_t, LANES) vh;

template <class T> INLINE T get(const void *p) {        // from any address
    T t;
    memcpy(&t, p, sizeof t);
    return t;
}

INLINE vf aligned(const void *p) { return *(const vf *)p; }     // from a multiple of its size
INLINE vf all(float f) { return f - vf{}; }

// a * b + c, rounded once where the processor can. trap: a compiler that may choose (-ffp-contract)
// chooses differently for different numbers of rows.
INLINE float fused(float a, float b, float c) {
#if defined __FMA__ || defined __aarch64__
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vf fused(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined __aarch64__
    float32x4_t *sums = (float32x4_t *)&c;
    for (int i = 0; i < 2; i++)
        sums[i] = vfmaq_f32(sums[i], ((float32x4_t *)&a)[i], ((float32x4_t *)&b)[i]);
    return c;
#else
    vf sum;
    for (int i = 0; i < LANES; i++) sum[i] = fused(a[i], b[i], c[i]);
    return sum;
#endif
}

INLINE float total(vf v) {              // by halves: one by one, each addition would wait
    typedef VECTOR(float, 4) four;
    four sum = {};
    for (int i = 0; i < LANES; i += 4) sum += get<four>((const float *)&v + i);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// --- half types. Of two numbers that are as near, the even one is taken

INLINE float wide(uint16_t h) {         // bfloat16 is the upper half of a float32
    uint32_t bits = (uint32_t)h << 16;
    return get<float>(&bits);
}

INLINE uint16_t bfloat16(float f) {
    uint32_t bits = get<uint32_t>(&f);
    return f == f ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

INLINE float from_float16(uint16_t h) {
    uint32_t size = (h & 0x7fff) << 13;
    float f = get<float>(&size) * 0x1p112f;     // its exponent is smaller by 112
    uint32_t bits = get<uint32_t>(&f) | (size >= 0x0f800000 ? 0x7f800000 : 0) | (h & 0x8000) << 16;
    return get<float>(&bits);
}

INLINE uint16_t float16(float f) {
    uint32_t bits = get<uint32_t>(&f), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return sign | 0x7e00;        // NaN
    if (size >= 0x47800000) return sign | 0x7c00;       // 65536 and more
    if (size >= 0x38800000) return sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    float sum = get<float>(&size) + 0.5f;               // a subnormal: the last bits of the sum
    return sign | (get<uint32_t>(&sum) - 0x3f000000);
}

INLINE vf wide(const uint16_t *h) { return (vf)(__builtin_convertvector(get<vh>(h), vu) << 16); }
INLINE vi spread(const void *four) { return get<int32_t>(four) - vi{}; }

// --- in each lane: sum + four products of codes (-128 to 127) and numbers of x (-127 to 127)

// Some processors take codes from 0 to 255 only. Those of int8 are moved there, and the sum starts
// at minus BIAS times the sum of the numbers.
#if (LANES == 16 && defined __AVX512VNNI__) || (LANES == 8 && defined __AVXVNNI__)
#define BIAS 128
#else
#define BIAS 0
#endif

#if defined __AVX2__
typedef VECTOR(int32_t, 8) part;
INLINE part products_of(part sum, part codes, part x) {
    // trap: two products of 255 would not fit into 16 bits
    __m256i size = _mm256_abs_epi8((__m256i)codes);
    __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8((__m256i)x, (__m256i)codes));
    return sum + (part)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#elif defined __ARM_FEATURE_DOTPROD
typedef VECTOR(int32_t, 4) part;
INLINE part products_of(part sum, part codes, part x) {
    return (part)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);
}
#else
typedef vi part;
INLINE part products_of(part sum, part codes, part x) {
    for (int i = 0; i < 32; i += 8) sum += (codes << (24 - i) >> 24) * (x << (24 - i) >> 24);
    return sum;
}
#endif

INLINE vi products(vi sum, vi codes, vi x) {
#if BIAS && LANES == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif BIAS
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#else
    part *sums = (part *)&sum, *all_codes = (part *)&codes, *numbers = (part *)&x;
    for (size_t i = 0; i < sizeof(vi) / sizeof(part); i++)
        sums[i] = products_of(sums[i], all_codes[i], numbers[i]);
    return sum;
#endif
}
