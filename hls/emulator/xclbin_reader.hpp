#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct axlf;

namespace smart_infinity::emulator {

struct Bank {
    std::uint64_t base;
    std::uint64_t bytes;
};

// The parts of an xclbin that the emulated card uses.
struct Xclbin {
    std::string uuid;
    std::vector<Bank> banks;
    std::vector<std::string> compute_units;  // "<kernel>:<name>", in the order in which XRT numbers them

    // Throws SystemError (EINVAL) if a section is missing.
    explicit Xclbin(const axlf& file);
};

}  // namespace smart_infinity::emulator
