#include "compute_units.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "base/flush_subnormals.hpp"
#include "base/system_error.hpp"

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
        throw SystemError(EINVAL,
                          "emulated card: the library of kernels has no " + kernel + ", which the xclbin names");
    }
    return reinterpret_cast<RunComputeUnit*>(found);
}

}  // namespace

ComputeUnit::ComputeUnit(const std::string& name, Execute execute)
    : name_(name.substr(name.find(':') + 1)),
      kernel_(find_kernel(name)),
      execute_(std::move(execute)),
      thread_("compute-unit", 1, [this](const Run& run) { begin(run); }) {}

void ComputeUnit::submit(const Run& run) {
    ++num_waiting_;
    thread_.push(run);
}

void ComputeUnit::compute(const Run& run, DeviceMemory& memory) const { kernel_(run.registers, memory); }

void ComputeUnit::begin(const Run& run) {
    --num_waiting_;
    const FlushSubnormals flush;
    if (!stopped_) execute_(*this, run);
}

}  // namespace smart_infinity::emulator
