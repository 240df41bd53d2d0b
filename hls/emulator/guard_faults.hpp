#pragma once

#include <atomic>
#include <cstdint>

namespace smart_infinity::emulator {

// Addresses that kernels may run into: while alive, an access to what is not mapped there does not end the process but
// is noted and let through, to memory that nobody else sees. A card goes on, too, and reports the error at the end.
class GuardedAddresses {
 public:
    GuardedAddresses(const void* begin, std::uint64_t bytes);
    ~GuardedAddresses();
    GuardedAddresses(const GuardedAddresses&) = delete;
    GuardedAddresses& operator=(const GuardedAddresses&) = delete;

    // Where the first such access went; 0 if there was none.
    std::uintptr_t first_fault() const;

 private:
    std::size_t slot_;
};

}  // namespace smart_infinity::emulator
