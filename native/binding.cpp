// What Python sees of the engine: the C interface on a framework's tensors. They are read through the table of C
// functions that DLPack (1.3) has tensor types carry, so that this serves every framework, and every version of it,
// without being built against any.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>  // for DLPack's structs

#include <new>
#include <stdexcept>

#include "onlinenorm.h"
#include "steps.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace {

constexpr int64_t kKeepLockBelow = 1 << 16;  // work this small is over before another Python thread would run
constexpr int kCpu = 1;                      // DLPack's code of the device
constexpr uint32_t kDlpackMajor = 1;

// The table, as DLPack lays it out.
struct ExchangeTable {
    uint32_t major, minor;
    ExchangeTable* older;
    void *allocate, *export_owned, *import_owned;
    int (*describe)(void* object, nb::dlpack::dltensor* to);
    void* current_stream;
};

// A tensor on the CPU, as long as its object lives.
struct View {
    nb::dlpack::dltensor t;
    bool there = false;  // nothing is known of a tensor that cannot be read this way

    void* data() const { return there ? static_cast<char*>(t.data) + t.byte_offset : nullptr; }
    bool is(nb::dlpack::dtype_code code, int bits) const {
        return t.dtype.code == uint8_t(code) && t.dtype.bits == bits && t.dtype.lanes == 1;
    }
    int dtype() const {
        using Code = nb::dlpack::dtype_code;
        if (is(Code::Float, 32)) return ONLINENORM_FLOAT32;
        if (is(Code::Float, 64)) return ONLINENORM_FLOAT64;
        if (is(Code::Bfloat, 16)) return ONLINENORM_BFLOAT16;
        if (is(Code::Float, 16)) return ONLINENORM_FLOAT16;
        return -1;
    }
    int64_t size() const {
        int64_t n = 1;
        for (int i = 0; i < t.ndim; ++i) n *= t.shape[i];
        return n;
    }
    // Whether the scalars lie together, in the order of the dimensions or with dimension 1 innermost.
    bool lies(onlinenorm_layout layout) const {
        if (!t.strides) return layout == ONLINENORM_NCD;
        int64_t expected = 1;
        const auto in_place = [&](int i) {
            const bool ok = t.shape[i] == 1 || t.strides[i] == expected;
            expected *= t.shape[i];
            return ok;
        };
        if (layout == ONLINENORM_NDC && !in_place(1)) return false;
        for (int i = t.ndim - 1; i >= 0; --i) {
            if ((layout == ONLINENORM_NCD || i != 1) && !in_place(i)) return false;
        }
        return true;
    }
    bool is_vector(int64_t length) const { return t.ndim == 1 && t.shape[0] == length && lies(ONLINENORM_NCD); }
};

// The settings of a layer; each call adds its tensors.
class Layer {
public:
    Layer(nb::type_object tensor_type, double alpha_fwd, double alpha_bwd, double eps, int guard, double guard_eps,
          double clamp_value, bool warmup, bool bound_control, int activation)
        : tensor_type(tensor_type), settings(onlinenorm_layer_init(1, 1)) {
        settings.alpha_fwd = alpha_fwd;
        settings.alpha_bwd = alpha_bwd;
        settings.eps = eps;
        settings.guard = guard;
        settings.guard_eps = guard_eps;
        settings.clamp_value = clamp_value;
        settings.warmup = warmup;
        settings.bound_control = bound_control;
        settings.activation = activation;
        const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__");
        auto* table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (table && table->major > kDlpackMajor) table = table->older;
        if (PyErr_Occurred()) throw nb::python_error();
        if (!table || !table->describe) throw std::runtime_error("the tensors' DLPack exchange table is of no use");
        describe = table->describe;
    }

    // Whether the engine can work on these as they are.
    bool fits(nb::handle x, nb::handle mean, nb::handle var, nb::handle control_y, nb::handle control_1,
              nb::handle weight, nb::handle bias, nb::handle num_samples) const {
        const View v = read(x);
        if (!v.there || v.t.ndim < 2 || v.dtype() < 0 || v.size() == 0) return false;
        if (!v.lies(ONLINENORM_NCD) && !v.lies(ONLINENORM_NDC)) return false;
        const int64_t channels = v.t.shape[1];
        for (const nb::handle state : {mean, var, control_y, control_1}) {
            const View s = read(state);
            if (!s.there || s.dtype() != ONLINENORM_FLOAT64 || !s.is_vector(channels)) return false;
        }
        int param_dtype = -1;
        for (const nb::handle parameter : {weight, bias}) {
            if (parameter.is_none()) continue;
            const View p = read(parameter);
            if (!p.there || !p.is_vector(channels)) return false;
            if (p.dtype() != v.dtype() && p.dtype() != ONLINENORM_FLOAT32) return false;
            if (param_dtype >= 0 && p.dtype() != param_dtype) return false;
            param_dtype = p.dtype();
        }
        if (num_samples.is_none()) return true;
        const View n = read(num_samples);
        return n.there && n.is(nb::dlpack::dtype_code::Int, 64) && n.size() == 1;
    }

    size_t replay_bytes(nb::handle x) const {
        const onlinenorm_layer layer = on(read(x), View(), true, 1);
        return onlinenorm_replay_bytes(&layer);
    }

    void forward(bool training, int threads, nb::handle x, nb::handle weight, nb::handle bias, nb::handle mean,
                 nb::handle var, nb::handle num_samples, nb::handle z, nb::handle replay) const {
        const View from = read(x), gamma = read(weight), beta = read(bias), to = read(z);
        const View m = read(mean), v = read(var), n = read(num_samples), kept = read(replay);
        const onlinenorm_layer layer = on(from, gamma.there ? gamma : beta, training, threads);
        onlinenorm_state state{static_cast<double*>(m.data()), static_cast<double*>(v.data()), nullptr, nullptr,
                               static_cast<int64_t*>(n.data())};
        run(layer, [&] {
            return onlinenorm_forward(&layer, &state, from.data(), gamma.data(), beta.data(), to.data(), kept.data());
        });
    }

    void backward(bool training, int threads, nb::handle x, nb::handle grad_z, nb::handle weight, nb::handle bias,
                  nb::handle control_y, nb::handle control_1, nb::handle replay, nb::handle grad_x,
                  nb::handle grad_weight, nb::handle grad_bias) const {
        const View from = read(x), grad = read(grad_z), gamma = read(weight), beta = read(bias), kept = read(replay);
        const View ey = read(control_y), e1 = read(control_1);
        const View to = read(grad_x), grad_gamma = read(grad_weight), grad_beta = read(grad_bias);
        const onlinenorm_layer layer = on(from, gamma.there ? gamma : beta, training, threads);
        onlinenorm_state state{nullptr, nullptr, static_cast<double*>(ey.data()), static_cast<double*>(e1.data()),
                               nullptr};
        run(layer, [&] {
            return onlinenorm_backward(&layer, &state, from.data(), grad.data(), gamma.data(), beta.data(),
                                       kept.data(), to.data(), grad_gamma.data(), grad_beta.data());
        });
    }

private:
    nb::type_object tensor_type;
    onlinenorm_layer settings;
    int (*describe)(void*, nb::dlpack::dltensor*);

    // None, and whatever has no memory on the CPU, is not there.
    View read(nb::handle object) const {
        View view;
        if (!PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(tensor_type.ptr()))) return view;
        if (describe(object.ptr(), &view.t) != 0) {
            PyErr_Clear();
            return view;
        }
        view.there = view.t.device.device_type == kCpu && view.t.data;
        return view;
    }

    onlinenorm_layer on(const View& x, const View& parameter, bool training, int threads) const {
        if (!x.there || x.t.ndim < 2) throw std::invalid_argument("the engine cannot read this tensor");
        onlinenorm_layer layer = settings;
        layer.samples = x.t.shape[0];
        layer.channels = x.t.shape[1];
        layer.elements = layer.samples * layer.channels ? x.size() / (layer.samples * layer.channels) : 0;
        layer.layout = x.lies(ONLINENORM_NCD) ? ONLINENORM_NCD : ONLINENORM_NDC;
        layer.dtype = x.dtype();
        layer.param_dtype = parameter.there ? parameter.dtype() : layer.dtype;
        layer.training = training;
        layer.threads = threads;
        return layer;
    }

    template <class Body>
    static void run(const onlinenorm_layer& layer, const Body& body) {
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
};

template <class E>
E* at(uintptr_t address) {
    return reinterpret_cast<E*>(address);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The CPU engine (native/include/onlinenorm.h) on tensors.";
    nb::class_<Layer>(m, "Layer")
        .def(nb::init<nb::type_object, double, double, double, int, double, double, bool, bool, int>(), "tensor_type"_a, "alpha_fwd"_a,
             "alpha_bwd"_a, "eps"_a, "guard"_a, "guard_eps"_a, "clamp_value"_a, "warmup"_a, "bound_control"_a,
             "activation"_a)
        .def("fits", &Layer::fits, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
             nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("replay_bytes", &Layer::replay_bytes)
        .def("forward", &Layer::forward, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
             nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none())
        .def("backward", &Layer::backward, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none());
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
