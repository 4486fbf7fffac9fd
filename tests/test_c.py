"""The C library as a C user meets it: built, installed, linked, called; and its numbers against the reference."""

import copy
import ctypes
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onlinenorm.reference import OnlineNorm as Reference

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "c"
PAGE = ROOT / "docs" / "c.md"
CC = shlex.split(os.environ.get("CC", "cc"))
CXX = shlex.split(os.environ.get("CXX", "c++"))
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]

OK, BAD_ARGUMENT = 0, 1
FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)
NCD, NDC = range(2)
GUARDS = (None, "layer_scaling", "clamp")  # in the order of onlinenorm_guard
STATE = {"mean": "running_mean", "var": "running_var", "control_y": "control_y", "control_1": "control_1"}
NUMPY = {FLOAT32: np.float32, FLOAT64: np.float64, BFLOAT16: np.uint16, FLOAT16: np.float16}
# What rounding costs, relative to the largest value: what is stored in the type, and what is summed on the way there.
STORED = {FLOAT32: 1e-5, FLOAT64: 1e-12, BFLOAT16: 1e-2, FLOAT16: 1e-3}
SUMMED = {FLOAT32: 2e-5, FLOAT64: 1e-12, BFLOAT16: 2e-5, FLOAT16: 2e-5}


# ---- built once


def run(*command, **settings):
    """Run a command to its end; its output. If it fails, the test says what it was and what it printed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **settings)
    said = f"{shlex.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert done.returncode == 0, said
    return done.stdout


def cmake():
    beside = Path(sys.executable).with_name("cmake")
    found = shutil.which("cmake") or (str(beside) if beside.exists() else None)
    for what, there in (("CMake", found), ("C compiler", shutil.which(CC[0])), ("C++ compiler", shutil.which(CXX[0]))):
        if not there:
            pytest.skip(f"no {what} on this machine")
    return found


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """Where the library is installed, from its sources."""
    tool, build, prefix = cmake(), tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("prefix")
    run(tool, "-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_INSTALL_PREFIX={prefix}")
    run(tool, "--build", build, "-j2")
    run(tool, "--install", build)
    return prefix


@pytest.fixture(scope="session")
def shared(prefix):
    """The library's file."""
    found = [path for suffix in (".so", ".dylib") for path in prefix.glob(f"lib*/libonlinenorm{suffix}")]
    assert found, f"no library among {sorted(path.name for path in prefix.rglob('*'))}"
    return found[0]


@pytest.fixture(scope="session")
def compile_c(prefix, shared):
    """Compile and link a C program against the installed library without CMake, every warning an error."""

    def compile_c(source, program, *flags):
        where = [f"-I{prefix}/include", f"-L{shared.parent}", f"-Wl,-rpath,{shared.parent}"]
        run(*CC, "-std=c99", "-O1", *STRICT, *flags, source, *where, "-lonlinenorm", "-o", program)
        return program

    return compile_c


# ---- what is installed


def test_what_is_installed(prefix, shared):
    assert (prefix / "include" / "onlinenorm.h").is_file()
    for name in ("onlinenorm-config.cmake", "onlinenorm-config-version.cmake"):
        assert (shared.parent / "cmake" / "onlinenorm" / name).is_file()


@pytest.mark.parametrize(
    ("compiler", "language"),
    [
        ([*CC, "-std=c99", "-Wstrict-prototypes", "-x", "c"], "C99"),
        ([*CXX, "-std=c++17", "-x", "c++"], "C++17"),
    ],
    ids=["c99", "c++17"],
)
def test_the_header_stands_alone(compiler, language, prefix, tmp_path):
    source = tmp_path / "only_the_header"
    source.write_text("#include <onlinenorm.h>\n#include <onlinenorm.h>\nint main(void) { return ONLINENORM_OK; }\n")
    run(*compiler, *STRICT, "-fsyntax-only", f"-I{prefix}/include", source)


def test_the_library_exports_what_the_header_declares(prefix, shared):
    if not shutil.which("nm") or shared.suffix != ".so":
        pytest.skip("no nm, or not an ELF library")
    header = (prefix / "include" / "onlinenorm.h").read_text()
    declared = set(re.findall(r"\bONLINENORM_API\s[\w\s]+?\*?\s?(onlinenorm_\w+)\(", header))
    lines = [line.split() for line in run("nm", "-D", "--defined-only", shared).splitlines()]
    # Templates of the C++ standard library are weak, and their namespace makes them visible whatever we ask for.
    exported = {name for *_, kind, name in lines if not (kind in "WVu" and re.match(r"_Z(GV|T[VIS])?N?K?S", name))}
    assert "onlinenorm_neuron_backward" in declared, "the header is not read as it should be"
    assert exported == declared, f"exported and declared differ in {sorted(exported ^ declared)}"


# ---- the example, and the page's program


@pytest.fixture(scope="session", params=[FLOAT32, FLOAT64], ids=["cmake-float", "cc-double"])
def stream(request, prefix, compile_c, tmp_path_factory):
    """The example, built in one of the two ways that it tells, and its type."""
    folder = tmp_path_factory.mktemp("stream")
    if request.param == FLOAT64:
        return compile_c(EXAMPLE / "stream.c", folder / "stream", "-DDOUBLE"), request.param
    tool = cmake()
    run(tool, "-S", EXAMPLE, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_C_FLAGS={' '.join(STRICT)}")
    run(tool, "--build", folder)
    return folder / "stream", request.param


@pytest.fixture(scope="session")
def told(stream, tmp_path_factory):
    """What the example prints, and its trace: what stands in the lines of one name, as rows."""
    trace = tmp_path_factory.mktemp("trace") / "trace"
    printed = run(stream[0], trace)
    rows = {}
    for line in trace.read_text().splitlines():
        name, *values = line.split()
        rows.setdefault(name, []).append(values)
    return printed, {name: np.array(values, dtype=np.float64) for name, values in rows.items()}


def test_the_example_learns(told):
    rows = np.array([line.replace("%", "").split() for line in told[0].splitlines()[1:]], dtype=float)
    sides, differences = rows[:, 1], rows[:, 2]
    assert sides[0] > 40, "the first guesses should be little better than a coin's"
    for last in (len(rows) // 2 - 1, len(rows) - 1):  # before the sensors are exchanged, and at the end
        assert sides[last] < 12, f"the layers have not learnt:\n{told[0]}"
        assert differences[last] < 0.1 * differences[0], f"the neuron has not learnt:\n{told[0]}"


@pytest.mark.parametrize(("layer", "guard"), [("readings", "clamp"), ("hidden", "layer_scaling")])
def test_the_example_against_the_reference(stream, told, layer, guard):
    traced = {name.split(".")[1]: rows for name, rows in told[1].items() if name.startswith(layer + ".")}
    steps, channels = traced["x"].shape
    assert steps > 1000, "the trace is not whole"
    reference = Reference(channels, alpha_fwd=0.99, alpha_bwd=0.9, guard=guard)
    expected = {name: np.empty((steps, channels)) for name in ("z", "grad_x", "grad_weight", "grad_bias")}
    for step in range(steps):
        reference.weight, reference.bias = traced["weight"][step], traced["bias"][step]
        reference.weight_grad, reference.bias_grad = np.zeros(channels), np.zeros(channels)
        expected["z"][step] = reference.forward(traced["x"][step : step + 1])[0]
        expected["grad_x"][step] = reference.backward(traced["grad_z"][step : step + 1])[0]
        expected["grad_weight"][step] = reference.weight_grad
        expected["grad_bias"][step] = reference.bias_grad
    for name, attribute in STATE.items():
        expected[name] = getattr(reference, attribute)[None]
    for name, values in expected.items():
        tolerance = 100 * STORED[stream[1]]  # the sensors are far from zero, and 6000 roundings of their means add up
        assert_close(f"{layer}.{name}", traced[name], values, tolerance, np.abs(values).max(axis=0))


def test_the_example_s_neuron_against_the_reference(told):
    reference = Reference(1, alpha_fwd=0.99, alpha_bwd=0.9, guard=None, affine=False)
    steps = told[1]["neuron.step"]
    for x, y, grad_y, grad_x in steps:
        assert reference.forward([[x]]) == pytest.approx(y, rel=1e-12)
        assert reference.backward([[grad_y]]) == pytest.approx(grad_x, rel=1e-12)
    state = [getattr(reference, name)[0] for name in STATE.values()]
    assert told[1]["neuron.state"][0] == pytest.approx(state, rel=1e-12)


def test_the_example_on_every_instruction_set(stream, tmp_path):
    traces = {}
    for isa in ("baseline", "avx2", "avx512"):
        run(stream[0], tmp_path / isa, env={**os.environ, "ONLINENORM_ISA": isa})
        traces[isa] = (tmp_path / isa).read_bytes()
    assert len(set(traces.values())) == 1, "the instruction set changes the numbers"


def test_the_example_says_what_is_wrong(stream, tmp_path):
    done = subprocess.run([stream[0], tmp_path / "no" / "folder"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr


def test_the_page_s_program(compile_c, tmp_path):
    source = tmp_path / "page.c"
    source.write_text(re.search(r"```c\n(#include.*?)```", PAGE.read_text(), re.DOTALL)[1])
    assert run(compile_c(source, tmp_path / "page")) == "ok\n"


# ---- the interface, from Python


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("samples", "channels", "elements")),
        *((name, ctypes.c_int32) for name in ("layout", "dtype", "param_dtype", "guard", "training")),
        *((name, ctypes.c_int32) for name in ("warmup", "bound_control", "activation", "threads")),
        *((name, ctypes.c_double) for name in ("alpha_fwd", "alpha_bwd", "eps", "guard_eps", "clamp_value")),
    ]


class State(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*STATE, "num_samples")]


class Neuron(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("alpha_fwd", "alpha_bwd", "eps", *STATE, "y", "sigma")]


@pytest.fixture(scope="session")
def library(shared):
    """The library's functions, with their types."""
    library = ctypes.CDLL(str(shared))
    double, pointer, layer = ctypes.c_double, ctypes.c_void_p, ctypes.POINTER(Layer)
    neuron = ctypes.POINTER(Neuron)
    for name, result, arguments in [
        ("layer_init", Layer, [ctypes.c_int64, ctypes.c_int64]),
        ("replay_bytes", ctypes.c_size_t, [layer]),
        ("forward", ctypes.c_int, [layer, ctypes.POINTER(State), *[pointer] * 5]),
        ("backward", ctypes.c_int, [layer, ctypes.POINTER(State), *[pointer] * 8]),
        ("status_text", ctypes.c_char_p, [ctypes.c_int]),
        ("isa", ctypes.c_char_p, []),
        ("neuron_init", Neuron, [double, double, double]),
        ("neuron_forward", double, [neuron, double]),
        ("neuron_backward", double, [neuron, double]),
    ]:
        function = getattr(library, f"onlinenorm_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def encode(values, dtype):
    """What is stored of `values` in a type; bfloat16, which NumPy has not, as the upper halves of float32."""
    if dtype != BFLOAT16:
        return np.array(values, dtype=NUMPY[dtype], order="C")
    bits = np.array(values, dtype=np.float32, order="C").view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(stored, dtype):
    return (stored.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16 else stored.astype(np.float64)


def rounded(values, dtype):
    return decode(encode(values, dtype), dtype).astype(np.float64)


def address(array):
    return None if array is None else array.ctypes.data


class Subject:
    """A layer of the C library on arrays of its own. Tensors come and go as float64 (N, C, D)."""

    def __init__(self, library, channels, dtype=FLOAT32, *, param_dtype=None, weight=None, bias=None, **settings):
        self.library = library
        self.layer = library.onlinenorm_layer_init(channels, 1)
        self.layer.dtype = dtype
        self.layer.param_dtype = dtype if param_dtype is None else param_dtype
        for name, value in settings.items():
            setattr(self.layer, name, value)
        self.weight, self.bias = (None if p is None else encode(p, self.layer.param_dtype) for p in (weight, bias))
        self.streams = {name: np.zeros(channels) for name in STATE}
        self.streams["var"] += 1
        self.num_samples = np.zeros(1, dtype=np.int64)
        self.state = State(*map(address, self.streams.values()), address(self.num_samples))

    def stored(self, values):
        ordered = values if self.layer.layout == NCD else values.transpose(0, 2, 1)
        return encode(ordered, self.layer.dtype)

    def loaded(self, stored):
        values = decode(stored, self.layer.dtype)
        return values if self.layer.layout == NCD else values.transpose(0, 2, 1)

    def forward(self, x, keep=True):
        self.layer.samples, _, self.layer.elements = x.shape
        self.x = self.stored(x)
        self.replay = np.zeros(self.library.onlinenorm_replay_bytes(self.layer) // 8 + 1) if keep else None
        z = np.empty_like(self.x)
        buffers = (self.x, self.weight, self.bias, z, self.replay)
        status = self.library.onlinenorm_forward(self.layer, self.state, *map(address, buffers))
        assert status == OK, self.library.onlinenorm_status_text(status)
        return self.loaded(z)

    def backward(self, grad_z, outputs=("grad_x", "grad_weight", "grad_bias")):
        grads = self.stored(grad_z)
        params = np.empty(self.layer.channels, dtype=NUMPY[self.layer.param_dtype])
        out = {"grad_x": np.empty_like(self.x), "grad_weight": params, "grad_bias": params.copy()}
        written = (out[name] if name in outputs else None for name in out)
        buffers = (self.x, grads, self.weight, self.bias, self.replay, *written)
        status = self.library.onlinenorm_backward(self.layer, self.state, *map(address, buffers))
        assert status == OK, self.library.onlinenorm_status_text(status)
        results = {"grad_x": self.loaded(out["grad_x"])}
        results |= {name: decode(out[name], self.layer.param_dtype) for name in ("grad_weight", "grad_bias")}
        return {name: results[name] for name in outputs}

    def everything(self):
        """The state, to compare bit for bit."""
        return {name: value.tobytes() for name, value in self.streams.items()} | {"num_samples": self.num_samples[0]}


def assert_close(what, got, expected, tolerance, scale=None):
    """Equal up to `tolerance` of the scale, which without one is that of the expected values, at least 1."""
    scale = 1 + np.abs(expected).max(initial=0) if scale is None else scale
    error = (np.abs(got - expected) / scale).max(initial=0)
    assert error <= tolerance, f"{what}: relative error {error:.2e} is above {tolerance:.0e}"


def assert_same(what, left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert np.array_equal(left[name], right[name]), f"{what}: {name} is not the same to the bit"


# Decays that show in a few samples; a guard_eps that lets no sample be nearly divided by zero, where rounding grows.
SETTINGS = {"alpha_fwd": 0.9, "alpha_bwd": 0.8, "guard_eps": 0.1, "clamp_value": 1.5}


def random_layer(library, channels, seed, dtype=FLOAT32, **settings):
    """A layer with parameters of its own, and SETTINGS."""
    rng = np.random.default_rng(seed)
    weight, bias = rng.uniform(0.5, 1.5, channels), rng.standard_normal(channels)
    return Subject(library, channels, dtype, weight=weight, bias=bias, **SETTINGS, **settings)


def random_pair(shape, seed, dtype=FLOAT32):
    """An input and a gradient that the type can hold."""
    rng = np.random.default_rng(seed)
    return rounded(2 * rng.standard_normal(shape) + 1, dtype), rounded(rng.standard_normal(shape), dtype)


def test_the_paper_s_settings(library):
    layer = library.onlinenorm_layer_init(7, 3)
    settings = {name: getattr(layer, name) for name, _ in Layer._fields_}
    assert settings == {
        **{"samples": 1, "channels": 7, "elements": 3, "layout": NCD, "dtype": FLOAT32, "param_dtype": FLOAT32},
        **{
            "guard": 1,
            "training": 1,
            "warmup": 0,
            "bound_control": 0,
            "activation": 0,
            "threads": 1,
            "alpha_fwd": 0.999,
            "alpha_bwd": 0.99,
            "eps": 1e-5,
        },
        **{"guard_eps": 1e-5, "clamp_value": 5.0},
    }


def test_texts(library):
    texts = [library.onlinenorm_status_text(status) for status in (0, 1, 2, 3, -1)]
    assert all(texts)
    assert len(set(texts)) == 4, "only unknown statuses may share a text"
    assert library.onlinenorm_isa() in (b"baseline", b"avx2", b"avx512")


@settings(max_examples=200)
@given(
    samples=st.integers(1, 4),
    channels=st.sampled_from([1, 2, 3, 16, 17, 64, 70]),
    elements=st.sampled_from([1, 2, 15, 16, 130]),
    dtype=st.sampled_from(list(NUMPY)),
    wide=st.booleans(),
    layout=st.sampled_from([NCD, NDC]),
    guard=st.sampled_from(GUARDS),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_against_the_reference(library, samples, channels, elements, dtype, wide, layout, guard, threads, seed):
    shape = (samples, channels, elements)
    param_dtype = FLOAT32 if wide else dtype
    settings = {"layout": layout, "guard": GUARDS.index(guard), "threads": threads, "param_dtype": param_dtype}
    layer = random_layer(library, shape[1], seed, dtype, **settings)
    reference = Reference(channels, guard=guard, **SETTINGS)
    reference.weight, reference.bias = (decode(p, param_dtype).astype(np.float64) for p in (layer.weight, layer.bias))

    for batch in range(3):
        x, grad_z = random_pair(shape, (seed, batch), dtype)
        if guard == "clamp":  # where rounding decides what is clipped, nothing is compared
            unguarded = copy.deepcopy(reference)
            unguarded.guard = None
            grad_z[np.abs(np.abs(unguarded.forward(x)) - 1.5) < 1e-3] = 0
        assert_close("z", layer.forward(x), reference.forward(x), STORED[dtype])
        reference.weight_grad, reference.bias_grad = np.zeros(shape[1]), np.zeros(shape[1])
        got, grad_x = layer.backward(grad_z), reference.backward(grad_z)
        assert_close("grad_x", got["grad_x"], grad_x, STORED[dtype])
        tolerance = max(STORED[param_dtype], SUMMED[dtype])
        assert_close("grad_weight", got["grad_weight"], reference.weight_grad, tolerance)
        assert_close("grad_bias", got["grad_bias"], reference.bias_grad, tolerance)
    for name, attribute in STATE.items():
        assert_close(name, layer.streams[name], getattr(reference, attribute), SUMMED[dtype])
    assert layer.num_samples[0] == 3 * shape[0]

    layer.layer.training = 0
    before = layer.everything()
    assert_close("z in evaluation", layer.forward(x, keep=False), reference.infer(x), STORED[dtype])
    assert layer.everything() == before, "evaluation changed the state"


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("elements", [1, 4])
def test_squares_that_overflow_do_not_poison_the_state(library, elements, guard):
    layer = random_layer(library, 3, 0, FLOAT64, guard=GUARDS.index(guard))
    reference = Reference(3, guard=guard, **SETTINGS)
    reference.weight, reference.bias = layer.weight, layer.bias
    x = np.ones((2, 3, elements))
    x[0, 1] = 1e200
    layer.forward(x)
    reference.forward(x)
    for name in ("mean", "var"):
        assert_close(name, layer.streams[name], getattr(reference, STATE[name]), 1e-12)


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("layout", [NCD, NDC], ids=["NCD", "NDC"])
@pytest.mark.parametrize("elements", [1, 7, 300])
def test_a_backward_in_evaluation_does_not_read_what_no_forward_wrote(library, elements, layout, guard):
    shape, results = (3, 5, elements), []
    for before in (0, NAN):  # what the replay buffer held
        layer = random_layer(library, 5, 0, guard=GUARDS.index(guard), layout=layout, training=0)
        x, grad_z = random_pair(shape, 0)
        layer.forward(x)
        layer.replay[:] = before
        buffers = (layer.x, layer.weight, layer.bias, np.empty_like(layer.x), layer.replay)
        assert library.onlinenorm_forward(layer.layer, layer.state, *map(address, buffers)) == OK
        results.append(layer.backward(grad_z))
    assert_same("after NaN in the replay buffer", *results)


@pytest.mark.parametrize("layout", [NCD, NDC], ids=["NCD", "NDC"])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", [(6, 70, 300), (300, 150, 1)], ids=str)
def test_cuts_and_threads_change_no_bit(library, shape, guard, layout):
    """One call of N samples on three threads, and N calls of one on one thread."""
    settings = {"layout": layout, "guard": GUARDS.index(guard)}
    together = random_layer(library, shape[1], 0, threads=3, **settings)
    alone = random_layer(library, shape[1], 0, **settings)
    x, grad_z = random_pair(shape, 1)
    z, grad_x = together.forward(x), together.backward(grad_z)["grad_x"]
    for n in range(shape[0]):
        one = slice(n, n + 1)
        assert np.array_equal(alone.forward(x[one]), z[one]), f"z of sample {n} is not the same to the bit"
        assert np.array_equal(alone.backward(grad_z[one])["grad_x"], grad_x[one]), f"grad_x of {n} is not"
    assert_same("state", together.everything(), alone.everything())


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 5, 1)], ids=str)
def test_what_may_be_null(library, shape, guard):
    x, grad_z = random_pair(shape, 2)
    settings = {"guard": GUARDS.index(guard)}
    ones = Subject(library, shape[1], weight=np.ones(shape[1]), bias=np.zeros(shape[1]), **settings)
    z, grads = ones.forward(x), ones.backward(grad_z)

    none = Subject(library, shape[1], **settings)
    none.state.num_samples = None
    assert np.array_equal(none.forward(x), z), "without weight and bias"
    assert_same("without weight and bias", none.backward(grad_z), grads)
    assert none.num_samples[0] == 0

    for wanted in ((), ("grad_x",), ("grad_weight",), ("grad_bias",)):
        layer = Subject(library, shape[1], **settings)
        layer.forward(x)
        assert_same(f"asked for {wanted}", layer.backward(grad_z, wanted), {name: grads[name] for name in wanted})
        assert_same("state", layer.everything(), ones.everything())

    layer = Subject(library, shape[1], **settings)
    assert np.array_equal(layer.forward(x, keep=False), z), "without a replay buffer"
    layer.state.control_y = layer.state.control_1 = None  # a forward leaves them alone
    layer.forward(x)
    layer.state.control_y, layer.state.control_1 = ones.state.control_y, ones.state.control_1
    layer.state.mean = layer.state.var = None  # and a backward these
    layer.backward(grad_z)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 3, 0)], ids=str)
def test_nothing_to_do(library, shape):
    layer = random_layer(library, 3, 0)
    before = layer.everything()
    layer.forward(np.empty(shape))
    grads = layer.backward(np.empty(shape))
    assert layer.everything() == before
    assert not grads["grad_weight"].any()
    assert not grads["grad_bias"].any()


NAN = math.nan
BAD_FIELDS = [
    *[("samples", -1), ("channels", 0), ("channels", -3), ("elements", -1), ("threads", 0), ("threads", -1)],
    *[("layout", -1), ("layout", 2), ("dtype", -1), ("dtype", 4), ("guard", -1), ("guard", 3)],
    *[("param_dtype", FLOAT64), ("param_dtype", -1), ("param_dtype", 4)],  # beside float32 tensors
    *[(alpha, value) for alpha in ("alpha_fwd", "alpha_bwd") for value in (1.0, 1.5, -0.1, NAN)],
    *[(eps, value) for eps in ("eps", "guard_eps") for value in (-1e-5, NAN, math.inf)],
    *[("activation", value) for value in (-1, 5)],
    *[("clamp_value", value) for value in (0.0, -1.0, NAN, math.inf)],
]


def refused(library, change_layer=lambda layer: None, change_state=lambda state: None, forward=(), backward=()):
    """Call both passes with good arguments but for a change; what they touch must stay as it was, to the bit.

    `forward` and `backward` name the arguments that become NULL.
    """
    subject = random_layer(library, 3, 0)
    x, grad_z = random_pair((2, 3, 4), 0)
    subject.forward(x)
    arrays = {"x": subject.x, "grad_z": subject.stored(grad_z), "replay": subject.replay, "z": np.ones_like(subject.x)}
    arrays |= {"weight": subject.weight, "bias": subject.bias, "grad_x": np.ones_like(subject.x)}
    arrays |= {"grad_weight": np.ones_like(subject.weight), "grad_bias": np.ones_like(subject.bias)}
    change_layer(subject.layer)
    change_state(subject.state)
    before = subject.everything() | {name: array.tobytes() for name, array in arrays.items()}
    for function, names, null in [
        (library.onlinenorm_forward, "x weight bias z replay", forward),
        (library.onlinenorm_backward, "x grad_z weight bias replay grad_x grad_weight grad_bias", backward),
    ]:
        if null is None:
            continue
        given = {name: None if name in null else address(arrays[name]) for name in names.split()}
        layer = None if "layer" in null else subject.layer
        state = None if "state" in null else subject.state
        assert function(layer, state, *given.values()) == BAD_ARGUMENT, f"{function.__name__} takes it"
        after = subject.everything() | {name: array.tobytes() for name, array in arrays.items()}
        assert_same(function.__name__, before, after)
    return subject


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_bad_settings(library, field, value):
    subject = refused(library, change_layer=lambda layer: setattr(layer, field, value))
    assert library.onlinenorm_replay_bytes(subject.layer) == 0


@pytest.mark.parametrize(
    "shape",
    [(1, 2**63 - 1, 1), (1, 2**62, 4), (4, 1, 2**63 - 1), (2**63 - 1, 16, 16), (1, 2**30, 2**32)],
    ids=str,
)
def test_sizes_whose_product_does_not_fit(library, shape):
    def change(layer):
        layer.samples, layer.channels, layer.elements = shape

    assert library.onlinenorm_replay_bytes(refused(library, change).layer) == 0


@pytest.mark.parametrize("name", ["layer", "state", "x", "z", "grad_z", "replay"])
def test_missing_arguments(library, name):
    everywhere = name in ("layer", "state", "x")
    refused(
        library,
        forward=[name] if everywhere or name == "z" else None,
        backward=[name] if everywhere or name in ("grad_z", "replay") else None,
    )
    assert library.onlinenorm_replay_bytes(None) == 0


@pytest.mark.parametrize("name", list(STATE))
def test_missing_streams(library, name):
    statistics = name in ("mean", "var")
    refused(
        library,
        change_state=lambda state: setattr(state, name, None),
        forward=[] if statistics else None,
        backward=None if statistics else [],
    )


@pytest.mark.parametrize("elements", [1, 5])
def test_warming_up(library, elements):
    layer = Subject(library, 3, FLOAT64, warmup=1, alpha_fwd=0.9)
    reference = Reference(3, alpha_fwd=0.9, alpha_bwd=0.99, affine=False, warmup=True)
    for seed in range(3):
        x, grad_z = random_pair((5, 3, elements), seed, FLOAT64)
        assert_close("z", layer.forward(x + 20), reference.forward(x + 20), 1e-12)
        assert_close("grad_x", layer.backward(grad_z)["grad_x"], reference.backward(grad_z), 1e-11)
    refused(
        library,
        lambda layer: setattr(layer, "warmup", 1),
        lambda state: setattr(state, "num_samples", None),
        backward=None,
    )


@pytest.mark.parametrize("elements", [1, 5])
def test_bounded_control(library, elements):
    layer = Subject(library, 3, FLOAT64, bound_control=1, alpha_fwd=0.99, alpha_bwd=0.5)
    reference = Reference(3, alpha_fwd=0.99, alpha_bwd=0.5, affine=False, bound_control=True)
    for seed in range(3):
        x, grad_z = random_pair((5, 3, elements), seed, FLOAT64)
        assert_close("z", layer.forward(4 * x), reference.forward(4 * x), 1e-12)
        assert_close("grad_x", layer.backward(grad_z)["grad_x"], reference.backward(grad_z), 1e-11)


@pytest.mark.parametrize("elements", [1, 5])
@pytest.mark.parametrize("activation", [1, 2, 3, 4])
def test_activations(library, elements, activation):
    """The layer behind which a caller would compute the activation and its derivative."""
    plain = random_layer(library, 3, 0, dtype=FLOAT64, param_dtype=FLOAT64)
    fused = random_layer(library, 3, 0, dtype=FLOAT64, param_dtype=FLOAT64, activation=activation)
    value, slope = {
        1: (lambda r: np.maximum(r, 0), lambda r: np.where(r > 0, 1, 0)),
        2: (lambda r: np.where(r > 0, r, 0.01 * r), lambda r: np.where(r > 0, 1, 0.01)),
        3: (lambda r: r / (1 + np.exp(-r)), lambda r: (1 + np.exp(-r) * (1 + r)) / (1 + np.exp(-r)) ** 2),
        4: (lambda r: r * normal(r), lambda r: normal(r) + r * np.exp(-r * r / 2) / math.sqrt(2 * math.pi)),
    }[activation]
    x, grad_z = random_pair((4, 3, elements), 1, FLOAT64)
    r = plain.forward(x)
    assert_close("z", fused.forward(x), value(r), 1e-12)
    expected, got = plain.backward(grad_z * slope(r)), fused.backward(grad_z)
    for name in expected:
        assert_close(name, got[name], expected[name], 1e-11)


normal = np.vectorize(lambda r: 0.5 * math.erfc(-r / math.sqrt(2)), otypes=[float])


# ---- the neuron


anything = st.floats() | st.floats(-10, 10)


@given(steps=st.lists(st.tuples(anything, anything), max_size=20), decays=st.tuples(*[st.floats(0, 0.999)] * 2))
def test_the_neuron_against_the_reference(library, steps, decays):
    """The paper's equations on one scalar, whatever comes: infinities, NaN, squares that overflow."""
    neuron = library.onlinenorm_neuron_init(*decays, 1e-5)
    reference = Reference(1, *decays, guard=None, affine=False)
    for x, grad_y in steps:
        got = [library.onlinenorm_neuron_forward(neuron, x), library.onlinenorm_neuron_backward(neuron, grad_y)]
        expected = [reference.forward([[x]])[0, 0], reference.backward([[grad_y]])[0, 0]]
        got += [getattr(neuron, name) for name in STATE]
        expected += [getattr(reference, name)[0] for name in STATE.values()]
        assert np.isfinite(got[2:]).all(), "the state is poisoned"
        np.testing.assert_allclose(got, expected, rtol=1e-12, err_msg=f"y, x', {', '.join(STATE)} differ")
