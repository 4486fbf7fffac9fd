// Step 1, moments: each chunk of a (sample, channel) plane becomes a mean and a sum of squares about that mean,
// or in the backward, the sums of z' and z' (x - shift).
#include "pack.h"
#include "steps.h"

namespace onlinenorm {
namespace {

template <class T>
using PackOf = Pack<Accumulator<T>>;

// From sums of (x - shift) and its square to the mean and the sum of squares about it.
ALWAYS_INLINE void centre(double shift, double sum1, double sum2, double per_element, double& mean, double& square) {
    const double off = sum1 * per_element, about_mean = sum2 - sum1 * off;
    mean = shift + off;
    square = about_mean < 0 ? 0 : about_mean;  // rounding; NaN stays
}

// Lanes are added in double: a chunk of squares may be more than a float can hold.
template <class A>
ALWAYS_INLINE double sum_of(const Pack<A> (&parts)[4]) {
    return sum(widen((parts[0] + parts[1]) + (parts[2] + parts[3])));
}

// Squares are taken about a shift close to the data, so that they don't cancel: of a short plane its mean, else the mean
// of its first elements, or first rows.
constexpr int64_t kShortPlane = 256;
constexpr int64_t kShiftRows = 8;

template <class T>
ALWAYS_INLINE void short_plane_moments(const T* x, int64_t length, double per_element, double& mean, double& square) {
    using P = PackOf<T>;
    Pack<double> total(0);
    int64_t i = 0;
    for (; i + kLanes <= length; i += kLanes) total += load_wide(x + i, kLanes);
    if (i < length) total += load_wide(x + i, length - i);
    mean = sum(total) * per_element;

    const Accumulator<T> shift = Accumulator<T>(mean);
    P sum2[2] = {P(0), P(0)};
    const auto add = [&](int j, const P& d) INLINE_LAMBDA { sum2[j] += d * d; };
    for (i = 0; i + 2 * kLanes <= length; i += 2 * kLanes) {
        each<2>([&](auto j) INLINE_LAMBDA { add(j, load(x + i + j * kLanes) - shift); });
    }
    if (i + kLanes <= length) add(0, load(x + i) - shift), i += kLanes;
    if (i < length) add(1, first_lanes(load(x + i, length - i) - shift, length - i));
    const double off = mean - shift;  // what rounding the shift left
    const double about_mean = sum(widen(sum2[0] + sum2[1])) - off * off * double(length);
    square = about_mean < 0 ? 0 : about_mean;
}

template <class T>
ALWAYS_INLINE void plane_moments(const T* x, int64_t length, double per_element, double& mean, double& square) {
    using A = Accumulator<T>;
    using P = Pack<A>;
    if (length <= kShortPlane) return short_plane_moments(x, length, per_element, mean, square);
    P rough(0);
    for (int64_t i = 0; i < kShortPlane; i += kLanes) rough += load(x + i);
    const A shift = sum(rough) * A(1.0 / kShortPlane);

    // Four accumulators: at most 64 terms to a lane, and enough additions in flight.
    P sum1[4] = {P(0), P(0), P(0), P(0)}, sum2[4] = {P(0), P(0), P(0), P(0)};
    const auto add = [&](int j, const P& d) INLINE_LAMBDA {
        sum1[j] += d;
        sum2[j] += d * d;
    };
    int64_t i = 0;
    for (; i + 4 * kLanes <= length; i += 4 * kLanes) {
        each<4>([&](auto j) INLINE_LAMBDA { add(j, load(x + i + j * kLanes) - shift); });
    }
    for (; i + kLanes <= length; i += kLanes) add(0, load(x + i) - shift);
    if (i < length) add(1, first_lanes(load(x + i, length - i) - shift, length - i));
    centre(shift, sum_of(sum1), sum_of(sum2), per_element, mean, square);
}

// Channels last: `packs` packs of neighbouring channels down the rows, `some` channels in the last of them.
template <class T, int packs>
ALWAYS_INLINE void row_moments(const T* x, int64_t stride, int64_t rows, int64_t some, double* mean, double* square) {
    using A = Accumulator<T>;
    using P = Pack<A>;
    const auto at = [&](int64_t row, int j) INLINE_LAMBDA {
        const T* p = x + row * stride + j * kLanes;
        return packs == 1 ? load(p, some) : load(p);
    };
    const int64_t sampled = smaller(rows, kShiftRows);
    P shift[packs], sum1[packs], sum2[packs];
    each<packs>([&](auto j) INLINE_LAMBDA { shift[j] = sum1[j] = sum2[j] = P(0); });
    for (int64_t row = 0; row < sampled; ++row) {
        each<packs>([&](auto j) INLINE_LAMBDA { shift[j] += at(row, j); });
    }
    each<packs>([&](auto j) INLINE_LAMBDA { shift[j] = shift[j] / A(sampled); });
    for (int64_t row = 0; row < rows; ++row) {
        each<packs>([&](auto j) INLINE_LAMBDA {
            const P d = at(row, j) - shift[j];
            sum1[j] += d;
            sum2[j] += d * d;
        });
    }
    each<packs>([&](auto j) INLINE_LAMBDA {
        const Pack<double> s1 = widen(sum1[j]), off = s1 / double(rows);
        const Pack<double> about_mean = widen(sum2[j]) - s1 * off;
        Pack<double> positive;
        each<Pack<double>::count>([&](auto i) INLINE_LAMBDA {
            const auto v = about_mean.v[i];
            positive.v[i] = v < 0 ? v - v : v;
        });
        store(mean + j * kLanes, widen(shift[j]) + off);
        store(square + j * kLanes, positive);
    });
}

template <class T, class End>
ALWAYS_INLINE void plane_grad_moments(const T* x, const T* grad, int64_t length, Accumulator<T> shift,
                                      Accumulator<T> scale, Accumulator<T> offset, const End& end, double& sum_grad,
                                      double& sum_product) {
    using A = Accumulator<T>;
    using P = Pack<A>;
    P sum1[4] = {P(0), P(0), P(0), P(0)}, sum2[4] = {P(0), P(0), P(0), P(0)};
    const auto add = [&](int j, const P& value, const P& g) INLINE_LAMBDA {
        const P d = value - P(shift);
        const P through = end.looks ? end.back(d * scale + P(offset), g) : g;
        sum1[j] += through;
        sum2[j] += through * d;
    };
    int64_t i = 0;
    if constexpr (!End::heavy) {
        for (; i + 4 * kLanes <= length; i += 4 * kLanes) {
            each<4>([&](auto j) INLINE_LAMBDA { add(j, load(x + i + j * kLanes), load(grad + i + j * kLanes)); });
        }
    }
    for (; i + kLanes <= length; i += kLanes) add(0, load(x + i), load(grad + i));
    if (i < length) add(1, load(x + i, length - i), load(grad + i, length - i));
    sum_grad = sum_of(sum1);
    sum_product = sum_of(sum2);
}

template <class T, int packs, class End>
ALWAYS_INLINE void row_grad_moments(const T* x, const T* grad, int64_t stride, int64_t rows, int64_t some,
                                    const Affine<Accumulator<T>>& affine, Accumulator<T> zoom, const End& end,
                                    double* sum_grad, double* sum_product) {
    using A = Accumulator<T>;
    using P = Pack<A>;
    P shift[packs], scale[packs], offset[packs], sum1[packs], sum2[packs];
    each<packs>([&](auto j) INLINE_LAMBDA {
        shift[j] = load(affine.shift + j * kLanes);
        if (end.looks) {
            scale[j] = load(affine.scale + j * kLanes) * zoom;
            offset[j] = load(affine.offset + j * kLanes) * zoom;
        }
        sum1[j] = sum2[j] = P(0);
    });
    for (int64_t row = 0; row < rows; ++row) {
        each<packs>([&](auto j) INLINE_LAMBDA {
            const int64_t at = row * stride + j * kLanes;
            const P d = (packs == 1 ? load(x + at, some) : load(x + at)) - shift[j];
            P g = packs == 1 ? load(grad + at, some) : load(grad + at);
            if (end.looks) g = end.back(d * scale[j] + offset[j], g);
            sum1[j] += g;
            sum2[j] += g * d;
        });
    }
    each<packs>([&](auto j) INLINE_LAMBDA {
        store(sum_grad + j * kLanes, widen(sum1[j]));
        store(sum_product + j * kLanes, widen(sum2[j]));
    });
}

template <class T, class End>
void grad_moments_of(const Geometry& given, const T* x, const T* grad, int64_t first, int64_t last,
                     const Affine<Accumulator<T>>& affine, const double* inv_zeta, const End& ending,
                     double* chunk_grad, double* chunk_product) {
    using A = Accumulator<T>;
    const Geometry g = given;
    const End end = ending;
    Unit u(g, first);
    for (int64_t left = last - first; left > 0; --left, u.next()) {
        const int64_t by_chunk = (u.sample * g.chunks + u.chunk) * g.padded + u.channel;
        const int64_t by_sample = u.sample * g.padded + u.channel;
        const A zoom = end.looks ? A(inv_zeta[u.sample]) : A(1);
        if (g.channels_last) {
            over_strip<!End::heavy>(u.channels, [&](auto packs, int64_t c, int64_t some) INLINE_LAMBDA {
                const Affine<A> here{affine.shift + by_sample + c, affine.scale + by_sample + c,
                                     affine.offset + by_sample + c};
                row_grad_moments<T, packs.value>(x + u.start + c, grad + u.start + c, g.channels, u.length, some, here,
                                                 zoom, end, chunk_grad + by_chunk + c, chunk_product + by_chunk + c);
            });
        } else {
            plane_grad_moments(x + u.start, grad + u.start, u.length, affine.shift[by_sample],
                               end.looks ? affine.scale[by_sample] * zoom : A(0),
                               end.looks ? affine.offset[by_sample] * zoom : A(0), end, chunk_grad[by_chunk],
                               chunk_product[by_chunk]);
        }
    }
}

}  // namespace

namespace ONLINENORM_ISA {

template <class T>
void moments(const Geometry& given, const T* x, int64_t first, int64_t last, double* chunk_mean, double* chunk_square) {
    const Geometry g = given;
    int64_t length = 0;  // of the chunks that these are for:
    double per_element = 0;
    Unit u(g, first);
    for (int64_t left = last - first; left > 0; --left, u.next()) {
        const int64_t at = (u.sample * g.chunks + u.chunk) * g.padded + u.channel;
        if (u.length != length) {
            length = u.length;
            per_element = 1 / double(length);
        }
        if (g.channels_last) {
            over_strip(u.channels, [&](auto packs, int64_t c, int64_t some) INLINE_LAMBDA {
                row_moments<T, packs.value>(x + u.start + c, g.channels, u.length, some, chunk_mean + at + c,
                                            chunk_square + at + c);
            });
        } else {
            plane_moments(x + u.start, length, per_element, chunk_mean[at], chunk_square[at]);
        }
    }
}

template <class T>
void grad_moments(const Geometry& g, const T* x, const T* grad_z, int64_t first, int64_t last,
                  const Affine<Accumulator<T>>& affine, const double* inv_zeta, const Ending<Accumulator<T>>& ending,
                  double* chunk_grad, double* chunk_product) {
    with_ending(ending, [&](const auto& end) INLINE_LAMBDA {
        grad_moments_of(g, x, grad_z, first, last, affine, inv_zeta, end, chunk_grad, chunk_product);
    });
}

#define INSTANTIATE(T)                                                                                             \
    template void moments(const Geometry&, const T*, int64_t, int64_t, double*, double*);                          \
    template void grad_moments(const Geometry&, const T*, const T*, int64_t, int64_t, const Affine<Accumulator<T>>&, \
                               const double*, const Ending<Accumulator<T>>&, double*, double*);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)

}  // namespace ONLINENORM_ISA
}  // namespace onlinenorm
