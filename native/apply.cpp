// Step 3, apply: one multiply-add per scalar, with coefficients by (sample, channel).
#include "pack.h"
#include "steps.h"

namespace onlinenorm {
namespace {

// Asks for what the next block reads at this place, `ahead` scalars further on: it comes from memory while this block's
// results go there.
template <class T>
ALWAYS_INLINE void fetch(const T* p, int64_t ahead) {
    if (ahead) __builtin_prefetch(p + ahead, 0, 2);
}

// Walks `length` scalars in packs. body(i, n) works on n lanes from i and returns the pack to write at out + i.
// Streaming writes start at the first aligned address.
template <class T, class Body>
ALWAYS_INLINE void over_plane(T* out, int64_t length, bool streaming, const Body& body) {
    int64_t i = 0;
    if (streaming && reinterpret_cast<uintptr_t>(out) % sizeof(T) == 0) {
        const int64_t misaligned = reinterpret_cast<uintptr_t>(out) % kStreamBytes<T>;
        const int64_t head = smaller(misaligned ? (kStreamBytes<T> - misaligned) / int64_t(sizeof(T)) : 0, length);
        if (head) store(out, body(0, head), head);
        for (i = head; i + kLanes <= length; i += kLanes) stream(out + i, body(i, int64_t(kLanes)));
    } else {
        for (; i + kLanes <= length; i += kLanes) store(out + i, body(i, int64_t(kLanes)));
    }
    if (i < length) store(out + i, body(i, length - i), length - i);
}

// The same for `packs` packs of neighbouring channels down the rows. body(at, j, n): lanes from `at`, pack j.
template <int packs, class T, class Body>
ALWAYS_INLINE void over_rows(T* out, int64_t stride, int64_t rows, int64_t some, bool streaming, const Body& body) {
    const bool aligned = (reinterpret_cast<uintptr_t>(out) | stride * int64_t(sizeof(T))) % kStreamBytes<T> == 0;
    const bool whole = packs > 1 || some >= kLanes;
    if (streaming && aligned && whole) {
        for (int64_t row = 0; row < rows; ++row) {
            each<packs>([&](auto j) INLINE_LAMBDA {
                const int64_t at = row * stride + j * kLanes;
                stream(out + at, body(at, j, int64_t(kLanes)));
            });
        }
    } else if (whole) {
        for (int64_t row = 0; row < rows; ++row) {
            each<packs>([&](auto j) INLINE_LAMBDA {
                const int64_t at = row * stride + j * kLanes;
                store(out + at, body(at, j, int64_t(kLanes)));
            });
        }
    } else {
        for (int64_t row = 0; row < rows; ++row) store(out + row * stride, body(row * stride, 0, some), some);
    }
}

template <class T, class End>
void apply_of(const Geometry& given, const T* x, T* z, int64_t first, int64_t last,
              const Affine<Accumulator<T>>& affine, const double* inv_zeta, const End& ending, bool streaming,
              int64_t ahead) {
    using A = Accumulator<T>;
    using P = Pack<A>;
    const Geometry g = given;
    const End end = ending;
    Unit u(g, last - 1);  // backwards: what the moments read last is still in the cache
    for (int64_t left = last - first; left > 0; --left, u.previous()) {
        const int64_t at = u.sample * g.padded + u.channel;
        const A zoom = A(inv_zeta[u.sample]);
        if (g.channels_last) {
            over_strip<!End::heavy>(u.channels, [&](auto packs, int64_t c, int64_t some) INLINE_LAMBDA {
                P shift[packs.value], scale[packs.value], offset[packs.value];
                each<packs.value>([&](auto j) INLINE_LAMBDA {
                    shift[j] = load(affine.shift + at + c + j * kLanes);
                    scale[j] = load(affine.scale + at + c + j * kLanes) * zoom;
                    offset[j] = load(affine.offset + at + c + j * kLanes) * zoom;
                });
                const T* from = x + u.start + c;
                over_rows<packs.value>(z + u.start + c, g.channels, u.length, some, streaming,
                                       [&](int64_t i, int j, int64_t n) INLINE_LAMBDA {
                                           fetch(from + i, ahead);
                                           return end.value((load(from + i, n) - shift[j]) * scale[j] + offset[j]);
                                       });
            });
        } else {
            const P shift(affine.shift[at]), scale(affine.scale[at] * zoom), offset(affine.offset[at] * zoom);
            const T* from = x + u.start;
            over_plane(z + u.start, u.length, streaming, [&](int64_t i, int64_t n) INLINE_LAMBDA {
                fetch(from + i, ahead);
                return end.value((load(from + i, n) - shift) * scale + offset);
            });
        }
    }
    if (streaming) end_streaming();
}

template <class T, class End>
void apply_grad_of(const Geometry& given, const T* x, const T* grad_z, T* grad_x, int64_t first, int64_t last,
                   const Affine<Accumulator<T>>& affine, const double* inv_zeta, const End& ending,
                   const Accumulator<T>* grad_scale, const Accumulator<T>* x_scale, const Accumulator<T>* grad_offset,
                   bool streaming, int64_t ahead) {
    using A = Accumulator<T>;
    using P = Pack<A>;
    const Geometry g = given;
    const End end = ending;
    Unit u(g, last - 1);
    for (int64_t left = last - first; left > 0; --left, u.previous()) {
        const int64_t at = u.sample * g.padded + u.channel;
        const A zoom = end.looks ? A(inv_zeta[u.sample]) : A(1);
        const T *from = x + u.start, *grads = grad_z + u.start;
        if (g.channels_last) {
            over_strip<!End::heavy>(u.channels, [&](auto packs, int64_t c, int64_t some) INLINE_LAMBDA {
                P shift[packs.value], by_grad[packs.value], by_x[packs.value], less[packs.value];
                each<packs.value>([&](auto j) INLINE_LAMBDA {
                    const int64_t here = at + c + j * kLanes;
                    shift[j] = load(affine.shift + here);
                    by_grad[j] = load(grad_scale + here);
                    by_x[j] = load(x_scale + here);
                    less[j] = load(grad_offset + here);
                });
                over_rows<packs.value>(grad_x + u.start + c, g.channels, u.length, some, streaming,
                                       [&](int64_t i, int j, int64_t n) INLINE_LAMBDA {
                                           fetch(from + c + i, ahead);
                                           fetch(grads + c + i, ahead);
                                           const P d = load(from + c + i, n) - shift[j];
                                           P grad = load(grads + c + i, n);
                                           if (end.looks) {
                                               const int64_t here = at + c + j * kLanes;
                                               const P scale = load(affine.scale + here) * zoom;
                                               grad = end.back(d * scale + load(affine.offset + here) * zoom, grad);
                                           }
                                           return grad * by_grad[j] - d * by_x[j] - less[j];
                                       });
            });
        } else {
            const P shift(affine.shift[at]), by_grad(grad_scale[at]), by_x(x_scale[at]), less(grad_offset[at]);
            const P scale(end.looks ? affine.scale[at] * zoom : A(0)), offset(end.looks ? affine.offset[at] * zoom : A(0));
            over_plane(grad_x + u.start, u.length, streaming, [&](int64_t i, int64_t n) INLINE_LAMBDA {
                fetch(from + i, ahead);
                fetch(grads + i, ahead);
                const P d = load(from + i, n) - shift;
                P grad = load(grads + i, n);
                if (end.looks) grad = end.back(d * scale + offset, grad);
                return grad * by_grad - d * by_x - less;
            });
        }
    }
    if (streaming) end_streaming();
}

template <class T, class End>
void apply_scalars_of(const Geometry& g, const Accumulator<T>* u, T* z, int64_t samples, int64_t block, int64_t first,
                      int64_t last, const double* inv_zeta, const End& ending) {
    using A = Accumulator<T>;
    const End end = ending;
    for (int64_t n = 0; n < samples; ++n) {
        const Pack<A> zoom(A(inv_zeta[n]));
        for (int64_t c = first; c < last; c += kLanes) {
            store(z + n * g.channels + c, end.value(load(u + by_strip(block, n, c)) * zoom), g.channels - c);
        }
    }
}

}  // namespace

namespace ONLINENORM_ISA {

template <class T>
void apply(const Geometry& g, const T* x, T* z, int64_t first, int64_t last, const Affine<Accumulator<T>>& affine,
           const double* inv_zeta, const Ending<Accumulator<T>>& ending, bool streaming, int64_t ahead) {
    with_ending(ending, [&](const auto& end) INLINE_LAMBDA {
        apply_of(g, x, z, first, last, affine, inv_zeta, end, streaming, ahead);
    });
}

template <class T>
void apply_grad(const Geometry& g, const T* x, const T* grad_z, T* grad_x, int64_t first, int64_t last,
                const Affine<Accumulator<T>>& affine, const double* inv_zeta, const Ending<Accumulator<T>>& ending,
                const Accumulator<T>* grad_scale, const Accumulator<T>* x_scale, const Accumulator<T>* grad_offset,
                bool streaming, int64_t ahead) {
    with_ending(ending, [&](const auto& end) INLINE_LAMBDA {
        apply_grad_of(g, x, grad_z, grad_x, first, last, affine, inv_zeta, end, grad_scale, x_scale, grad_offset,
                      streaming, ahead);
    });
}

template <class T>
void apply_scalars(const Geometry& g, const Accumulator<T>* u, T* z, int64_t samples, int64_t block, int64_t first, int64_t last,
                   const double* inv_zeta, const Ending<Accumulator<T>>& ending) {
    with_ending(ending, [&](const auto& end) INLINE_LAMBDA {
        apply_scalars_of(g, u, z, samples, block, first, last, inv_zeta, end);
    });
}

#define INSTANTIATE(T)                                                                                                \
    template void apply(const Geometry&, const T*, T*, int64_t, int64_t, const Affine<Accumulator<T>>&, const double*, \
                        const Ending<Accumulator<T>>&, bool, int64_t);                                                \
    template void apply_grad(const Geometry&, const T*, const T*, T*, int64_t, int64_t,                               \
                             const Affine<Accumulator<T>>&, const double*, const Ending<Accumulator<T>>&,             \
                             const Accumulator<T>*, const Accumulator<T>*, const Accumulator<T>*, bool, int64_t);     \
    template void apply_scalars(const Geometry&, const Accumulator<T>*, T*, int64_t, int64_t, int64_t, int64_t, const double*, \
                                const Ending<Accumulator<T>>&);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bfloat16)
INSTANTIATE(float16)

}  // namespace ONLINENORM_ISA
}  // namespace onlinenorm
