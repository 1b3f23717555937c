/* Row kernels for CPU, float32: SwiGLU, rotary positions, and what decoding needs: a linear layer on a few rows and
 * attention of one new token to its cache.
 *
 * In the same library and by the same rules as residual/kernels.c. The equations stand in mlp.py, rotary.py and
 * attention.py, whose plain forms these functions are tested against.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../residual/kernels/rows.h"
#include "../../residual/kernels/exponential.h"

typedef struct {
    int64_t rows, hidden;
    int32_t threads;
    const float *projected, *grad; /* rows of (value, gate); grad: backward only */
    float *out;                    /* silu(gate) * value, or the gradient of projected */
} SwiGLUCall;

FAST static void swiglu_rows(const SwiGLUCall *c, int64_t from, int64_t to) {
    const int64_t hidden = c->hidden;
    for (int64_t i = from; i < to; i++) {
        const float *value = c->projected + 2 * i * hidden, *gate = value + hidden;
        float *out = c->out + i * hidden;
        for (int64_t j = 0; j < hidden; j++) out[j] = value[j] * gate[j] * sigmoid(gate[j]);
    }
}

FAST static void swiglu_back_rows(const SwiGLUCall *c, int64_t from, int64_t to) {
    const int64_t hidden = c->hidden;
    for (int64_t i = from; i < to; i++) {
        const float *value = c->projected + 2 * i * hidden, *gate = value + hidden, *g = c->grad + i * hidden;
        float *to_value = c->out + 2 * i * hidden, *to_gate = to_value + hidden;
        for (int64_t j = 0; j < hidden; j++) {
            const float s = sigmoid(gate[j]), silu = gate[j] * s;
            to_value[j] = g[j] * silu;
            to_gate[j] = g[j] * value[j] * (s + silu * (1.0f - s));
        }
    }
}

/* One head: (first, second) * (cos, cos) + (second, first) * (-sin, sin). out must not be x. */
static inline void rotate(const float *x, const float *cosine, const float *sine, float *out, int64_t width,
                          float direction) {
    const int64_t half = width / 2;
    for (int64_t j = 0; j < half; j++) out[j] = x[j] * cosine[j] + direction * sine[j] * x[j + half];
    for (int64_t j = half; j < width; j++) out[j] = x[j] * cosine[j] + direction * sine[j] * x[j - half];
}

/* Heads (batch, tokens, heads, width) with strides, the last of which is 1. */
typedef struct {
    float *data;
    int64_t batch, token, head;
} Heads;

typedef struct {
    int64_t batch, tokens, heads, width;
    int64_t positions; /* rows of cosine and sine: tokens, or batch * tokens */
    int32_t threads;
    float direction; /* 1, or -1 to rotate back */
    const float *cosine, *sine;
    Heads x, out;
} RotaryCall;

FAST static void rotate_rows(const RotaryCall *c, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
        const int64_t b = i / c->tokens, t = i % c->tokens, angle = (i % c->positions) * c->width;
        const float *x = c->x.data + b * c->x.batch + t * c->x.token;
        float *out = c->out.data + b * c->out.batch + t * c->out.token;
        for (int64_t h = 0; h < c->heads; h++)
            rotate(x + h * c->x.head, c->cosine + angle, c->sine + angle, out + h * c->out.head, c->width,
                   c->direction);
    }
}

/* One new token a row of the batch: its key and value go into the cache, its queries look at all of it. */
typedef struct {
    int64_t batch, heads, kv_heads, width;
    int64_t room, length, first; /* the cache's: tokens it has room for, holds already, and the first to be seen */
    int64_t q_batch, k_batch, v_batch; /* strides */
    int32_t threads;
    const float *cosine, *sine, *q, *k, *v;
    float *keys, *values, *out; /* (batch, kv_heads, room, width) twice; (batch, heads, width) */
} DecodeCall;

FAST static void decode_heads(const DecodeCall *c, int64_t from, int64_t to, float *scratch) {
    const int64_t width = c->width, group = c->heads / c->kv_heads, end = c->length + 1, count = end - c->first;
    const float scale = 1.0f / sqrtf((float)width);
    float *q = scratch, *weights = scratch + width;
    for (int64_t i = from; i < to; i++) {
        const int64_t b = i / c->kv_heads, h = i % c->kv_heads;
        float *keys = c->keys + i * c->room * width, *values = c->values + i * c->room * width;
        rotate(c->k + b * c->k_batch + h * width, c->cosine, c->sine, keys + c->length * width, width, 1.0f);
        memcpy(values + c->length * width, c->v + b * c->v_batch + h * width, (size_t)width * sizeof(float));
        keys += c->first * width, values += c->first * width;
        for (int64_t g = h * group; g < (h + 1) * group; g++) {
            rotate(c->q + b * c->q_batch + g * width, c->cosine, c->sine, q, width, 1.0f);
            float highest = -INFINITY, sum = 0.0f;
            for (int64_t t = 0; t < count; t++) {
                float dot = 0.0f;
                for (int64_t j = 0; j < width; j++) dot += q[j] * keys[t * width + j];
                weights[t] = dot * scale;
                highest = weights[t] > highest ? weights[t] : highest;
            }
            for (int64_t t = 0; t < count; t++) {
                weights[t] = exponential(weights[t] - highest);
                sum += weights[t];
            }
            float *out = c->out + (b * c->heads + g) * width;
            memset(out, 0, (size_t)width * sizeof(float));
            for (int64_t t = 0; t < count; t++) {
                const float weight = weights[t] / sum;
                for (int64_t j = 0; j < width; j++) out[j] += weight * values[t * width + j];
            }
        }
    }
}

/* out = x weight^T + bias. Few rows of x: the weights are walked over once, whatever the number of rows. */
typedef struct {
    int64_t rows, in, out_dim;
    int32_t threads;
    const float *x, *weight, *bias;
    float *out;
} LinearCall;

FAST static void linear_columns(const LinearCall *c, int64_t from, int64_t to) {
    const int64_t in = c->in;
    int64_t o = from;
    for (; o + 4 <= to; o += 4) { /* four sums at a time hide the latency of each */
        const float *w0 = c->weight + o * in, *w1 = w0 + in, *w2 = w1 + in, *w3 = w2 + in;
        for (int64_t i = 0; i < c->rows; i++) {
            const float *x = c->x + i * in;
            float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
            for (int64_t j = 0; j < in; j++) {
                s0 += w0[j] * x[j];
                s1 += w1[j] * x[j];
                s2 += w2[j] * x[j];
                s3 += w3[j] * x[j];
            }
            float *out = c->out + i * c->out_dim + o;
            out[0] = s0, out[1] = s1, out[2] = s2, out[3] = s3;
        }
    }
    for (; o < to; o++)
        for (int64_t i = 0; i < c->rows; i++) {
            float sum = 0.0f;
            for (int64_t j = 0; j < in; j++) sum += c->weight[o * in + j] * c->x[i * in + j];
            c->out[i * c->out_dim + o] = sum;
        }
    if (c->bias)
        for (int64_t i = 0; i < c->rows; i++)
            for (o = from; o < to; o++) c->out[i * c->out_dim + o] += c->bias[o];
}

int siamesenorm_linear(const LinearCall *c) {
    const int parts = threads_for(c->out_dim, c->in, c->threads);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->out_dim, parts, p, from, to);
        linear_columns(c, from, to);
    }
    return 0;
}

int siamesenorm_swiglu_forward(const SwiGLUCall *c) {
    const int parts = threads_for(c->rows, c->hidden, c->threads);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        swiglu_rows(c, from, to);
    }
    return 0;
}

int siamesenorm_swiglu_backward(const SwiGLUCall *c) {
    const int parts = threads_for(c->rows, c->hidden, c->threads);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(c->rows, parts, p, from, to);
        swiglu_back_rows(c, from, to);
    }
    return 0;
}

int siamesenorm_turn(const RotaryCall *c) {
    const int64_t rows = c->batch * c->tokens;
    const int parts = threads_for(rows, c->heads * c->width, c->threads);
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(rows, parts, p, from, to);
        rotate_rows(c, from, to);
    }
    return 0;
}

int siamesenorm_decode(const DecodeCall *c) {
    const int64_t rows = c->batch * c->kv_heads, count = c->length + 1 - c->first, stride = c->width + count + 16;
    const int parts = threads_for(rows, count * c->width, c->threads);
    float *scratch = malloc((size_t)parts * (size_t)stride * sizeof(float));
    if (!scratch) return 1;
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
    for (int p = 0; p < parts; p++) {
        SPLIT(rows, parts, p, from, to);
        decode_heads(c, from, to, scratch + p * stride);
    }
    free(scratch);
    return 0;
}
