/* Row kernels for CPU, float32: a norm, and the fused step of a siamese pair, forward and backward.
 *
 * Plain C, loaded with ctypes (native.py): no Python or torch headers, so it compiles in a second. A row is read
 * once into the cache and everything that happens to it happens there; PyTorch's operators would walk over the
 * whole tensor a dozen times. Threads come from the OpenMP runtime that torch itself has loaded: a second one
 * would fight it for the cores. The equations stand in the plain forms of rms_norm.py and siamese_step.py, which
 * these functions are tested against. Shapes, strides and dtypes were checked by native.py.
 *
 * Every kernel takes one structure and returns 0, or 1 where memory is short.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "rows.h"

/* A norm: centred = LayerNorm. A null weight or bias means none. mean is null for RMSNorm. */
typedef struct {
    int32_t present, centred;
    float eps;
    const float *weight, *bias;
    float *mean, *rstd;             /* one number per row; written forward, read backward */
    float *grad_weight, *grad_bias; /* backward only, may be null */
} Norm;

typedef struct {
    int64_t rows, dim;
    int32_t threads;
    Norm norm;
    const float *x, *grad; /* grad: backward only */
    float *out;            /* normalised rows, or the gradient of x */
} NormCall;

typedef struct {
    int64_t rows, dim;
    int32_t threads;
    float scale;
    Norm norm_x, norm_y, norm_in;
    const float *gain;
    float *grad_gain;
    const float *x, *y, *output;                /* forward: X, Y, O; null output: X1 = X and Y' = Y */
    float *x1, *y1, *next_x, *h;                /* forward; x1 and y1 are read backward; next_x null without N_X */
    const float *grad_x, *grad_y, *grad_h;      /* backward: gradients of X' (or null), Y' (null: no O), h */
    float *out_x, *out_y, *out_output;          /* backward: gradients of X, Y, O */
} StepCall;

/* A norm as loops want it: no branches inside. What is absent has mean 0, rstd 1, weight 1 and bias 0. */
typedef struct {
    float mean, rstd;
    const float *weight, *bias;
} Affine;

/* Rows of ones and zeros that stand for absent weights, gains and biases; they belong to one thread. */
typedef struct {
    const float *ones, *zeros;
} Neutral;

static Neutral make_neutral(float *room, int64_t dim) {
    for (int64_t j = 0; j < dim; j++) room[j] = 1.0f, room[dim + j] = 0.0f;
    return (Neutral){room, room + dim};
}

static inline Affine affine(const Norm *n, Neutral neutral) {
    return (Affine){0.0f, 1.0f, n->weight ? n->weight : neutral.ones, n->bias ? n->bias : neutral.zeros};
}

/* The same with a row's statistics, as they were kept. */
static inline Affine affine_of_row(const Norm *n, Neutral neutral, int64_t i) {
    Affine a = affine(n, neutral);
    if (n->present) {
        a.mean = n->centred ? n->mean[i] : 0.0f;
        a.rstd = n->rstd[i];
    }
    return a;
}

/* Statistics from the sum of a row and, once the mean is known, from that of the squares around it. */
static inline float mean_from(const Norm *n, float sum, int64_t dim) { return n->centred ? sum / (float)dim : 0.0f; }

static inline float keep_statistics(const Norm *n, float mean, float square, int64_t dim, int64_t i) {
    const float rstd = 1.0f / sqrtf(square / (float)dim + n->eps);
    if (n->centred) n->mean[i] = mean;
    n->rstd[i] = rstd;
    return rstd;
}

/* What a norm's backward takes off every element: shift + (value - mean) * slope. */
typedef struct {
    float shift, slope;
} Correction;

static inline Correction correction(const Norm *n, const Affine *a, float dot, float total, int64_t dim) {
    if (!n->present) return (Correction){0.0f, 0.0f};
    return (Correction){n->centred ? total / (float)dim : 0.0f, dot * a->rstd * a->rstd / (float)dim};
}

FAST static void norm_forward_rows(const NormCall *c, int64_t from, int64_t to, float *room) {
    const int64_t dim = c->dim;
    const Norm *n = &c->norm;
    Affine a = affine(n, make_neutral(room, dim));
    for (int64_t i = from; i < to; i++) {
        const float *x = c->x + i * dim;
        float *out = c->out + i * dim;
        float sum = 0.0f, square = 0.0f;
        if (n->centred) {
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < dim; j++) sum += x[j];
        }
        const float mean = mean_from(n, sum, dim);
#pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < dim; j++) square += (x[j] - mean) * (x[j] - mean);
        const float rstd = keep_statistics(n, mean, square, dim, i);
#pragma omp simd
        for (int64_t j = 0; j < dim; j++) out[j] = (x[j] - mean) * rstd * a.weight[j] + a.bias[j];
    }
}

/* sums: weight and bias; after them room for a neutral. */
FAST static void norm_backward_rows(const NormCall *c, int64_t from, int64_t to, float *sums) {
    const int64_t dim = c->dim;
    const Norm *n = &c->norm;
    const Neutral neutral = make_neutral(sums + 2 * dim, dim);
    float *sum_weight = sums, *sum_bias = sums + dim;
    for (int64_t i = from; i < to; i++) {
        const float *grad = c->grad + i * dim, *x = c->x + i * dim;
        float *out = c->out + i * dim;
        const Affine a = affine_of_row(n, neutral, i);
        float dot = 0.0f, total = 0.0f;
#pragma omp simd reduction(+ : dot, total)
        for (int64_t j = 0; j < dim; j++) {
            const float g = grad[j] * a.weight[j], centred = x[j] - a.mean;
            dot += g * centred;
            total += g;
            sum_weight[j] += grad[j] * (centred * a.rstd);
            sum_bias[j] += grad[j];
        }
        const Correction t = correction(n, &a, dot, total, dim);
#pragma omp simd
        for (int64_t j = 0; j < dim; j++)
            out[j] = a.rstd * (grad[j] * a.weight[j] - t.shift - (x[j] - a.mean) * t.slope);
    }
}

FAST static void step_forward_rows(const StepCall *c, int64_t from, int64_t to, float *room) {
    const int64_t dim = c->dim;
    const float scale = c->scale;
    const Norm *nx = &c->norm_x, *ny = &c->norm_y, *ni = &c->norm_in;
    const Neutral neutral = make_neutral(room, dim);
    const float *gain = c->gain ? c->gain : neutral.ones;
    float *unread = room + 2 * dim; /* X' where it is X1 */
    Affine ax = affine(nx, neutral), ay = affine(ny, neutral), ai = affine(ni, neutral);
    for (int64_t i = from; i < to; i++) {
        const float *x1 = c->x + i * dim, *y1 = c->y + i * dim;
        float *h = c->h + i * dim, *next = nx->present ? c->next_x + i * dim : unread;
        float sum_x = 0.0f, sum_y = 0.0f, sum_s = 0.0f, square_x = 0.0f, square_y = 0.0f, square_s = 0.0f;
        if (c->output) {
            const float *x = x1, *y = y1, *o = c->output + i * dim;
            float *sum_xo = c->x1 + i * dim, *sum_yo = c->y1 + i * dim;
#pragma omp simd
            for (int64_t j = 0; j < dim; j++) {
                sum_xo[j] = x[j] + scale * o[j];
                sum_yo[j] = y[j] + o[j];
            }
            x1 = sum_xo, y1 = sum_yo;
        }
        if (nx->centred || ny->centred) {
#pragma omp simd reduction(+ : sum_x, sum_y)
            for (int64_t j = 0; j < dim; j++) sum_x += x1[j], sum_y += y1[j];
        }
        ax.mean = nx->present ? mean_from(nx, sum_x, dim) : 0.0f;
        ay.mean = mean_from(ny, sum_y, dim);
#pragma omp simd reduction(+ : square_x, square_y)
        for (int64_t j = 0; j < dim; j++) {
            square_x += (x1[j] - ax.mean) * (x1[j] - ax.mean);
            square_y += (y1[j] - ay.mean) * (y1[j] - ay.mean);
        }
        if (nx->present) ax.rstd = keep_statistics(nx, ax.mean, square_x, dim, i);
        ay.rstd = keep_statistics(ny, ay.mean, square_y, dim, i);
#pragma omp simd reduction(+ : sum_s)
        for (int64_t j = 0; j < dim; j++) {
            const float seen = (x1[j] - ax.mean) * ax.rstd * ax.weight[j] + ax.bias[j];
            next[j] = seen;
            h[j] = (y1[j] - ay.mean) * ay.rstd * ay.weight[j] + ay.bias[j] + seen * gain[j];
            sum_s += h[j];
        }
        if (!ni->present) continue;
        ai.mean = mean_from(ni, sum_s, dim);
#pragma omp simd reduction(+ : square_s)
        for (int64_t j = 0; j < dim; j++) square_s += (h[j] - ai.mean) * (h[j] - ai.mean);
        ai.rstd = keep_statistics(ni, ai.mean, square_s, dim, i);
#pragma omp simd
        for (int64_t j = 0; j < dim; j++) h[j] = (h[j] - ai.mean) * ai.rstd * ai.weight[j] + ai.bias[j];
    }
}

/* sums: weight and bias of N_X, N_Y and N_in, then g; after them room for a neutral and three rows of scratch. */
FAST static void step_backward_rows(const StepCall *c, int64_t from, int64_t to, float *sums) {
    const int64_t dim = c->dim;
    const float scale = c->scale;
    const Norm *nx = &c->norm_x, *ny = &c->norm_y, *ni = &c->norm_in;
    const Neutral neutral = make_neutral(sums + 7 * dim, dim);
    const float *gain = c->gain ? c->gain : neutral.ones;
    float *weight_x = sums, *bias_x = sums + dim, *weight_y = sums + 2 * dim, *bias_y = sums + 3 * dim;
    float *weight_in = sums + 4 * dim, *bias_in = sums + 5 * dim, *sum_gain = sums + 6 * dim;
    float *s = sums + 9 * dim, *grad_s = s + dim, *grad_x = grad_s + dim;
    for (int64_t i = from; i < to; i++) {
        const float *x1 = c->x1 + i * dim, *y1 = c->y1 + i * dim;
        const float *gx = c->grad_x ? c->grad_x + i * dim : neutral.zeros, *gh = c->grad_h + i * dim;
        float *ox = c->out_x + i * dim, *oy = c->out_y + i * dim;
        const Affine ax = affine_of_row(nx, neutral, i), ay = affine_of_row(ny, neutral, i);
        const Affine ai = affine_of_row(ni, neutral, i);
        float dot = 0.0f, total = 0.0f, dot_x = 0.0f, total_x = 0.0f, dot_y = 0.0f, total_y = 0.0f;
        if (ni->present) {
#pragma omp simd reduction(+ : dot, total)
            for (int64_t j = 0; j < dim; j++) {
                const float seen = (x1[j] - ax.mean) * ax.rstd * ax.weight[j] + ax.bias[j];
                const float normed = (y1[j] - ay.mean) * ay.rstd * ay.weight[j] + ay.bias[j];
                const float centred = normed + seen * gain[j] - ai.mean, g = gh[j] * ai.weight[j];
                s[j] = centred;
                dot += g * centred;
                total += g;
                weight_in[j] += gh[j] * (centred * ai.rstd);
                bias_in[j] += gh[j];
            }
        }
        const Correction ti = correction(ni, &ai, dot, total, dim);
#pragma omp simd reduction(+ : dot_x, total_x, dot_y, total_y)
        for (int64_t j = 0; j < dim; j++) {
            const float gs = ai.rstd * (gh[j] * ai.weight[j] - ti.shift - s[j] * ti.slope);
            const float gx1 = gx[j] + gs * gain[j], from_y = gs * ay.weight[j], from_x = gx1 * ax.weight[j];
            const float centred_y = y1[j] - ay.mean, centred_x = x1[j] - ax.mean;
            grad_s[j] = from_y;
            grad_x[j] = from_x;
            dot_y += from_y * centred_y;
            total_y += from_y;
            dot_x += from_x * centred_x;
            total_x += from_x;
            weight_y[j] += gs * (centred_y * ay.rstd);
            bias_y[j] += gs;
            weight_x[j] += gx1 * (centred_x * ax.rstd);
            bias_x[j] += gx1;
        }
        if (c->gain) {
            for (int64_t j = 0; j < dim; j++) {
                const float gs = ai.rstd * (gh[j] * ai.weight[j] - ti.shift - s[j] * ti.slope);
                sum_gain[j] += gs * ((x1[j] - ax.mean) * ax.rstd * ax.weight[j] + ax.bias[j]);
            }
        }
        const Correction ty = correction(ny, &ay, dot_y, total_y, dim), tx = correction(nx, &ax, dot_x, total_x, dim);
#pragma omp simd
        for (int64_t j = 0; j < dim; j++) {
            oy[j] = ay.rstd * (grad_s[j] - ty.shift - (y1[j] - ay.mean) * ty.slope);
            ox[j] = ax.rstd * (grad_x[j] - tx.shift - (x1[j] - ax.mean) * tx.slope);
        }
        if (c->grad_y) {
            const float *gy = c->grad_y + i * dim;
            float *oo = c->out_output + i * dim;
#pragma omp simd
            for (int64_t j = 0; j < dim; j++) {
                oy[j] += gy[j];
                oo[j] = oy[j] + scale * ox[j];
            }
        }
    }
}

static void add_sum(float *into, const float *sums, int64_t dim, int parts, int64_t stride) {
    if (!into) return;
    for (int64_t j = 0; j < dim; j++) into[j] = sums[j];
    for (int p = 1; p < parts; p++)
        for (int64_t j = 0; j < dim; j++) into[j] += sums[p * stride + j];
}

int siamesenorm_version(void) { return KERNELS_VERSION; }

int siamesenorm_norm_forward(const NormCall *c) {
    const int parts = threads_for(c->rows, c->dim, c->threads);
    const int64_t stride = 2 * c->dim + 16;
    float *room = malloc((size_t)parts * (size_t)stride * sizeof(float));
    if (!room) return 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        norm_forward_rows(c, from, to, room + p * stride);
    }
    free(room);
    return 0;
}

int siamesenorm_norm_backward(const NormCall *c) {
    const int parts = threads_for(c->rows, c->dim, c->threads);
    const int64_t stride = 4 * c->dim + 16;
    float *sums = calloc((size_t)parts * (size_t)stride, sizeof(float));
    if (!sums) return 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        norm_backward_rows(c, from, to, sums + p * stride);
    }
    add_sum(c->norm.grad_weight, sums, c->dim, parts, stride);
    add_sum(c->norm.grad_bias, sums + c->dim, c->dim, parts, stride);
    free(sums);
    return 0;
}

int siamesenorm_step_forward(const StepCall *c) {
    const int parts = threads_for(c->rows, c->dim, c->threads);
    const int64_t stride = 3 * c->dim + 16;
    float *room = malloc((size_t)parts * (size_t)stride * sizeof(float));
    if (!room) return 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        step_forward_rows(c, from, to, room + p * stride);
    }
    free(room);
    return 0;
}

int siamesenorm_step_backward(const StepCall *c) {
    const int parts = threads_for(c->rows, c->dim, c->threads);
    const int64_t dim = c->dim, stride = 12 * dim + 16;
    float *sums = calloc((size_t)parts * (size_t)stride, sizeof(float));
    if (!sums) return 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        step_backward_rows(c, from, to, sums + p * stride);
    }
    const Norm *norms[3] = {&c->norm_x, &c->norm_y, &c->norm_in};
    for (int k = 0; k < 3; k++) {
        add_sum(norms[k]->grad_weight, sums + 2 * k * dim, dim, parts, stride);
        add_sum(norms[k]->grad_bias, sums + (2 * k + 1) * dim, dim, parts, stride);
    }
    add_sum(c->grad_gain, sums + 6 * dim, dim, parts, stride);
    free(sums);
    return 0;
}
