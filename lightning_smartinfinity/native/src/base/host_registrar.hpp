#pragma once

#include <cstddef>

namespace smart_infinity {

// Registers host memory, so that copies between it and a device are asynchronous.
class HostRegistrar {
 public:
    // Returns whether it succeeded.
    virtual bool register_host(void* data, std::size_t bytes) const = 0;
    virtual void unregister_host(void* data) const noexcept = 0;

 protected:
    ~HostRegistrar() = default;
};

}  // namespace smart_infinity
