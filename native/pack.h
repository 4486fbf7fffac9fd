// Sixteen lanes of float or double, whatever the SIMD width: the same lanes on every machine make the same sums.
//
// Each of the three steps is compiled once per instruction set (see CMakeLists.txt) and sees here the widest vectors
// it may use. Everything is in an anonymous namespace, so no two of those builds can share a function.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Calls body(0), ..., body(n - 1) with constants: loops over a Pack's vectors must be gone before the compiler decides
// what lives in registers.
template <int n, int i = 0, class Body>
ALWAYS_INLINE void each(const Body& body) {
    if constexpr (i < n) {
        body(Constant<i>{});
        each<n, i + 1>(body);
    }
}

template <class A>
struct Pack {
    static constexpr int width = kVectorBytes / sizeof(A);
    static constexpr int count = kLanes / width;
    using V = Vector<A, width>;
    V v[count];

    Pack() = default;
    ALWAYS_INLINE Pack(A scalar) {
        each<count>([&](auto i) INLINE_LAMBDA { v[i] = scalar - V{}; });
    }
};

#define ONLINENORM_PACK_OPERATOR(op)                                               \
    template <class A>                                                             \
    ALWAYS_INLINE Pack<A> operator op(const Pack<A>& a, const Pack<A>& b) {        \
        Pack<A> r;                                                                 \
        each<Pack<A>::count>([&](auto i) INLINE_LAMBDA { r.v[i] = a.v[i] op b.v[i]; }); \
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
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        for (int j = 0; j < Pack<A>::width; ++j) {
            r.v[i][j] = sizeof(A) == 4 ? A(__builtin_sqrtf(float(a.v[i][j]))) : A(__builtin_sqrt(a.v[i][j]));
        }
    });
    return r;
}

// Where a is finite: yes, elsewhere: no. Comparisons with the zero that subtracting a finite number from itself gives.
template <class A>
ALWAYS_INLINE Pack<A> where_finite(const Pack<A>& a, const Pack<A>& yes, const Pack<A>& no) {
    Pack<A> r;
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        r.v[i] = a.v[i] - a.v[i] == typename Pack<A>::V{} ? yes.v[i] : no.v[i];
    });
    return r;
}
template <class A>
ALWAYS_INLINE Pack<A> where_finite(const Pack<A>& a, const Pack<A>& b, const Pack<A>& yes, const Pack<A>& no) {
    Pack<A> r;
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        r.v[i] = a.v[i] - a.v[i] == b.v[i] - b.v[i] ? yes.v[i] : no.v[i];
    });
    return r;
}

// Whether a condition holds for every element of a vector; given as the comparison's result, all bits set or none.
template <class V>
ALWAYS_INLINE bool all_set(const V& condition) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) {
        __m512i v;
        std::memcpy(&v, &condition, sizeof v);
        return _mm512_movepi32_mask(v) == 0xffff;
    } else
#endif
#if defined(__AVX2__)
    if constexpr (sizeof(V) == 32) {
        __m256i v;
        std::memcpy(&v, &condition, sizeof v);
        return _mm256_movemask_epi8(v) == -1;
    } else
#endif
    {
        bool all = true;
        for (unsigned j = 0; j < sizeof(V) / sizeof condition[0]; ++j) all &= condition[j] != 0;
        return all;
    }
}
template <class A>
ALWAYS_INLINE bool all_finite(const Pack<A>& a) {
    bool all = true;
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA { all &= all_set(a.v[i] - a.v[i] == typename Pack<A>::V{}); });
    return all;
}

// NaN stays NaN, as in torch.clamp
template <class A>
ALWAYS_INLINE Pack<A> clip(const Pack<A>& a, A bound) {
    Pack<A> r;
    const auto top = Pack<A>(bound), bottom = Pack<A>(-bound);
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        const auto low = a.v[i] > top.v[i] ? top.v[i] : a.v[i];
        r.v[i] = low < bottom.v[i] ? bottom.v[i] : low;
    });
    return r;
}

// value where |a| <= bound, 0 where a was clipped
template <class A>
ALWAYS_INLINE Pack<A> where_within(const Pack<A>& a, A bound, const Pack<A>& value) {
    Pack<A> r;
    const auto top = Pack<A>(bound), bottom = Pack<A>(-bound);
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        const auto below = a.v[i] > top.v[i] ? top.v[i] - top.v[i] : value.v[i];
        r.v[i] = a.v[i] < bottom.v[i] ? top.v[i] - top.v[i] : below;
    });
    return r;
}

// ---- halves of a vector, kept in registers

template <class E, int lanes>
struct Halves {
    Vector<E, lanes / 2> low, high;
    ALWAYS_INLINE explicit Halves(const Vector<E, lanes>& v) {
#if defined(__AVX512F__)
        if constexpr (sizeof v == 64 && sizeof(E) == 4) {
            low = _mm512_castps512_ps256(v);
            high = _mm512_extractf32x8_ps(v, 1);
            return;
        } else if constexpr (sizeof v == 64) {
            low = _mm512_castpd512_pd256(v);
            high = _mm512_extractf64x4_pd(v, 1);
            return;
        } else
#endif
#if defined(__AVX2__)
        if constexpr (sizeof v == 32 && sizeof(E) == 4) {
            low = _mm256_castps256_ps128(v);
            high = _mm256_extractf128_ps(v, 1);
            return;
        } else if constexpr (sizeof v == 32) {
            low = _mm256_castpd256_pd128(v);
            high = _mm256_extractf128_pd(v, 1);
            return;
        } else
#endif
        {
            for (int j = 0; j < lanes / 2; ++j) {
                low[j] = v[j];
                high[j] = v[j + lanes / 2];
            }
        }
    }
};

template <class E, int lanes>
ALWAYS_INLINE E sum_lanes(const Vector<E, lanes>& v) {
    if constexpr (lanes == 2) {
        return v[0] + v[1];
    } else if constexpr (lanes == 4 && sizeof(E) == 4) {
        return (v[0] + v[2]) + (v[1] + v[3]);
    } else {
        const Halves<E, lanes> h(v);
        return sum_lanes<E, lanes / 2>(h.low + h.high);
    }
}

// lane j + lane j+8, then +4, +2, +1: one order on every machine
template <class A>
ALWAYS_INLINE A sum(const Pack<A>& a) {
    constexpr int n = Pack<A>::count;
    Pack<A> t = a;
    if constexpr (n >= 8) each<4>([&](auto i) INLINE_LAMBDA { t.v[i] += t.v[i + 4]; });
    if constexpr (n >= 4) each<2>([&](auto i) INLINE_LAMBDA { t.v[i] += t.v[i + 2]; });
    if constexpr (n >= 2) t.v[0] += t.v[1];
    return sum_lanes<A, Pack<A>::width>(t.v[0]);
}

// ---- between float and double

ALWAYS_INLINE Pack<double> widen(const Pack<double>& a) { return a; }
ALWAYS_INLINE Pack<double> widen(const Pack<float>& a) {
    Pack<double> r;
    each<Pack<float>::count>([&](auto i) INLINE_LAMBDA {
        const Halves<float, Pack<float>::width> h(a.v[i]);
#if defined(__AVX512F__)
        r.v[2 * i] = _mm512_cvtps_pd(h.low);
        r.v[2 * i + 1] = _mm512_cvtps_pd(h.high);
#elif defined(__AVX2__)
        r.v[2 * i] = _mm256_cvtps_pd(h.low);
        r.v[2 * i + 1] = _mm256_cvtps_pd(h.high);
#else
        r.v[2 * i] = __builtin_convertvector(h.low, Pack<double>::V);
        r.v[2 * i + 1] = __builtin_convertvector(h.high, Pack<double>::V);
#endif
    });
    return r;
}

template <class A>
Pack<A> narrow(const Pack<double>& a);
template <>
ALWAYS_INLINE Pack<double> narrow<double>(const Pack<double>& a) { return a; }
template <>
ALWAYS_INLINE Pack<float> narrow<float>(const Pack<double>& a) {
    Pack<float> r;
    each<Pack<float>::count>([&](auto i) INLINE_LAMBDA {
        const auto low = a.v[2 * i], high = a.v[2 * i + 1];
#if defined(__AVX512F__)
        r.v[i] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
#elif defined(__AVX2__)
        r.v[i] = _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
#else
        for (int j = 0; j < Pack<double>::width; ++j) {
            r.v[i][j] = float(low[j]);
            r.v[i][j + Pack<double>::width] = float(high[j]);
        }
#endif
    });
    return r;
}

// ---- between memory and registers

// The first n lanes of a vector, for n of at least 0; the others read as zero and are not written.
template <class E, int lanes>
ALWAYS_INLINE Vector<E, lanes> load_some(const void* p, int64_t n) {
    if (n >= lanes) {
        Vector<E, lanes> v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    [[maybe_unused]] const uint32_t mask = n <= 0 ? 0 : (1u << n) - 1;
    Vector<E, lanes> v{};
#if defined(__AVX512F__)
    if constexpr (sizeof v == 64 && sizeof(E) == 4) {
        const __m512i r = _mm512_maskz_loadu_epi32(__mmask16(mask), p);
        std::memcpy(&v, &r, sizeof v);
        return v;
    } else if constexpr (sizeof v == 64) {
        const __m512i r = _mm512_maskz_loadu_epi64(__mmask8(mask), p);
        std::memcpy(&v, &r, sizeof v);
        return v;
    } else if constexpr (sizeof v == 32) {
        const __m256i r = _mm256_maskz_loadu_epi16(__mmask16(mask), p);
        std::memcpy(&v, &r, sizeof v);
        return v;
    } else
#endif
    {
        for (int j = 0; j < lanes; ++j) {
            if (j < n) std::memcpy(reinterpret_cast<char*>(&v) + j * sizeof(E), static_cast<const E*>(p) + j, sizeof(E));
        }
        return v;
    }
}

template <class E, int lanes>
ALWAYS_INLINE void store_some(void* p, const Vector<E, lanes>& v, int64_t n) {
    if (n >= lanes) {
        std::memcpy(p, &v, sizeof v);
        return;
    }
    [[maybe_unused]] const uint32_t mask = n <= 0 ? 0 : (1u << n) - 1;
#if defined(__AVX512F__)
    if constexpr (sizeof v == 64 && sizeof(E) == 4) {
        __m512i r;
        std::memcpy(&r, &v, sizeof v);
        _mm512_mask_storeu_epi32(p, __mmask16(mask), r);
    } else if constexpr (sizeof v == 64) {
        __m512i r;
        std::memcpy(&r, &v, sizeof v);
        _mm512_mask_storeu_epi64(p, __mmask8(mask), r);
    } else if constexpr (sizeof v == 32) {
        __m256i r;
        std::memcpy(&r, &v, sizeof v);
        _mm256_mask_storeu_epi16(p, __mmask16(mask), r);
    } else
#endif
    {
        for (int j = 0; j < lanes; ++j) {
            if (j < n) std::memcpy(static_cast<E*>(p) + j, reinterpret_cast<const char*>(&v) + j * sizeof(E), sizeof(E));
        }
    }
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

// One vector of a pack as it lies in memory, `width` scalars of T, and the way there and back.
template <class T>
struct Image {
    using Element = T;
    static constexpr int width = Pack<T>::width;
    using V = Vector<T, width>;
    static ALWAYS_INLINE V of(const V& v) { return v; }
    static ALWAYS_INLINE V read(const V& v) { return v; }
};
template <>
struct Image<bfloat16> {
    using Element = uint16_t;
    static constexpr int width = Pack<float>::width;
    using V = Vector<uint16_t, width>;
    static ALWAYS_INLINE V of(const Pack<float>::V& v) {
        Vector<uint32_t, width> bits;
        std::memcpy(&bits, &v, sizeof bits);
        const Vector<uint32_t, width> rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest even
        const Vector<uint32_t, width> quiet = bits >> 16 | 0x40;
        const Vector<uint32_t, width> chosen = v == v ? rounded : quiet;
        return __builtin_convertvector(chosen, V);
    }
    static ALWAYS_INLINE Pack<float>::V read(const V& bits) {
        const auto wide = __builtin_convertvector(bits, Vector<uint32_t, width>) << 16;
        Pack<float>::V v;
        std::memcpy(&v, &wide, sizeof v);
        return v;
    }
};
template <>
struct Image<float16> {
    using Element = uint16_t;
    static constexpr int width = Pack<float>::width;
    using V = Vector<uint16_t, width>;
    static ALWAYS_INLINE V of(const Pack<float>::V& v) {
        V r;
#if defined(__AVX512F__)
        const __m256i narrow = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        std::memcpy(&r, &narrow, sizeof r);
#elif defined(__F16C__)
        const __m128i narrow = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(&r, &narrow, sizeof r);
#else
        for (int j = 0; j < width; ++j) r[j] = float_to_float16(v[j]);
#endif
        return r;
    }
    static ALWAYS_INLINE Pack<float>::V read(const V& bits) {
#if defined(__AVX512F__)
        __m256i narrow;
        std::memcpy(&narrow, &bits, sizeof narrow);
        return _mm512_cvtph_ps(narrow);
#elif defined(__F16C__)
        __m128i narrow;
        std::memcpy(&narrow, &bits, sizeof narrow);
        return _mm256_cvtph_ps(narrow);
#else
        Pack<float>::V v;
        for (int j = 0; j < width; ++j) v[j] = float16_to_float(bits[j]);
        return v;
#endif
    }
};

template <class T>
ALWAYS_INLINE Pack<Accumulator<T>> load(const T* p) {
    Pack<Accumulator<T>> r;
    each<decltype(r)::count>([&](auto i) INLINE_LAMBDA {
        typename Image<T>::V lanes;
        std::memcpy(&lanes, p + i * r.width, sizeof lanes);
        r.v[i] = Image<T>::read(lanes);
    });
    return r;
}
template <class T, class A>
ALWAYS_INLINE void store(T* p, const Pack<A>& a) {
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        const auto lanes = Image<T>::of(a.v[i]);
        std::memcpy(p + i * Pack<A>::width, &lanes, sizeof lanes);
    });
}

// The first n lanes only; the others read as zero.
template <class T>
ALWAYS_INLINE Pack<Accumulator<T>> load(const T* p, int64_t n) {
    if (n >= kLanes) return load(p);
    Pack<Accumulator<T>> r;
    each<decltype(r)::count>([&](auto i) INLINE_LAMBDA {
        r.v[i] = Image<T>::read(load_some<typename Image<T>::Element, r.width>(p + i * r.width, n - i * r.width));
    });
    return r;
}
template <class T, class A>
ALWAYS_INLINE void store(T* p, const Pack<A>& a, int64_t n) {
    if (n >= kLanes) return store(p, a);
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        store_some<typename Image<T>::Element, Pack<A>::width>(p + i * Pack<A>::width, Image<T>::of(a.v[i]),
                                                              n - i * Pack<A>::width);
    });
}

// The same in double.
template <class T>
ALWAYS_INLINE Pack<double> load_wide(const T* p, int64_t n) {
    return widen(load(p, n));
}
template <>
ALWAYS_INLINE Pack<double> load_wide(const float* p, int64_t n) {
    if (n < kLanes) return widen(load(p, n));
    Pack<double> r;
    each<Pack<double>::count>([&](auto i) INLINE_LAMBDA {
        const float* const half = p + i * Pack<double>::width;
#if defined(__AVX512F__)
        r.v[i] = _mm512_cvtps_pd(_mm256_loadu_ps(half));
#elif defined(__AVX2__)
        r.v[i] = _mm256_cvtps_pd(_mm_loadu_ps(half));
#else
        Vector<float, Pack<double>::width> lanes;
        std::memcpy(&lanes, half, sizeof lanes);
        r.v[i] = __builtin_convertvector(lanes, Pack<double>::V);
#endif
    });
    return r;
}

// The first n lanes of a, 0 in the others.
template <class A>
ALWAYS_INLINE Pack<A> first_lanes(const Pack<A>& a, int64_t n) {
    using Index = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
    Pack<A> r;
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        Vector<Index, Pack<A>::width> lane;
        for (int j = 0; j < Pack<A>::width; ++j) lane[j] = i.value * Pack<A>::width + j;
        r.v[i] = lane < Index(n) ? a.v[i] : typename Pack<A>::V{};
    });
    return r;
}

// Past the caches, for results too large to stay in them. p is aligned to kStreamBytes<T>.
template <class T>
constexpr int64_t kStreamBytes = sizeof(typename Image<T>::V);

template <class T, class A>
ALWAYS_INLINE void stream(T* p, const Pack<A>& a) {
    each<Pack<A>::count>([&](auto i) INLINE_LAMBDA {
        const auto lanes = Image<T>::of(a.v[i]);
        [[maybe_unused]] T* const to = p + i * Pack<A>::width;
#if defined(__AVX512F__)
        if constexpr (sizeof lanes == 64) {
            __m512i v;
            std::memcpy(&v, &lanes, sizeof v);
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to), v);
        } else
#endif
#if defined(__AVX2__)
        if constexpr (sizeof lanes == 32) {
            __m256i v;
            std::memcpy(&v, &lanes, sizeof v);
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to), v);
        } else
#endif
#if defined(__SSE2__)
        if constexpr (sizeof lanes == 16) {
            __m128i v;
            std::memcpy(&v, &lanes, sizeof v);
            _mm_stream_si128(reinterpret_cast<__m128i*>(to), v);
        } else
#endif
            std::memcpy(to, &lanes, sizeof lanes);
    });
}

ALWAYS_INLINE void end_streaming() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// Calls body(number of packs, a constant; first channel) for each strip of [first, last).
template <class Body>
ALWAYS_INLINE void over_strips(int64_t first, int64_t last, const Body& body) {
    static_assert(kStrip / kLanes == 4);
    for (int64_t strip = first; strip < last; strip += kStrip) {
        switch ((last - strip) / kLanes) {
            case 1: body(Constant<1>{}, strip); break;
            case 2: body(Constant<2>{}, strip); break;
            case 3: body(Constant<3>{}, strip); break;
            default: body(Constant<4>{}, strip);
        }
    }
}

// Calls body(pack count, channel, channels left) over a strip: its four packs at once if `unroll`, or one by one.
template <bool unroll = true, class Body>
ALWAYS_INLINE void over_strip(int64_t channels, const Body& body) {
    constexpr int all = kStrip / kLanes;
    if constexpr (unroll) {
        if (channels == kStrip) return body(Constant<all>{}, int64_t(0), kStrip);
    }
    for (int64_t c = 0; c < channels; c += kLanes) body(Constant<1>{}, c, channels - c);
}

}  // namespace
}  // namespace onlinenorm
