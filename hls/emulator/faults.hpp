#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

namespace smart_infinity::emulator {

enum class FaultKind {
    kHang,     // a run waits until it is released, and only then computes
    kError,    // a run ends in ERROR with useless outputs
    kAbort,    // a run ends in ABORT with useless outputs
    kCorrupt,  // one bit of a run's outputs is wrong
    kLost,     // the card is gone when a run begins
    kSubmit,   // a run cannot be started
    kSync,     // a sync fails
    kStall,    // a sync waits until it is released, and only then copies
    kAlloc,    // an allocation fails
};

struct Fault {
    FaultKind kind;
    std::int64_t skipped;      // number of opportunities to pass over first
    std::uint64_t pointer;     // for kCorrupt: index of the kernel's pointer, counted from 0
    std::uint64_t bit_offset;  // for kCorrupt: offset of the bit
};

// Throws std::invalid_argument if the name is unknown.
FaultKind fault_kind(std::string_view name);

// The faults that a card still has to show, each once.
class Faults {
 public:
    // Reads SMART_INFINITY_CARD_FAULTS: "<card>:<kind>:<skipped>[:<pointer>:<bit>]", separated by semicolons.
    explicit Faults(unsigned card);

    void add(const Fault& fault);
    void clear();
    // Called at every opportunity for a fault of this kind; returns the fault if it strikes now.
    std::optional<Fault> strike(FaultKind kind);

 private:
    std::mutex mutex_;
    std::vector<Fault> faults_;
};

}  // namespace smart_infinity::emulator
