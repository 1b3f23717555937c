/* Row kernels for CPU, float32: a norm, and the fused step of a siamese pair, forward and backward.
 *
 * Plain C, loaded with ctypes (native.py): no Python or torch headers, so it compiles in a second. A row is read
 * once into the cache and everything that happens to it happens there; PyTorch's operators would walk over the
 * whole tensor a dozen times. Threads come from the OpenMP runtime that torch itself has loaded: a second one
 * would fight it for the cores. The equations stand in fused/siamese.py and norms.py, which is also what these
 * functions are tested against.
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
    int32_t stride;                 /* from one row's statistics to the next: 1, or 0 where nobody wants to keep them */
    const float *weight, *bias;
    float *mean, *rstd;             /* one number a row; written forward, read backward. Null with stride 0 */
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
    const float *x, *y, *output;                /* forward: X, Y, O */
    float *x1, *y1, *next_x, *h;                /* forward; x1 and y1 are read backward */
    const float *grad_x, *grad_y, *grad_h;      /* backward: gradients of X', Y', h */
    float *out_x, *out_y, *out_output;          /* backward: gradients of X, Y, O */
} StepCall;

/* Mean and 1/deviation of a row. Sums run in single precision but over vector lanes, so errors stay small. */
static inline void statistics(const float *row, int64_t dim, const Norm *n, int64_t i) {
    float mean = 0.0f, square = 0.0f;
    if (n->centred) {
        for (int64_t j = 0; j < dim; j++) mean += row[j];
        mean /= (float)dim;
        for (int64_t j = 0; j < dim; j++) square += (row[j] - mean) * (row[j] - mean);
        n->mean[i * n->stride] = mean;
    } else {
        for (int64_t j = 0; j < dim; j++) square += row[j] * row[j];
    }
    n->rstd[i * n->stride] = 1.0f / sqrtf(square / (float)dim + n->eps);
}

static inline float mean_of(const Norm *n, int64_t i) { return n->centred ? n->mean[i * n->stride] : 0.0f; }

/* out = (row - mean) * rstd * weight + bias; out may be row. */
static inline void apply(const float *row, float *out, int64_t dim, const Norm *n, int64_t i) {
    const float mean = mean_of(n, i), rstd = n->rstd[i * n->stride];
    if (n->weight && n->bias)
        for (int64_t j = 0; j < dim; j++) out[j] = (row[j] - mean) * rstd * n->weight[j] + n->bias[j];
    else if (n->weight)
        for (int64_t j = 0; j < dim; j++) out[j] = (row[j] - mean) * rstd * n->weight[j];
    else
        for (int64_t j = 0; j < dim; j++) out[j] = (row[j] - mean) * rstd;
}

/* out = gradient of row, from the gradient of the normalised row; adds to the sums for weight and bias.
 * out may be grad. */
static inline void back(const float *grad, const float *row, float *out, int64_t dim, const Norm *n, int64_t i,
                        float *sum_weight, float *sum_bias) {
    const float mean = mean_of(n, i), rstd = n->rstd[i * n->stride];
    const float *w = n->weight;
    float dot = 0.0f, total = 0.0f;
    if (w) {
        for (int64_t j = 0; j < dim; j++) {
            const float g = grad[j] * w[j];
            dot += g * (row[j] - mean);
            total += g;
        }
        for (int64_t j = 0; j < dim; j++) sum_weight[j] += grad[j] * ((row[j] - mean) * rstd);
        if (n->bias)
            for (int64_t j = 0; j < dim; j++) sum_bias[j] += grad[j];
    } else {
        for (int64_t j = 0; j < dim; j++) {
            dot += grad[j] * (row[j] - mean);
            total += grad[j];
        }
    }
    const float slope = dot * rstd * rstd / (float)dim;
    const float shift = n->centred ? total / (float)dim : 0.0f;
    if (w)
        for (int64_t j = 0; j < dim; j++) out[j] = rstd * (grad[j] * w[j] - shift - (row[j] - mean) * slope);
    else
        for (int64_t j = 0; j < dim; j++) out[j] = rstd * (grad[j] - shift - (row[j] - mean) * slope);
}

/* Room for the statistics of one row of each norm, where nobody wants to keep them. */
typedef struct {
    float mean[3], rstd[3];
} Room;

static inline void give_room(Norm *n, Room *room, int k) {
    if (!n->stride) n->mean = &room->mean[k], n->rstd = &room->rstd[k];
}

FAST static void norm_forward_rows(const NormCall *call, int64_t from, int64_t to) {
    NormCall c = *call;
    Room room;
    give_room(&c.norm, &room, 0);
    for (int64_t i = from; i < to; i++) {
        const float *row = c.x + i * c.dim;
        statistics(row, c.dim, &c.norm, i);
        apply(row, c.out + i * c.dim, c.dim, &c.norm, i);
    }
}

FAST static void norm_backward_rows(const NormCall *c, int64_t from, int64_t to, float *sums) {
    for (int64_t i = from; i < to; i++)
        back(c->grad + i * c->dim, c->x + i * c->dim, c->out + i * c->dim, c->dim, &c->norm, i, sums, sums + c->dim);
}

/* s = g * X' + N_Y(Y'); X' and N_Y(Y') from x1 and y1 and their statistics. next may be null. */
static inline void join(const StepCall *c, int64_t i, float *next, float *s) {
    const int64_t dim = c->dim;
    const float *x1 = c->x1 + i * dim, *y1 = c->y1 + i * dim, *x = x1;
    if (c->norm_x.present) {
        apply(x1, next, dim, &c->norm_x, i);
        x = next;
    }
    apply(y1, s, dim, &c->norm_y, i);
    if (c->gain)
        for (int64_t j = 0; j < dim; j++) s[j] += x[j] * c->gain[j];
    else
        for (int64_t j = 0; j < dim; j++) s[j] += x[j];
}

FAST static void step_forward_rows(const StepCall *call, int64_t from, int64_t to) {
    StepCall own = *call, *const c = &own;
    const int64_t dim = c->dim;
    Room room;
    give_room(&own.norm_x, &room, 0), give_room(&own.norm_y, &room, 1), give_room(&own.norm_in, &room, 2);
    for (int64_t i = from; i < to; i++) {
        const float *x = c->x + i * dim, *y = c->y + i * dim, *o = c->output + i * dim;
        float *x1 = c->x1 + i * dim, *y1 = c->y1 + i * dim, *h = c->h + i * dim;
        for (int64_t j = 0; j < dim; j++) {
            x1[j] = x[j] + c->scale * o[j];
            y1[j] = y[j] + o[j];
        }
        if (c->norm_x.present) statistics(x1, dim, &c->norm_x, i);
        statistics(y1, dim, &c->norm_y, i);
        join(c, i, c->norm_x.present ? c->next_x + i * dim : x1, h);
        if (c->norm_in.present) {
            statistics(h, dim, &c->norm_in, i);
            apply(h, h, dim, &c->norm_in, i);
        }
    }
}

/* h again, from x1, y1 and the statistics. */
FAST static void step_again_rows(const StepCall *c, int64_t from, int64_t to, float *scratch) {
    for (int64_t i = from; i < to; i++) {
        float *h = c->h + i * c->dim;
        join(c, i, scratch, h);
        if (c->norm_in.present) apply(h, h, c->dim, &c->norm_in, i);
    }
}

/* sums: weight and bias of N_X, N_Y and N_in, then g; after them three rows of scratch. */
FAST static void step_backward_rows(const StepCall *c, int64_t from, int64_t to, float *sums) {
    const int64_t dim = c->dim;
    float *next = sums + 7 * dim, *s = next + dim, *grad_s = s + dim;
    for (int64_t i = from; i < to; i++) {
        const float *x1 = c->x1 + i * dim, *y1 = c->y1 + i * dim;
        const float *gx = c->grad_x + i * dim, *gy = c->grad_y + i * dim, *gh = c->grad_h + i * dim;
        float *ox = c->out_x + i * dim, *oy = c->out_y + i * dim, *oo = c->out_output + i * dim;
        const float *gs = gh;
        if (c->norm_in.present) {
            join(c, i, next, s);
            back(gh, s, grad_s, dim, &c->norm_in, i, sums + 4 * dim, sums + 5 * dim);
            gs = grad_s;
        } else if (c->gain && c->norm_x.present) {
            apply(x1, next, dim, &c->norm_x, i);
        }
        back(gs, y1, oy, dim, &c->norm_y, i, sums + 2 * dim, sums + 3 * dim);
        for (int64_t j = 0; j < dim; j++) oy[j] += gy[j];
        if (c->gain) {
            const float *x = c->norm_x.present ? next : x1;
            float *sum = sums + 6 * dim;
            for (int64_t j = 0; j < dim; j++) sum[j] += gs[j] * x[j];
            for (int64_t j = 0; j < dim; j++) ox[j] = gx[j] + gs[j] * c->gain[j];
        } else {
            for (int64_t j = 0; j < dim; j++) ox[j] = gx[j] + gs[j];
        }
        if (c->norm_x.present) back(ox, x1, ox, dim, &c->norm_x, i, sums, sums + dim);
        for (int64_t j = 0; j < dim; j++) oo[j] = oy[j] + c->scale * ox[j];
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
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        norm_forward_rows(c, from, to);
    }
    return 0;
}

int siamesenorm_norm_backward(const NormCall *c) {
    const int parts = threads_for(c->rows, c->dim, c->threads);
    const int64_t stride = 2 * c->dim + 16;
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
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        step_forward_rows(c, from, to);
    }
    return 0;
}

int siamesenorm_step_again(const StepCall *c) {
    const int parts = threads_for(c->rows, c->dim, c->threads);
    const int64_t stride = c->dim + 16;
    float *scratch = malloc((size_t)parts * (size_t)stride * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        step_again_rows(c, from, to, scratch + p * stride);
    }
    free(scratch);
    return 0;
}

int siamesenorm_step_backward(const StepCall *c) {
    const int parts = threads_for(c->rows, c->dim, c->threads);
    const int64_t dim = c->dim, stride = 10 * dim + 16;
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
