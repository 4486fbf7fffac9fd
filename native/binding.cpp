// What Python sees of the engine: the C interface on plain addresses, so that it serves every framework alike.
#include <nanobind/nanobind.h>

#include <new>
#include <stdexcept>

#include "onlinenorm.h"
#include "steps.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

constexpr int64_t kKeepLockBelow = 1 << 16;  // work this small is over before another Python thread would run

template <class Body>
void run(const onlinenorm_layer& layer, const Body& body) {
    onlinenorm_status status;
    if (layer.samples * layer.channels * layer.elements < kKeepLockBelow) {
        status = body();
    } else {
        nb::gil_scoped_release release;
        status = body();
    }
    if (status == ONLINENORM_OUT_OF_MEMORY) throw std::bad_alloc();
    if (status != ONLINENORM_OK) throw std::invalid_argument(onlinenorm_status_text(status));
}

template <class E = void>
E* at(uintptr_t address) {
    return reinterpret_cast<E*>(address);
}

// The settings of a layer; each call adds its shape.
struct Layer {
    onlinenorm_layer settings;

    Layer(int64_t channels, double alpha_fwd, double alpha_bwd, double eps, int guard, double guard_eps,
          double clamp_value)
        : settings(onlinenorm_layer_init(channels, 1)) {
        settings.alpha_fwd = alpha_fwd;
        settings.alpha_bwd = alpha_bwd;
        settings.eps = eps;
        settings.guard = guard;
        settings.guard_eps = guard_eps;
        settings.clamp_value = clamp_value;
    }

    onlinenorm_layer on(int64_t samples, int64_t elements, int layout, int dtype, int param_dtype, bool training,
                        int threads) const {
        onlinenorm_layer layer = settings;
        layer.samples = samples;
        layer.elements = elements;
        layer.layout = layout;
        layer.dtype = dtype;
        layer.param_dtype = param_dtype;
        layer.training = training;
        layer.threads = threads;
        return layer;
    }

    size_t replay_bytes(int64_t samples, int64_t elements, int dtype) const {
        const onlinenorm_layer layer = on(samples, elements, ONLINENORM_NCD, dtype, dtype, true, 1);
        return onlinenorm_replay_bytes(&layer);
    }

    void forward(int64_t samples, int64_t elements, int layout, int dtype, int param_dtype, bool training, int threads,
                 uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t mean, uintptr_t var, uintptr_t num_samples,
                 uintptr_t z, uintptr_t replay) const {
        const onlinenorm_layer layer = on(samples, elements, layout, dtype, param_dtype, training, threads);
        onlinenorm_state state{at<double>(mean), at<double>(var), nullptr, nullptr, at<int64_t>(num_samples)};
        run(layer, [&] { return onlinenorm_forward(&layer, &state, at(x), at(weight), at(bias), at(z), at(replay)); });
    }

    void backward(int64_t samples, int64_t elements, int layout, int dtype, int param_dtype, bool training, int threads,
                  uintptr_t x, uintptr_t grad_z, uintptr_t weight, uintptr_t bias, uintptr_t control_y,
                  uintptr_t control_1, uintptr_t replay, uintptr_t grad_x, uintptr_t grad_weight,
                  uintptr_t grad_bias) const {
        const onlinenorm_layer layer = on(samples, elements, layout, dtype, param_dtype, training, threads);
        onlinenorm_state state{nullptr, nullptr, at<double>(control_y), at<double>(control_1), nullptr};
        run(layer, [&] {
            return onlinenorm_backward(&layer, &state, at(x), at(grad_z), at(weight), at(bias), at(replay), at(grad_x),
                                       at(grad_weight), at(grad_bias));
        });
    }
};

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The CPU engine (native/include/onlinenorm.h) on plain addresses.";
    nb::class_<Layer>(m, "Layer")
        .def(nb::init<int64_t, double, double, double, int, double, double>(), "channels"_a, "alpha_fwd"_a,
             "alpha_bwd"_a, "eps"_a, "guard"_a, "guard_eps"_a, "clamp_value"_a)
        .def("replay_bytes", &Layer::replay_bytes)
        .def("forward", &Layer::forward)
        .def("backward", &Layer::backward);
    m.def("isa", &onlinenorm_isa, "The SIMD level in use.");
    m.def(
        "floor_forward",
        [](uintptr_t source, uintptr_t to, int64_t bytes, int threads, bool streaming) {
            onlinenorm::floor_forward(at<float>(source), at<float>(to), bytes / 4, threads, streaming);
        },
        "Read one, write one: the least that a forward has to move.", nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "floor_backward",
        [](uintptr_t first, uintptr_t second, uintptr_t to, int64_t bytes, int threads, bool streaming) {
            onlinenorm::floor_backward(at<float>(first), at<float>(second), at<float>(to), bytes / 4, threads,
                                       streaming);
        },
        "Read two, write one: the least that a backward has to move.", nb::call_guard<nb::gil_scoped_release>());
}
