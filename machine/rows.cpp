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
#define CACHE 32768     // bytes of x that the first cache holds. Longer rows are cut into pieces:
#define PIECE 1024      // the numbers of each row that stay there, while
#define OUTPUTS 8       // these outputs use them in turn
#define INLINE static inline __attribute__((always_inline))

// Vectors, which the compiler turns into the processor's own. They may begin at any address.
#define VECTOR(type, n) \
    type __attribute__((vector_size(sizeof(type) * n), aligned(1), may_alias))
typedef VECTOR(float, LANES) vf;
typedef VECTOR(int32_t, LANES) vi;
typedef VECTOR(uint32_t, LANES) vu;
typedef VECTOR(uint16_t, LANES) vh;

enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT8_ROUNDED, INT4_ROUNDED };
constexpr long BITS[] = {32, 16, 16, 8, 4, 8, 4};      // of a weight of each kind

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
    static const long bits = BITS[kind];
    static const bool cut = kind == BFLOAT16;   // whether long rows are cut (more to compile)
    static size_t row(size_t K) { return 4 * K; }   // bytes of a row of x
    template <int M> INLINE void end(vf (*)[2], const uint16_t *, const char *, size_t) {}
    template <int M> INLINE void add(vf (*sum)[2], At w, const char *x, size_t k, size_t K) {
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
    static const long bits = 16;
    static const bool cut = true;
    static size_t row(size_t K) { return 2 * K; }
    template <int M> INLINE void end(vf (*)[2], const uint16_t *, const char *, size_t) {}
    template <int M> INLINE void add(vf (*sum)[2], At w, const char *x, size_t k, size_t K) {
        auto below = get<__m512bh>(w.data), above = get<__m512bh>(w.data + 64);
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const char *numbers = x + m * row(K) + 2 * k;
            sum[m][0] = (vf)_mm512_dpbf16_ps((__m512)sum[m][0], below, get<__m512bh>(numbers));
            sum[m][1] = (vf)_mm512_dpbf16_ps((__m512)sum[m][1], above, get<__m512bh>(numbers + 64));
        }
    }
};
#else
typedef Floats<BFLOAT16> Pairs;
#endif

// --- the loops. S: what does a step
// sum += the weights from .. to-1 of row n times x. ahead: bytes from these to what is prefetched
template <class S, int M>
INLINE void add(const Weight &w, size_t n, size_t from, size_t to, long ahead, const char *x,
                vf (*sum)[2]) {
    const size_t K = pad(w.k), bits = S::bits;
    size_t stored = bits < 16 ? K : w.k;        // weights of a row
    size_t whole = stored / STEP * STEP;
    const uint16_t *steps = w.groups + (n * 2 * K + from) / 32;
    At at = {w.data + (n * stored + from) * bits / 8, steps, steps + K / 32};
    vf s[M][2];
    #pragma GCC unroll 16
    for (int i = 0; i < 2 * M; i++) s[i / 2][i % 2] = sum[i / 2][i % 2];
    size_t k = from;
    for (; k < to && k < whole; k += STEP) {
        // into the second cache (2): in the first, weights would take the place of x
        for (size_t i = 0; i < 8 * bits; i += 64) __builtin_prefetch(at.data + ahead + i, 0, 2);
        S::template add<M>(s, at, x, k, K);
        at.data += STEP * bits / 8;
        at.steps += STEP / 32;
        at.offsets += STEP / 32;
    }
    if (k < to) {                               // the rest of a row; x is padded with zeros
        char rest[4 * STEP] = {};
        memcpy(rest, at.data, (w.k - whole) * bits / 8);
        at.data = rest;
        S::template add<M>(s, at, x, k, K);
    }
    #pragma GCC unroll 16
    for (int i = 0; i < 2 * M; i++) sum[i / 2][i % 2] = s[i / 2][i % 2];
}

template <class S, int M>
INLINE void finish(const Weight &w, long n, const char *x, vf (*sum)[2], float *y) {
    S::template end<M>(sum, w.groups + (2 * n + 1) * pad(w.k) / 32, x, pad(w.k));
    #pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        float dot = total(sum[m][0] + sum[m][1]);
        y[m * w.n + n] = w.scale ? dot * w.scale[n] : dot;
    }
}

// The outputs first .. first+count-1. Several of them use each piece of x in turn.
template <class S, int M>
static void tile(const Weight &w, long first, long count, const char *x, float *y) {
    const long K = pad(w.k), bits = S::bits;
    long bytes = (bits < 16 ? K : w.k) * bits / 8;      // of a row of the matrix
    if (count == 1) {                                   // the sums stay in registers
        vf sum[M][2] = {};
        add<S, M>(w, first, 0, K, AHEAD, x, sum);
        return finish<S, M>(w, first, x, sum, y);
    }
    if constexpr (S::cut) {
        vf sums[OUTPUTS][M][2] = {};
        for (long from = 0; from < K; from += PIECE) {
            long to = from + PIECE < K ? from + PIECE : K;
            for (long i = 0; i < count; i++) {
                long next = i + AHEAD * 8 / (PIECE * bits);
                long ahead = (next % count - i) * bytes + (next < count ? 0 : PIECE) * bits / 8;
                add<S, M>(w, first + i, from, to, ahead, x, sums[i]);
            }
        }
        for (long i = 0; i < count; i++) finish<S, M>(w, first + i, x, sums[i], y);
    }
}

template <class S, int M>
static void tile_of(long rows, const Weight &w, long n, long count, const char *x, float *y) {
    if (rows == M) return tile<S, M>(w, n, count, x, y);
    if constexpr (M > 1) tile_of<S, M - 1>(rows, w, n, count, x, y);
}

// y (M, n). Called by all threads of a parallel region: each takes some outputs, with all rows.
template <class S> static void loop(const Weight &w, const char *x, float *y, long M) {
    long bytes = S::row(pad(w.k));
    long group = S::cut && bytes * (M < TILE ? M : TILE) > CACHE ? OUTPUTS : 1;
    #pragma omp for schedule(static)
    for (long n = 0; n < w.n; n += group)
        for (long m = 0; m < M; m += TILE)
            tile_of<S, TILE>(M - m < TILE ? M - m : TILE, w, n, w.n - n < group ? w.n - n : group,
                             x + m * bytes, y + m * w.n);
}
