#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "io/file_queue.hpp"
#include "io/io_engines.hpp"
#include "pipeline/pipeline.hpp"

namespace smart_infinity {

// Destruction waits for what is in flight, which must not hold up other Python threads.
class PythonPipeline : public Pipeline {
 public:
    using Pipeline::Pipeline;
    ~PythonPipeline() {
        const nanobind::gil_scoped_release release;
        close();
    }
};

class PythonFileQueue : public FileQueue {
 public:
    using FileQueue::FileQueue;
    ~PythonFileQueue() {
        const nanobind::gil_scoped_release release;
        close();
    }
};

// Lets Ctrl-C end a wait. Python runs signal handlers in the main thread only; elsewhere this does nothing.
void check_signals();

// None: "auto", the fastest that works here.
std::optional<IoEngineKind> io_engine_of(const std::string& name);

}  // namespace smart_infinity
