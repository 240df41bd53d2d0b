#include "settings.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

namespace smart_infinity::emulator {
namespace {

using Member = std::pair<std::string_view, std::atomic<std::int64_t> Settings::*>;

constexpr std::array<Member, 6> kMembers{{
    {"dram_mib", &Settings::dram_mib},
    {"p2p", &Settings::p2p},
    {"latency_us", &Settings::latency_us},
    {"dma_mib_per_s", &Settings::dma_mib_per_s},
    {"channel_mib_per_s", &Settings::channel_mib_per_s},
    {"kernel_mib_per_s", &Settings::kernel_mib_per_s},
}};

std::int64_t from_environment(std::string_view setting, std::int64_t otherwise) {
    std::string name(setting);
    std::ranges::transform(name, name.begin(), [](unsigned char letter) { return std::toupper(letter); });
    const char* value = std::getenv(("SMART_INFINITY_CARD_" + name).c_str());
    return value != nullptr ? std::stoll(value) : otherwise;
}

std::atomic<unsigned>& count() {
    static std::atomic<unsigned> count{static_cast<unsigned>(from_environment("count", 1))};
    return count;
}

}  // namespace

Settings::Settings() {
    for (const auto& [name, member] : kMembers) this->*member = from_environment(name, this->*member);
}

void Settings::set(std::string_view name, std::int64_t value) {
    const auto* found = std::ranges::find(kMembers, name, &Member::first);
    if (found == kMembers.end()) throw std::invalid_argument("an emulated card has no setting " + std::string(name));
    this->*found->second = value;
}

unsigned num_cards() { return count(); }

void set_num_cards(unsigned number) { count() = std::min(number, kMaxCards); }

}  // namespace smart_infinity::emulator
