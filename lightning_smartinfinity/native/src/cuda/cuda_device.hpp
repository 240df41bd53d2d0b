#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

#include "base/host_registrar.hpp"
#include "base/process.hpp"
#include "cuda/cuda_driver.hpp"
#include "extent/batch.hpp"

namespace smart_infinity {

// A CUDA device through its primary context, which is also torch's. Addresses and streams are those of the context.
//
// Destructors here and below give back what they can and tell nobody of failures: at exit the driver may be gone before
// them. In a forked child, which has no context, they do nothing and everything else throws.
class CudaDevice final : public HostRegistrar {
 public:
    // Throws CudaError: no driver, no such device.
    explicit CudaDevice(int index);
    ~CudaDevice();
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;

    int index() const { return index_; }
    const CudaDriver& driver() const { return *driver_; }
    bool is_usable() const { return process_.is_current(); }

    // Returns whether it worked, and remembers the first failure. Only what copies touch is worth it: the gradient
    // arena and the slots of travelling parameters. Pages of the ring, whose state stays on the host, stay pageable.
    bool register_host(void* data, std::size_t bytes) const override;
    void unregister_host(void* data) const noexcept override;
    // Why memory could not be registered; empty if it always could.
    std::string registration_failure() const;

    // Both throw CudaError. Copies start in the stream's order; their memory stays until they have completed.
    void copy_to_device(Address device, const void* host, std::size_t bytes, CudaStreamHandle stream) const;
    void copy_to_host(void* host, Address device, std::size_t bytes, CudaStreamHandle stream) const;

    // Makes the context the calling thread's while it lives: threads of ours, and of autograd, have none or another.
    class Current {
     public:
        explicit Current(const CudaDevice& device);
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

     private:
        const CudaDriver& driver_;
    };

    // Calls an entry point that gives something back, on a thread that may have no context.
    template <class... Parameters>
    void give_back(const CudaEntry<Parameters...>& entry,
                   std::type_identity_t<Parameters>... arguments) const noexcept {
        if (!is_usable()) return;
        try {
            const Current current(*this);
            (void)driver_->attempt(entry, arguments...);
        } catch (const CudaError&) {
            // The context is gone, and with it what was to be given back.
            return;
        }
    }

 private:
    int index_;
    std::shared_ptr<const CudaDriver> driver_;
    int device_ = 0;
    CudaContext context_ = nullptr;
    mutable std::mutex mutex_;
    mutable std::string registration_failure_;
    Process process_;
};

// A point in a stream's order, recorded anew as often as wanted; a wait is for the point recorded last.
class CudaEvent {
 public:
    explicit CudaEvent(std::shared_ptr<const CudaDevice> device);
    ~CudaEvent();
    CudaEvent(const CudaEvent&) = delete;
    CudaEvent& operator=(const CudaEvent&) = delete;

    // All throw CudaError; also of the work before the point, if that failed.
    void record(CudaStreamHandle stream) const;
    void synchronize() const;
    // What is issued in the stream from now on runs after the point.
    void hold(CudaStreamHandle stream) const;

    const std::shared_ptr<const CudaDevice>& device() const { return device_; }

 private:
    std::shared_ptr<const CudaDevice> device_;
    CudaEventHandle event_ = nullptr;
};

// A stream of ours, which waits for others and lets them wait only where it is told to.
class CudaStream {
 public:
    explicit CudaStream(std::shared_ptr<const CudaDevice> device);
    ~CudaStream();
    CudaStream(const CudaStream&) = delete;
    CudaStream& operator=(const CudaStream&) = delete;

    CudaStreamHandle handle() const { return stream_; }
    const std::shared_ptr<const CudaDevice>& device() const { return device_; }

    // What is issued here from now on runs after what is in the other stream now.
    void follow(CudaStreamHandle other) const;
    // What is issued in the other stream from now on runs after what is here now.
    void lead(CudaStreamHandle other) const;

 private:
    std::shared_ptr<const CudaDevice> device_;
    CudaStreamHandle stream_ = nullptr;
};

}  // namespace smart_infinity
