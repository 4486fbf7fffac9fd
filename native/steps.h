// The three steps as the engine calls them: moments, scan, apply. Each is built once per instruction set.
//
// Scratch arrays by channel have rows of `padded` entries. `n` counts the samples of the current block, `k` chunks.
#pragma once

#include "ending.h"
#include "types.h"

namespace onlinenorm {

// How to get from x to a normalised value: (x - shift) * scale + offset. The shift is the streaming mean rounded to
// the accumulator's type; what the rounding left is in the offset, so that large offsets cost no precision.
template <class A>
struct Affine {
    A *shift, *scale, *offset;  // [n][padded]
};

// The scan over the statistics, eq. 8, for channels [first, last): multiples of kStrip, or `padded` at the end.
template <class A>
struct StatisticsScan {
    int64_t samples;
    const double* alpha;        // [n]: the decay that each sample averages with
    double eps;
    bool advance;               // whether mean and var move
    double *mean, *var;         // [padded], the streams
    const A *gamma, *beta;      // [padded]
    // one of: the sums of this block, merged here into moments and kept if there is a place to keep them ...
    const double *chunk_mean, *chunk_square;  // [n][k][padded]
    A* keep;                                  // [n][2][padded]: mean, variance
    // ... or moments kept earlier
    const A* moments;
    // results, each optional
    Affine<A> normalise;        // to yhat
    Affine<A> affine;           // to gamma * yhat + beta; its shift is normalise's too
    double *y1, *y2;            // [n][padded]: mean of yhat and of yhat^2
    double* square;             // [strip][n]: sums over channels of the mean of (gamma * yhat + beta)^2
};

// The scan over the control errors, eqs. 10 to 12.
template <class A>
struct ControlScan {
    int64_t samples;
    double decay;               // 1 - alpha_bwd; 0 where the streams are frozen
    bool advance, bound;
    const A *gamma, *beta;
    Affine<A> normalise;
    const double *y1, *y2;
    const double *chunk_grad, *chunk_product;  // [n][k][padded]: sums of z' and z' (x - shift)
    const double* inv_zeta;                    // [n]; all 1 without layer scaling
    const double* common;                      // [n]: the DESIGN's k, what all channels subtract; 0 without
    double *control_y, *control_1;             // [padded], the streams
    double *grad_gamma, *grad_beta;            // [padded], summed
    // results: x' = grad_scale z' - x_scale (x - shift) - grad_offset
    A *grad_scale, *x_scale, *grad_offset;     // [n][padded]
};

// D = 1: the moments are the input itself, and scan and apply are all there is.
template <class T>
struct ScalarForward {
    int64_t samples, block, channels;  // samples of the block's; see by_strip
    const double* alpha;        // [n]
    double eps;
    bool advance;
    double *mean, *var;
    const Accumulator<T>*gamma, *beta;
    const T* x;                 // [n][channels]
    Accumulator<T>* u;          // [n][padded]: gamma * yhat + beta
    double* square;             // [strip][n]
};
template <class T>
struct ScalarReplay {
    ScalarForward<T> forward;
    const T* grad_z;
    Accumulator<T>*y, *inv;     // [n][padded]
    double* product;            // [strip][n]: sums over channels of z' (gamma yhat + beta)
};
template <class T>
struct ScalarBackward {
    int64_t samples, block, channels;
    double decay;
    bool advance, bound;
    const Accumulator<T>*gamma, *beta, *y, *inv;
    const T* grad_z;
    const double *inv_zeta, *common;
    double *control_y, *control_1, *grad_gamma, *grad_beta;
    T* grad_x;                  // or null
    Accumulator<T>* passed;     // [n][padded]: z' behind clamp and activation; null where it is grad_z
};

#define ONLINENORM_STEPS(isa)                                                                                       \
    namespace isa {                                                                                                 \
    /* moments.cpp: sums over the scalars of units [first, last) of the block that starts at x */                   \
    template <class T>                                                                                              \
    void moments(const Geometry&, const T* x, int64_t first, int64_t last, double* chunk_mean, double* chunk_square); \
    template <class T>                                                                                              \
    void grad_moments(const Geometry&, const T* x, const T* grad_z, int64_t first, int64_t last,                    \
                      const Affine<Accumulator<T>>& affine, const double* inv_zeta,                                 \
                      const Ending<Accumulator<T>>&, double* chunk_grad, double* chunk_product);                                                                     \
    /* scan.cpp: the recurrences over samples, on means alone */                                                    \
    template <class A>                                                                                              \
    void scan_statistics(const Geometry&, const StatisticsScan<A>&, int64_t first, int64_t last);                   \
    void layer_scaling(const Geometry&, const double* square, int64_t samples, double guard_eps, double* inv_zeta); \
    void common_of_strips(const Geometry&, const double* product, int64_t samples, const double* inv_zeta,          \
                          double* common);                                                                          \
    template <class A>                                                                                              \
    void control_common(const Geometry&, const ControlScan<A>&, double* common);                                    \
    template <class A>                                                                                              \
    void scan_control(const Geometry&, const ControlScan<A>&, int64_t first, int64_t last);                         \
    template <class T>                                                                                              \
    void scan_scalars(const Geometry&, const ScalarForward<T>&, int64_t first, int64_t last);                       \
    template <class T>                                                                                              \
    void replay_scalars(const Geometry&, const ScalarReplay<T>&, int64_t first, int64_t last);                      \
    template <class T>                                                                                              \
    void pass_back_scalars(const Geometry&, const ScalarBackward<T>&, const Ending<Accumulator<T>>&, int64_t first, \
                           int64_t last, double* product);                                                          \
    template <class T>                                                                                              \
    void control_scalars(const Geometry&, const ScalarBackward<T>&, int64_t first, int64_t last);                   \
    /* apply.cpp: one multiply-add per scalar. ahead: scalars to the next block, whose data it fetches; or 0 */\
    template <class T>                                                                                              \
    void apply(const Geometry&, const T* x, T* z, int64_t first, int64_t last,                                      \
               const Affine<Accumulator<T>>& affine, const double* inv_zeta, const Ending<Accumulator<T>>&,         \
               bool streaming, int64_t ahead);                                                                      \
    template <class T>                                                                                              \
    void apply_scalars(const Geometry&, const Accumulator<T>* u, T* z, int64_t samples, int64_t block, int64_t first, \
                       int64_t last, const double* inv_zeta, const Ending<Accumulator<T>>&);                                             \
    template <class T>                                                                                              \
    void apply_grad(const Geometry&, const T* x, const T* grad_z, T* grad_x, int64_t first, int64_t last,           \
                    const Affine<Accumulator<T>>& affine, const double* inv_zeta, const Ending<Accumulator<T>>&,    \
                    const Accumulator<T>* grad_scale, const Accumulator<T>* x_scale,                                \
                    const Accumulator<T>* grad_offset, bool streaming, int64_t ahead);              \
    /* floor.cpp: the least that any normaliser has to move, for the benchmark */                                   \
    void read_one_write_one(const float* a, float* out, int64_t count, bool streaming);                             \
    void read_two_write_one(const float* a, const float* b, float* out, int64_t count, bool streaming);             \
    }

ONLINENORM_STEPS(baseline)
#if defined(__x86_64__)
ONLINENORM_STEPS(avx2)
ONLINENORM_STEPS(avx512)
#endif
#undef ONLINENORM_STEPS

// The benchmark's floor, with the engine's threads and instruction set.
void floor_forward(const float* a, float* out, int64_t count, int threads, bool streaming);
void floor_backward(const float* a, const float* b, float* out, int64_t count, int threads, bool streaming);

}  // namespace onlinenorm
