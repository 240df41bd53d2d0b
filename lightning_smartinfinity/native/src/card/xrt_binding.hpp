#pragma once

#include <memory>
#include <string>
#include <variant>

#include "card/card_binding.hpp"

namespace smart_infinity {

using CardAddress = std::variant<unsigned, std::string>;  // an index, or a PCIe address as 0000:3b:00.1

// Opens a card through XRT's public C API and loads its kernels. Throws CardError with the call that failed.
std::shared_ptr<CardBinding> open_xrt_binding(const std::string& library, const CardAddress& card,
                                              const std::string& xclbin);

}  // namespace smart_infinity
