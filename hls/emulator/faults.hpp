#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

namespace smart_infinity::emulator {

enum class FaultKind {
    kHang,     // a run waits until it is released, and computes only then
    kError,    // a run ends in ERROR, its outputs of no use
    kAbort,    // a run ends in ABORT, its outputs of no use
    kCorrupt,  // one bit of what a run wrote is wrong
    kLost,     // the card is gone when a run begins
    kSubmit,   // a run cannot be started
    kSync,     // a sync fails
    kStall,    // a sync waits until it is released, and moves only then
    kAlloc,    // an allocation fails
};

struct Fault {
    FaultKind kind;
    std::int64_t skipped;      // so many chances are let pass first
    std::uint64_t pointer;     // of kCorrupt: which of the kernel's pointers, counted from 0
    std::uint64_t bit_offset;  // of kCorrupt: which bit of it
};

// Throws std::invalid_argument.
FaultKind fault_kind(std::string_view name);

// What is to go wrong on a card, once each.
class Faults {
 public:
    // From SMART_INFINITY_CARD_FAULTS: "<card>:<kind>:<skipped>[:<pointer>:<bit>]", divided by semicolons.
    explicit Faults(unsigned card);

    void add(const Fault& fault);
    void clear();
    // Called at every chance of a fault of this kind; the fault, if it strikes now.
    std::optional<Fault> strike(FaultKind kind);

 private:
    std::mutex mutex_;
    std::vector<Fault> faults_;
};

}  // namespace smart_infinity::emulator
