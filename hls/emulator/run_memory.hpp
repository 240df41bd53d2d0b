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

// Returns host memory from a card's address on; empty if the buffer that holds the address has none.
using FindHostMemory = std::function<std::span<std::byte>(std::uint64_t address)>;

// The buffers of a run as its kernel reaches them, each between guards.
//
// A pointer's buffer ends where the next pointer of the run begins or where its allocation ends, so that neighbours
// within one allocation are guarded, too. A buffer that does not end with a page is copied to where one ends.
class RunMemory final : public DeviceMemory {
 public:
    RunMemory(CardMemory& memory, FindHostMemory find_host) : memory_(memory), find_host_(std::move(find_host)) {}

    void map(std::span<PointerArgument> pointers) override;

    // Called after the kernel: copies go back, and host memory of changed beats becomes poison until it is synced.
    void finish();
    // Poisons the buffers that a run writes, because the run failed half way.
    void poison_written();
    // Describes an access outside of the run's buffers; empty if there was none.
    std::string trespass() const;

    std::uint64_t bytes() const;
    // Returns the card's address of a byte after a pointer, given by its index; throws std::out_of_range.
    std::uint64_t address(std::size_t pointer, std::uint64_t offset) const;

 private:
    struct View {
        Range range;
        bool written;
        std::byte* memory = nullptr;
        bool is_copy = false;
        std::vector<std::byte> before = {};  // contents before the run, if changes matter
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
