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
#include "extent/ready_point.hpp"

namespace smart_infinity {

// A CUDA device, used through its primary context, as torch does. Addresses and streams belong to that context.
//
// The destructors in this file release what they can and ignore failures, because at exit the driver may be gone
// already. In a forked child, which has no context, they do nothing, and all other calls throw.
class CudaDevice final : public HostRegistrar {
 public:
    // Throws CudaError if there is no driver or no such device.
    explicit CudaDevice(int index);
    ~CudaDevice();
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;

    int index() const { return index_; }
    const CudaDriver& driver() const { return *driver_; }
    bool is_usable() const { return process_.is_current(); }

    // Returns whether it succeeded; the first failure is kept. Only memory that copies use needs registering: the
    // ring of gradients, the slots of parameters and the pool of activations.
    bool register_host(void* data, std::size_t bytes) const override;
    void unregister_host(void* data) const noexcept override;
    // Returns why memory could not be registered; empty if registering has not failed.
    std::string registration_failure() const;

    // Both throw CudaError. Copies start in the stream's order; their memory must stay valid until they have completed.
    void copy_to_device(Address device, const void* host, std::size_t bytes, CudaStreamHandle stream) const;
    void copy_to_host(void* host, Address device, std::size_t bytes, CudaStreamHandle stream) const;

    // Makes the context current in the calling thread while it exists: our threads and autograd's have no context or
    // another one.
    class Current {
     public:
        explicit Current(const CudaDevice& device);
        ~Current();
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

     private:
        const CudaDriver& driver_;
    };

    // Calls an entry point that releases a resource, on a thread that may have no context.
    template <class... Parameters>
    void release(const CudaEntry<Parameters...>& entry, std::type_identity_t<Parameters>... arguments) const noexcept {
        if (!is_usable()) return;
        try {
            const Current current(*this);
            (void)driver_->attempt(entry, arguments...);
        } catch (const CudaError&) {
            // The context is gone, and the resource with it.
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

// A point in a stream's order. It can be recorded repeatedly; a wait refers to the last recording.
class CudaEvent final : public ReadyPoint {
 public:
    explicit CudaEvent(std::shared_ptr<const CudaDevice> device);
    ~CudaEvent() override;

    // All throw CudaError, also if the work before the point failed.
    void record(CudaStreamHandle stream) const;
    void synchronize() const override;
    // Returns whether the work before the point is done.
    bool done() const;
    // Makes work that is issued to the stream from now on wait for the point.
    void hold(CudaStreamHandle stream) const;

    const std::shared_ptr<const CudaDevice>& device() const { return device_; }

 private:
    std::shared_ptr<const CudaDevice> device_;
    CudaEventHandle event_ = nullptr;
};

// A stream of our own. Only these calls order it with other streams.
class CudaStream {
 public:
    explicit CudaStream(std::shared_ptr<const CudaDevice> device);
    ~CudaStream();
    CudaStream(const CudaStream&) = delete;
    CudaStream& operator=(const CudaStream&) = delete;

    CudaStreamHandle handle() const { return stream_; }
    const std::shared_ptr<const CudaDevice>& device() const { return device_; }

    // Makes work issued here from now on wait for all present work of the other stream.
    void follow(CudaStreamHandle other) const;
    // Makes work issued to the other stream from now on wait for all present work here.
    void lead(CudaStreamHandle other) const;

 private:
    std::shared_ptr<const CudaDevice> device_;
    CudaStreamHandle stream_ = nullptr;
};

}  // namespace smart_infinity
