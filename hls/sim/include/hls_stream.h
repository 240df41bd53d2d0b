// What the kernels use of Vitis HLS's hls::stream, for simulation.
//
// Sequential, as C simulation by the vendor's headers: one process after the other, streams without bounds. Threaded
// (SMART_INFINITY_THREADED_SIMULATION): see simulated_process.hpp; a stream then holds as much as on the card.
#pragma once

#ifdef SMART_INFINITY_THREADED_SIMULATION
#include "bounded_stream.hpp"
#else
#include "unbounded_stream.hpp"
#endif

namespace hls {

template <class T, int kDepth>
class stream : public stream<T> {
 public:
    explicit stream(const char* name) : stream<T>(name, kDepth) {}
};

}  // namespace hls
