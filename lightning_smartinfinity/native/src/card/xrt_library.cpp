#include "card/xrt_library.hpp"

#include <dlfcn.h>

#include "card/card_binding.hpp"

namespace smart_infinity {
namespace {

// The library is never closed: it has threads of its own and loads other libraries.
void* open_library(const std::string& path) {
    if (void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    const char* const reason = ::dlerror();
    throw CardError("XRT's library cannot be opened: " + (reason == nullptr ? path : std::string(reason)));
}

template <class Function>
void resolve(void* library, XrtEntry<Function>& entry) {
    void* const symbol = ::dlsym(library, entry.name);
    if (symbol == nullptr) throw CardError(std::string("XRT's library has no ") + entry.name);
    entry.function = reinterpret_cast<Function*>(symbol);
}

}  // namespace

XrtLibrary::XrtLibrary(const std::string& path) {
    void* const handle = open_library(path);
    const auto resolve_all = [handle](auto&... entries) { (resolve(handle, entries), ...); };
    resolve_all(device_open, device_open_by_bdf, device_close, device_load, device_uuid, kernel_open, kernel_close,
                kernel_group, buffer_allocate, buffer_part, buffer_free, buffer_map, buffer_sync, run_open, run_close,
                run_set, run_start, run_wait, run_state);
}

}  // namespace smart_infinity
