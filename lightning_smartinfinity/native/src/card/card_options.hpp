#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "card/card_binding.hpp"
#include "io/state_file.hpp"

namespace smart_infinity {

// Options of a card that updates the tasklets of a pipeline.
struct CardOptions {
    std::shared_ptr<CardBinding> binding;
    std::string kernel;
    std::size_t gradient_buffer_bytes;  // on the card, for each buffer of the ring
    std::size_t parameter_bytes;
    std::chrono::milliseconds timeout;                      // longest time of a run, a transfer or another call
    std::optional<std::size_t> dram_bytes = std::nullopt;   // largest size of the ring; none: unlimited
    std::optional<StateFile> gradient_file = std::nullopt;  // file that carries gradients; none: host memory does
};

}  // namespace smart_infinity
