// Sixteen lanes of float or double, whatever the SIMD width: the same lanes on every machine make the same sums.
//
// Each of the three steps is compiled once per instruction set (see CMakeLists.txt) and sees here the widest vectors
// it may use. Everything is in an anonymous namespace, so no two of those builds can share a function.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "types.h"

#define INLINE_LAMBDA __attribute__((always_inline))

namespace onlinenorm {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class E, int lanes>
struct VectorOf {
    typedef E type __attribute__((vector_size(lanes * sizeof(E))));
};
template <class E, int lanes>
using Vector = typename VectorOf<E, lanes>::type;

template <class A>
struct Pack {
    static constexpr int width = kVectorBytes / sizeof(A);
    static constexpr int count = kLanes / width;
    using V = Vector<A, width>;
    V v[count];

    Pack() = default;
    ALWAYS_INLINE Pack(A scalar) {
        for (int i = 0; i < count; ++i) v[i] = scalar - V{};
    }
};

#define ONLINENORM_PACK_OPERATOR(op)                                               \
    template <class A>                                                             \
    ALWAYS_INLINE Pack<A> operator op(const Pack<A>& a, const Pack<A>& b) {        \
        Pack<A> r;                                                                 \
        for (int i = 0; i < Pack<A>::count; ++i) r.v[i] = a.v[i] op b.v[i];        \
        return r;                                                                  \
    }                                                                              \
    template <class A>                                                             \
    ALWAYS_INLINE Pack<A> operator op(const Pack<A>& a, A b) { return a op Pack<A>(b); } \
    template <class A>                                                             \
    ALWAYS_INLINE Pack<A> operator op(A a, const Pack<A>& b) { return Pack<A>(a) op b; }
ONLINENORM_PACK_OPERATOR(+)
ONLINENORM_PACK_OPERATOR(-)
ONLINENORM_PACK_OPERATOR(*)
ONLINENORM_PACK_OPERATOR(/)
#undef ONLINENORM_PACK_OPERATOR

template <class A>
ALWAYS_INLINE void operator+=(Pack<A>& a, const Pack<A>& b) { a = a + b; }

template <class A>
ALWAYS_INLINE Pack<A> root(const Pack<A>& a) {
    Pack<A> r;
    for (int i = 0; i < Pack<A>::count; ++i) {
        for (int j = 0; j < Pack<A>::width; ++j) {
            r.v[i][j] = sizeof(A) == 4 ? A(__builtin_sqrtf(float(a.v[i][j]))) : A(__builtin_sqrt(a.v[i][j]));
        }
    }
    return r;
}

// where both a and b are finite: yes, elsewhere: no
template <class A>
ALWAYS_INLINE Pack<A> where_finite(const Pack<A>& a, const Pack<A>& b, const Pack<A>& yes, const Pack<A>& no) {
    Pack<A> r;
    for (int i = 0; i < Pack<A>::count; ++i) {
        const auto zero = (a.v[i] - a.v[i]) + (b.v[i] - b.v[i]);  // NaN where a or b is not finite
        r.v[i] = zero == zero ? yes.v[i] : no.v[i];
    }
    return r;
}

// NaN stays NaN, as in torch.clamp
template <class A>
ALWAYS_INLINE Pack<A> clip(const Pack<A>& a, A bound) {
    Pack<A> r;
    const auto top = Pack<A>(bound), bottom = Pack<A>(-bound);
    for (int i = 0; i < Pack<A>::count; ++i) {
        const auto low = a.v[i] > top.v[i] ? top.v[i] : a.v[i];
        r.v[i] = low < bottom.v[i] ? bottom.v[i] : low;
    }
    return r;
}

// value where |a| <= bound, 0 where a was clipped
template <class A>
ALWAYS_INLINE Pack<A> where_within(const Pack<A>& a, A bound, const Pack<A>& value) {
    Pack<A> r;
    const auto top = Pack<A>(bound), bottom = Pack<A>(-bound);
    for (int i = 0; i < Pack<A>::count; ++i) {
        const auto below = a.v[i] > top.v[i] ? top.v[i] - top.v[i] : value.v[i];
        r.v[i] = a.v[i] < bottom.v[i] ? top.v[i] - top.v[i] : below;
    }
    return r;
}

// lane j + lane j+8, then +4, +2, +1: one order on every machine
template <class A>
ALWAYS_INLINE A sum(const Pack<A>& a) {
    A t[kLanes];
    std::memcpy(t, a.v, sizeof t);
    for (int half = kLanes / 2; half > 0; half /= 2) {
        for (int j = 0; j < half; ++j) t[j] += t[j + half];
    }
    return t[0];
}

// ---- between float and double

ALWAYS_INLINE Pack<double> widen(const Pack<double>& a) { return a; }
ALWAYS_INLINE Pack<double> widen(const Pack<float>& a) {
    constexpr int half = Pack<double>::width;
    Pack<double> r;
    for (int i = 0; i < Pack<double>::count; ++i) {
        Vector<float, half> part;
        std::memcpy(&part, reinterpret_cast<const char*>(a.v) + i * sizeof part, sizeof part);
        r.v[i] = __builtin_convertvector(part, Pack<double>::V);
    }
    return r;
}

template <class A>
Pack<A> narrow(const Pack<double>& a);
template <>
ALWAYS_INLINE Pack<double> narrow<double>(const Pack<double>& a) { return a; }
template <>
ALWAYS_INLINE Pack<float> narrow<float>(const Pack<double>& a) {
    Pack<float> r;
    for (int i = 0; i < Pack<double>::count; ++i) {
        const auto part = __builtin_convertvector(a.v[i], Vector<float, Pack<double>::width>);
        std::memcpy(reinterpret_cast<char*>(r.v) + i * sizeof part, &part, sizeof part);
    }
    return r;
}

// ---- between memory and registers

ALWAYS_INLINE Pack<float> load(const float* p) {
    Pack<float> r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
ALWAYS_INLINE Pack<double> load(const double* p) {
    Pack<double> r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
}
ALWAYS_INLINE Pack<float> load(const bfloat16* p) {
    constexpr int width = Pack<float>::width;
    Pack<float> r;
    for (int i = 0; i < Pack<float>::count; ++i) {
        Vector<uint16_t, width> bits;
        std::memcpy(&bits, p + i * width, sizeof bits);
        const auto wide = __builtin_convertvector(bits, Vector<uint32_t, width>) << 16;
        std::memcpy(&r.v[i], &wide, sizeof wide);
    }
    return r;
}

ALWAYS_INLINE float float16_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    uint32_t bits;
    if (exponent == 31) {  // infinity or NaN (made quiet, as the hardware does)
        bits = sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0);
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else {  // zero or subnormal: fraction * 2^-24 is exact
        const float magnitude = float(fraction) * 0x1p-24f;
        std::memcpy(&bits, &magnitude, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

ALWAYS_INLINE uint16_t float_to_float16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00 | (bits >> 13 & 0x3ff));  // NaN
    if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);                        // rounds to infinity
    if (bits >= 0x38800000) {                                                      // normal: round to nearest even
        return uint16_t(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
    }
    float magnitude;  // subnormal: adding 0.5 rounds at 2^-24 in hardware
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
}

ALWAYS_INLINE Pack<float> load(const float16* p) {
    Pack<float> r;
#if defined(__AVX512F__)
    const __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    std::memcpy(r.v, &wide, sizeof wide);
#elif defined(__F16C__)
    for (int i = 0; i < 2; ++i) {
        const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i)));
        std::memcpy(&r.v[i], &wide, sizeof wide);
    }
#else
    float t[kLanes];
    for (int j = 0; j < kLanes; ++j) t[j] = float16_to_float(p[j].bits);
    std::memcpy(r.v, t, sizeof t);
#endif
    return r;
}

// The pack as it lies in memory: sixteen T.
template <class T>
struct Image {
    T lanes[kLanes];
};

ALWAYS_INLINE Image<float> image(const Pack<float>& a, float) {
    Image<float> r;
    std::memcpy(&r, a.v, sizeof r);
    return r;
}
ALWAYS_INLINE Image<double> image(const Pack<double>& a, double) {
    Image<double> r;
    std::memcpy(&r, a.v, sizeof r);
    return r;
}
ALWAYS_INLINE Image<bfloat16> image(const Pack<float>& a, bfloat16) {
    constexpr int width = Pack<float>::width;
    Image<bfloat16> r;
    for (int i = 0; i < Pack<float>::count; ++i) {
        Vector<uint32_t, width> bits;
        std::memcpy(&bits, &a.v[i], sizeof bits);
        const auto rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest even
        const auto quiet = bits >> 16 | 0x40;
        const auto chosen = a.v[i] == a.v[i] ? rounded : quiet;
        const auto narrow = __builtin_convertvector(chosen, Vector<uint16_t, width>);
        std::memcpy(r.lanes + i * width, &narrow, sizeof narrow);
    }
    return r;
}
ALWAYS_INLINE Image<float16> image(const Pack<float>& a, float16) {
    Image<float16> r;
#if defined(__AVX512F__)
    __m512 wide;
    std::memcpy(&wide, a.v, sizeof wide);
    const __m256i narrow = _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(&r, &narrow, sizeof r);
#elif defined(__F16C__)
    for (int i = 0; i < 2; ++i) {
        __m256 wide;
        std::memcpy(&wide, &a.v[i], sizeof wide);
        const __m128i narrow = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(r.lanes + 8 * i, &narrow, sizeof narrow);
    }
#else
    float t[kLanes];
    std::memcpy(t, a.v, sizeof t);
    for (int j = 0; j < kLanes; ++j) r.lanes[j].bits = float_to_float16(t[j]);
#endif
    return r;
}

template <class T, class A>
ALWAYS_INLINE void store(T* p, const Pack<A>& a) {
    const auto lanes = image(a, T{});
    std::memcpy(p, &lanes, sizeof lanes);
}

// The first n lanes only; the others read as `fill`.
template <class T>
ALWAYS_INLINE Pack<Accumulator<T>> load(const T* p, int64_t n, Accumulator<T> fill) {
    using A = Accumulator<T>;
    if (n >= kLanes) return load(p);
    T t[kLanes] = {};
    for (int64_t j = 0; j < n; ++j) t[j] = p[j];
    const Pack<A> some = load(t);
    A lanes[kLanes];
    std::memcpy(lanes, some.v, sizeof lanes);
    for (int64_t j = n; j < kLanes; ++j) lanes[j] = fill;
    return load(lanes);
}
template <class T, class A>
ALWAYS_INLINE void store(T* p, const Pack<A>& a, int64_t n) {
    if (n >= kLanes) return store(p, a);
    const auto lanes = image(a, T{});
    for (int64_t j = 0; j < n; ++j) p[j] = lanes.lanes[j];
}

// Past the caches, for results too large to stay in them. p is aligned to kStreamBytes<T>.
template <class T>
constexpr int64_t kStreamBytes = kLanes * sizeof(T) < size_t(kVectorBytes) ? kLanes * sizeof(T) : kVectorBytes;

template <class T, class A>
ALWAYS_INLINE void stream(T* p, const Pack<A>& a) {
    const auto lanes = image(a, T{});
    const char* from = reinterpret_cast<const char*>(&lanes);
    char* to = reinterpret_cast<char*>(p);
    constexpr int64_t step = kStreamBytes<T>;
    for (size_t i = 0; i < sizeof lanes; i += step) {
#if defined(__AVX512F__)
        if constexpr (step == 64) {
            __m512i v;
            std::memcpy(&v, from + i, step);
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), v);
        } else
#endif
#if defined(__AVX2__)
        if constexpr (step == 32) {
            __m256i v;
            std::memcpy(&v, from + i, step);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), v);
        } else
#endif
        {
#if defined(__SSE2__)
            __m128i v;
            std::memcpy(&v, from + i, 16);
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), v);
#else
            std::memcpy(to + i, from + i, step);
#endif
        }
    }
}

ALWAYS_INLINE void end_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Calls body(pack count, channel, channels left) over a strip: its four packs at once, or one by one.
template <class Body>
ALWAYS_INLINE void over_strip(int64_t channels, const Body& body) {
    constexpr int all = kStrip / kLanes;
    if (channels == kStrip) return body(Constant<all>{}, int64_t(0), kStrip);
    for (int64_t c = 0; c < channels; c += kLanes) body(Constant<1>{}, c, channels - c);
}

}  // namespace
}  // namespace onlinenorm
