#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace smart_infinity {

// The types of XRT's C API, declared here so that a build needs no headers: handles are opaque, states and directions
// are numbers.
using XrtDevice = void*;
using XrtKernel = void*;
using XrtRun = void*;
using XrtBuffer = void*;
using XrtUuid = unsigned char[16];

template <class Function>
struct XrtEntry {
    const char* name;
    Function* function = nullptr;
};

// XRT's library, opened at run time. Its calls do not need Python's lock.
class XrtLibrary {
 public:
    // Throws CardError if there is no such library or it lacks an entry point.
    explicit XrtLibrary(const std::string& path);

    XrtEntry<XrtDevice(unsigned)> device_open{"xrtDeviceOpen"};
    XrtEntry<XrtDevice(const char*)> device_open_by_bdf{"xrtDeviceOpenByBDF"};
    XrtEntry<int(XrtDevice)> device_close{"xrtDeviceClose"};
    XrtEntry<int(XrtDevice, const char*)> device_load{"xrtDeviceLoadXclbinFile"};
    XrtEntry<int(XrtDevice, unsigned char*)> device_uuid{"xrtDeviceGetXclbinUUID"};
    XrtEntry<XrtKernel(XrtDevice, const unsigned char*, const char*)> kernel_open{"xrtPLKernelOpen"};
    XrtEntry<int(XrtKernel)> kernel_close{"xrtKernelClose"};
    XrtEntry<int(XrtKernel, int)> kernel_group{"xrtKernelArgGroupId"};
    XrtEntry<XrtBuffer(XrtDevice, std::size_t, std::uint64_t, std::uint32_t)> buffer_allocate{"xrtBOAlloc"};
    XrtEntry<XrtBuffer(XrtBuffer, std::size_t, std::size_t)> buffer_part{"xrtBOSubAlloc"};
    XrtEntry<int(XrtBuffer)> buffer_free{"xrtBOFree"};
    XrtEntry<void*(XrtBuffer)> buffer_map{"xrtBOMap"};
    XrtEntry<int(XrtBuffer, int, std::size_t, std::size_t)> buffer_sync{"xrtBOSync"};
    XrtEntry<XrtRun(XrtKernel)> run_open{"xrtRunOpen"};
    XrtEntry<int(XrtRun)> run_close{"xrtRunClose"};
    XrtEntry<int(XrtRun, int, ...)> run_set{"xrtRunSetArg"};
    XrtEntry<int(XrtRun)> run_start{"xrtRunStart"};
    XrtEntry<int(XrtRun, unsigned)> run_wait{"xrtRunWaitFor"};
    XrtEntry<int(XrtRun)> run_state{"xrtRunState"};
};

}  // namespace smart_infinity
