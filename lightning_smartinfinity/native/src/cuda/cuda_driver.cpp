#include "cuda/cuda_driver.hpp"

#include <dlfcn.h>

namespace smart_infinity {
namespace {

constexpr CudaResult kNoDriver = -1;  // the driver never returns this number

// The library is never closed, because the driver has threads of its own.
void* open_library(const std::string& library) {
    if (void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    const char* const reason = ::dlerror();
    throw CudaError(kNoDriver,
                    "The CUDA driver cannot be opened: " + (reason == nullptr ? library : std::string(reason)) + ".");
}

template <class... Parameters>
void resolve(void* library, CudaEntry<Parameters...>& entry) {
    void* const symbol = ::dlsym(library, entry.name);
    if (symbol == nullptr) throw CudaError(kNoDriver, std::string("The CUDA driver has no ") + entry.name + ".");
    entry.function = reinterpret_cast<CudaResult (*)(Parameters...)>(symbol);
}

}  // namespace

CudaDriver::CudaDriver(const std::string& library) {
    void* const handle = open_library(library);
    const auto resolve_all = [handle](auto&... entries) { (resolve(handle, entries), ...); };
    resolve_all(init, error_name, error_string, device_get, primary_context_retain, primary_context_release,
                context_push, context_pop, host_register, host_unregister, copy_to_device, copy_to_host, stream_create,
                stream_destroy, stream_wait_event, event_create, event_destroy, event_record, event_query,
                event_synchronize);
    call(init, 0);
}

void CudaDriver::require(CudaResult result, const char* name) const {
    if (result == 0) return;
    const char* code = nullptr;
    const char* text = nullptr;
    (void)attempt(error_name, result, &code);
    (void)attempt(error_string, result, &text);
    throw CudaError(result, std::string(name) + " failed: " + (code == nullptr ? "unknown error" : code) + " (" +
                                std::to_string(result) + "): " + (text == nullptr ? "no description" : text) + ".");
}

std::shared_ptr<const CudaDriver> cuda_driver() {
    CudaLibrary& library = cuda_library();
    const std::lock_guard lock(library.mutex);
    if (!library.driver) library.driver = std::make_shared<const CudaDriver>(library.path);
    return library.driver;
}

CudaLibrary& cuda_library() {
    static auto* const instance = new CudaLibrary;  // never destroyed: destructors that run at exit use it
    return *instance;
}

}  // namespace smart_infinity
