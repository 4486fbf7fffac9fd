// Step 2, scan: the recurrences over samples, channel by channel, on means alone.
//
// All scratch rows are padded to whole packs. The padding holds gamma = beta = 0 and moments of 0, and adds nothing.
#include "pack.h"
#include "steps.h"

namespace onlinenorm {
namespace {

using D = Pack<double>;

template <class A>
ALWAYS_INLINE Pack<A> one_over_root(const D& squared) {
    return Pack<A>(A(1)) / root(narrow<A>(squared));
}

// The streams of sixteen channels, eq. 8.
struct Statistics {
    D mean, var;

    // Moves on by a sample with these moments. Moments that are not finite leave the streams as they are.
    ALWAYS_INLINE void advance(const D& m, const D& v, double alpha) {
        const D d = m - mean;
        const D next_var = var * alpha + v * (1 - alpha) + d * d * (alpha * (1 - alpha));  // eq. 8c
        const D next_mean = mean * alpha + m * (1 - alpha);                                // eq. 8b
        const D old_mean = mean;
        mean = where_finite(m, v, next_mean, old_mean);
        var = where_finite(m, v, next_var, var);
    }
};

// Merges the chunks of a plane (Chan et al.): mean and variance of sixteen channels.
template <class A>
ALWAYS_INLINE void merge_chunks(const Geometry& g, const double* chunk_mean, const double* chunk_square, Pack<A>& mean,
                                Pack<A>& var) {
    D m = load(chunk_mean), square = load(chunk_square);
    double count = double(g.chunk_elements(0));
    for (int64_t k = 1; k < g.chunks; ++k) {
        const double more = double(g.chunk_elements(k)), total = count + more;
        const D d = load(chunk_mean + k * g.padded) - m;
        m += d * (more / total);
        square += load(chunk_square + k * g.padded) + d * d * (count * more / total);
        count = total;
    }
    mean = narrow<A>(m);
    var = narrow<A>(square / count);
}

ALWAYS_INLINE D sum_chunks(const Geometry& g, const double* sums) {
    D total = load(sums);
    for (int64_t k = 1; k < g.chunks; ++k) total += load(sums + k * g.padded);
    return total;
}

// Calls body(c) for the packs of channels [first, last), and done(strip) after each whole strip.
template <class Body, class Done>
ALWAYS_INLINE void over_channels(int64_t first, int64_t last, const Body& body, const Done& done) {
    for (int64_t strip = first; strip < last; strip += kStrip) {
        for (int64_t c = strip; c < smaller(strip + kStrip, last); c += kLanes) body(c);
        done(strip / kStrip);
    }
}

// A scalar feature and sixteen channels of it: yhat, and gamma yhat + beta.
template <class T>
struct ScalarStep {
    using A = Accumulator<T>;
    Pack<A> inv, y, affine;

    ALWAYS_INLINE ScalarStep(const ScalarForward<T>& s, const Geometry& g, int64_t n, int64_t c) {
        const Pack<A> x = load(s.x + n * g.channels + c, g.channels - c, A(0));
        Statistics streams{load(s.mean + c), load(s.var + c)};
        inv = one_over_root<A>(streams.var + D(s.eps));
        y = narrow<A>(widen(x) - streams.mean) * inv;
        affine = load(s.gamma + c) * y + load(s.beta + c);
        if (s.advance) {
            streams.advance(widen(x), D(0), s.alpha);
            store(s.mean + c, streams.mean);
            store(s.var + c, streams.var);
        }
    }
};

}  // namespace

namespace ONLINENORM_ISA {

template <class A>
void scan_statistics(const Geometry& g, const StatisticsScan<A>& s, int64_t first, int64_t last) {
    for (int64_t n = 0; n < s.samples; ++n) {
        const int64_t row = n * g.padded, rows = row * g.chunks;
        D squares(0);
        over_channels(
            first, last,
            [&](int64_t c) INLINE_LAMBDA {
                Statistics streams{load(s.mean + c), load(s.var + c)};
                const Pack<A> gamma = load(s.gamma + c), beta = load(s.beta + c);
                const Pack<A> inv = one_over_root<A>(streams.var + D(s.eps));
                const Pack<A> shift = narrow<A>(streams.mean), rest = narrow<A>(streams.mean - widen(shift));
                if (s.normalise.shift) store(s.normalise.shift + row + c, shift);
                if (s.normalise.scale) {
                    store(s.normalise.scale + row + c, inv);
                    store(s.normalise.offset + row + c, A(0) - rest * inv);
                }
                if (s.affine.scale) {
                    const Pack<A> scale = gamma * inv;
                    store(s.affine.scale + row + c, scale);
                    store(s.affine.offset + row + c, beta - rest * scale);
                }
                if (!s.chunk_mean && !s.moments) return;

                Pack<A> mean, var;
                if (s.chunk_mean) {
                    merge_chunks(g, s.chunk_mean + rows + c, s.chunk_square + rows + c, mean, var);
                    if (s.keep) {
                        store(s.keep + 2 * row + c, mean);
                        store(s.keep + 2 * row + g.padded + c, var);
                    }
                } else {
                    mean = load(s.moments + 2 * row + c);
                    var = load(s.moments + 2 * row + g.padded + c);
                }
                const D m = widen(mean), v = widen(var);
                if (s.square || s.y1) {
                    const D wide = widen(inv), y1 = (m - streams.mean) * wide, spread = v * wide * wide;
                    if (s.y1) {
                        store(s.y1 + row + c, y1);
                        store(s.y2 + row + c, spread + y1 * y1);
                    }
                    // mean of (gamma yhat + beta)^2 = gamma^2 var(yhat) + mean(gamma yhat + beta)^2
                    const D wide_gamma = widen(gamma), affine = wide_gamma * y1 + widen(beta);
                    squares += affine * affine + wide_gamma * wide_gamma * spread;
                }
                if (s.advance) {
                    streams.advance(m, v, s.alpha);
                    store(s.mean + c, streams.mean);
                    store(s.var + c, streams.var);
                }
            },
            [&](int64_t strip) INLINE_LAMBDA {
                if (s.square) s.square[n * g.strips + strip] = sum(squares);
                squares = D(0);
            });
    }
}

// Mean over elements of z' and of z' yhat, from the sums over z' and z' (x - shift).
template <class A>
ALWAYS_INLINE void grad_means(const Geometry& g, const ControlScan<A>& s, int64_t n, int64_t c, D& s1, D& s2) {
    const int64_t rows = n * g.padded * g.chunks, at = n * g.padded + c;
    const double per_element = 1 / double(g.elements);
    s1 = sum_chunks(g, s.chunk_grad + rows + c) * per_element;
    const D product = sum_chunks(g, s.chunk_product + rows + c) * per_element;
    s2 = product * widen(load(s.normalise.scale + at)) + s1 * widen(load(s.normalise.offset + at));
}

template <class A>
void control_common(const Geometry& g, const ControlScan<A>& s, double* common) {
    for (int64_t n = 0; n < s.samples; ++n) {
        D total(0);
        for (int64_t c = 0; c < g.padded; c += kLanes) {
            D s1, s2;
            grad_means(g, s, n, c, s1, s2);
            total += widen(load(s.gamma + c)) * s2 + widen(load(s.beta + c)) * s1;
        }
        common[n] = sum(total) / double(g.channels) * s.inv_zeta[n];
    }
}

template <class A>
void scan_control(const Geometry& g, const ControlScan<A>& s, int64_t first, int64_t last) {
    for (int64_t n = 0; n < s.samples; ++n) {
        const D zoom(s.inv_zeta[n]), pull(s.common[n] * s.inv_zeta[n]);
        for (int64_t c = first; c < last; c += kLanes) {
            const int64_t at = n * g.padded + c;
            const D gamma = widen(load(s.gamma + c)), beta = widen(load(s.beta + c));
            const D inv = widen(load(s.normalise.scale + at)), offset = widen(load(s.normalise.offset + at));
            const D ey = load(s.control_y + c), e1 = load(s.control_1 + c);

            const D y_scale = inv * (gamma * gamma * pull * zoom + ey * s.decay);
            store(s.grad_scale + at, narrow<A>(inv * gamma * zoom));
            store(s.x_scale + at, narrow<A>(y_scale * inv));
            store(s.grad_offset + at, narrow<A>(inv * gamma * beta * pull * zoom + e1 * s.decay + y_scale * offset));
            if (!s.chunk_grad) continue;

            D s1, s2;
            grad_means(g, s, n, c, s1, s2);
            const D y1 = load(s.y1 + at), y2 = load(s.y2 + at);
            const D a1 = (s1 - pull * (gamma * y1 + beta)) * zoom;
            const D a2 = (s2 - pull * (gamma * y2 + beta * y1)) * zoom;
            store(s.grad_beta + c, load(s.grad_beta + c) + a1 * double(g.elements));
            store(s.grad_gamma + c, load(s.grad_gamma + c) + a2 * double(g.elements));
            if (!s.advance) continue;

            const D next_y = ey + (gamma * a2 - ey * s.decay * y2);                               // eq. 11b
            const D next_1 = e1 + (inv * (gamma * a1 - ey * s.decay * y1) - e1 * s.decay);         // eq. 12b
            store(s.control_y + c, where_finite(next_y, next_1, next_y, ey));
            store(s.control_1 + c, where_finite(next_y, next_1, next_1, e1));
        }
    }
}

template <class T>
void scan_scalars(const Geometry& g, const ScalarForward<T>& s, int64_t first, int64_t last) {
    for (int64_t n = 0; n < s.samples; ++n) {
        D squares(0);
        over_channels(
            first, last,
            [&](int64_t c) INLINE_LAMBDA {
                const ScalarStep<T> step(s, g, n, c);
                store(s.u + n * g.padded + c, step.affine);
                const D wide = widen(step.affine);
                squares += wide * wide;
            },
            [&](int64_t strip) INLINE_LAMBDA {
                s.square[n * g.strips + strip] = sum(squares);
                squares = D(0);
            });
    }
}

template <class T>
void replay_scalars(const Geometry& g, const ScalarReplay<T>& s, int64_t first, int64_t last) {
    using A = Accumulator<T>;
    for (int64_t n = 0; n < s.forward.samples; ++n) {
        D squares(0), products(0);
        over_channels(
            first, last,
            [&](int64_t c) INLINE_LAMBDA {
                const ScalarStep<T> step(s.forward, g, n, c);
                store(s.y + n * g.padded + c, step.y);
                store(s.inv + n * g.padded + c, step.inv);
                const D wide = widen(step.affine);
                squares += wide * wide;
                products += wide * widen(load(s.grad_z + n * g.channels + c, g.channels - c, A(0)));
            },
            [&](int64_t strip) INLINE_LAMBDA {
                s.forward.square[n * g.strips + strip] = sum(squares);
                s.product[n * g.strips + strip] = sum(products);
                squares = products = D(0);
            });
    }
}

template <class T>
void control_scalars(const Geometry& g, const ScalarBackward<T>& s, int64_t first, int64_t last) {
    using A = Accumulator<T>;
    for (int64_t n = 0; n < s.samples; ++n) {
        const D zoom(s.inv_zeta[n]), pull(s.common[n] * s.inv_zeta[n]);
        for (int64_t c = first; c < last; c += kLanes) {
            const int64_t at = n * g.channels + c, padded = n * g.padded + c;
            const Pack<A> narrow_y = load(s.y + padded), narrow_gamma = load(s.gamma + c);
            const Pack<A> u = narrow_gamma * narrow_y + load(s.beta + c);
            const D y = widen(narrow_y), gamma = widen(narrow_gamma);
            const D grad = widen(where_within(u, s.bound, load(s.grad_z + at, g.channels - c, A(0))));
            const D ey = load(s.control_y + c), e1 = load(s.control_1 + c);
            const D a1 = (grad - pull * widen(u)) * zoom; // eq. 10
            const D a2 = a1 * y;
            const D tilde = gamma * a1 - ey * s.decay * y; // eq. 11a
            const D grad_x = tilde * widen(load(s.inv + padded)) - e1 * s.decay;             // eq. 12a
            store(s.grad_beta + c, load(s.grad_beta + c) + a1);
            store(s.grad_gamma + c, load(s.grad_gamma + c) + a2);
            if (s.grad_x) store(s.grad_x + at, narrow<A>(grad_x), g.channels - c);
            if (!s.advance) continue;
            const D next_y = ey + tilde * y, next_1 = e1 + grad_x;                           // eqs. 11b, 12b
            store(s.control_y + c, where_finite(next_y, next_1, next_y, ey));
            store(s.control_1 + c, where_finite(next_y, next_1, next_1, e1));
        }
    }
}

#define INSTANTIATE(A)                                                                                      \
    template void scan_statistics(const Geometry&, const StatisticsScan<A>&, int64_t, int64_t);             \
    template void control_common(const Geometry&, const ControlScan<A>&, double*);                          \
    template void scan_control(const Geometry&, const ControlScan<A>&, int64_t, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE
#define INSTANTIATE(T)                                                                                      \
    template void scan_scalars(const Geometry&, const ScalarForward<T>&, int64_t, int64_t);                 \
    template void replay_scalars(const Geometry&, const ScalarReplay<T>&, int64_t, int64_t);                \
    template void control_scalars(const Geometry&, const ScalarBackward<T>&, int64_t, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)

}  // namespace ONLINENORM_ISA
}  // namespace onlinenorm
