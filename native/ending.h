// What becomes of r = (gamma yhat + beta) / zeta: the guard "clamp" and the activation, and a gradient's way back through
// them. Each kind is a type of its own, so that a step's loop is compiled for it.
#pragma once

#include "pack.h"

namespace onlinenorm {

enum class Activation : int32_t { none, relu, leaky_relu, silu, gelu };  // as in onlinenorm.h

template <class A>
struct Ending {
    A bound;  // of the clamp; infinite without
    Activation activation;

    // Whether a gradient's way back depends on r.
    bool looks() const { return bound < __builtin_inf() || activation != Activation::none; }
};

namespace {

// e^x to float's precision or double's: 2^n e^f with |f| <= ln 2 / 2, and the series of e^f.
template <class A>
ALWAYS_INLINE Pack<A> exponential(const Pack<A>& given) {
    constexpr bool single = sizeof(A) == 4;
    using Bits = std::conditional_t<single, int32_t, int64_t>;
    constexpr int terms = single ? 7 : 13, fraction = single ? 23 : 52;
    constexpr A magic = single ? A(0x1.8p23) : A(0x1.8p52);  // adding it rounds to an integer, in the lowest bits
    constexpr A top = single ? A(88) : A(709), bottom = single ? A(-87) : A(-708);
    constexpr A ln2_high = single ? A(0x1.62e4p-1) : A(0x1.62e42fefap-1);
    constexpr A ln2_low = single ? A(0x1.7f7d1cp-20) : A(0x1.cf79abc9e3b3ap-40);
    Pack<A> x;
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {  // NaN stays
        const auto low = given.v[i] > top ? top - typename Pack<A>::V{} : given.v[i];
        x.v[i] = low < bottom ? bottom - typename Pack<A>::V{} : low;
    });
    const Pack<A> shifted = x * A(0x1.71547652b82fep0) + magic, n = shifted - magic;
    const Pack<A> f = x - n * ln2_high - n * ln2_low;
    Pack<A> sum(1);
    each<terms>([&](auto k) INLINE_LAMBDA { sum = A(1) + f * sum * (A(1) / A(terms - k.value)); });
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        Vector<Bits, Pack<A>::width> power, bits;
        std::memcpy(&power, &shifted.v[i], sizeof power);
        std::memcpy(&bits, &sum.v[i], sizeof bits);
        bits += power << fraction;
        std::memcpy(&sum.v[i], &bits, sizeof bits);
    });
    return sum;
}

ALWAYS_INLINE Pack<double> normal_distribution(const Pack<double>& x, const Pack<double>&) {
    Pack<double> r;
    each<Pack<double>::count>([&](auto i) INLINE_LAMBDA {
        for (int j = 0; j < Pack<double>::width; ++j) r.v[i][j] = 0.5 * __builtin_erfc(x.v[i][j] * -0x1.6a09e667f3bcdp-1);
    });
    return r;
}
// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: to 8e-8. bell: exp(-x^2 / 2).
ALWAYS_INLINE Pack<float> normal_distribution(const Pack<float>& x, const Pack<float>& bell) {
    Pack<float> size, r;
    each<Pack<float>::count>([&](auto i) INLINE_LAMBDA { size.v[i] = x.v[i] < 0 ? -x.v[i] : x.v[i]; });
    const Pack<float> t = 1.0f / (1.0f + size * (0.3275911f * 0.70710678f));
    const Pack<float> series =
        t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const Pack<float> tail = series * bell * 0.5f, rest = 1.0f - tail;
    each<Pack<float>::count>([&](auto i) INLINE_LAMBDA { r.v[i] = x.v[i] < 0 ? tail.v[i] : rest.v[i]; });
    return r;
}

// Each kind says whether a gradient's way back looks at r, and whether it takes so many operations that unrolling the loop
// around it is of no use.

template <class A>
struct Plain {
    static constexpr bool looks = false, heavy = false;
    ALWAYS_INLINE Pack<A> value(const Pack<A>& r) const { return r; }
    ALWAYS_INLINE Pack<A> back(const Pack<A>&, const Pack<A>& grad) const { return grad; }
};

template <class A>
struct Clamp {
    static constexpr bool looks = true, heavy = false;
    A bound;
    ALWAYS_INLINE Pack<A> value(const Pack<A>& r) const { return clip(r, bound); }
    ALWAYS_INLINE Pack<A> back(const Pack<A>& r, const Pack<A>& grad) const { return where_within(r, bound, grad); }
};

// An activation after the clamp: how large its function is at r, and how steep.
template <class A, class Function>
struct Activated {
    static constexpr bool looks = true, heavy = Function::heavy;
    Clamp<A> clamp;
    Function function;
    ALWAYS_INLINE Pack<A> value(const Pack<A>& r) const { return function.value(clamp.value(r)); }
    ALWAYS_INLINE Pack<A> back(const Pack<A>& r, const Pack<A>& grad) const {
        return clamp.back(r, function.back(r, grad));
    }
};

template <class A>
struct Relu {
    static constexpr bool heavy = false;
    A slope;  // below 0; leaky, if it is not 0
    ALWAYS_INLINE Pack<A> select(const Pack<A>& r, const Pack<A>& above) const {
        const Pack<A> below = slope == 0 ? Pack<A>(0) : above * slope;
        Pack<A> chosen;
        each<Pack<A>::count>([&](auto i) INLINE_LAMBDA { chosen.v[i] = r.v[i] <= 0 ? below.v[i] : above.v[i]; });
        return chosen;
    }
    ALWAYS_INLINE Pack<A> value(const Pack<A>& r) const { return select(r, r); }
    ALWAYS_INLINE Pack<A> back(const Pack<A>& r, const Pack<A>& grad) const { return select(r, grad); }
};

template <class A>
struct Silu {
    static constexpr bool heavy = true;
    ALWAYS_INLINE Pack<A> sigmoid(const Pack<A>& r) const { return A(1) / (A(1) + exponential(A(0) - r)); }
    ALWAYS_INLINE Pack<A> value(const Pack<A>& r) const { return r * sigmoid(r); }
    ALWAYS_INLINE Pack<A> back(const Pack<A>& r, const Pack<A>& grad) const {
        const Pack<A> s = sigmoid(r);
        return grad * (s * (A(1) + r * (A(1) - s)));
    }
};

template <class A>
struct Gelu {
    static constexpr bool heavy = true;
    ALWAYS_INLINE Pack<A> bell(const Pack<A>& r) const { return exponential(r * r * A(-0.5)); }
    ALWAYS_INLINE Pack<A> value(const Pack<A>& r) const { return r * normal_distribution(r, bell(r)); }
    ALWAYS_INLINE Pack<A> back(const Pack<A>& r, const Pack<A>& grad) const {
        const Pack<A> b = bell(r);
        return grad * (normal_distribution(r, b) + r * b * A(0x1.9884533d43651p-2));  // 1 / sqrt(2 pi)
    }
};

constexpr double kLeakySlope = 0.01;

// Calls body with the type that does this ending's work.
template <class A, class Body>
void with_ending(const Ending<A>& ending, const Body& body) {
    const Clamp<A> clamp{ending.bound};
    switch (ending.activation) {
        case Activation::none:
            if (ending.looks()) return body(clamp);
            return body(Plain<A>{});
        case Activation::relu: return body(Activated<A, Relu<A>>{clamp, {A(0)}});
        case Activation::leaky_relu: return body(Activated<A, Relu<A>>{clamp, {A(kLeakySlope)}});
        case Activation::silu: return body(Activated<A, Silu<A>>{clamp, {}});
        case Activation::gelu: return body(Activated<A, Gelu<A>>{clamp, {}});
    }
}

}  // namespace
}  // namespace onlinenorm
