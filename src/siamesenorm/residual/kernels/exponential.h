/* e^x and what is made of it, in a form that compilers turn into vector code. */
#ifndef SIAMESENORM_EXPONENTIAL_H
#define SIAMESENORM_EXPONENTIAL_H
#include <math.h>
#include <stdint.h>
#include <string.h>

/* e^x to about 2e-7. NaN stays NaN. */
static inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float n = rintf(x * 1.44269504f);
    const float r = x - n * 0.693147181f; /* in [-ln2/2, ln2/2] */
    float p = 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = ((int32_t)(n > -127.0f ? n : -127.0f) + 127) << 23; /* 2^n; of NaN there is no integer */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

#endif
