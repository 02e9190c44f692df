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
//
// trap: rows of x begin at a cache line. If they began in the middle of one, every load of x would
// read two lines, and a block of five tokens would take half as long again.
#include "vectors.cpp"

#define STEP 64         // weights that are read together
#define AHEAD 4096      // bytes between what is prefetched and what is used
#define CACHE 32768     // bytes of x that the first cache holds. Longer rows are cut into pieces:
#define PIECE 1024      // the numbers of each row that stay there, while
#define OUTPUTS 8       // these outputs use them in turn

// Of a matrix, and of the form in which it takes x: whole numbers take it as it is, in bfloat16
// (HALF), or rounded to int8.
enum Kind { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT4_HALF, INT8_ROUNDED, INT4_ROUNDED };

struct Weight {                 // a matrix (n, k)
    const char *data;           // rows of numbers, or the tiles of bits.cpp
    const float *scale;         // int8: (n,) rounded up to whole tiles
    int64_t n, k, kind;
};

INLINE int64_t pad(int64_t k) { return (k + STEP - 1) / STEP * STEP; }

// The i-th vector of a step's weights, as floats.
template <Kind kind> INLINE vf weights_of(const char *data, int i) {
    if constexpr (kind == FLOAT32) return get<vf>(data + i * sizeof(vf));
    vu bits = __builtin_convertvector(get<vh>(data + i * sizeof(vh)), vu);
    if constexpr (kind == BFLOAT16) return (vf)(bits << 16);
    // float16 has 13 bits less than float32, and its exponent is smaller by 112
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (bits & 0x8000) << 16);
}

// --- one step: sum[m] += 64 weights times the numbers k .. k+63 of row m of x, of K in all

template <Kind kind> struct Floats {            // x as float32
    static const int64_t bytes = kind == FLOAT32 ? 4 : 2;      // of a weight
    static const bool cut = kind == BFLOAT16;   // whether long rows are cut (more to compile)
    static int64_t row(int64_t k) { return 4 * pad(k); }        // bytes of a row of x
    static void prepare(const float *x, int64_t k, char *to) { memcpy(to, x, 4 * k); }
    template <int M>
    INLINE void add(vf (*sum)[2], const char *w, const char *x, size_t k, size_t K) {
        #pragma GCC unroll 16
        for (int i = 0; i < STEP / LANES; i++) {
            vf weights = weights_of<kind>(w, i);
            #pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                vf numbers = aligned(x + 4 * (m * K + k + i * LANES));
                sum[m][i % 2] = fused(weights, numbers, sum[m][i % 2]);
            }
        }
    }
};

#ifdef __AVX512BF16__
struct Pairs {                                  // x as bfloat16: one instruction takes 32 pairs
    static const int64_t bytes = 2;
    static const bool cut = true;
    static int64_t row(int64_t k) { return 2 * pad(k); }
    static void prepare(const float *x, int64_t k, char *to) {
        for (int64_t i = 0; i < k; i++) ((uint16_t *)to)[i] = bfloat16(x[i]);
    }
    template <int M>
    INLINE void add(vf (*sum)[2], const char *w, const char *x, size_t k, size_t K) {
        auto below = get<__m512bh>(w), above = get<__m512bh>(w + 64);
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            auto in = (const __m512bh *)(x + 2 * (m * K + k));
            sum[m][0] = (vf)_mm512_dpbf16_ps((__m512)sum[m][0], below, in[0]);
            sum[m][1] = (vf)_mm512_dpbf16_ps((__m512)sum[m][1], above, in[1]);
        }
    }
};
#else
typedef Floats<BFLOAT16> Pairs;
#endif

// --- the loops. S: what does a step
// sum += the weights from .. to-1 of row n times x. ahead: bytes from these to what is prefetched
template <class S, int M>
INLINE void add(const Weight &w, size_t n, size_t from, size_t to, int64_t ahead, const char *x,
                vf (*sum)[2]) {
    const size_t K = pad(w.k), whole = w.k / STEP * STEP;
    const char *data = w.data + (n * w.k + from) * S::bytes;
    vf s[M][2];
    #pragma GCC unroll 16
    for (int i = 0; i < 2 * M; i++) s[i / 2][i % 2] = sum[i / 2][i % 2];
    size_t k = from;
    for (; k < to && k < whole; k += STEP) {
        // into the second cache (2): in the first, weights would take the place of x
        for (int i = 0; i < STEP * S::bytes; i += LINE) __builtin_prefetch(data + ahead + i, 0, 2);
        S::template add<M>(s, data, x, k, K);
        data += STEP * S::bytes;
    }
    if (k < to) {                               // the rest of a row; x is padded with zeros
        char rest[4 * STEP] = {};
        memcpy(rest, data, (w.k - whole) * S::bytes);
        S::template add<M>(s, rest, x, k, K);
    }
    #pragma GCC unroll 16
    for (int i = 0; i < 2 * M; i++) sum[i / 2][i % 2] = s[i / 2][i % 2];
}

// The outputs n .. n+count-1 of a plain matrix. Several of them use each piece of x in turn.
template <class S> struct Plain : S {
    static int64_t outputs(const Weight &w, int64_t M) {
        return M * S::row(w.k) > CACHE ? OUTPUTS : 1;
    }
    template <int M>
    static void tile(const Weight &w, int64_t n, int64_t count, const char *x, float *y) {
        const int64_t K = pad(w.k), bytes = w.k * S::bytes;     // of a row of the matrix
        if (!S::cut || M * S::row(w.k) <= CACHE) {              // the sums stay in registers
            for (int64_t i = 0; i < count; i++) {
                vf sum[M][2] = {};
                add<S, M>(w, n + i, 0, K, AHEAD, x, sum);
                for (int m = 0; m < M; m++) y[m * w.n + n + i] = total(sum[m][0] + sum[m][1]);
            }
            return;
        }
        vf sums[OUTPUTS][M][2] = {};
        if constexpr (S::cut)
            for (int64_t from = 0; from < K; from += PIECE) {
                int64_t to = from + PIECE < K ? from + PIECE : K;
                for (int64_t i = 0; i < count; i++) {
                    int64_t next = i + AHEAD / (PIECE * S::bytes);
                    int64_t piece = next < count ? 0 : PIECE * S::bytes;
                    add<S, M>(w, n + i, from, to, (next % count - i) * bytes + piece, x, sums[i]);
                }
            }
        for (int64_t i = 0; i < count; i++)
            for (int m = 0; m < M; m++) y[m * w.n + n + i] = total(sums[i][m][0] + sums[i][m][1]);
    }
};

template <class S, int M>
static void tile_of(int64_t rows, const Weight &w, int64_t n, int64_t count, const char *x,
                    float *y) {
    if (rows == M) return S::template tile<M>(w, n, count, x, y);
    if constexpr (M > 1) tile_of<S, M - 1>(rows, w, n, count, x, y);
}

// y (M, n). Called by all threads of a parallel region: each takes some outputs, with all rows.
template <class S> static void loop(const Weight &w, const char *x, float *y, int64_t M) {
    int64_t group = S::outputs(w, M);
    #pragma omp for schedule(static)
    for (int64_t n = 0; n < w.n; n += group)
        for (int64_t m = 0; m < M; m += TILE)
            tile_of<S, TILE>(M - m < TILE ? M - m : TILE, w, n, w.n - n < group ? w.n - n : group,
                             x + m * S::row(w.k), y + m * w.n);
}
