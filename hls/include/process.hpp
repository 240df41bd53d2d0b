// Defines how a top calls the processes of its dataflow.
#pragma once

#ifdef SMART_INFINITY_THREADED_SIMULATION
#include <simulated_process.hpp>  // runs each process in a thread of its own
#else
#define PROCESS(function, ...) function(__VA_ARGS__)
#endif
