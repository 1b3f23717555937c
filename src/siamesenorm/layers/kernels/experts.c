/* A mixture of SwiGLU experts on a few tokens, as in decoding: CPU, float32.
 *
 * In the same library and by the same rules as residual/kernels.c. Routing and experts are one call, because on one
 * token PyTorch's forty operators cost more than the products do. The equations stand in moe.py, whose grouped form
 * this is tested against.
 */
#include <stdlib.h>

#include "../../residual/kernels/rows.h"
#include "../../residual/kernels/exponential.h"

typedef struct {
    int64_t tokens, dim, hidden, experts, top_k;
    int32_t threads, normalize; /* normalize: whether a token's k weights are divided by their sum */
    const float *h, *router, *w_in, *b_in, *w_out, *b_out;
    float *out, *stats; /* (tokens, dim); balance loss, z-loss, entropy */
    int64_t *counts;    /* (experts,): slots of each */
} ExpertsCall;

/* A token that chose k experts fills k slots. They lie sorted by expert. */
typedef struct {
    int64_t token, expert;
    float weight;
} Slot;

#define BLOCK 64 /* rows of a weight that stay in the cache while all slots of their expert read them */

/* The slot behind the last one of slot i's expert. */
static inline int64_t end_of(const ExpertsCall *c, const Slot *slots, int64_t i) {
    const int64_t expert = slots[i].expert;
    while (i < c->tokens * c->top_k && slots[i].expert == expert) i++;
    return i;
}

static inline void four_sums(const float *w, int64_t stride, const float *x, int64_t n, float *s) {
    const float *w0 = w, *w1 = w + stride, *w2 = w1 + stride, *w3 = w2 + stride;
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f; /* four sums at a time hide the latency of each */
    for (int64_t j = 0; j < n; j++) {
        s0 += w0[j] * x[j];
        s1 += w1[j] * x[j];
        s2 += w2[j] * x[j];
        s3 += w3[j] * x[j];
    }
    s[0] = s0, s[1] = s1, s[2] = s2, s[3] = s3;
}

/* out[o] = weight[o] · x for rows `from` to `to` of weight. */
static inline void products(const float *weight, const float *x, int64_t n, float *out, int64_t from, int64_t to) {
    int64_t o = from;
    for (; o + 4 <= to; o += 4) four_sums(weight + o * n, n, x, n, out + o);
    for (; o < to; o++) {
        float sum = 0.0f;
        for (int64_t j = 0; j < n; j++) sum += weight[o * n + j] * x[j];
        out[o] = sum;
    }
}

/* p: room for logits and probabilities of a token, and for the sum of the latter over tokens. */
FAST static void route(const ExpertsCall *c, Slot *slots, float *p) {
    const int64_t experts = c->experts, k = c->top_k;
    float *logits = p + experts, *sums = logits + experts, z = 0.0f, entropy = 0.0f, balance = 0.0f;
    for (int64_t e = 0; e < experts; e++) sums[e] = 0.0f, c->counts[e] = 0;
    for (int64_t t = 0; t < c->tokens; t++) {
        products(c->router, c->h + t * c->dim, c->dim, logits, 0, experts);
        float highest = logits[0], total = 0.0f, chosen = 0.0f;
        for (int64_t e = 1; e < experts; e++) highest = logits[e] > highest ? logits[e] : highest;
        for (int64_t e = 0; e < experts; e++) total += p[e] = exponential(logits[e] - highest);
        const float log_total = highest + logf(total);
        for (int64_t e = 0; e < experts; e++) {
            p[e] /= total;
            sums[e] += p[e];
            entropy -= p[e] * (logits[e] - log_total);
        }
        z += log_total * log_total;
        for (int64_t i = 0; i < k; i++) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; e++) /* a probability below 0 is taken already */
                if (p[e] >= 0.0f && (best < 0 || logits[e] > logits[best])) best = e;
            for (int64_t e = 0; best < 0; e++) /* not numbers: any that is left */
                if (!(p[e] < 0.0f)) best = e;
            slots[t * k + i] = (Slot){t, best, p[best]};
            chosen += p[best];
            c->counts[best]++;
            p[best] = -1.0f;
        }
        if (c->normalize)
            for (int64_t i = 0; i < k; i++) slots[t * k + i].weight /= chosen;
    }
    for (int64_t e = 0; e < experts; e++) balance += sums[e] * (float)c->counts[e];
    const float tokens = (float)c->tokens;
    c->stats[0] = balance * (float)experts / (tokens * tokens * (float)k);
    c->stats[1] = z / tokens;
    c->stats[2] = entropy / tokens;
    for (int64_t i = 1; i < c->tokens * k; i++) /* few: sorted by insertion */
        for (int64_t j = i; j > 0 && slots[j - 1].expert > slots[j].expert; j--) {
            const Slot slot = slots[j];
            slots[j] = slots[j - 1], slots[j - 1] = slot;
        }
}

/* Hidden units `from` to `to` of every slot, times the slot's weight; their values stand in units on the way. */
FAST static void hidden_units(const ExpertsCall *c, const Slot *slots, float *units, float *gates, int64_t from,
                              int64_t to) {
    const int64_t hidden = c->hidden, dim = c->dim, all = c->tokens * c->top_k;
    for (int64_t i = 0, end; i < all; i = end) {
        const float *w = c->w_in + slots[i].expert * 2 * hidden * dim;
        end = end_of(c, slots, i);
        for (int64_t o = from; o < to; o += BLOCK)
            for (int64_t s = i; s < end; s++) {
                const float *x = c->h + slots[s].token * dim;
                const int64_t stop = o + BLOCK < to ? o + BLOCK : to;
                products(w, x, dim, units + s * hidden, o, stop);
                products(w + hidden * dim, x, dim, gates + s * hidden, o, stop);
            }
    }
    for (int64_t i = 0; i < all; i++) {
        const float weight = slots[i].weight, *bias = c->b_in ? c->b_in + slots[i].expert * 2 * hidden : NULL;
        float *unit = units + i * hidden, *gate = gates + i * hidden;
        if (bias)
            for (int64_t j = from; j < to; j++) unit[j] += bias[j], gate[j] += bias[hidden + j];
        for (int64_t j = from; j < to; j++) unit[j] *= gate[j] * sigmoid(gate[j]) * weight;
    }
}

/* Features `from` to `to` of every token's output; sums: room for one row of them. */
FAST static void outputs(const ExpertsCall *c, const Slot *slots, const float *units, float *sums, int64_t from,
                         int64_t to) {
    const int64_t hidden = c->hidden, dim = c->dim, all = c->tokens * c->top_k;
    for (int64_t t = 0; t < c->tokens; t++) memset(c->out + t * dim + from, 0, (size_t)(to - from) * sizeof(float));
    for (int64_t i = 0, end; i < all; i = end) {
        const int64_t expert = slots[i].expert;
        const float *w = c->w_out + expert * dim * hidden, *bias = c->b_out ? c->b_out + expert * dim : NULL;
        end = end_of(c, slots, i);
        for (int64_t o = from; o < to; o += BLOCK)
            for (int64_t s = i; s < end; s++) {
                float *out = c->out + slots[s].token * dim;
                const int64_t stop = o + BLOCK < to ? o + BLOCK : to;
                products(w, units + s * hidden, hidden, sums, o, stop);
                for (int64_t j = o; j < stop; j++) out[j] += sums[j];
                if (bias)
                    for (int64_t j = o; j < stop; j++) out[j] += slots[s].weight * bias[j];
            }
    }
}

int siamesenorm_experts(const ExpertsCall *c) {
    const int64_t slots = c->tokens * c->top_k, room = 2 * slots * c->hidden + c->dim + 3 * c->experts;
    Slot *sorted = malloc((size_t)slots * sizeof(Slot) + (size_t)room * sizeof(float));
    if (!sorted) return 1;
    float *units = (float *)(sorted + slots), *gates = units + slots * c->hidden, *sums = gates + slots * c->hidden;
    route(c, sorted, sums + c->dim);
    int parts = threads_for(c->hidden, 2 * slots * c->dim, c->threads);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->hidden, parts, p, from, to);
        hidden_units(c, sorted, units, gates, from, to);
    }
    parts = threads_for(c->dim, slots * c->hidden, c->threads);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->dim, parts, p, from, to);
        outputs(c, sorted, units, sums, from, to);
    }
    free(sorted);
    return 0;
}
