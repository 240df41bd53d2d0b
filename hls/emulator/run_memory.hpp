#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "card_memory.hpp"
#include "compute_unit.hpp"
#include "guard_faults.hpp"

namespace smart_infinity::emulator {

// Host memory of the buffer that a card's address lies in, from that address on; empty if it has none of its own.
using FindHostMemory = std::function<std::span<std::byte>(std::uint64_t address)>;

// The buffers of one run as its kernel reaches them, each between guards.
//
// A pointer's buffer ends where the next pointer of the run begins, or where its allocation ends: what lies one behind
// the other in one allocation is guarded, too. A buffer that does not end with a page is copied to where one ends.
class RunMemory final : public DeviceMemory {
 public:
    RunMemory(CardMemory& memory, FindHostMemory find_host) : memory_(memory), find_host_(std::move(find_host)) {}

    void map(std::span<PointerArgument> pointers) override;

    // After the kernel: copies go back, and the host's memory of what changed becomes poison until it is synced.
    void finish();
    // For a run that fails half way: what is in the buffers that it writes is of no use.
    void poison_written();
    // What the kernel touched outside of its buffers, in words; empty if nothing.
    std::string trespass() const;

    std::uint64_t bytes() const;
    // The card's address of a byte of the argument-th pointer; throws std::out_of_range.
    std::uint64_t address(std::size_t pointer, std::uint64_t offset) const;

 private:
    struct View {
        Range range;
        bool written;
        std::byte* memory = nullptr;
        bool is_copy = false;
        std::vector<std::byte> before = {};  // where changes matter
    };

    void find_ranges(std::span<const PointerArgument> pointers);
    void place_views();
    void place(View& view, std::byte* begin);
    void finish(const View& view);
    std::size_t view_of(std::uint64_t address) const;

    CardMemory& memory_;
    FindHostMemory find_host_;
    std::vector<std::uint64_t> pointers_;
    std::vector<View> views_;  // ascending
    Mapping addresses_;
    std::optional<GuardedAddresses> guard_;
};

}  // namespace smart_infinity::emulator
