// The element types, the shape of a call, and the units that threads share out.
#pragma once

#include <cstdint>

namespace onlinenorm {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

template <class T>
struct AccumulatorOf {
    using type = float;
};
template <>
struct AccumulatorOf<double> {
    using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

constexpr int kLanes = 16;          // lanes of a Pack, on every machine
constexpr int64_t kStrip = 64;      // channels that one thread scans, or takes of a channels-last row, at a time
constexpr int64_t kPlaneChunk = 4096;  // elements summed in the accumulator's precision before merging in double
constexpr int64_t kRowChunk = 128;     // the same for channels last, in rows

// Always inlined: a copy left outside would be compiled for one instruction set and called on all.
#define ALWAYS_INLINE inline __attribute__((always_inline))

ALWAYS_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ALWAYS_INLINE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Samples of C channels and D elements. A sample falls into units, the smallest pieces of work: chunk k of plane c, or
// channels last, strip s of the rows of chunk k. Units and their inner order depend on C and D alone, never on the
// number of samples or threads, and so neither does any sum.
struct Geometry {
    int64_t channels, elements;
    bool channels_last;
    int64_t padded = ceil_div(channels, kLanes) * kLanes;  // row length of every scratch array by channel
    int64_t strips = ceil_div(channels, kStrip);
    int64_t chunk = channels_last ? kRowChunk : kPlaneChunk;
    int64_t chunks = ceil_div(elements, chunk);
    int64_t units = chunks * (channels_last ? strips : channels);  // per sample
    int64_t size = channels * elements;                            // scalars per sample

    ALWAYS_INLINE int64_t chunk_elements(int64_t k) const { return smaller(chunk, elements - k * chunk); }
};

// A walk over units: where the scalars of one start, which chunk it is, and its channels. It owns copies of what it
// needs, which no store to memory can reach, so that all of it stays in registers.
class Unit {
public:
    int64_t sample, chunk, channel, channels, start, length;

    ALWAYS_INLINE Unit(const Geometry& geometry, int64_t index) : g(geometry) {
        sample = index / g.units;
        const int64_t within = index % g.units, inner = g.channels_last ? g.strips : g.chunks;
        (g.channels_last ? chunk : channel) = within / inner;
        (g.channels_last ? channel : chunk) = within % inner * (g.channels_last ? kStrip : 1);
        measure();
        start = sample * g.size + (g.channels_last ? chunk * g.chunk * g.channels + channel
                                                   : channel * g.elements + chunk * g.chunk);
    }
    ALWAYS_INLINE void next() {
        if (g.channels_last) {
            start += channels;  // to the next strip, or from a row's end to the next row
            if ((channel += kStrip) >= g.channels) {
                start += (length - 1) * g.channels;
                channel = 0;
                if (++chunk == g.chunks) chunk = 0, ++sample;
            }
        } else {
            start += length;  // planes lie one after the other
            if (++chunk == g.chunks) {
                chunk = 0;
                if (++channel == g.channels) channel = 0, ++sample;
            }
        }
        measure();
    }
    ALWAYS_INLINE void previous() {
        if (g.channels_last) {
            if ((channel -= kStrip) < 0) {
                channel = (g.strips - 1) * kStrip;
                if (--chunk < 0) chunk = g.chunks - 1, --sample;
                measure();
                start -= channels + (length - 1) * g.channels;
            } else {
                measure();
                start -= channels;
            }
        } else {
            if (--chunk < 0) {
                chunk = g.chunks - 1;
                if (--channel < 0) channel = g.channels - 1, --sample;
            }
            measure();
            start -= length;
        }
    }

private:
    const Geometry g;

    ALWAYS_INLINE void measure() {
        channels = g.channels_last ? smaller(kStrip, g.channels - channel) : 1;
        length = g.chunk_elements(chunk);
    }
};

// Where D = 1, scratch lies strip by strip: channel c, a multiple of kLanes, of sample n of a block. A strip has room for
// as many samples as a whole block has, also in a shorter last one: so the strips of two threads never share a place,
// even if one of them has gone on to the next block.
ALWAYS_INLINE constexpr int64_t by_strip(int64_t block, int64_t n, int64_t c) {
    return (c / kStrip * block + n) * kStrip + c % kStrip;
}

// An integer that is known when it is passed on.
template <int n>
struct Constant {
    static constexpr int value = n;
    ALWAYS_INLINE constexpr operator int() const { return n; }
};

}  // namespace onlinenorm
