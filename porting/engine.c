/* An engine in C: speculative sampling, token by token, in float. It answers the cases of the rule
   "token" and leaves the others to do.

       cc -O2 -o engine porting/engine.c && python porting/engine.py --rule token ./engine

   The two functions to read are `choose` and `verify`; the rest reads JSON, without a library. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The lowest token whose running sum is greater than u times the whole sum. */
static int choose(const float *weights, int V, float u) {
    double total = 0, running = 0;
    for (int v = 0; v < V; v++) total += weights[v];
    for (int v = 0; v < V; v++) {
        running += weights[v];
        if (running > u * total) return v;
    }
    return V - 1;
}

/* p: (K+1, V). q: (K, V), or NULL for copied tokens. uniforms: K flips, then one for the choice.
   weights: room for V numbers. Returns how many tokens are accepted, and sets the one after them. */
static int verify(const float *p, const float *q, const int *tokens, int K, int V, int length,
                  const float *uniforms, float *weights, int *token) {
    int k = 0;
    while (k < length) {
        float drawn = q ? q[k * V + tokens[k]] : 1;
        if (uniforms[k] >= p[k * V + tokens[k]] / drawn) break;
        k++;
    }
    float sum = 0;
    for (int v = 0; v < V; v++) {
        float drawn = 0;    /* after a whole draft: the residual is p itself */
        if (k < length) drawn = q ? q[k * V + v] : v == tokens[k];
        float left = p[k * V + v] - drawn;
        weights[v] = left > 0 ? left : 0;
        sum += weights[v];
    }
    *token = choose(sum > 0 ? weights : p + k * V, V, uniforms[K]);
    return k;
}

/* --- JSON: the numbers that follow a key, whatever brackets stand between them */

static const char *after(const char *line, const char *key) {
    char quoted[32];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *at = strstr(line, quoted);
    if (!at) {
        fprintf(stderr, "error: no key %s\n", key);
        exit(1);
    }
    return at + strlen(quoted);
}

/* Returns how many numbers there are; rows: in how many inner lists; 0 and NULL for null. */
static int numbers(const char *line, const char *key, float **found, int *rows) {
    const char *at = after(line, key);
    int count = 0, depth = 0;
    *found = NULL;
    *rows = 0;
    if (*at != '[') return 0;
    *found = malloc(strlen(at) * sizeof **found);
    do {
        char *end;
        float x = strtof(at, &end);
        if (end > at) {
            (*found)[count++] = x;
            at = end;
            continue;
        }
        if (*at == '[' && ++depth == 2) ++*rows;
        if (*at == ']') depth--;
        at++;
    } while (depth > 0);
    return count;
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        int number = atoi(after(line, "case"));
        if (strncmp(after(line, "rule"), "\"token\"", 7)) {
            printf("{\"case\": %d, \"todo\": true}\n", number);
            continue;
        }
        float *p, *q, *drafted, *uniforms;
        int rows, none, token;
        int V = numbers(line, "p", &p, &rows) / rows;
        numbers(line, "q", &q, &none);
        int K = numbers(line, "tokens", &drafted, &none);
        numbers(line, "uniforms", &uniforms, &none);
        int *tokens = malloc((K + 1) * sizeof *tokens);
        for (int k = 0; k < K; k++) tokens[k] = (int)drafted[k];
        float *weights = malloc(V * sizeof *weights);
        int length = atoi(after(line, "length"));
        int accepted = verify(p, q, tokens, K, V, length, uniforms, weights, &token);
        printf("{\"case\": %d, \"accepted\": %d, \"token\": %d}\n", number, accepted, token);
        free(p), free(q), free(drafted), free(uniforms), free(tokens), free(weights);
    }
    free(line);
    return 0;
}
