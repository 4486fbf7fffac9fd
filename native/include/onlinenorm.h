/* Online Normalization for training neural networks: the C interface of the engine.
 *
 * Chiley et al., "Online Normalization for Training Neural Networks", NeurIPS 2019. A layer has C channels. It is
 * fed samples of C x D scalars, one after the other, and keeps four numbers per channel between them: the streaming
 * mean and variance, which the forward advances, and two control errors, which the backward advances. The caller owns
 * that state, the parameters and every buffer; all the engine keeps between calls is scratch memory of each thread.
 *
 * Results do not depend on the number of threads, on the SIMD width chosen at run time, or on how a stream of samples
 * is cut into calls (for parameters that do not change in between): outputs, input gradients and state agree bit for
 * bit. Every call either succeeds or changes nothing. Calls on different layers may run at the same time.
 *
 * What a call writes must not overlap what it reads, but for the state.
 */
#ifndef ONLINENORM_H
#define ONLINENORM_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ONLINENORM_API
#else
#define ONLINENORM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    ONLINENORM_OK = 0,
    ONLINENORM_BAD_ARGUMENT = 1, /* a size, factor or enumerator out of range, or a required pointer that is NULL */
    ONLINENORM_OUT_OF_MEMORY = 2 /* no scratch memory */
} onlinenorm_status;

typedef enum {
    ONLINENORM_FLOAT32 = 0,
    ONLINENORM_FLOAT64 = 1,
    ONLINENORM_BFLOAT16 = 2,
    ONLINENORM_FLOAT16 = 3
} onlinenorm_dtype;

typedef enum {
    ONLINENORM_NCD = 0, /* the D scalars of a channel lie together */
    ONLINENORM_NDC = 1  /* the C channels of a position lie together (channels last) */
} onlinenorm_layout;

typedef enum {
    ONLINENORM_GUARD_NONE = 0,
    ONLINENORM_GUARD_LAYER_SCALING = 1, /* the paper's, eq. 9: divide by the root mean square of the whole sample */
    ONLINENORM_GUARD_CLAMP = 2          /* clip the affine output at +-clamp_value */
} onlinenorm_guard;

/* What follows the guard, on every scalar of the output. */
typedef enum {
    ONLINENORM_NO_ACTIVATION = 0,
    ONLINENORM_RELU = 1,
    ONLINENORM_LEAKY_RELU = 2, /* slope 0.01 below 0 */
    ONLINENORM_SILU = 3,       /* z / (1 + exp(-z)) */
    ONLINENORM_GELU = 4        /* z times the normal distribution function of z */
} onlinenorm_activation;

/* What a call works on. Fill it once for a layer and a shape; onlinenorm_layer_init gives the paper's settings.
 * Every field has to be in its range, used or not. */
typedef struct {
    int64_t samples;        /* N, may be 0 */
    int64_t channels;       /* C, at least 1 */
    int64_t elements;       /* D, may be 0 */
    int32_t layout;         /* onlinenorm_layout */
    int32_t dtype;          /* onlinenorm_dtype of x, z and their gradients */
    int32_t param_dtype;    /* onlinenorm_dtype of weight, bias and their gradients: dtype's or ONLINENORM_FLOAT32 */
    int32_t guard;          /* onlinenorm_guard */
    int32_t training;       /* 1: the streams advance; 0: they are read only (evaluation) */
    int32_t warmup;         /* 1: sample t = 0, 1, ... averages with decay 1 - 1 / (t + 2) until that reaches alpha_fwd */
    int32_t bound_control;  /* 1: a sample takes away no more of control_y than there is; 0: eq. 11b as it stands */
    int32_t activation;     /* onlinenorm_activation */
    int32_t threads;        /* at most this many */
    double alpha_fwd;       /* decay of the statistics, in [0, 1) */
    double alpha_bwd;       /* decay of the control process, in [0, 1) */
    double eps;             /* added to the variance; finite, at least 0 */
    double guard_eps;       /* added to the second moment under layer scaling's root; finite, at least 0 */
    double clamp_value;     /* bound of ONLINENORM_GUARD_CLAMP; finite, above 0 */
} onlinenorm_layer;

/* The state of a layer: C doubles each. It starts at mean 0, var 1, control_y 0, control_1 0, num_samples 0.
 * A forward asks for the first two and a backward for the next two; the others may be NULL. */
typedef struct {
    double *mean;
    double *var;
    double *control_y;    /* the paper's epsilon^(y), eq. 11 */
    double *control_1;    /* the paper's epsilon^(1), eq. 12 */
    int64_t *num_samples; /* one number: counts the samples of training forwards; may be NULL, but not with warmup */
} onlinenorm_state;

/* The paper's settings for N = 1, one thread, float32, NCD, no activation. */
ONLINENORM_API onlinenorm_layer onlinenorm_layer_init(int64_t channels, int64_t elements);

/* Bytes of what a forward keeps for its backward beside x: the statistics before the call and the samples' moments.
 * 0 where there is nothing to do (N or D is 0), and for a layer that the calls would refuse. */
ONLINENORM_API size_t onlinenorm_replay_bytes(const onlinenorm_layer *layer);

/* Forward, eqs. 8 and 9, and the activation. weight and bias may be NULL (1 and 0). replay: onlinenorm_replay_bytes bytes, 8-byte aligned,
 * or NULL if no backward follows. In training, mean, var and num_samples advance by N samples (by none if D is 0).
 * A channel for which a sample's moments, or the statistics they lead to, are not finite keeps its statistics for that
 * sample. */
ONLINENORM_API onlinenorm_status onlinenorm_forward(const onlinenorm_layer *layer, onlinenorm_state *state,
                                                    const void *x, const void *weight, const void *bias, void *z,
                                                    void *replay);

/* Backward, eqs. 10 to 12, of the forward that filled replay, with the same layer, x, weight and bias.
 * Writes grad_x, grad_weight and grad_bias (the sums over this call's samples), each of which may be NULL. In training,
 * control_y and control_1 advance. A channel whose control errors would not be finite keeps them for that sample. */
ONLINENORM_API onlinenorm_status onlinenorm_backward(const onlinenorm_layer *layer, onlinenorm_state *state,
                                                     const void *x, const void *grad_z, const void *weight,
                                                     const void *bias, const void *replay, void *grad_x,
                                                     void *grad_weight, void *grad_bias);

/* What a status means, for people. */
ONLINENORM_API const char *onlinenorm_status_text(onlinenorm_status status);

/* The SIMD level in use: "baseline", "avx2" or "avx512". The environment variable ONLINENORM_ISA, read when the library
 * is loaded, lowers it. */
ONLINENORM_API const char *onlinenorm_isa(void);

/* The paper's neuron: one scalar in, one scalar out, constant state, no layer around it and so no layer scaling.
 * Call forward, then backward, once a step. Nothing is checked: decays in [0, 1), eps at least 0, no NULL. */
typedef struct {
    double alpha_fwd, alpha_bwd, eps;
    double mean, var, control_y, control_1; /* as in onlinenorm_state */
    double y, sigma;                        /* of the last forward, for its backward */
} onlinenorm_neuron;

ONLINENORM_API onlinenorm_neuron onlinenorm_neuron_init(double alpha_fwd, double alpha_bwd, double eps);
ONLINENORM_API double onlinenorm_neuron_forward(onlinenorm_neuron *neuron, double x);       /* eq. 8: returns y */
ONLINENORM_API double onlinenorm_neuron_backward(onlinenorm_neuron *neuron, double grad_y); /* eqs. 11, 12: x' */

#ifdef __cplusplus
}
#endif
#endif
