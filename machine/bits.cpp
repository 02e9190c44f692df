// Quantised weights, sixteen outputs side by side: y = x w^T for int8 and int4.
//
// Why is a lane an output here, and not a place in a row as in rows.cpp? Along one output, every 32
// weights end in a sum that must be converted to floats and multiplied by a scale, which is first
// spread over the lanes, for each row of x. That takes three times as long as reading the weights.
// With an output in each lane, whole numbers are summed first, and then one conversion and two
// multiplications serve 512 weights. Steps and offsets are vectors as they stand.
//
//     tile    16 outputs x 32 weights in one piece. The tiles of 16 outputs follow each other
//     int8    8 lines. In line i, lane n has the weights 4i .. 4i+3 of output n
//     int4    4 lines. In line i, lane n has the weights 4i .. 4i+3 of output n in the low halves
//             of its bytes and 16+4i .. 16+4i+3 in the high ones. Then come 16 steps and 16 offsets
//             in bfloat16. A weight is step * code + offset
//
// A lane adds in one order, so a row of y has the same bits alone and among others.
#include <math.h>
#include "rows.cpp"

#define OUT 16              // outputs of a tile
#define SHARE 32            // weights of each
#define SETS (OUT / LANES)  // vectors that hold 16 outputs

template <int bits> struct Tile { uint8_t codes[8][LINE]; };
template <> struct Tile<4> { uint8_t codes[4][LINE]; uint16_t steps[OUT], offsets[OUT]; };

struct Group {              // what belongs to 32 numbers of x, after all numbers of a row
    float scale, sum;
    int32_t start;          // of the sum of products, see `BIAS`
};

// --- the forms of x. dots[m] = the weights of a tile times 32 numbers of row m of x

INLINE int64_t row_of(int64_t k, int64_t bytes) {       // of k numbers, with their Groups
    int64_t count = pad(k) * bytes + pad(k) / SHARE * (int64_t)sizeof(Group);
    return (count + LINE - 1) / LINE * LINE;
}

// Rounded to int8, as a draft may: four pairs of whole numbers are multiplied in one instruction.
template <int size> struct Rounded {
    static const int bits = size, bytes = 1;
    static void put(const float *x, char *to, Group *group) {
        int8_t *codes = (int8_t *)to;
        float largest = 0;
        for (int i = 0; i < SHARE; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        float inverse = largest > 0 ? 127 / largest : 0;
        int32_t sum = 0;
        for (int i = 0; i < SHARE; i++) {
            codes[i] = (int8_t)(int32_t)nearbyintf(x[i] * inverse);
            sum += codes[i];
        }
        group->scale = largest / 127;
        group->sum = group->scale * sum;
        group->start = -BIAS * sum;
    }
    template <int M>
    INLINE void dot(vf *dots, const char *lines, const char *x, const Group *group, int64_t row) {
        vi codes[8];
        #pragma GCC unroll 8
        for (int i = 0; i < bits; i++) {
            vi line = get<vi>(lines + i * LINE);
            codes[i] = line & 0x0f0f0f0f;
            if (bits == 4) codes[4 + i % 4] = line >> 4 & 0x0f0f0f0f;
            if (bits == 8) codes[i] = line ^ (int32_t)(BIAS ? 0x80808080 : 0);
        }
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            vi even = {}, odd = {};             // two, because each addition waits for the last
            if (bits == 8 && BIAS) even = spread((const char *)&group->start + m * row);
            #pragma GCC unroll 4
            for (int i = 0; i < 8; i += 2) {
                even = products(even, codes[i], spread(x + m * row + 4 * i));
                odd = products(odd, codes[i + 1], spread(x + m * row + 4 * i + 4));
            }
            dots[m] = __builtin_convertvector(even + odd, vf);
        }
    }
};

// As it is, in float32.
template <int size> struct Integers {
    static const int bits = size, bytes = 4;
    static void put(const float *x, char *to, Group *group) {
        memcpy(to, x, 4 * SHARE);
        for (int i = 0; i < SHARE; i++) group->sum += x[i];
    }
    template <int M>
    INLINE void dot(vf *dots, const char *lines, const char *x, const Group *, int64_t row) {
        vf even[M] = {}, odd[M] = {};
        #pragma GCC unroll 8
        for (int i = 0; i < SHARE / 4; i++) {
            vi line = get<vi>(lines + i % bits * LINE);
            if (bits == 4) line = (i < 4 ? line : line >> 4) & 0x0f0f0f0f;
            #pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                vf codes = __builtin_convertvector(line << (24 - 8 * j) >> 24, vf);
                #pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    vf number = all(get<float>(x + m * row + 4 * (4 * i + j)));
                    vf &sum = j % 2 ? odd[m] : even[m];
                    sum = fused(codes, number, sum);
                }
            }
        }
        for (int m = 0; m < M; m++) dots[m] = even[m] + odd[m];
    }
};

// Of int4 as it is, in bfloat16: one instruction takes two numbers for each lane, and a table turns
// codes into numbers. (From int8 they are made so slowly that float32 is no worse.)
#ifdef __AVX512BF16__
const uint16_t NUMBERS[16] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                              0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

struct Half {
    static const int bits = 4, bytes = 2;
    static void put(const float *x, char *to, Group *group) {
        for (int i = 0; i < SHARE; i++) {   // in the order that the shifts below give
            int from = i / 8 * 4 + i % 8 / 4 + i % 2 * 2 + i / 2 % 2 * 16;
            ((uint16_t *)to)[i] = bfloat16(x[from]);
            group->sum += x[i];
        }
    }
    template <int M>
    INLINE void dot(vf *dots, const char *lines, const char *x, const Group *, int64_t row) {
        // twice, because a table has 32 places, and the fifth bit is another code's
        const __m512i table = _mm512_broadcast_i64x4(get<__m256i>(NUMBERS));
        __m512bh pairs[16];
        #pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            vi line = get<vi>(lines + i / 4 * LINE) >> i % 4 * 4;
            pairs[i] = (__m512bh)_mm512_permutexvar_epi16((__m512i)line, table);
        }
        #pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            __m512 even = {}, odd = {};
            #pragma GCC unroll 8
            for (int i = 0; i < 16; i += 2) {
                const char *in = x + m * row + 4 * i;
                even = _mm512_dpbf16_ps(even, pairs[i], (__m512bh)spread(in));
                odd = _mm512_dpbf16_ps(odd, pairs[i + 1], (__m512bh)spread(in + 4));
            }
            dots[m] = (vf)even + (vf)odd;
        }
    }
};
#else
typedef Integers<4> Half;
#endif

// --- sixteen outputs

template <class Form> struct Lanes : Form {
    static int64_t row(int64_t k) { return row_of(k, Form::bytes); }
    static int64_t outputs(const Weight &, int64_t) { return OUT; }
    static void prepare(const float *x, int64_t k, char *to) {
        auto group = (Group *)(to + pad(k) * Form::bytes);
        for (int64_t g = 0; g < k; g += SHARE, group++) {
            float numbers[SHARE] = {};
            memcpy(numbers, x + g, 4 * (k - g < SHARE ? k - g : SHARE));
            group->scale = 1;
            Form::put(numbers, to + g * Form::bytes, group);
        }
    }
    template <int M>
    static void tile(const Weight &w, int64_t n, int64_t count, const char *x, float *y) {
        const int64_t tiles = (w.k + SHARE - 1) / SHARE, next = row(w.k);
        auto t = (const Tile<Form::bits> *)w.data + n / OUT * tiles;
        auto group = (const Group *)(x + pad(w.k) * Form::bytes);
        vf sum[SETS][M] = {};
        for (int64_t g = 0; g < tiles; g++, t++, group++, x += SHARE * Form::bytes) {
            for (size_t i = 0; i < sizeof *t; i += LINE)
                __builtin_prefetch((const char *)t + AHEAD + i, 0, 2);
            for (int set = 0; set < SETS; set++) {
                vf dots[M];
                const char *lines = (const char *)t->codes + set * sizeof(vi);
                Form::template dot<M>(dots, lines, x, group, next);
                #pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    auto own = (const Group *)((const char *)group + m * next);
                    vf step = all(own->scale);
                    if constexpr (Form::bits == 4) {
                        step *= wide(t->steps + set * LANES);
                        vf offset = wide(t->offsets + set * LANES);
                        sum[set][m] = fused(offset, all(own->sum), sum[set][m]);
                    }
                    sum[set][m] = fused(dots[m], step, sum[set][m]);
                }
            }
        }
        for (int m = 0; m < M; m++) {
            float all_outputs[OUT];
            for (int set = 0; set < SETS; set++) {
                if (w.scale) sum[set][m] *= get<vf>(w.scale + n + set * LANES);
                memcpy(all_outputs + set * LANES, &sum[set][m], sizeof(vf));
            }
            memcpy(y + m * w.n + n, all_outputs, 4 * (count < OUT ? count : OUT));
        }
    }
};
