/* Doubly stochastic matrices by Sinkhorn's rounds, one for every token, forward and backward: CPU, float32.
 *
 * In the same library and by the same rules as rows.c. PyTorch's operators walk over all tokens twice for each of the
 * forty sums, on matrices of sixteen numbers. Here LANES tokens go through all rounds at once, an element of their
 * matrices in neighbouring lanes. The equation stands in the plain form of sinkhorn.py, which this is tested against.
 */
#include <stdlib.h>

#include "exponential.h"
#include "rows.h"

#define LANES 16

typedef struct {
    int64_t tokens, n, rounds;
    int32_t threads;
    float eps;
    const float *logits, *grad; /* (tokens, n²); grad of out: backward only */
    float *out;                 /* (tokens, n²): the matrices, or the gradient of logits */
} SinkhornCall;

/* Columns, then rows and columns in turn. */
static inline int64_t steps_of(const SinkhornCall *c) { return 2 * c->rounds - 1; }

/* Element k of group g: groups are the columns of the matrix in even steps, its rows in odd ones. */
static inline int64_t element(int64_t n, int64_t step, int64_t g, int64_t k) {
    return (step % 2 ? g * n + k : k * n + g) * LANES;
}

/* (LANES, size) numbers of tokens from `first` on, turned around; zeros behind the last token. */
static inline void gather(const float *from, int64_t first, int64_t tokens, int64_t size, float *into) {
    for (int64_t e = 0; e < size; e++)
        for (int64_t t = 0; t < LANES; t++)
            into[e * LANES + t] = first + t < tokens ? from[(first + t) * size + e] : 0.0f;
}

static inline void scatter(const float *from, int64_t first, int64_t tokens, int64_t size, float *into) {
    for (int64_t t = 0; t < LANES && first + t < tokens; t++)
        for (int64_t e = 0; e < size; e++) into[(first + t) * size + e] = from[e * LANES + t];
}

/* Softmax of every row of n; m over the logits. */
static inline void softmax_rows(float *m, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float *row = m + i * n * LANES, highest[LANES], total[LANES];
        for (int t = 0; t < LANES; t++) highest[t] = row[t], total[t] = 0.0f;
        for (int64_t j = 1; j < n; j++)
            for (int t = 0; t < LANES; t++) {
                const float x = row[j * LANES + t];
                highest[t] = x > highest[t] ? x : highest[t];
            }
        for (int64_t j = 0; j < n; j++)
            for (int t = 0; t < LANES; t++) total[t] += row[j * LANES + t] = exponential(row[j * LANES + t] - highest[t]);
        for (int64_t j = 0; j < n; j++)
            for (int t = 0; t < LANES; t++) row[j * LANES + t] /= total[t];
    }
}

/* m = a / (sum of its group + eps); over: one over those sums, (n, LANES). m may be a. */
static inline void normalise(const float *a, float *m, float *over, int64_t n, int64_t step, float eps) {
    for (int64_t g = 0; g < n; g++) {
        float sum[LANES];
        for (int t = 0; t < LANES; t++) sum[t] = 0.0f;
        for (int64_t k = 0; k < n; k++)
            for (int t = 0; t < LANES; t++) sum[t] += a[element(n, step, g, k) + t];
        for (int t = 0; t < LANES; t++) over[g * LANES + t] = sum[t] = 1.0f / (sum[t] + eps);
        for (int64_t k = 0; k < n; k++)
            for (int t = 0; t < LANES; t++)
                m[element(n, step, g, k) + t] = a[element(n, step, g, k) + t] * sum[t];
    }
}

/* The gradient of a from that of m, in place: (grad - sum of grad * m over the group) / (sum of a + eps). */
static inline void normalise_backward(float *grad, const float *m, const float *over, int64_t n, int64_t step) {
    for (int64_t g = 0; g < n; g++) {
        float dot[LANES];
        for (int t = 0; t < LANES; t++) dot[t] = 0.0f;
        for (int64_t k = 0; k < n; k++)
            for (int t = 0; t < LANES; t++)
                dot[t] += grad[element(n, step, g, k) + t] * m[element(n, step, g, k) + t];
        for (int64_t k = 0; k < n; k++)
            for (int t = 0; t < LANES; t++) {
                float *x = grad + element(n, step, g, k) + t;
                *x = (*x - dot[t]) * over[g * LANES + t];
            }
    }
}

/* room: a matrix, and sums of its groups. */
FAST static void sinkhorn_forward_tokens(const SinkhornCall *c, int64_t from, int64_t to, float *room) {
    const int64_t n = c->n, size = n * n;
    for (int64_t first = from; first < to; first += LANES) {
        gather(c->logits, first, to, size, room);
        softmax_rows(room, n);
        for (int64_t e = 0; e < size * LANES; e++) room[e] += c->eps;
        for (int64_t s = 0; s < steps_of(c); s++) normalise(room, room, room + size * LANES, n, s, c->eps);
        scatter(room, first, to, size, c->out);
    }
}

/* room: the gradient, the softmax, and for every step what it divided by and what it made. */
FAST static void sinkhorn_backward_tokens(const SinkhornCall *c, int64_t from, int64_t to, float *room) {
    const int64_t n = c->n, size = n * n, whole = size * LANES, step = (n + size) * LANES;
    float *grad = room, *softmax = room + whole, *trail = softmax + whole;
    for (int64_t first = from; first < to; first += LANES) {
        gather(c->logits, first, to, size, softmax);
        softmax_rows(softmax, n);
        float *m = grad; /* what a step is given */
        for (int64_t e = 0; e < whole; e++) m[e] = softmax[e] + c->eps;
        for (int64_t s = 0; s < steps_of(c); s++) {
            float *over = trail + s * step, *made = over + n * LANES;
            normalise(m, made, over, n, s, c->eps);
            m = made;
        }
        gather(c->grad, first, to, size, grad);
        for (int64_t s = steps_of(c) - 1; s >= 0; s--) {
            const float *over = trail + s * step;
            normalise_backward(grad, over + n * LANES, over, n, s);
        }
        for (int64_t i = 0; i < n; i++) { /* softmax: p (grad - sum of grad p over the row) */
            float dot[LANES], *g = grad + i * n * LANES;
            const float *p = softmax + i * n * LANES;
            for (int t = 0; t < LANES; t++) dot[t] = 0.0f;
            for (int64_t j = 0; j < n; j++)
                for (int t = 0; t < LANES; t++) dot[t] += g[j * LANES + t] * p[j * LANES + t];
            for (int64_t j = 0; j < n; j++)
                for (int t = 0; t < LANES; t++) g[j * LANES + t] = p[j * LANES + t] * (g[j * LANES + t] - dot[t]);
        }
        scatter(grad, first, to, size, c->out);
    }
}

static int run(const SinkhornCall *c, int64_t matrices, int64_t sums,
               void (*tokens)(const SinkhornCall *, int64_t, int64_t, float *)) {
    /* Work grows with the steps: so do the tokens that are worth a thread. */
    const int parts = threads_for(c->tokens, c->n * c->n * steps_of(c), c->threads);
    const int64_t stride = (matrices * c->n + sums) * c->n * LANES + 16;
    float *room = malloc((size_t)parts * (size_t)stride * sizeof(float));
    if (!room) return 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->tokens, parts, p, from, to);
        tokens(c, from, to, room + p * stride);
    }
    free(room);
    return 0;
}

int siamesenorm_sinkhorn_forward(const SinkhornCall *c) { return run(c, 1, 1, sinkhorn_forward_tokens); }

int siamesenorm_sinkhorn_backward(const SinkhornCall *c) {
    return run(c, 2 + steps_of(c), steps_of(c), sinkhorn_backward_tokens);
}
