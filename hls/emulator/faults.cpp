#include "faults.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace smart_infinity::emulator {
namespace {

constexpr std::array<std::pair<std::string_view, FaultKind>, 9> kNames{{
    {"hang", FaultKind::kHang},
    {"error", FaultKind::kError},
    {"abort", FaultKind::kAbort},
    {"corrupt", FaultKind::kCorrupt},
    {"lost", FaultKind::kLost},
    {"submit", FaultKind::kSubmit},
    {"sync", FaultKind::kSync},
    {"stall", FaultKind::kStall},
    {"alloc", FaultKind::kAlloc},
}};

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
    return parts;
}

}  // namespace

FaultKind fault_kind(std::string_view name) {
    const auto* found = std::ranges::find(kNames, name, &std::pair<std::string_view, FaultKind>::first);
    if (found == kNames.end()) throw std::invalid_argument("an emulated card has no fault " + std::string(name));
    return found->second;
}

Faults::Faults(unsigned card) {
    const char* text = std::getenv("SMART_INFINITY_CARD_FAULTS");
    for (const std::string& each : split(text != nullptr ? text : "", ';')) {
        std::vector<std::string> fields = split(each, ':');
        if (fields.size() < 3) throw std::invalid_argument("SMART_INFINITY_CARD_FAULTS: " + each);
        fields.resize(5, "0");
        if (std::stoul(fields[0]) != card) continue;
        faults_.push_back(
            {fault_kind(fields[1]), std::stoll(fields[2]), std::stoull(fields[3]), std::stoull(fields[4])});
    }
}

void Faults::add(const Fault& fault) {
    const std::scoped_lock lock(mutex_);
    faults_.push_back(fault);
}

void Faults::clear() {
    const std::scoped_lock lock(mutex_);
    faults_.clear();
}

std::optional<Fault> Faults::strike(FaultKind kind) {
    const std::scoped_lock lock(mutex_);
    const auto due = [kind](const Fault& fault) { return fault.kind == kind && fault.skipped == 0; };
    const auto striking = std::ranges::find_if(faults_, due);
    for (Fault& fault : faults_) {
        if (fault.kind == kind && fault.skipped > 0) --fault.skipped;
    }
    if (striking == faults_.end()) return std::nullopt;
    const Fault struck = *striking;
    faults_.erase(striking);
    return struck;
}

}  // namespace smart_infinity::emulator
