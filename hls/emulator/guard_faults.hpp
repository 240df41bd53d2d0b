#pragma once

#include <atomic>
#include <cstdint>

namespace smart_infinity::emulator {

// Addresses that kernels may run into. While the object lives, an access to unmapped memory there does not end the
// process: it is recorded and let through, to memory that nothing else sees. A real card also continues, and reports
// the error at the end.
class GuardedAddresses {
 public:
    GuardedAddresses(const void* begin, std::uint64_t bytes);
    ~GuardedAddresses();
    GuardedAddresses(const GuardedAddresses&) = delete;
    GuardedAddresses& operator=(const GuardedAddresses&) = delete;

    // Returns the address of the first such access; 0 if there was none.
    std::uintptr_t first_fault() const;

 private:
    std::size_t index_;
};

}  // namespace smart_infinity::emulator
