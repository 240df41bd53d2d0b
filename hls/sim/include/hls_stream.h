// The part of Vitis HLS's hls::stream that the kernels use, for simulation.
//
// The sequential simulation works like the vendor's C simulation: processes run one after the other, and streams have
// no bounds. In the threaded one (SMART_INFINITY_THREADED_SIMULATION, simulated_process.hpp) they are as deep as on the
// card.
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
