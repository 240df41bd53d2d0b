#include "compute_units.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "base/flush_subnormals.hpp"

namespace smart_infinity::emulator {
namespace {

// Loads the library of kernels that SMART_INFINITY_CARD_KERNELS names.
void* kernel_library() {
    static void* const library = [] {
        const char* path = std::getenv("SMART_INFINITY_CARD_KERNELS");
        if (path == nullptr) throw std::runtime_error("emulated card: set SMART_INFINITY_CARD_KERNELS to a library");
        void* loaded = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (loaded == nullptr) throw std::runtime_error(std::string("emulated card: ") + dlerror());
        return loaded;
    }();
    return library;
}

RunComputeUnit* find_kernel(const std::string& name) {
    const std::string kernel = name.substr(0, name.find(':'));
    void* found = dlsym(kernel_library(), ("smart_infinity_compute_unit_" + kernel).c_str());
    if (found == nullptr) {
        throw std::system_error(EINVAL, std::generic_category(),
                                "emulated card: the library of kernels has no " + kernel + ", which the xclbin names");
    }
    return reinterpret_cast<RunComputeUnit*>(found);
}

}  // namespace

ComputeUnit::ComputeUnit(const std::string& name, Execute execute)
    : name_(name.substr(name.find(':') + 1)),
      kernel_(find_kernel(name)),
      execute_(std::move(execute)),
      thread_([this] { serve(); }) {}

ComputeUnit::~ComputeUnit() {
    {
        const std::scoped_lock lock(mutex_);
        stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void ComputeUnit::submit(Run run) {
    {
        const std::scoped_lock lock(mutex_);
        waiting_.push_back(std::move(run));
    }
    changed_.notify_all();
}

std::size_t ComputeUnit::num_waiting() const {
    const std::scoped_lock lock(mutex_);
    return waiting_.size();
}

void ComputeUnit::compute(const Run& run, DeviceMemory& memory) const { kernel_(run.registers, memory); }

void ComputeUnit::serve() {
    const FlushSubnormals flush;
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stopped_ || !waiting_.empty(); });
        if (stopped_) return;
        const Run run = std::move(waiting_.front());
        waiting_.pop_front();
        lock.unlock();
        execute_(*this, run);
        lock.lock();
    }
}

}  // namespace smart_infinity::emulator
