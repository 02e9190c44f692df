// A pass over few rows: the sub-layers of model.py in one call, with the products of rows.cpp.
//
//     norm -> wqkv -> rotate and store -> attend -> wo -> add        attention
//     norm -> gate_up -> act(gate) * up -> down -> add               MLP
//
// Every step works row by row, and no sum crosses two rows. So what rows.cpp promises of a product
// holds for a whole pass: a row depends on its text alone, not on the rows beside it. Numbers are
// float32 on their way, and rounded to the model's type wherever model.py rounds them. All threads
// run all of it together, and share the iterations of each loop.
#include "kinds.cpp"
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num() { return 0; }
#endif

struct BlockWeights {                  // a null pointer: the model has no such part
    const float *attn_norm, *attn_post, *mlp_norm, *mlp_post, *q_norm, *k_norm, *bias;
    Weight wqkv, wo, gate_up, down;
    int64_t window;                // 0: none
};

struct Model {
    const BlockWeights *blocks;
    int64_t dim, heads, kv_heads, head_dim, hidden, gelu;
    float eps, scale, softcap;          // softcap 0: none
};

struct Pass {                   // B texts, T tokens of each, S slots that are read
    const int64_t *sublayers, *places;     // for each sub-layer: its place in `out`, or -1
    int64_t count, B, T, S, threads;
    const int64_t *positions, *slots;   // (B, T)
    const uint8_t *masks;       // (1 or 2, B, T, S) without and with a window; null: a chain
    const float *cos, *sin;             // (at least S, D)
    int64_t local;                      // how far behind them those of blocks with a window begin
    float *keys, *values;               // (layers, B, kv_heads, S, D), strides below
    int64_t layer, text, head;
    const void *x;                      // (B, T, dim)
    void *out;                          // (places, B, T, dim)
};

// --- numbers: a float, a bfloat16, a float16, by the model's type

template <Kind type> INLINE float load(const void *x, int64_t i) {
    if (type == FLOAT32) return ((const float *)x)[i];
    uint16_t half = ((const uint16_t *)x)[i];
    return type == BFLOAT16 ? wide(half) : from_float16(half);
}

template <Kind type> INLINE void store(void *x, int64_t i, float f) {
    if (type == FLOAT32) ((float *)x)[i] = f;
    else ((uint16_t *)x)[i] = type == BFLOAT16 ? bfloat16(f) : float16(f);
}

template <Kind type> INLINE float rounded(float f) {
    if (type == FLOAT32) return f;
    return type == BFLOAT16 ? wide(bfloat16(f)) : from_float16(float16(f));
}

INLINE float exponential(float x) {     // 2^n e^r with |r| below ln 2 / 2 (Cephes, expf)
    x = x < -87 ? -87 : x;
    x = x > 88 ? 88 : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = fused(n, 2.12194440e-4f, fused(n, -0.693359375f, x));
    float y = 1.9875691500e-4f;
    y = fused(y, r, 1.3981999507e-3f);
    y = fused(y, r, 8.3334519073e-3f);
    y = fused(y, r, 4.1665795894e-2f);
    y = fused(y, r, 1.6666665459e-1f);
    y = fused(y, r, 5.0000001201e-1f);
    uint32_t power = (uint32_t)((int32_t)n + 127) << 23;     // of a NaN any: r makes it NaN again
    return (fused(y * r, r, r) + 1) * get<float>(&power);
}

INLINE float tangent(float x) { return 1 - 2 / (exponential(2 * x) + 1); }      // tanh
INLINE float capped(float x, float cap) { return cap > 0 ? cap * tangent(x / cap) : x; }
INLINE float silu(float x) { return x / (1 + exponential(-x)); }
INLINE float gelu(float x) {             // by its tanh approximation
    return 0.5f * x * (1 + tangent(0.79788456f * (x + 0.044715f * x * x * x)));
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    vf sum = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = fused(get<vf>(a + i), get<vf>(b + i), sum);
    float rest = 0;
    for (; i < n; i++) rest = fused(a[i], b[i], rest);
    return total(sum) + rest;
}

template <Kind type>
static void norm(const float *x, const float *w, float eps, float *y, int64_t n) {
    float scale = 1 / sqrtf(dot(x, x, n) / n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = rounded<type>(x[i] * scale * w[i]);
}

// --- a pass

template <class T> struct Buffer {      // memory that begins at a cache line
    struct alignas(LINE) Line { char bytes[LINE]; };
    std::vector<Line> lines;
    void grow(size_t n) {
        size_t count = (n * sizeof(T) + LINE - 1) / LINE;
        if (lines.size() < count) lines.resize(count);
    }
    T &operator[](size_t i) { return ((T *)lines.data())[i]; }
};

struct Memory {     // what the threads share: rows of floats, and rows in the form a weight takes
    Buffer<float> x, row, sums, q, scores;
    Buffer<char> in;
};

template <Kind type> struct Running {
    const Model &m;
    const Pass &p;
    Memory &b;
    int64_t R = p.B * p.T, D = m.head_dim, G = m.heads / m.kv_heads;

    void multiply_norm(const float *w, const Weight &weight) {
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++) {
            norm<type>(&b.x[r * m.dim], w, m.eps, &b.row[r * m.dim], m.dim);
            prepare(weight, &b.row[r * m.dim], &b.in[r * row_bytes(weight)]);
        }
        multiply(weight, &b.in[0], &b.sums[0], R);
    }

    void multiply_add(const Weight &weight, const float *post) {    // x += norm(row w^T)
        #pragma omp for
        for (int64_t r = 0; r < R; r++)
            prepare(weight, &b.row[r * weight.k], &b.in[r * row_bytes(weight)]);
        multiply(weight, &b.in[0], &b.sums[0], R);
        // without a barrier, because the next sub-layer gives each thread the same rows
        #pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < R; r++) {
            float *x = &b.x[r * m.dim], *y = &b.sums[r * m.dim];
            for (int64_t i = 0; i < m.dim; i++) y[i] = rounded<type>(y[i]);
            if (post) norm<type>(y, post, m.eps, y, m.dim);
            for (int64_t i = 0; i < m.dim; i++) x[i] = rounded<type>(x[i] + y[i]);
        }
    }

    // The j-th vector of a group: one of its G queries, its key, or its value.
    void rotate(const BlockWeights &block, int64_t layer, int64_t r, int64_t group, int64_t j) {
        int64_t i = group * (G + 2) + j;
        float v[D], turned[D];
        const float *sums = &b.sums[r * block.wqkv.n + i * D];
        for (int64_t d = 0; d < D; d++) v[d] = rounded<type>(sums[d]);
        if (block.bias)
            for (int64_t d = 0; d < D; d++) v[d] = rounded<type>(v[d] + block.bias[i * D + d]);
        if (j < G && block.q_norm) norm<type>(v, block.q_norm, m.eps, v, D);
        if (j == G && block.k_norm) norm<type>(v, block.k_norm, m.eps, v, D);
        int64_t angle = p.positions[r] * D + (block.window ? p.local : 0);
        const float *cos = p.cos + angle, *sin = p.sin + angle;
        for (int64_t d = 0; d < D / 2; d++) {
            turned[d] = v[d] * cos[d] + v[d + D / 2] * sin[d];
            turned[d + D / 2] = v[d + D / 2] * cos[d + D / 2] + v[d] * sin[d + D / 2];
        }
        int64_t place = layer * p.layer + r / p.T * p.text + group * p.head + p.slots[r] * D;
        float *q = &b.q[(r * m.heads + group * G + j) * D];
        if (j < G)
            for (int64_t d = 0; d < D; d++) q[d] = turned[d] * m.scale;
        else if (j == G) memcpy(p.keys + place, turned, 4 * D);
        else memcpy(p.values + place, v, 4 * D);
    }

    void attend(const BlockWeights &block, int64_t layer, int64_t r, int64_t h) {
        int64_t place = layer * p.layer + r / p.T * p.text + h / G * p.head;
        const float *q = &b.q[(r * m.heads + h) * D];
        const float *keys = p.keys + place, *values = p.values + place;
        const uint8_t *mask = nullptr;
        if (p.masks) mask = p.masks + ((block.window > 0) * R + r) * p.S;
        int64_t from = 0, to = p.S;
        if (!mask) {            // a chain: a token sees itself and all before it
            to = p.slots[r] + 1;
            from = block.window && to > block.window ? to - block.window : 0;
        }
        float *s = &b.scores[omp_get_thread_num() * p.S], *y = &b.row[(r * m.heads + h) * D];
        float largest = -INFINITY;
        for (int64_t t = from; t < to; t++) s[t] = dot(q, keys + t * D, D);
        if (m.softcap > 0)
            for (int64_t t = from; t < to; t++) s[t] = capped(s[t], m.softcap);
        if (mask)
            for (int64_t t = from; t < to; t++) s[t] = mask[t] ? s[t] : -INFINITY;
        #pragma omp simd reduction(max : largest)
        for (int64_t t = from; t < to; t++) largest = s[t] > largest ? s[t] : largest;
        for (int64_t t = from; t < to; t++)
            s[t] = s[t] == -INFINITY ? 0 : exponential(s[t] - largest);
        int64_t d = 0;
        for (; d + 4 * LANES <= D; d += 4 * LANES) mean<4>(s, values + d, y + d, from, to);
        for (; d + LANES <= D; d += LANES) mean<1>(s, values + d, y + d, from, to);
        for (; d < D; d++) {
            float weights = 0, sum = 0;
            for (int64_t t = from; t < to; t++) {
                weights += s[t];
                sum = fused(s[t], values[t * D + d], sum);
            }
            y[d] = rounded<type>(sum / weights);
        }
    }

    // n vectors of the mean of the values, weighted by s. The weights are added slot by slot, too: a
    // path of a tree leaves slots out, and a zero there must not change the order of a sum.
    template <int n>
    void mean(const float *s, const float *values, float *y, int64_t from, int64_t to) {
        vf sums[n] = {}, weights = {};
        for (int64_t t = from; t < to; t++) {
            weights += all(s[t]);
            for (int i = 0; i < n; i++)
                sums[i] = fused(all(s[t]), get<vf>(values + t * D + i * LANES), sums[i]);
        }
        for (int i = 0; i < n; i++)
            for (int j = 0; j < LANES; j++)
                y[i * LANES + j] = rounded<type>(sums[i][j] / weights[j]);
    }

    void attention(const BlockWeights &block, int64_t layer) {
        multiply_norm(block.attn_norm, block.wqkv);
        #pragma omp for collapse(3)
        for (int64_t r = 0; r < R; r++)
            for (int64_t group = 0; group < m.kv_heads; group++)
                for (int64_t j = 0; j < G + 2; j++) rotate(block, layer, r, group, j);
        #pragma omp for collapse(2)
        for (int64_t h = 0; h < m.heads; h++)      // outside, so that its keys stay in the cache
            for (int64_t r = 0; r < R; r++) attend(block, layer, r, h);
        multiply_add(block.wo, block.attn_post);
    }

    void mlp(const BlockWeights &block) {
        multiply_norm(block.mlp_norm, block.gate_up);
        const int64_t H = m.hidden;
        #pragma omp for collapse(2)
        for (int64_t r = 0; r < R; r++)
            for (int64_t first = 0; first < H; first += STEP) {
                const float *gate = &b.sums[2 * r * H], *up = gate + H;
                int64_t last = first + STEP < H ? first + STEP : H;
                for (int64_t i = first; i < last; i++) {
                    float g = rounded<type>(gate[i]), u = rounded<type>(up[i]);
                    float active = rounded<type>(m.gelu ? gelu(g) : silu(g));
                    b.row[r * H + i] = rounded<type>(active * u);
                }
            }
        multiply_add(block.down, block.mlp_post);
    }

    void run() {
        int64_t widest = m.dim;
        for (int64_t n : {m.heads * D, m.hidden}) widest = n > widest ? n : widest;
        b.x.grow(R * m.dim);
        b.row.grow(R * widest);
        b.sums.grow(R * (m.blocks->wqkv.n + m.dim + 2 * m.hidden));
        b.q.grow(R * m.heads * D);
        b.scores.grow(p.threads * p.S);
        b.in.grow(R * row_of(widest, 4));
        #pragma omp parallel num_threads(p.threads)
        {
            #pragma omp for
            for (int64_t i = 0; i < R * m.dim; i++) b.x[i] = load<type>(p.x, i);
            for (int64_t i = 0; i < p.count; i++) {
                int64_t layer = p.sublayers[i] / 2;
                if (p.sublayers[i] % 2) mlp(m.blocks[layer]);
                else attention(m.blocks[layer], layer);
                if (p.places[i] < 0) continue;
                int64_t place = p.places[i] * R * m.dim;
                #pragma omp barrier
                #pragma omp for
                for (int64_t j = 0; j < R * m.dim; j++) store<type>(p.out, place + j, b.x[j]);
            }
        }
    }
};

// y (R, n) = the product of x (R, k), after the norm w and within a soft-cap, if there are any.
template <Kind type>
static void multiplying(const Weight &weight, const float *w, float eps, float cap, const void *x,
                        void *y, int64_t R, int64_t threads) {
    static thread_local Memory memory;
    Memory &b = memory;
    int64_t K = weight.k, N = weight.n;
    b.row.grow(R * K);
    b.sums.grow(R * N);
    b.in.grow(R * row_bytes(weight));
    #pragma omp parallel num_threads(threads)
    {
        #pragma omp for
        for (int64_t r = 0; r < R; r++) {
            float *row = &b.row[r * K];
            for (int64_t k = 0; k < K; k++) row[k] = load<type>(x, r * K + k);
            if (w) norm<type>(row, w, eps, row, K);
            prepare(weight, row, &b.in[r * row_bytes(weight)]);
        }
        multiply(weight, &b.in[0], &b.sums[0], R);
        #pragma omp for
        for (int64_t i = 0; i < R * N; i++) {
            float f = rounded<type>(b.sums[i]);
            if (cap > 0) f = rounded<type>(tangent(rounded<type>(f / cap))) * cap;
            store<type>(y, i, f);
        }
    }
}

extern "C" void run_pass(const Model *m, const Pass *p, int64_t type) {
    static thread_local Memory memory;
    if (type == FLOAT32) Running<FLOAT32>{*m, *p, memory}.run();
    if (type == BFLOAT16) Running<BFLOAT16>{*m, *p, memory}.run();
    if (type == FLOAT16) Running<FLOAT16>{*m, *p, memory}.run();
}

extern "C" void run_product(int64_t type, const Weight *weight, const float *w, float eps,
                            float cap, const void *x, void *y, int64_t R, int64_t threads) {
    auto multiply = multiplying<FLOAT32>;
    if (type == BFLOAT16) multiply = multiplying<BFLOAT16>;
    if (type == FLOAT16) multiply = multiplying<FLOAT16>;
    multiply(*weight, w, eps, cap, x, y, R, threads);
}
