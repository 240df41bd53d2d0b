#include "settings.hpp"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace smart_infinity::emulator {
namespace {

std::int64_t from_environment(std::string name, std::int64_t otherwise) {
    std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::toupper(letter); });
    const char* value = std::getenv(("SMART_INFINITY_CARD_" + name).c_str());
    return value != nullptr ? std::stoll(value) : otherwise;
}

std::atomic<unsigned>& count() {
    static std::atomic<unsigned> count{static_cast<unsigned>(from_environment("count", 1))};
    return count;
}

}  // namespace

Settings::Settings()
    : dram_mib(from_environment("dram_mib", 4096)),
      p2p(from_environment("p2p", 1)),
      latency_us(from_environment("latency_us", 0)),
      dma_mib_per_s(from_environment("dma_mib_per_s", 0)),
      channel_mib_per_s(from_environment("channel_mib_per_s", 0)),
      kernel_mib_per_s(from_environment("kernel_mib_per_s", 0)) {}

void Settings::set(std::string_view name, std::int64_t value) {
    if (name == "dram_mib") {
        dram_mib = value;
    } else if (name == "p2p") {
        p2p = value;
    } else if (name == "latency_us") {
        latency_us = value;
    } else if (name == "dma_mib_per_s") {
        dma_mib_per_s = value;
    } else if (name == "channel_mib_per_s") {
        channel_mib_per_s = value;
    } else if (name == "kernel_mib_per_s") {
        kernel_mib_per_s = value;
    } else {
        throw std::invalid_argument("an emulated card has no setting " + std::string(name));
    }
}

unsigned num_cards() { return count(); }

void set_num_cards(unsigned number) { count() = std::min(number, kMaxCards); }

}  // namespace smart_infinity::emulator
