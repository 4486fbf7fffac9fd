// The least that any normaliser has to move, as plain loops: what the benchmark measures against.
#include "pack.h"
#include "steps.h"

namespace onlinenorm {
namespace {

template <class Body>
ALWAYS_INLINE void write(float* out, int64_t count, bool streaming, const Body& body) {
    int64_t i = 0;
    if (streaming && reinterpret_cast<uintptr_t>(out) % kStreamBytes<float> == 0) {
        for (; i + kLanes <= count; i += kLanes) stream(out + i, body(i));
        end_streaming();
    }
    for (; i + kLanes <= count; i += kLanes) store(out + i, body(i));
}

}  // namespace

namespace ONLINENORM_ISA {

void read_one_write_one(const float* a, float* out, int64_t count, bool streaming) {
    write(out, count, streaming, [&](int64_t i) INLINE_LAMBDA { return load(a + i) * 2.0f; });
}

void read_two_write_one(const float* a, const float* b, float* out, int64_t count, bool streaming) {
    write(out, count, streaming, [&](int64_t i) INLINE_LAMBDA { return load(a + i) * 2.0f + load(b + i); });
}

}  // namespace ONLINENORM_ISA
}  // namespace onlinenorm
