// The engine: blocks of samples that fit in the cache go through moments, scan and apply while they are there.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <string>

#include "onlinenorm.h"
#include "pack.h"
#include "parallel.h"
#include "steps.h"

namespace onlinenorm {
namespace {

// ---- what this machine is

enum Isa { kBaseline, kAvx2, kAvx512 };

Isa detect_isa() {
    Isa best = kBaseline;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) best = kAvx2;
    if (best == kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        best = kAvx512;
    }
    if (const char* wanted = std::getenv("ONLINENORM_ISA")) {
        if (!std::strcmp(wanted, "baseline")) return kBaseline;
        if (!std::strcmp(wanted, "avx2") && best > kAvx2) return kAvx2;
    }
#endif
    return best;
}

const Isa isa = detect_isa();

// One of the steps, at the instruction set of this machine.
#if defined(__x86_64__)
#define STEP(name)                                               \
    ([](const auto&... a) INLINE_LAMBDA {                        \
        if (isa == kAvx512) return avx512::name(a...);           \
        if (isa == kAvx2) return avx2::name(a...);               \
        return baseline::name(a...);                             \
    })
#else
#define STEP(name) ([](const auto&... a) INLINE_LAMBDA { return baseline::name(a...); })
#endif

// Bytes of this machine's cache of a level. Where a virtual machine's share is smaller than the host's cache, sysfs
// knows and sysconf does not.
int64_t cache_bytes(int level, int64_t otherwise) {
    for (int index = 0; index < 8; ++index) {
        const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
        int found = 0;
        int64_t kibibytes = 0;
        std::ifstream(folder + "level") >> found;
        if (found == level && std::ifstream(folder + "size") >> kibibytes) otherwise = kibibytes << 10;
    }
    return otherwise;
}

const int64_t core_cache = cache_bytes(2, 512 << 10);
const int64_t last_cache = cache_bytes(3, 0);

constexpr int64_t kMostThreads = 1024;  // more than any machine has, and no more than OpenMP can start
constexpr int64_t kGrain = 16384;       // scalars that are worth another thread
constexpr int64_t kGrainScalars = 4096;  // the same where D = 1
constexpr int64_t kBlockScalars = 65536;  // scalars in a block where D = 1, whose coefficients are as large as they
constexpr int64_t kFusedScalars = 8192;  // scalars that stay in the innermost cache between two steps

// ---- scratch

// Hands out pieces of one buffer, which each thread keeps from call to call. A layout is a function that takes its
// pieces from a Scratch; it runs once to count and once to take.
class Scratch {
public:
    template <class Layout>
    static void provide(Layout layout) {
        Scratch counting{nullptr};
        layout(counting);
        thread_local std::unique_ptr<char[]> buffer;
        thread_local size_t capacity = 0;
        if (counting.used > capacity) {
            buffer.reset();
            capacity = 0;
            buffer.reset(new char[counting.used]);
            capacity = counting.used;
        }
        Scratch taking{buffer.get()};
        layout(taking);
    }
    template <class E>
    void take(E*& piece, int64_t count) {
        used = (used + 63) / 64 * 64;
        if (base) piece = reinterpret_cast<E*>(base + used);
        used += sizeof(E) * size_t(count);
    }
    template <class A>
    void take(Affine<A>& affine, int64_t count) {
        take(affine.shift, count);
        take(affine.scale, count);
        take(affine.offset, count);
    }

private:
    explicit Scratch(char* base) : base(base) {}
    char* base;
    size_t used = 64;  // room to align the buffer itself is not needed: loads are unaligned
};

// ---- parameters

// All of these are for channels [first, last), which are one thread's, and round last up to whole packs.

template <class P, class A>
void read_parameters_as(const void* from, int64_t channels, int64_t first, int64_t last, A otherwise, A* to) {
    for (int64_t c = first; c < last; c += kLanes) {
        const Pack<A> value = from ? narrow<A>(load_wide(static_cast<const P*>(from) + c, channels - c))
                                   : first_lanes(Pack<A>(otherwise), channels - c);
        store(to + c, value);
    }
}

template <class T, class A>
void read_parameters(const onlinenorm_layer& layer, const void* from, int64_t first, int64_t last, A otherwise, A* to) {
    const auto read = layer.param_dtype == layer.dtype ? read_parameters_as<T, A> : read_parameters_as<float, A>;
    read(from, layer.channels, first, last, otherwise, to);
}

template <class P>
void write_parameters_as(const double* from, int64_t channels, int64_t first, int64_t last, void* to) {
    for (int64_t c = first; c < last; c += kLanes) {
        store(static_cast<P*>(to) + c, narrow<Accumulator<P>>(load(from + c)), channels - c);
    }
}

template <class T>
void write_parameters(const onlinenorm_layer& layer, const double* from, int64_t first, int64_t last, void* to) {
    if (!to) return;
    const auto write = layer.param_dtype == layer.dtype ? write_parameters_as<T> : write_parameters_as<float>;
    write(from, layer.channels, first, last, to);
}

// Between the caller's state and scratch, or between two arrays of scratch.
void read_state(const double* from, int64_t channels, int64_t first, int64_t last, double padding, double* to) {
    for (int64_t c = first; c < last; c += kLanes) store(to + c, load(from + c, channels - c));
    if (channels < last) std::fill(to + channels, to + last, padding);
}
void write_state(const double* from, int64_t channels, int64_t first, int64_t last, double* to) {
    for (int64_t c = first; c < last; c += kLanes) store(to + c, load(from + c), channels - c);
}

// ---- the loop over blocks

// Whether a plane's two moments are small beside the plane, at most a twentieth. If not, the backward, which reads the
// plane anyway, takes them anew.
bool moments_are_kept(const Geometry& g, int64_t scalar_bytes) {
    const int64_t moment_bytes = scalar_bytes == sizeof(double) ? sizeof(double) : sizeof(float);
    return 2 * moment_bytes * 20 <= g.elements * scalar_bytes;
}

// What the forward leaves for the backward: the statistics and the count before the call, then the moments of every
// sample.
template <class A>
struct Replay {
    double *mean = nullptr, *var = nullptr;  // [padded]
    int64_t* num_samples = nullptr;
    A* moments = nullptr;                    // [N][2][padded]; null where they are not kept

    Replay(const Geometry& g, int64_t scalar_bytes, const void* buffer) {
        if (!buffer) return;
        mean = static_cast<double*>(const_cast<void*>(buffer));
        var = mean + g.padded;
        num_samples = reinterpret_cast<int64_t*>(var + g.padded);
        if (moments_are_kept(g, scalar_bytes)) moments = reinterpret_cast<A*>(num_samples + 1);
    }
    A* of(const Geometry& g, int64_t sample) const { return moments ? moments + 2 * sample * g.padded : nullptr; }
};

template <class T>
class Call {
    using A = Accumulator<T>;

public:
    explicit Call(const onlinenorm_layer& layer)
        : layer(layer),
          g{layer.channels, layer.elements, layer.layout == ONLINENORM_NDC},
          scaling(layer.guard == ONLINENORM_GUARD_LAYER_SCALING),
          ending{layer.guard == ONLINENORM_GUARD_CLAMP ? A(layer.clamp_value) : std::numeric_limits<A>::infinity(),
                 Activation(layer.activation)} {
        const int64_t worth = layer.samples * g.size / (g.elements == 1 ? kGrainScalars : kGrain);
        threads = worth < 1 ? 1 : int(smaller(worth, smaller(layer.threads, kMostThreads)));
    }

    void forward(onlinenorm_state& state, const T* x, const void* weight, const void* bias, T* z, void* replay_buffer) {
        const Replay<A> replay(g, sizeof(T), replay_buffer);
        const bool needs_moments = layer.training || scaling || replay.moments;
        const bool streaming = past_cache();
        block = block_for(streaming ? 1 : 2);
        const int64_t rows = block * g.padded;
        const int64_t num_samples = layer.warmup && layer.training ? *state.num_samples : 0;

        double *alpha, *mean, *var, *chunk_mean, *chunk_square, *square, *inv_zeta;
        A *gamma, *beta, *u;
        Affine<A> affine{};
        Scratch::provide([&](Scratch& s) {
            s.take(alpha, layer.samples);
            s.take(mean, g.padded);
            s.take(var, g.padded);
            s.take(gamma, g.padded);
            s.take(beta, g.padded);
            s.take(square, 2 * block * g.strips);
            s.take(inv_zeta, threads * block);
            if (g.elements == 1) return s.take(u, block * g.strips * kStrip);
            s.take(affine, rows);
            s.take(chunk_mean, rows * g.chunks);
            s.take(chunk_square, rows * g.chunks);
        });
        if (g.elements != 1) clear_padding(chunk_mean, chunk_square, rows * g.chunks);
        fill_decays(num_samples, alpha);
        if (replay.num_samples) *replay.num_samples = num_samples;

        in_parallel(threads, [&](const Team& team) {
            const Share strips(team, g.strips);
            const int64_t first = strips.first * kStrip, last = smaller(strips.last * kStrip, g.padded);
            read_state(state.mean, g.channels, first, last, 0, mean);
            read_state(state.var, g.channels, first, last, 1, var);
            read_parameters<T>(layer, weight, first, last, A(1), gamma);
            read_parameters<T>(layer, bias, first, last, A(0), beta);
            if (replay.mean) {
                write_state(mean, g.padded, first, last, replay.mean);
                write_state(var, g.padded, first, last, replay.var);
            }
            double* const zoom = inv_zeta + team.rank * block;
            if (!scaling) for (int64_t n = 0; n < block; ++n) zoom[n] = 1;

            for (int64_t start = 0, parity = 0; start < layer.samples; start += block, parity ^= 1) {
                const int64_t samples = smaller(block, layer.samples - start);
                const T* const from = x + start * g.size;
                T* const to = z + start * g.size;
                double* const squares = square + parity * block * g.strips;

                if (g.elements == 1) {
                    STEP(scan_scalars)(g, ScalarForward<T>{samples, block, g.channels, alpha + start, layer.eps,
                                                           layer.training != 0, mean, var, gamma, beta, from, u, squares},
                                       first, last);
                    if (scaling) {
                        team.barrier();
                        STEP(layer_scaling)(g, squares, samples, layer.guard_eps, zoom);
                    }
                    STEP(apply_scalars)(g, u, to, samples, block, first, last, zoom, ending);
                    continue;
                }

                StatisticsScan<A> scan = statistics(samples, alpha + start, mean, var, gamma, beta);
                StatisticsScan<A> coefficients = scan;  // what apply needs
                coefficients.normalise.shift = affine.shift;
                coefficients.affine = affine;
                // Without layer scaling no sample waits for itself, and one pass can serve moments and apply.
                const bool fused = !scaling && (block == 1 || !needs_moments);
                StatisticsScan<A>& moving = fused ? scan : coefficients;  // what needs the moments
                moving.chunk_mean = chunk_mean;
                moving.chunk_square = chunk_square;
                moving.keep = replay.of(g, start);
                moving.square = scaling ? squares : nullptr;
                coefficients.advance &= !fused;

                const Share units(team, samples * g.units);
                if (fused) {
                    STEP(scan_statistics)(g, coefficients, first, last);
                    team.barrier();
                    over_fused(units, [&](int64_t one, int64_t end) {
                        if (needs_moments) STEP(moments)(g, from, one, end, chunk_mean, chunk_square);
                        STEP(apply)(g, from, to, one, end, affine, zoom, ending, streaming, int64_t(0));
                    });
                    team.barrier();
                    if (needs_moments) STEP(scan_statistics)(g, scan, first, last);
                } else {
                    STEP(moments)(g, from, units.first, units.last, chunk_mean, chunk_square);
                    team.barrier();
                    STEP(scan_statistics)(g, coefficients, first, last);
                    team.barrier();
                    if (scaling) STEP(layer_scaling)(g, squares, samples, layer.guard_eps, zoom);
                    STEP(apply)(g, from, to, units.first, units.last, affine, zoom, ending, streaming, ahead_of(start));
                }
            }
            if (!layer.training) return;
            write_state(mean, g.channels, first, last, state.mean);
            write_state(var, g.channels, first, last, state.var);
        });
        if (layer.training && state.num_samples) *state.num_samples += layer.samples;
    }

    void backward(onlinenorm_state& state, const T* x, const T* grad_z, const void* weight, const void* bias,
                  const void* replay_buffer, T* grad_x, void* grad_weight, void* grad_bias) {
        const Replay<A> replay(g, sizeof(T), replay_buffer);
        const double decay = layer.training ? 1 - layer.alpha_bwd : 0;
        const bool streaming = past_cache();
        block = block_for(streaming ? 2 : 3);
        const int64_t rows = block * g.padded;

        struct Replayed {  // of one block; a block is replayed while the one before it is still in use
            Affine<A> normalise, affine;
            double *y1, *y2, *square, *product;
            A *y, *inv;
        } replayed[2];
        double *alpha, *mean, *var, *control_y, *control_1, *grad_gamma, *grad_beta, *inv_zeta, *common;
        double *chunk_grad, *chunk_product, *chunk_mean, *chunk_square;
        A *gamma, *beta, *grad_scale, *x_scale, *grad_offset, *passed = nullptr;
        Scratch::provide([&](Scratch& s) {
            s.take(alpha, layer.samples);
            for (double** stream : {&mean, &var, &control_y, &control_1, &grad_gamma, &grad_beta}) {
                s.take(*stream, g.padded);
            }
            s.take(gamma, g.padded);
            s.take(beta, g.padded);
            s.take(inv_zeta, threads * block);
            s.take(common, threads * block);
            for (Replayed& r : replayed) {
                s.take(r.square, block * g.strips);
                if (g.elements == 1) {
                    s.take(r.product, block * g.strips);
                    s.take(r.y, block * g.strips * kStrip);
                    s.take(r.inv, block * g.strips * kStrip);
                } else {
                    s.take(r.normalise, rows);
                    s.take(r.affine, rows);
                    s.take(r.y1, rows);
                    s.take(r.y2, rows);
                }
            }
            if (g.elements == 1) return ending.looks() ? s.take(passed, block * g.strips * kStrip) : void();
            s.take(chunk_grad, rows * g.chunks);
            s.take(chunk_product, rows * g.chunks);
            for (A** coefficient : {&grad_scale, &x_scale, &grad_offset}) s.take(*coefficient, rows);
            if (replay.moments) return;
            s.take(chunk_mean, rows * g.chunks);
            s.take(chunk_square, rows * g.chunks);
        });
        if (g.elements != 1) clear_padding(chunk_grad, chunk_product, rows * g.chunks);
        if (g.elements != 1 && !replay.moments) clear_padding(chunk_mean, chunk_square, rows * g.chunks);
        fill_decays(*replay.num_samples, alpha);

        in_parallel(threads, [&](const Team& team) {
            const Share strips(team, g.strips);
            const int64_t first = strips.first * kStrip, last = smaller(strips.last * kStrip, g.padded);
            read_state(replay.mean, g.padded, first, last, 0, mean);
            read_state(replay.var, g.padded, first, last, 1, var);
            read_state(state.control_y, g.channels, first, last, 0, control_y);
            read_state(state.control_1, g.channels, first, last, 0, control_1);
            read_parameters<T>(layer, weight, first, last, A(1), gamma);
            read_parameters<T>(layer, bias, first, last, A(0), beta);
            std::fill(grad_gamma + first, grad_gamma + last, 0);
            std::fill(grad_beta + first, grad_beta + last, 0);
            double *const zoom = inv_zeta + team.rank * block, *const pull = common + team.rank * block;
            for (int64_t n = 0; n < block; ++n) {
                zoom[n] = 1;
                pull[n] = 0;
            }
            const auto samples_from = [&](int64_t start) { return smaller(block, layer.samples - start); };

            const auto replay_block = [&](int64_t start, Replayed& r) {
                StatisticsScan<A> scan = statistics(samples_from(start), alpha + start, mean, var, gamma, beta);
                scan.moments = replay.of(g, start);
                if (!scan.moments) {
                    const Share units(team, scan.samples * g.units);
                    STEP(moments)(g, x + start * g.size, units.first, units.last, chunk_mean, chunk_square);
                    team.barrier();
                    scan.chunk_mean = chunk_mean;
                    scan.chunk_square = chunk_square;
                }
                scan.normalise = r.normalise;
                if (ending.looks()) scan.affine = r.affine;
                scan.y1 = r.y1;
                scan.y2 = r.y2;
                scan.square = scaling ? r.square : nullptr;
                STEP(scan_statistics)(g, scan, first, last);
            };
            if (g.elements != 1) replay_block(0, replayed[0]);

            for (int64_t start = 0, parity = 0; start < layer.samples; start += block, parity ^= 1) {
                const int64_t samples = samples_from(start);
                const T *const from = x + start * g.size, *const grads = grad_z + start * g.size;
                T* const to = grad_x ? grad_x + start * g.size : nullptr;
                Replayed& r = replayed[parity];

                if (g.elements == 1) {
                    const ScalarForward<T> again{samples, block, g.channels, alpha + start, layer.eps, layer.training != 0,
                                                 mean, var, gamma, beta, from, nullptr, r.square};
                    const ScalarBackward<T> control{samples, block, g.channels, decay, layer.training != 0,
                                                    layer.bound_control != 0, gamma, beta, r.y, r.inv, grads, zoom, pull,
                                                    control_y, control_1, grad_gamma, grad_beta, to, passed};
                    STEP(replay_scalars)(g, ScalarReplay<T>{again, grads, r.y, r.inv, r.product}, first, last);
                    if (scaling) {
                        team.barrier();
                        STEP(layer_scaling)(g, r.square, samples, layer.guard_eps, zoom);
                    }
                    if (passed) STEP(pass_back_scalars)(g, control, ending, first, last, r.product);
                    if (scaling) {
                        if (passed) team.barrier();
                        STEP(common_of_strips)(g, r.product, samples, zoom, pull);
                    }
                    STEP(control_scalars)(g, control, first, last);
                    continue;
                }

                ControlScan<A> control{};
                control.samples = samples;
                control.decay = decay;
                control.advance = layer.training;
                control.bound = layer.bound_control;
                control.gamma = gamma;
                control.beta = beta;
                control.normalise = r.normalise;
                control.y1 = r.y1;
                control.y2 = r.y2;
                control.inv_zeta = zoom;
                control.common = pull;
                control.control_y = control_y;
                control.control_1 = control_1;
                control.grad_gamma = grad_gamma;
                control.grad_beta = grad_beta;
                control.grad_scale = grad_scale;
                control.x_scale = x_scale;
                control.grad_offset = grad_offset;
                ControlScan<A> coefficients = control;
                control.chunk_grad = chunk_grad;
                control.chunk_product = chunk_product;

                Affine<A> passing = r.affine;  // to what clamp and activation saw
                passing.shift = r.normalise.shift;
                const auto reduce = [&](int64_t one, int64_t end) {
                    STEP(grad_moments)(g, from, grads, one, end, passing, zoom, ending, chunk_grad, chunk_product);
                };
                const auto apply_to = [&](int64_t one, int64_t end, int64_t ahead) {
                    STEP(apply_grad)(g, from, grads, to, one, end, passing, zoom, ending, grad_scale, x_scale,
                                     grad_offset, streaming, ahead);
                };
                const auto replay_next = [&] {
                    if (start + block < layer.samples) replay_block(start + block, replayed[parity ^ 1]);
                };

                const Share units(team, samples * g.units);
                if (!scaling && block == 1 && grad_x) {
                    STEP(scan_control)(g, coefficients, first, last);
                    team.barrier();
                    over_fused(units, [&](int64_t one, int64_t end) {
                        reduce(one, end);
                        apply_to(one, end, 0);
                    });
                    team.barrier();
                    STEP(scan_control)(g, control, first, last);
                    replay_next();
                } else {
                    if (start == 0) team.barrier();  // the first replay
                    if (scaling) STEP(layer_scaling)(g, r.square, samples, layer.guard_eps, zoom);
                    reduce(units.first, units.last);
                    team.barrier();
                    if (scaling) STEP(control_common)(g, control, pull);
                    STEP(scan_control)(g, control, first, last);
                    replay_next();
                    team.barrier();
                    if (grad_x) apply_to(units.first, units.last, ahead_of(start));
                }
            }
            write_parameters<T>(layer, grad_gamma, first, last, grad_weight);
            write_parameters<T>(layer, grad_beta, first, last, grad_bias);
            if (!layer.training) return;
            write_state(control_y, g.channels, first, last, state.control_y);
            write_state(control_1, g.channels, first, last, state.control_1);
        });
    }

private:
    const onlinenorm_layer& layer;
    const Geometry g;
    const bool scaling;
    const Ending<A> ending;
    int threads;
    int64_t block;

    // The decay that each sample averages with; while warming up, sample t counts as much as each of the t before it and
    // as the initial state.
    void fill_decays(int64_t num_samples, double* alpha) const {
        std::fill(alpha, alpha + layer.samples, layer.alpha_fwd);
        if (!layer.warmup) return;
        for (int64_t n = 0; n < layer.samples; ++n) {
            alpha[n] = std::min(layer.alpha_fwd, 1 - 1 / (double(num_samples + n) + 2));
        }
    }

    StatisticsScan<A> statistics(int64_t samples, const double* alpha, double* mean, double* var, const A* gamma,
                                 const A* beta) const {
        StatisticsScan<A> scan{};
        scan.samples = samples;
        scan.alpha = alpha;
        scan.eps = layer.eps;
        scan.advance = layer.training;
        scan.mean = mean;
        scan.var = var;
        scan.gamma = gamma;
        scan.beta = beta;
        return scan;
    }

    // Whether x, z and their gradients are more than the caches hold together. What is written then goes past them: it
    // would be gone from there before anyone reads it, and take the place of what is still to be read.
    bool past_cache() const {
        return 4 * layer.samples * g.size * int64_t(sizeof(T)) > usable(std::max(last_cache, layer.threads * core_cache));
    }

    // Scalars to the block after the one that starts at a sample, where that one is not in the caches yet.
    int64_t ahead_of(int64_t start) const { return past_cache() && start + block < layer.samples ? block * g.size : 0; }

    // Bytes of a cache that are there for the tensors, and those of the cores' own.
    static int64_t usable(int64_t cache) { return cache * 3 / 4; }
    static int64_t cache_of(int64_t cores) { return usable(cores * core_cache); }

    // Samples whose tensors fit there together.
    int64_t block_for(int64_t tensors) const {
        if (g.elements == 1) return smaller(ceil_div(kBlockScalars, g.padded), layer.samples);
        const int64_t bytes = g.size * int64_t(sizeof(T)) * tensors;
        const int64_t fit = cache_of(threads) / bytes;
        return fit < 1 ? 1 : smaller(fit, layer.samples);
    }

    // Planes write no more than their own channel; the rest of a pack has to be zero.
    void clear_padding(double* a, double* b, int64_t count) const {
        if (g.padded == g.channels) return;
        std::memset(a, 0, size_t(count) * sizeof(double));
        std::memset(b, 0, size_t(count) * sizeof(double));
    }

    // Both steps on a piece that stays in the innermost cache, then the next piece.
    template <class Body>
    void over_fused(const Share& units, const Body& body) const {
        const int64_t scalars = g.channels_last ? g.chunk * smaller(kStrip, g.channels) : g.chunk_elements(0);
        const int64_t step = scalars < kFusedScalars ? kFusedScalars / scalars : 1;
        for (int64_t one = units.first; one < units.last; one += step) body(one, smaller(one + step, units.last));
    }
};

// ---- checks, and from enumerators to types

bool between(int64_t low, int64_t value, int64_t high) { return low <= value && value <= high; }
bool decay(double alpha) { return alpha >= 0 && alpha < 1; }
bool finite_and_not_negative(double value) { return value >= 0 && std::isfinite(value); }

// Sizes are allowed as long as no count of bytes, scratch included, can overflow.
bool sizes_fit(const onlinenorm_layer& l) {
    constexpr int64_t most = int64_t(1) << 52;
    if (!between(0, l.samples, most) || !between(1, l.channels, most) || !between(0, l.elements, most)) return false;
    const double padded = double(l.channels) + kStrip, elements = l.elements > 0 ? double(l.elements) : 1;
    return padded * elements * (double(l.samples) + 1) <= double(most);
}

bool valid(const onlinenorm_layer* layer) {
    if (!layer) return false;
    const onlinenorm_layer& l = *layer;
    return sizes_fit(l) && between(ONLINENORM_NCD, l.layout, ONLINENORM_NDC) &&
           between(ONLINENORM_FLOAT32, l.dtype, ONLINENORM_FLOAT16) &&
           (l.param_dtype == l.dtype || l.param_dtype == ONLINENORM_FLOAT32) &&
           between(ONLINENORM_GUARD_NONE, l.guard, ONLINENORM_GUARD_CLAMP) &&
           between(ONLINENORM_NO_ACTIVATION, l.activation, ONLINENORM_GELU) && l.threads >= 1 && decay(l.alpha_fwd) &&
           decay(l.alpha_bwd) && finite_and_not_negative(l.eps) && finite_and_not_negative(l.guard_eps) &&
           finite_and_not_negative(l.clamp_value) && l.clamp_value > 0;
}

template <class Body>
onlinenorm_status with_type(const onlinenorm_layer& layer, const Body& body) {
    try {
        switch (layer.dtype) {
            case ONLINENORM_FLOAT32: body(float{}); break;
            case ONLINENORM_FLOAT64: body(double{}); break;
            case ONLINENORM_BFLOAT16: body(bfloat16{}); break;
            case ONLINENORM_FLOAT16: body(float16{}); break;
        }
    } catch (const std::bad_alloc&) {
        return ONLINENORM_OUT_OF_MEMORY;
    }
    return ONLINENORM_OK;
}

int64_t scalar_bytes(int32_t dtype) { return dtype == ONLINENORM_FLOAT64 ? 8 : dtype == ONLINENORM_FLOAT32 ? 4 : 2; }

bool empty(const onlinenorm_layer& layer) { return layer.samples == 0 || layer.elements == 0; }

}  // namespace

void floor_forward(const float* a, float* out, int64_t count, int threads, bool streaming) {
    in_parallel(threads, [&](const Team& team) {
        const Share part(team, count / kLanes);
        STEP(read_one_write_one)(a + part.first * kLanes, out + part.first * kLanes,
                                 (part.last - part.first) * kLanes, streaming);
    });
}

void floor_backward(const float* a, const float* b, float* out, int64_t count, int threads, bool streaming) {
    in_parallel(threads, [&](const Team& team) {
        const Share part(team, count / kLanes);
        STEP(read_two_write_one)(a + part.first * kLanes, b + part.first * kLanes, out + part.first * kLanes,
                                 (part.last - part.first) * kLanes, streaming);
    });
}

}  // namespace onlinenorm

using namespace onlinenorm;

onlinenorm_layer onlinenorm_layer_init(int64_t channels, int64_t elements) {
    onlinenorm_layer layer{};
    layer.samples = 1;
    layer.channels = channels;
    layer.elements = elements;
    layer.layout = ONLINENORM_NCD;
    layer.dtype = layer.param_dtype = ONLINENORM_FLOAT32;
    layer.guard = ONLINENORM_GUARD_LAYER_SCALING;
    layer.training = 1;
    layer.threads = 1;
    layer.alpha_fwd = 0.999;
    layer.alpha_bwd = 0.99;
    layer.eps = layer.guard_eps = 1e-5;
    layer.clamp_value = 5;
    return layer;
}

size_t onlinenorm_replay_bytes(const onlinenorm_layer* layer) {
    if (!valid(layer) || empty(*layer)) return 0;
    const Geometry g{layer->channels, layer->elements, layer->layout == ONLINENORM_NDC};
    const size_t scalar = layer->dtype == ONLINENORM_FLOAT64 ? sizeof(double) : sizeof(float);
    const size_t moments = moments_are_kept(g, scalar_bytes(layer->dtype)) ? 2 * size_t(layer->samples) * scalar : 0;
    return size_t(g.padded) * (2 * sizeof(double) + moments) + sizeof(int64_t);
}

onlinenorm_status onlinenorm_forward(const onlinenorm_layer* layer, onlinenorm_state* state, const void* x,
                                     const void* weight, const void* bias, void* z, void* replay) {
    if (!valid(layer) || !state || !state->mean || !state->var) return ONLINENORM_BAD_ARGUMENT;
    if (layer->warmup && layer->training && !(state->num_samples && *state->num_samples >= 0)) return ONLINENORM_BAD_ARGUMENT;
    if (empty(*layer)) return ONLINENORM_OK;
    if (!x || !z) return ONLINENORM_BAD_ARGUMENT;
    return with_type(*layer, [&](auto type) {
        using T = decltype(type);
        Call<T>(*layer).forward(*state, static_cast<const T*>(x), weight, bias, static_cast<T*>(z), replay);
    });
}

onlinenorm_status onlinenorm_backward(const onlinenorm_layer* layer, onlinenorm_state* state, const void* x,
                                      const void* grad_z, const void* weight, const void* bias, const void* replay,
                                      void* grad_x, void* grad_weight, void* grad_bias) {
    if (!valid(layer) || !state || !state->control_y || !state->control_1) return ONLINENORM_BAD_ARGUMENT;
    if (empty(*layer)) {
        const size_t scalar = size_t(scalar_bytes(layer->param_dtype));
        if (grad_weight) std::memset(grad_weight, 0, size_t(layer->channels) * scalar);
        if (grad_bias) std::memset(grad_bias, 0, size_t(layer->channels) * scalar);
        return ONLINENORM_OK;
    }
    if (!x || !grad_z || !replay) return ONLINENORM_BAD_ARGUMENT;
    return with_type(*layer, [&](auto type) {
        using T = decltype(type);
        Call<T>(*layer).backward(*state, static_cast<const T*>(x), static_cast<const T*>(grad_z), weight, bias, replay,
                                 static_cast<T*>(grad_x), grad_weight, grad_bias);
    });
}

const char* onlinenorm_status_text(onlinenorm_status status) {
    switch (status) {
        case ONLINENORM_OK: return "ok";
        case ONLINENORM_BAD_ARGUMENT: return "an argument is out of range or missing";
        case ONLINENORM_OUT_OF_MEMORY: return "out of memory";
    }
    return "unknown status";
}

const char* onlinenorm_isa(void) {
    return isa == kAvx512 ? "avx512" : isa == kAvx2 ? "avx2" : "baseline";
}
