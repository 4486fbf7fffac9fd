// Step 2, scan: the recurrences over samples, channel by channel, on means alone.
//
// All scratch rows are padded to whole packs. The padding holds gamma = beta = 0 and moments of 0, and adds nothing.
#include "pack.h"
#include "steps.h"

namespace onlinenorm {
namespace {

using D = Pack<double>;

template <class A>
ALWAYS_INLINE Pack<A> one_over_root(const Pack<A>& squared) {
    return Pack<A>(A(1)) / root(squared);
}

// The streams of sixteen channels, eq. 8.
struct Statistics {
    D mean, var;

    // Moves on by a sample whose moments are mean + d and v (none where D = 1: there v is 0). A sample that would make
    // the streams infinite or NaN leaves them as they are if `checked`; the mean can't be so where the variance is finite.
    template <bool checked, class... Variance>
    ALWAYS_INLINE void advance(const D& d, double alpha, const Variance&... v) {
        const D step = d * (1 - alpha);
        const D next_var = (var + d * step) * alpha;                       // eq. 8c, but for its middle term:
        const D with_v = (next_var + ... + (v * (1 - alpha)));
        mean = checked ? where_finite(with_v, mean + step, mean) : mean + step;  // eq. 8b
        var = checked ? where_finite(with_v, with_v, var) : with_v;
    }
    ALWAYS_INLINE bool finite() const { return all_finite(var); }
};

// The control errors of sixteen channels, eqs. 11 and 12.
struct Control {
    D y, one;

    // Moves on by the means of x~' y and of x'. If `checked`, a sample that would make one of them infinite or NaN moves
    // neither.
    template <bool checked>
    ALWAYS_INLINE void advance(const D& tilde_y, const D& grad_x) {
        const D next_y = y + tilde_y, next_one = one + grad_x;  // eqs. 11b, 12b
        y = checked ? where_finite(next_y, next_one, next_y, y) : next_y;
        one = checked ? where_finite(next_y, next_one, next_one, one) : next_one;
    }
    ALWAYS_INLINE bool finite() const { return all_finite(y) && all_finite(one); }
};

// Where D = 1 a check of every sample takes a fifth of the time. What is not finite stays so, sample after sample: it is
// enough to look at the end, and to run a strip again with every sample checked if need be. run(checked, a constant)
// says whether the strip ended finite.
template <class Run>
ALWAYS_INLINE void check_at_the_end(const Run& run) {
    if (!run(Constant<false>{})) run(Constant<true>{});
}

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

// D = 1: the samples of one block through eq. 8, strip by strip with the streams in registers. For each sample and pack,
// tell(n, c, inv, y, affine), and after each sample of a strip done(n, strip).
template <class T, class Tell, class Done>
ALWAYS_INLINE void over_scalars(const Geometry& g, const ScalarForward<T>& given, int64_t first, int64_t last,
                                const Tell& tell, const Done& done) {
    using A = Accumulator<T>;
    const ScalarForward<T> s = given;  // a copy that no store can reach
    const int64_t channels = g.channels;
    over_strips(first, last, [&](auto packs, int64_t strip) INLINE_LAMBDA { check_at_the_end([&](auto checked) INLINE_LAMBDA {
        Statistics streams[packs.value];
        Pack<A> gamma[packs.value], beta[packs.value];
        each<packs.value>([&](auto j) INLINE_LAMBDA {
            streams[j].mean = load(s.mean + strip + j * kLanes);
            streams[j].var = load(s.var + strip + j * kLanes);
            gamma[j] = load(s.gamma + strip + j * kLanes);
            beta[j] = load(s.beta + strip + j * kLanes);
        });
        for (int64_t n = 0; n < s.samples; ++n) {
            each<packs.value>([&](auto j) INLINE_LAMBDA {
                const int64_t c = strip + j * kLanes;
                __builtin_prefetch(s.x + n * channels + c + kStrip);  // rows are far apart
                const D d = load_wide(s.x + n * channels + c, channels - c) - streams[j].mean;
                const Pack<A> inv = one_over_root(narrow<A>(streams[j].var + s.eps)), y = narrow<A>(d) * inv;
                tell(n, c, inv, y, gamma[j] * y + beta[j]);
                if (s.advance) streams[j].template advance<checked.value != 0>(d, s.alpha[n]);
            });
            done(n, strip / kStrip);
        }
        if (!s.advance) return true;
        bool finite = true;
        each<packs.value>([&](auto j) INLINE_LAMBDA { finite &= streams[j].finite(); });
        if (!finite && !checked) return false;
        each<packs.value>([&](auto j) INLINE_LAMBDA {
            store(s.mean + strip + j * kLanes, streams[j].mean);
            store(s.var + strip + j * kLanes, streams[j].var);
        });
        return true;
    }); });
}

template <class T, class End>
void pass_back_scalars_of(const Geometry& g, const ScalarBackward<T>& s, const End& ending, int64_t first, int64_t last,
                          double* product) {
    using A = Accumulator<T>;
    const End end = ending;
    for (int64_t strip = first; strip < last; strip += kStrip) {
        for (int64_t n = 0; n < s.samples; ++n) {
            const Pack<A> zoom(A(s.inv_zeta[n]));
            Pack<A> products(0);
            for (int64_t c = strip; c < smaller(strip + kStrip, last); c += kLanes) {
                const int64_t at = by_strip(s.block, n, c);
                const Pack<A> u = load(s.gamma + c) * load(s.y + at) + load(s.beta + c);
                const Pack<A> grad = end.back(u * zoom, load(s.grad_z + n * g.channels + c, g.channels - c));
                store(s.passed + at, grad);
                products += u * grad;
            }
            product[strip / kStrip * s.samples + n] = sum(widen(products));
        }
    }
}

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
                const Pack<A> inv = one_over_root(narrow<A>(streams.var + D(s.eps)));
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
                    streams.template advance<true>(m - streams.mean, s.alpha[n], v);
                    store(s.mean + c, streams.mean);
                    store(s.var + c, streams.var);
                }
            },
            [&](int64_t strip) INLINE_LAMBDA {
                if (s.square) s.square[strip * s.samples + n] = sum(squares);
                squares = D(0);
            });
    }
}

// The mean over channels of what a scan has summed over strips, [strip][n], for sixteen samples from n.
ALWAYS_INLINE D over_all_strips(const Geometry& g, const double* sums, int64_t samples, int64_t n) {
    D total(0);
    for (int64_t strip = 0; strip < g.strips; ++strip) total += load(sums + strip * samples + n, samples - n);
    return total / double(g.channels);
}

// eq. 9: zeta is the root mean square over all features of the sample. One bad value makes the whole sample bad; 1 /
// infinity would make it zero.
void layer_scaling(const Geometry& g, const double* square, int64_t samples, double guard_eps, double* inv_zeta) {
    for (int64_t n = 0; n < samples; n += kLanes) {
        const D q = over_all_strips(g, square, samples, n);
        store(inv_zeta + n, where_finite(q, 1.0 / root(q + guard_eps), q - q), samples - n);
    }
}

void common_of_strips(const Geometry& g, const double* product, int64_t samples, const double* inv_zeta,
                      double* common) {
    for (int64_t n = 0; n < samples; n += kLanes) {
        const D mean = over_all_strips(g, product, samples, n);
        store(common + n, mean * load(inv_zeta + n, samples - n), samples - n);
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

            Control control{ey, e1};
            const D taken = s.bound ? ey * clip(y2 * s.decay, 1.0) : ey * s.decay * y2;
            control.template advance<true>(gamma * a2 - taken, inv * (gamma * a1 - ey * s.decay * y1) - e1 * s.decay);
            store(s.control_y + c, control.y);
            store(s.control_1 + c, control.one);
        }
    }
}

template <class T>
void scan_scalars(const Geometry& g, const ScalarForward<T>& s, int64_t first, int64_t last) {
    using P = Pack<Accumulator<T>>;
    const int64_t samples = s.samples, block = s.block;
    Accumulator<T>* const u = s.u;
    double* const square = s.square;
    P squares(0);
    over_scalars(
        g, s, first, last,
        [&](int64_t n, int64_t c, const P&, const P&, const P& affine) INLINE_LAMBDA {
            store(u + by_strip(block, n, c), affine);
            squares += affine * affine;
        },
        [&](int64_t n, int64_t strip) INLINE_LAMBDA {
            square[strip * samples + n] = sum(widen(squares));
            squares = P(0);
        });
}

template <class T>
void replay_scalars(const Geometry& g, const ScalarReplay<T>& given, int64_t first, int64_t last) {
    using P = Pack<Accumulator<T>>;
    const ScalarReplay<T> s = given;
    const int64_t channels = g.channels, samples = s.forward.samples;
    P squares(0), products(0);
    over_scalars(
        g, s.forward, first, last,
        [&](int64_t n, int64_t c, const P& inv, const P& y, const P& affine) INLINE_LAMBDA {
            store(s.y + by_strip(s.forward.block, n, c), y);
            store(s.inv + by_strip(s.forward.block, n, c), inv);
            squares += affine * affine;
            __builtin_prefetch(s.grad_z + n * channels + c + kStrip);
            products += affine * load(s.grad_z + n * channels + c, channels - c);
        },
        [&](int64_t n, int64_t strip) INLINE_LAMBDA {
            s.forward.square[strip * samples + n] = sum(widen(squares));
            s.product[strip * samples + n] = sum(widen(products));
            squares = products = P(0);
        });
}

template <class T>
void pass_back_scalars(const Geometry& g, const ScalarBackward<T>& s, const Ending<Accumulator<T>>& ending,
                       int64_t first, int64_t last, double* product) {
    with_ending(ending, [&](const auto& end) INLINE_LAMBDA { pass_back_scalars_of(g, s, end, first, last, product); });
}

template <class T>
void control_scalars(const Geometry& g, const ScalarBackward<T>& given, int64_t first, int64_t last) {
    using A = Accumulator<T>;
    using P = Pack<A>;
    const ScalarBackward<T> s = given;
    const int64_t channels = g.channels;
    const P decay(A(s.decay));
    over_strips(first, last, [&](auto packs, int64_t strip) INLINE_LAMBDA { check_at_the_end([&](auto checked) INLINE_LAMBDA {
        Control control[packs.value];
        P grad_gamma[packs.value], grad_beta[packs.value];
        each<packs.value>([&](auto j) INLINE_LAMBDA {
            control[j].y = load(s.control_y + strip + j * kLanes);
            control[j].one = load(s.control_1 + strip + j * kLanes);
            grad_gamma[j] = grad_beta[j] = P(0);
        });
        for (int64_t n = 0; n < s.samples; ++n) {
            const P zoom(A(s.inv_zeta[n])), pull(A(s.common[n] * s.inv_zeta[n]));
            each<packs.value>([&](auto j) INLINE_LAMBDA {
                const int64_t c = strip + j * kLanes, at = n * channels + c;
                __builtin_prefetch(s.grad_z + at + kStrip);
                const P y = load(s.y + by_strip(s.block, n, c)), gamma = load(s.gamma + c), u = gamma * y + load(s.beta + c);
                const P grad = s.passed ? load(s.passed + by_strip(s.block, n, c)) : load(s.grad_z + at, channels - c);
                const P a1 = (grad - pull * u) * zoom;                                                // eq. 10
                const P tilde = gamma * a1 - narrow<A>(control[j].y) * decay * y;                     // eq. 11a
                const P grad_x = tilde * load(s.inv + by_strip(s.block, n, c)) - narrow<A>(control[j].one) * decay;  // eq. 12a
                grad_beta[j] += a1;
                grad_gamma[j] += a1 * y;
                if (s.grad_x) store(s.grad_x + at, grad_x, channels - c);
                const D tilde_y = s.bound ? widen(gamma * a1 * y) - control[j].y * widen(clip(decay * y * y, A(1))) : widen(tilde * y);
                if (s.advance) control[j].template advance<checked.value != 0>(tilde_y, widen(grad_x));
            });
        }
        bool finite = true;
        each<packs.value>([&](auto j) INLINE_LAMBDA { finite &= control[j].finite(); });
        if (!finite && !checked) return false;
        each<packs.value>([&](auto j) INLINE_LAMBDA {
            const int64_t c = strip + j * kLanes;
            store(s.grad_gamma + c, load(s.grad_gamma + c) + widen(grad_gamma[j]));
            store(s.grad_beta + c, load(s.grad_beta + c) + widen(grad_beta[j]));
            if (!s.advance) return;
            store(s.control_y + c, control[j].y);
            store(s.control_1 + c, control[j].one);
        });
        return true;
    }); });
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
    template void pass_back_scalars(const Geometry&, const ScalarBackward<T>&, const Ending<Accumulator<T>>&, int64_t, \
                                    int64_t, double*);                                                      \
    template void control_scalars(const Geometry&, const ScalarBackward<T>&, int64_t, int64_t);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)

}  // namespace ONLINENORM_ISA
}  // namespace onlinenorm
