// Which loop multiplies by a matrix of each kind, and how a row of x is put into its form.
#include "bits.cpp"

// go(S{}), where S is what rows.cpp or bits.cpp has for a kind
template <class Go> INLINE auto with(int64_t kind, Go go) {
    switch (kind) {
        case FLOAT32: return go(Plain<Floats<FLOAT32>>{});
        case BFLOAT16: return go(Plain<Pairs>{});
        case FLOAT16: return go(Plain<Floats<FLOAT16>>{});
        case INT8: return go(Lanes<Integers<8>>{});
        case INT4: return go(Lanes<Integers<4>>{});
        case INT4_HALF: return go(Lanes<Half>{});
        case INT8_ROUNDED: return go(Lanes<Rounded<8>>{});
        default: return go(Lanes<Rounded<4>>{});
    }
}

static void multiply(const Weight &w, const char *x, float *y, int64_t M) {
    with(w.kind, [&](auto s) { loop<decltype(s)>(w, x, y, M); });
}

static int64_t row_bytes(const Weight &w) {     // of a row of x, in the form that `multiply` takes
    return with(w.kind, [&](auto s) { return decltype(s)::row(w.k); });
}

static void prepare(const Weight &w, const float *x, char *to) {
    memset(to, 0, row_bytes(w));
    with(w.kind, [&](auto s) { decltype(s)::prepare(x, w.k, to); });
}
