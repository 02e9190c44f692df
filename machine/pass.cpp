// A pass over few rows: the sub-layers of model.py in one call, with the products of rows.cpp.
//
//     norm -> wqkv -> rotate and store -> attend -> wo -> add        attention
//     norm -> gate_up -> act(gate) * up -> down -> add               MLP
//
// Every step works row by row, and no sum crosses two rows. So what rows.cpp promises of a product
// holds for a whole pass: a row depends on its text alone, not on the rows beside it. Numbers are
// float32 on their way, and rounded to the model's type wherever model.py rounds them. All threads
// run all of it together, and share the iterations of each loop.
#include "bits.cpp"
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

struct Block {                  // a null pointer: the model has no such part
    const float *attn_norm, *attn_post, *mlp_norm, *mlp_post, *q_norm, *k_norm, *bias;
    Weight wqkv, wo, gate_up, down;
    long window;                // 0: none
};

struct Model {
    const Block *blocks;
    long dim, heads, kv_heads, head_dim, hidden, gelu;
    float eps, scale, softcap;          // softcap 0: none
};

struct Pass {                   // B texts, T tokens of each, S slots that are read
    const long *sublayers, *places;     // for each sub-layer: its place in `out`, or -1
    long count, B, T, S, threads;
    const int64_t *positions, *slots;   // (B, T)
    const uint8_t *masks;               // (1 or 2, B, T, S) without and with a window; null: a chain
    const float *cos, *sin;             // (at least S, D)
    float *keys, *values;               // (layers, B, kv_heads, S, D), strides below
    long layer, text, head;
    const void *x;                      // (B, T, dim)
    void *out;                          // (places, B, T, dim)
};

// --- numbers: a float, a bfloat16, a float16, by the model's type

#ifdef __aarch64__
typedef __fp16 float16;
#else
typedef _Float16 float16;
#endif

template <Kind type> struct Number { typedef uint16_t Stored; };
template <> struct Number<FLOAT32> { typedef float Stored; };
template <> struct Number<FLOAT16> { typedef float16 Stored; };

template <Kind type> INLINE float load(const void *x, long i) {
    auto number = ((const typename Number<type>::Stored *)x)[i];
    if constexpr (type == BFLOAT16) return wide(number);
    else return number;
}

template <Kind type> INLINE void store(void *x, long i, float f) {
    auto &number = ((typename Number<type>::Stored *)x)[i];
    if constexpr (type == BFLOAT16) number = bfloat16(f);
    else number = f;
}

template <Kind type> INLINE float rounded(float f) {
    if constexpr (type == BFLOAT16) return wide(bfloat16(f));
    else return (typename Number<type>::Stored)f;
}

INLINE float exponential(float x) {     // 2^n e^r with |r| below ln 2 / 2 (Cephes, expf)
    x = x < -87 ? -87 : x;
    x = x > 88 ? 88 : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    int32_t power = ((int32_t)n + 127) << 23;
    return (y * r * r + r + 1) * get<float>(&power);
}

INLINE float tangent(float x) { return 1 - 2 / (exponential(2 * x) + 1); }      // tanh
INLINE float capped(float x, float cap) { return cap > 0 ? cap * tangent(x / cap) : x; }
INLINE float silu(float x) { return x / (1 + exponential(-x)); }
INLINE float gelu(float x) {             // by its tanh approximation
    return 0.5f * x * (1 + tangent(0.79788456f * (x + 0.044715f * x * x * x)));
}

INLINE float dot(const float *a, const float *b, long n) {
    vf sum = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES) sum += floats(a + i) * floats(b + i);
    float rest = 0;
    for (; i < n; i++) rest += a[i] * b[i];
    return total(sum) + rest;
}

template <Kind type> static void norm(const float *x, const float *w, float eps, float *y, long n) {
    float scale = 1 / sqrtf(dot(x, x, n) / n + eps);
    for (long i = 0; i < n; i++) y[i] = rounded<type>(x[i] * scale * w[i]);
}

// --- a pass

struct Memory {     // what the threads share: rows of floats, and rows in the form a weight takes
    std::vector<float> x, row, sums, q, scores;
    std::vector<char> in;
};

template <class V> static void grow(V &v, long n) { if ((long)v.size() < n) v.resize(n); }

template <Kind type> struct Running {
    const Model &m;
    const Pass &p;
    Memory &b;
    long R = p.B * p.T, D = m.head_dim, G = m.heads / m.kv_heads;

    void multiply_norm(const float *w, const Weight &weight) {
        #pragma omp for
        for (long r = 0; r < R; r++) {
            norm<type>(&b.x[r * m.dim], w, m.eps, &b.row[r * m.dim], m.dim);
            prepare(weight, &b.row[r * m.dim], &b.in[r * row_bytes(weight)]);
        }
        multiply(weight, b.in.data(), b.sums.data(), R);
    }

    void multiply_add(const Weight &weight, const float *post) {    // x += norm(row w^T)
        #pragma omp for
        for (long r = 0; r < R; r++)
            prepare(weight, &b.row[r * weight.k], &b.in[r * row_bytes(weight)]);
        multiply(weight, b.in.data(), b.sums.data(), R);
        #pragma omp for
        for (long r = 0; r < R; r++) {
            float *x = &b.x[r * m.dim], *y = &b.sums[r * m.dim];
            for (long i = 0; i < m.dim; i++) y[i] = rounded<type>(y[i]);
            if (post) norm<type>(y, post, m.eps, y, m.dim);
            for (long i = 0; i < m.dim; i++) x[i] = rounded<type>(x[i] + y[i]);
        }
    }

    // The j-th vector of a group: one of its G queries, its key, or its value.
    void rotate(const Block &block, long layer, long r, long group, long j) {
        long i = group * (G + 2) + j;
        float v[D], turned[D];
        const float *sums = &b.sums[r * block.wqkv.n + i * D];
        for (long d = 0; d < D; d++) v[d] = rounded<type>(sums[d]);
        if (block.bias)
            for (long d = 0; d < D; d++) v[d] = rounded<type>(v[d] + block.bias[i * D + d]);
        if (j < G && block.q_norm) norm<type>(v, block.q_norm, m.eps, v, D);
        if (j == G && block.k_norm) norm<type>(v, block.k_norm, m.eps, v, D);
        const float *cos = p.cos + p.positions[r] * D, *sin = p.sin + p.positions[r] * D;
        for (long d = 0; d < D / 2; d++) {
            turned[d] = v[d] * cos[d] + v[d + D / 2] * sin[d];
            turned[d + D / 2] = v[d + D / 2] * cos[d + D / 2] + v[d] * sin[d + D / 2];
        }
        long place = layer * p.layer + r / p.T * p.text + group * p.head + p.slots[r] * D;
        float *q = &b.q[(r * m.heads + group * G + j) * D];
        if (j < G)
            for (long d = 0; d < D; d++) q[d] = turned[d] * m.scale;
        else if (j == G) memcpy(p.keys + place, turned, 4 * D);
        else memcpy(p.values + place, v, 4 * D);
    }

    void attend(const Block &block, long layer, long r, long h) {
        long place = layer * p.layer + r / p.T * p.text + h / G * p.head;
        const float *q = &b.q[(r * m.heads + h) * D];
        const float *keys = p.keys + place, *values = p.values + place;
        const uint8_t *mask = nullptr;
        if (p.masks) mask = p.masks + ((block.window > 0) * R + r) * p.S;
        long from = 0, to = p.S;
        if (!mask) {            // a chain: a token sees itself and all before it
            to = p.slots[r] + 1;
            from = block.window && to > block.window ? to - block.window : 0;
        }
        float *s = &b.scores[omp_get_thread_num() * pad(p.S)], *y = &b.row[(r * m.heads + h) * D];
        float largest = -INFINITY;
        for (long t = from; t < to; t++) s[t] = dot(q, keys + t * D, D);
        if (m.softcap > 0)
            for (long t = from; t < to; t++) s[t] = capped(s[t], m.softcap);
        if (mask)
            for (long t = from; t < to; t++) s[t] = mask[t] ? s[t] : -INFINITY;
        #pragma omp simd reduction(max : largest)
        for (long t = from; t < to; t++) largest = s[t] > largest ? s[t] : largest;
        for (long t = from; t < to; t++)
            s[t] = s[t] == -INFINITY ? 0 : exponential(s[t] - largest);
        float sum = sum_of(s, from, to);
        long d = 0;
        for (; d + 4 * LANES <= D; d += 4 * LANES) mean<4>(s, values + d, y + d, from, to, sum);
        for (; d + LANES <= D; d += LANES) mean<1>(s, values + d, y + d, from, to, sum);
        for (; d < D; d++) {
            float one = 0;
            for (long t = from; t < to; t++) one += s[t] * values[t * D + d];
            y[d] = rounded<type>(one / sum);
        }
    }

    // A slot has its lane wherever the sum begins and ends: a tree's ends later, and adds zeros.
    float sum_of(float *s, long from, long to) {
        vf sum = {};
        for (long t = to; t % LANES; t++) s[t] = 0;
        for (; from % LANES; from--) s[from - 1] = 0;
        for (long t = from; t < to; t += LANES) sum += floats(s + t);
        return total(sum);
    }

    // n vectors of the mean of the values, weighted by s.
    template <int n>
    void mean(const float *s, const float *values, float *y, long from, long to, float sum) {
        vf sums[n] = {};
        for (long t = from; t < to; t++)
            for (int i = 0; i < n; i++) sums[i] += s[t] * floats(values + t * D + i * LANES);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < LANES; j++) y[i * LANES + j] = rounded<type>(sums[i][j] / sum);
    }

    void attention(const Block &block, long layer) {
        multiply_norm(block.attn_norm, block.wqkv);
        #pragma omp for collapse(3)
        for (long r = 0; r < R; r++)
            for (long group = 0; group < m.kv_heads; group++)
                for (long j = 0; j < G + 2; j++) rotate(block, layer, r, group, j);
        #pragma omp for collapse(2)
        for (long h = 0; h < m.heads; h++)      // outside, so that its keys stay in the cache
            for (long r = 0; r < R; r++) attend(block, layer, r, h);
        multiply_add(block.wo, block.attn_post);
    }

    void mlp(const Block &block) {
        multiply_norm(block.mlp_norm, block.gate_up);
        const long H = m.hidden;
        #pragma omp for collapse(2)
        for (long r = 0; r < R; r++)
            for (long first = 0; first < H; first += STEP) {
                const float *gate = &b.sums[2 * r * H], *up = gate + H;
                long last = first + STEP < H ? first + STEP : H;
                for (long i = first; i < last; i++) {
                    float g = rounded<type>(gate[i]), u = rounded<type>(up[i]);
                    float active = rounded<type>(m.gelu ? gelu(g) : silu(g));
                    b.row[r * H + i] = rounded<type>(active * u);
                }
            }
        multiply_add(block.down, block.mlp_post);
    }

    void run() {
        long widest = m.dim;
        for (long n : {m.heads * D, m.hidden}) widest = n > widest ? n : widest;
        grow(b.x, R * m.dim);
        grow(b.row, R * widest);
        grow(b.sums, R * (m.blocks->wqkv.n + m.dim + 2 * m.hidden));
        grow(b.q, R * m.heads * D);
        grow(b.scores, p.threads * pad(p.S));
        grow(b.in, R * 4 * pad(widest));
        #pragma omp parallel num_threads(p.threads)
        {
            #pragma omp for
            for (long i = 0; i < R * m.dim; i++) b.x[i] = load<type>(p.x, i);
            for (long i = 0; i < p.count; i++) {
                long layer = p.sublayers[i] / 2;
                if (p.sublayers[i] % 2) mlp(m.blocks[layer]);
                else attention(m.blocks[layer], layer);
                if (p.places[i] < 0) continue;
                long place = p.places[i] * R * m.dim;
                #pragma omp for
                for (long j = 0; j < R * m.dim; j++) store<type>(p.out, place + j, b.x[j]);
            }
        }
    }
};

// y (R, n) = the product of x (R, k), after the norm w and within a soft-cap, if there are any.
template <Kind type>
static void multiplying(const Weight &weight, const float *w, float eps, float cap, const void *x,
                        void *y, long R, long threads) {
    static thread_local Memory memory;
    Memory &b = memory;
    long K = weight.k, N = weight.n;
    grow(b.row, R * K);
    grow(b.sums, R * N);
    grow(b.in, R * row_bytes(weight));
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for
        for (long r = 0; r < R; r++) {
            float *row = &b.row[r * K];
            for (long k = 0; k < K; k++) row[k] = load<type>(x, r * K + k);
            if (w) norm<type>(row, w, eps, row, K);
            prepare(weight, row, &b.in[r * row_bytes(weight)]);
        }
        multiply(weight, b.in.data(), b.sums.data(), R);
        #pragma omp for
        for (long i = 0; i < R * N; i++) {
            float f = b.sums[i];
            store<type>(y, i, cap > 0 ? capped(rounded<type>(f), cap) : f);
        }
    }
}

extern "C" void run_pass(const Model *m, const Pass *p, long type) {
    static thread_local Memory memory;
    if (type == FLOAT32) Running<FLOAT32>{*m, *p, memory}.run();
    if (type == BFLOAT16) Running<BFLOAT16>{*m, *p, memory}.run();
    if (type == FLOAT16) Running<FLOAT16>{*m, *p, memory}.run();
}

extern "C" void run_product(long type, const Weight *weight, const float *w, float eps, float cap,
                            const void *x, void *y, long R, long threads) {
    auto multiply = multiplying<FLOAT32>;
    if (type == BFLOAT16) multiply = multiplying<BFLOAT16>;
    if (type == FLOAT16) multiply = multiplying<FLOAT16>;
    multiply(*weight, w, eps, cap, x, y, R, threads);
}
