#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "io/deadline_engine.hpp"
#include "io/file_queue.hpp"
#include "kernels/instruction_set.hpp"
#include "pipeline/pipeline.hpp"
#include "tensor/tensor_store.hpp"

namespace smart_infinity {

// Changes private parts of pipelines, queues and tensor stores, which declare it a friend. No request may be in flight.
struct Seams {
    using Decorate = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;

    // Wraps the engine that moves the bytes. Deadlines stay outside of both engines.
    static void decorate_engine(Pipeline& pipeline, const Decorate& decorate);
    static void decorate_engine(FileQueue& queue, const Decorate& decorate);
    static void decorate_engine(TensorStore& store, const Decorate& decorate) {
        decorate_engine(store.queue_, decorate);
    }
    // Calls `gate` before each change of a file's length.
    static void put_before_resizing(TensorStore& store, const std::function<void()>& gate);
    // Calls Updater::put_before_transfers().
    static void put_before_transfers(Pipeline& pipeline, std::function<void(const IoRequest&)> gate);

 private:
    static void decorate(std::unique_ptr<IoEngine>& engine, DeadlineEngine* deadlines, const Decorate& decorate);
};

// Selects the set that every thread uses from now on. Throws std::invalid_argument if this CPU does not support it.
void select_instruction_set(InstructionSet choice);

// Switches to another CUDA library, or back to libcuda.so.1. Existing objects keep their library.
void use_cuda_library(std::optional<std::string> path);

}  // namespace smart_infinity
