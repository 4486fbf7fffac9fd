/* Learning from a stream, one sample at a time, with Online Normalization and nothing else.
 *
 *     stream [TRACE]
 *
 * Four sensors are read again and again. The scale of one is 100,000 times that of another, their zeros wander, and
 * halfway two of them are exchanged for others. Every reading is used once, when it comes, and forgotten:
 *
 *     readings -> norm -+-> 8 hidden units -> norm -> ReLU -> sum    are sensors 0 and 1 on the same side?  +1 or -1
 *                       +-> sum -> normalising neuron                sensor 2 less sensor 3, in their own units
 *
 * The first path uses the layer interface, the second the neuron. Both learn by gradient descent on squared errors.
 * With TRACE, what goes into the normalisers and comes out of them is written to that file, a vector a line: its name,
 * then its values.
 *
 * To build it, with the library installed in PREFIX: in this folder, with CMake,
 *     cmake -B build -DCMAKE_PREFIX_PATH=PREFIX && cmake --build build
 * or by hand
 *     cc -std=c99 -O2 stream.c -IPREFIX/include -LPREFIX/lib -Wl,-rpath,PREFIX/lib -lonlinenorm -o stream
 * It computes in float, with -DDOUBLE in double.
 */
#include <onlinenorm.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef DOUBLE
typedef double real;
#define REAL ONLINENORM_FLOAT64
#else
typedef float real;
#define REAL ONLINENORM_FLOAT32
#endif

enum { SENSORS = 4, HIDDEN = 8, STEPS = 6000, REPORT = 500 };
static const real rate = (real)0.01;
static FILE *trace;

static void die(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(EXIT_FAILURE);
}

static void check(onlinenorm_status status, const char *what) {
    if (status != ONLINENORM_OK) die(what, onlinenorm_status_text(status));
}

static void *allocate(size_t count, size_t size) { /* zeros */
    void *memory = calloc(count, size);
    if (!memory) die("stream", "out of memory");
    return memory;
}

static void record(const char *owner, const char *what, const void *values, int dtype, int64_t count) {
    if (!trace) return;
    fprintf(trace, "%s.%s", owner, what);
    for (int64_t i = 0; i < count; ++i) {
        const double value = dtype == ONLINENORM_FLOAT64 ? ((const double *)values)[i] : ((const float *)values)[i];
        fprintf(trace, " %.17g", value);
    }
    fputc('\n', trace);
}

static double uniform(void) { /* in [-1, 1), the same on every machine */
    static uint64_t state = UINT64_C(88172645463325252);
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) / 4503599627370496.0 - 1;
}

/* ---- a layer: the caller owns its state, its parameters and every buffer */

typedef struct {
    const char *name;
    onlinenorm_layer layer;
    onlinenorm_state state;
    void *replay;
    real *x, *z, *grad_x, *grad_z, *weight, *bias, *grad_weight, *grad_bias;
} norm;

static norm norm_new(const char *name, int64_t channels, onlinenorm_guard guard) {
    norm n = {.name = name, .layer = onlinenorm_layer_init(channels, 1)}; /* D = 1, the paper's settings; then: */
    n.layer.dtype = n.layer.param_dtype = REAL;
    n.layer.guard = guard;
    n.layer.alpha_fwd = 0.99; /* the statistics follow the last 100 samples or so */
    n.layer.alpha_bwd = 0.9;
    n.state.mean = allocate((size_t)channels * 4, sizeof(double));
    n.state.var = n.state.mean + channels;
    n.state.control_y = n.state.var + channels;
    n.state.control_1 = n.state.control_y + channels;
    real *vector = n.x = allocate((size_t)channels * 8, sizeof(real));
    real **others[] = {&n.z, &n.grad_x, &n.grad_z, &n.weight, &n.bias, &n.grad_weight, &n.grad_bias};
    for (int i = 0; i < 7; ++i) *others[i] = vector += channels;
    for (int64_t c = 0; c < channels; ++c) n.state.var[c] = n.weight[c] = 1;
    n.replay = allocate(onlinenorm_replay_bytes(&n.layer), 1);
    return n;
}

static void norm_forward(norm *n) { /* from x to z */
    check(onlinenorm_forward(&n->layer, &n->state, n->x, n->weight, n->bias, n->z, n->replay), n->name);
}

static void norm_backward(norm *n) { /* from grad_z to grad_x, and a step of gradient descent */
    check(onlinenorm_backward(&n->layer, &n->state, n->x, n->grad_z, n->weight, n->bias, n->replay, n->grad_x,
                              n->grad_weight, n->grad_bias), n->name);
    const char *const names[] = {"x", "z", "grad_x", "grad_z", "weight", "bias", "grad_weight", "grad_bias"};
    for (int i = 0; i < 8; ++i) record(n->name, names[i], n->x + i * n->layer.channels, REAL, n->layer.channels);
    for (int64_t c = 0; c < n->layer.channels; ++c) {
        n->weight[c] -= rate * n->grad_weight[c];
        n->bias[c] -= rate * n->grad_bias[c];
    }
}

static void norm_free(norm *n) {
    const char *const names[] = {"mean", "var", "control_y", "control_1"};
    for (int i = 0; i < 4; ++i) {
        record(n->name, names[i], n->state.mean + i * n->layer.channels, ONLINENORM_FLOAT64, n->layer.channels);
    }
    free(n->state.mean);
    free(n->x);
    free(n->replay);
}

/* ---- the stream and the model */

int main(int argc, char **argv) {
    if (argc > 2) die("usage", "stream [TRACE]");
    if (argc == 2 && !(trace = fopen(argv[1], "w"))) die(argv[1], "cannot be written");

    double scale[SENSORS] = {0.01, 1000, 1, 20}, zero[SENSORS] = {0, -5000, 10, 0};
    norm readings = norm_new("readings", SENSORS, ONLINENORM_GUARD_CLAMP); /* a large reading stays one, up to 5 */
    norm hidden = norm_new("hidden", HIDDEN, ONLINENORM_GUARD_LAYER_SCALING);
    onlinenorm_neuron neuron = onlinenorm_neuron_init(0.99, 0.9, 1e-5);
    real first[HIDDEN][SENSORS], second[HIDDEN] = {0}, sum[SENSORS], gain = 1; /* the weights of the two paths */
    for (int i = 0; i < SENSORS; ++i) {
        sum[i] = (real)uniform();
        for (int h = 0; h < HIDDEN; ++h) first[h][i] = (real)uniform();
    }

    double wrong = 0, squares = 0;
    printf("samples   wrong sides   squared error of the difference\n");
    for (int step = 1; step <= STEPS; ++step) {
        double s[SENSORS]; /* what the sensors see */
        if (step == STEPS / 2 + 1) scale[1] = 0.5, scale[3] = 700;
        for (int i = 0; i < SENSORS; ++i) {
            s[i] = uniform();
            zero[i] += 0.01 * scale[i] * uniform();
            readings.x[i] = (real)(zero[i] + scale[i] * s[i]);
        }

        norm_forward(&readings);
        for (int h = 0; h < HIDDEN; ++h) {
            hidden.x[h] = 0;
            for (int i = 0; i < SENSORS; ++i) hidden.x[h] += first[h][i] * readings.z[i];
        }
        norm_forward(&hidden);
        real side = 0, x = 0;
        for (int h = 0; h < HIDDEN; ++h) side += hidden.z[h] > 0 ? second[h] * hidden.z[h] : 0;
        for (int i = 0; i < SENSORS; ++i) x += sum[i] * readings.z[i];
        const double y = onlinenorm_neuron_forward(&neuron, x);
        const real bounded = (real)(y < -5 ? -5 : y > 5 ? 5 : y); /* a neuron has no guard of its own */

        const real side_error = side - (s[0] * s[1] > 0 ? 1 : -1), error = gain * bounded - (real)(s[2] - s[3]);
        const double grad_y = bounded == (real)y ? gain * error : 0;
        const double grad_x = onlinenorm_neuron_backward(&neuron, grad_y), neuron_step[] = {x, y, grad_y, grad_x};
        record("neuron", "step", neuron_step, ONLINENORM_FLOAT64, 4);
        gain -= rate * error * bounded;
        for (int h = 0; h < HIDDEN; ++h) {
            hidden.grad_z[h] = hidden.z[h] > 0 ? side_error * second[h] : 0;
            second[h] -= hidden.z[h] > 0 ? rate * side_error * hidden.z[h] : 0;
        }
        norm_backward(&hidden);
        for (int i = 0; i < SENSORS; ++i) {
            readings.grad_z[i] = (real)grad_x * sum[i];
            sum[i] -= rate * (real)grad_x * readings.z[i];
            for (int h = 0; h < HIDDEN; ++h) {
                readings.grad_z[i] += hidden.grad_x[h] * first[h][i];
                first[h][i] -= rate * hidden.grad_x[h] * readings.z[i];
            }
        }
        norm_backward(&readings);

        wrong += (side > 0) != (s[0] * s[1] > 0);
        squares += error * error;
        if (step % REPORT == 0) {
            printf("%7d %12.1f%% %33.4f\n", step, 100 * wrong / REPORT, squares / REPORT);
            wrong = squares = 0;
        }
    }

    const double neuron_state[] = {neuron.mean, neuron.var, neuron.control_y, neuron.control_1};
    record("neuron", "state", neuron_state, ONLINENORM_FLOAT64, 4);
    norm_free(&readings);
    norm_free(&hidden);
    if (trace && (ferror(trace) || fclose(trace))) die(argv[1], "cannot be written");
    return EXIT_SUCCESS;
}
