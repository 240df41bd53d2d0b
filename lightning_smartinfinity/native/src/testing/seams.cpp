#include "testing/seams.hpp"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "cuda/cuda_driver.hpp"

namespace smart_infinity {
namespace {

void require(bool condition, const char* problem) {
    if (!condition) throw std::invalid_argument(problem);
}

}  // namespace

void Seams::decorate(std::unique_ptr<IoEngine>& engine, DeadlineEngine* deadlines, const Decorate& decorate) {
    std::unique_ptr<IoEngine>& inner = deadlines != nullptr ? deadlines->inner_ : engine;
    inner = decorate(std::move(inner));
}

void Seams::decorate_engine(Pipeline& pipeline, const Decorate& decorate) {
    const std::lock_guard lock(pipeline.mutex_);
    require(pipeline.batch_ == nullptr, "decorate_engine: a batch is active");
    Seams::decorate(pipeline.transfers_.engine_, pipeline.transfers_.deadlines_, decorate);
}

void Seams::decorate_engine(FileQueue& queue, const Decorate& decorate) {
    const std::lock_guard lock(queue.mutex_);
    require(queue.parts_.empty(), "decorate_engine: a request is in flight");
    Seams::decorate(queue.engine_, queue.watch_, decorate);
}

void Seams::put_before_resizing(TensorStore& store, const std::function<void()>& gate) {
    for (const auto& file : store.files_) {
        file->resize_ = [gate, resize = file->resize_](int descriptor, std::uint64_t from, std::uint64_t to) {
            gate();
            return resize(descriptor, from, to);
        };
    }
}

void Seams::put_before_transfers(Pipeline& pipeline, std::function<void(const IoRequest&)> gate) {
    const std::lock_guard lock(pipeline.mutex_);
    require(pipeline.batch_ == nullptr, "put_before_transfers: a batch is active");
    pipeline.updater_->put_before_transfers(std::move(gate));
}

void select_instruction_set(InstructionSet choice) {
    const auto sets = supported_instruction_sets();
    require(std::find(sets.begin(), sets.end(), choice) != sets.end(),
            "select_instruction_set: this CPU does not support the chosen instruction set");
    selected_instruction_set() = choice;
}

void use_cuda_library(std::optional<std::string> path) {
    CudaLibrary& library = cuda_library();
    const std::lock_guard lock(library.mutex);
    library.path = std::move(path).value_or(CudaLibrary().path);
    library.driver.reset();
}

}  // namespace smart_infinity
