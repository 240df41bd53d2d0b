#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace smart_infinity {

// The types of cuda.h, which the build does not need: handles are opaque, results are numbers, and 0 is success.
using CudaResult = int;
using CudaContext = void*;
using CudaStreamHandle = void*;  // null: the default stream
using CudaEventHandle = void*;
using CudaAddress = unsigned long long;  // in device memory

// A call that the driver refused, with the driver's text; becomes Python's CudaError.
class CudaError : public std::runtime_error {
 public:
    CudaError(CudaResult result, const std::string& problem) : std::runtime_error(problem), result_(result) {}
    CudaResult result() const { return result_; }

 private:
    CudaResult result_;
};

template <class... Parameters>
struct CudaEntry {
    const char* name;
    CudaResult (*function)(Parameters...) = nullptr;
};

// The driver's library, opened at run time: nothing is linked, so the core also runs on machines without it.
class CudaDriver {
 public:
    // Throws CudaError if there is no such library, it lacks an entry point, or it finds no device.
    explicit CudaDriver(const std::string& library);

    // Calls an entry point; throws CudaError with its name and the driver's text unless it succeeds.
    template <class... Parameters>
    void call(const CudaEntry<Parameters...>& entry, std::type_identity_t<Parameters>... arguments) const {
        require(attempt(entry, arguments...), entry.name);
    }
    // Calls an entry point and returns its result, for callers that expect a failure or cannot react to it.
    template <class... Parameters>
    CudaResult attempt(const CudaEntry<Parameters...>& entry, std::type_identity_t<Parameters>... arguments) const {
        return entry.function(arguments...);
    }
    void require(CudaResult result, const char* name) const;

    CudaEntry<unsigned> init{"cuInit"};
    CudaEntry<CudaResult, const char**> error_name{"cuGetErrorName"};
    CudaEntry<CudaResult, const char**> error_string{"cuGetErrorString"};
    CudaEntry<int*, int> device_get{"cuDeviceGet"};
    CudaEntry<CudaContext*, int> primary_context_retain{"cuDevicePrimaryCtxRetain"};
    CudaEntry<int> primary_context_release{"cuDevicePrimaryCtxRelease_v2"};
    CudaEntry<CudaContext> context_push{"cuCtxPushCurrent_v2"};
    CudaEntry<CudaContext*> context_pop{"cuCtxPopCurrent_v2"};
    CudaEntry<void*, std::size_t, unsigned> host_register{"cuMemHostRegister_v2"};
    CudaEntry<void*> host_unregister{"cuMemHostUnregister"};
    CudaEntry<CudaAddress, const void*, std::size_t, CudaStreamHandle> copy_to_device{"cuMemcpyHtoDAsync_v2"};
    CudaEntry<void*, CudaAddress, std::size_t, CudaStreamHandle> copy_to_host{"cuMemcpyDtoHAsync_v2"};
    CudaEntry<CudaStreamHandle*, unsigned> stream_create{"cuStreamCreate"};
    CudaEntry<CudaStreamHandle> stream_destroy{"cuStreamDestroy_v2"};
    CudaEntry<CudaStreamHandle, CudaEventHandle, unsigned> stream_wait_event{"cuStreamWaitEvent"};
    CudaEntry<CudaEventHandle*, unsigned> event_create{"cuEventCreate"};
    CudaEntry<CudaEventHandle> event_destroy{"cuEventDestroy_v2"};
    CudaEntry<CudaEventHandle, CudaStreamHandle> event_record{"cuEventRecord"};
    CudaEntry<CudaEventHandle> event_query{"cuEventQuery"};
    CudaEntry<CudaEventHandle> event_synchronize{"cuEventSynchronize"};
};

// Returns the process's driver. The first successful call opens it. Throws like CudaDriver.
std::shared_ptr<const CudaDriver> cuda_driver();

// The library that cuda_driver() opens, and the driver in it once it is open. Only tests change them.
struct CudaLibrary {
    std::mutex mutex;  // guards the other members
    std::string path = "libcuda.so.1";
    std::shared_ptr<const CudaDriver> driver;
};
CudaLibrary& cuda_library();

}  // namespace smart_infinity
