// y = x w^T for few rows of x: the product that a token waits for.
//
// What limits it? First the bytes. Memory delivers a weight more slowly than a processor core
// multiplies it with eight rows of x. So up to about eight rows cost what one row costs, as long as
// the matrix is read once, as one stream that the processor can prefetch. Then the multiplications
// count, and sixteen rows take about twice as long. A library that reorders the matrix for every
// product, or reads it once per row, pays for the bytes several times.
//
//     for each output n                   one row of w: the stream
//         for 64 weights of it            a few registers
//             for each row m of x         sum[m] += these weights times 64 numbers of x
//
// Each sum has two accumulators and adds in one order, whatever the number of rows, of outputs or
// of threads. So a row of y has the same bits alone and among others.
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#define LANES 16        // of a vector, in floats
#define TILE 8          // rows of x at a time: their accumulators must fit into the registers
#else
#define LANES 8
#define TILE 4
#endif
#define STEP 64         // weights that are read together
#define AHEAD 4096      // bytes between what is prefetched and what is used
#define INLINE static inline __attribute__((always_inline))

// Vectors, which the compiler turns into the processor's own. They may begin at any address.
#define VECTOR(type, n) \
    type __attribute__((vector_size(sizeof(type) * n), aligned(1), may_alias))
typedef VECTOR(float, LANES) vf;
typedef VECTOR(int32_t, LANES) vi;
typedef VECTOR(uint32_t, LANES) vu;
typedef VECTOR(uint16_t, LANES) vh;

enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT8_ROUNDED, INT4_ROUNDED };

struct Weight {                 // a matrix (n, k); rows of whole numbers are padded to whole steps
    const char *data;
    const float *scale;         // int8: (n,)
    const uint16_t *groups;     // int4: (n, 2, padded k / 32) bfloat16: steps, then offsets
    long n, k, kind;
};

struct At {                     // where a step begins in a row of the matrix
    const char *data;
    const uint16_t *steps, *offsets;
};

template <class T> INLINE T get(const void *p) {
    T t;
    memcpy(&t, p, sizeof t);
    return t;
}

INLINE long pad(long k) { return (k + STEP - 1) / STEP * STEP; }
INLINE vf floats(const void *p) { return *(const vf *)p; }

INLINE float wide(uint16_t h) {         // bfloat16 is the upper half of a float32
    uint32_t bits = (uint32_t)h << 16;
    return get<float>(&bits);
}

INLINE uint16_t bfloat16(float f) {     // the nearest, and of two the even one
    uint32_t bits = get<uint32_t>(&f);
    return f == f ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

INLINE float total(vf v) {              // by halves: one by one, each addition would wait
    typedef VECTOR(float, 4) four;
    four sum = {};
    for (int i = 0; i < LANES; i += 4) sum += get<four>((const float *)&v + i);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The i-th vector of a step's weights, as floats. For whole numbers see bits.cpp.
template <Kind kind> INLINE vf weights_of(At w, int i) {
    if constexpr (kind == FLOAT32) return ((const vf *)w.data)[i];
    vu bits = __builtin_convertvector(((const vh *)w.data)[i], vu);
    if constexpr (kind == BFLOAT16) return (vf)(bits << 16);
    // float16 has 13 bits less than float32, and its exponent is smaller by 112
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (bits & 0x8000) << 16);
}

// --- one step: sum[m] += 64 weights times the numbers k .. k+63 of row m of x, of K in all

template <Kind kind> struct Floats {            // x as float32
    static long row(long K) { return 4 * K; }   // bytes of a row of x
    template <int M> INLINE void add(vf (*sum)[2], At w, const char *x, long k, long K) {
        #pragma GCC unroll 16
        for (int i = 0; i < STEP / LANES; i++) {
            vf weights = weights_of<kind>(w, i);
            #pragma GCC unroll 8
            for (int m = 0; m < M; m++)
                sum[m][i % 2] += weights * floats(x + m * row(K) + 4 * (k + i * LANES));
        }
    }
};

#ifdef __AVX512BF16__
struct Pairs {                                  // x as bfloat16: one instruction takes 32 pairs
    static long row(long K) { return 2 * K; }
    template <int M> INLINE void add(vf (*sum)[2], At w, const char *x, long k, long K) {
        #pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            __m512bh weights = (__m512bh)_mm512_loadu_si512(w.data + 64 * i);
            #pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const char *numbers = x + m * row(K) + 2 * k + 64 * i;
                __m512bh pairs = (__m512bh)_mm512_loadu_si512(numbers);
                sum[m][i] = (vf)_mm512_dpbf16_ps((__m512)sum[m][i], weights, pairs);
            }
        }
    }
};
#else
typedef Floats<BFLOAT16> Pairs;
#endif

// --- the loops. S: what does a step; bits: of a weight

template <class S, int M>
static void tile(const Weight &w, long bits, long n, const char *x, float *y) {
    long K = pad(w.k);
    long stored = bits < 16 ? K : w.k;          // weights of a row
    long whole = stored / STEP * STEP;
    const char *row = w.data + n * stored * bits / 8;
    const uint16_t *steps = w.groups + n * K / 16;
    const uint16_t *offsets = steps + K / 32;
    vf sum[M][2] = {};
    for (long k = 0; k < whole; k += STEP) {
        At at = {row + k * bits / 8, steps + k / 32, offsets + k / 32};
        // into the second cache (2): in the first, weights would take the place of x
        for (int i = 0; i < STEP * bits / 8; i += 64) __builtin_prefetch(at.data + AHEAD + i, 0, 2);
        S::template add<M>(sum, at, x, k, K);
    }
    if (whole < K) {                            // the rest of a row; x is padded with zeros
        char rest[4 * STEP] = {};
        memcpy(rest, row + whole * bits / 8, (w.k - whole) * bits / 8);
        S::template add<M>(sum, At{rest, steps, offsets}, x, whole, K);
    }
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        float dot = total(sum[m][0] + sum[m][1]);
        y[m * w.n + n] = w.scale ? dot * w.scale[n] : dot;
    }
}

// y (M, n). Called by all threads of a parallel region: each takes some outputs, with all rows.
template <class S> static void loop(const Weight &w, long bits, const char *x, float *y, long M) {
    #pragma omp for schedule(static)
    for (long n = 0; n < w.n; n++) {
        const char *in = x;
        float *out = y;
        long left = M;
        for (; left >= TILE; left -= TILE, in += TILE * S::row(pad(w.k)), out += TILE * w.n)
            tile<S, TILE>(w, bits, n, in, out);
        switch (left) {
            case 1: tile<S, 1>(w, bits, n, in, out); break;
            case 2: tile<S, 2>(w, bits, n, in, out); break;
            case 3: tile<S, 3>(w, bits, n, in, out); break;
#if TILE == 8
            case 4: tile<S, 4>(w, bits, n, in, out); break;
            case 5: tile<S, 5>(w, bits, n, in, out); break;
            case 6: tile<S, 6>(w, bits, n, in, out); break;
            case 7: tile<S, 7>(w, bits, n, in, out); break;
#endif
        }
    }
}
