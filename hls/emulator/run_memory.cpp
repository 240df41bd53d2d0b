#include "run_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "base/system_error.hpp"

namespace smart_infinity::emulator {
namespace {

// Large enough for a kernel that overruns by a whole card's memory.
constexpr std::uint64_t kGuardBytes = std::uint64_t{4} << 30;

std::string named(std::size_t pointer, std::uint64_t address) {
    std::ostringstream text;
    text << "pointer " << pointer << " (0x" << std::hex << address << ")";
    return text.str();
}

std::uint64_t bytes_of(const Range& range) { return range.end - range.begin; }

}  // namespace

void RunMemory::map(std::span<PointerArgument> pointers) {
    find_ranges(pointers);
    place_views();
    for (PointerArgument& pointer : pointers) {
        pointers_.push_back(pointer.address);
        pointer.memory = views_[view_of(pointer.address)].memory;
    }
}

void RunMemory::find_ranges(std::span<const PointerArgument> pointers) {
    for (std::size_t index = 0; index < pointers.size(); ++index) {
        const auto [address, written, _] = pointers[index];
        if (address % kBeatBytes != 0) throw std::invalid_argument(named(index, address) + " is not 64-byte aligned");
        const Range allocation = memory_.allocation(address);
        if (allocation.end == 0) throw std::invalid_argument(named(index, address) + " lies in no buffer");
        // Memory is moved in whole beats.
        views_.push_back({{address, round_up(allocation.end, kBeatBytes)}, written});
    }
    const auto begin = [](const View& view) { return view.range.begin; };
    std::ranges::sort(views_, {}, begin);
    for (std::size_t index = views_.size(); index-- > 1;) {
        View& view = views_[index - 1];
        const View& next = views_[index];
        if (view.range.begin == next.range.begin) {  // the array is updated in place
            view.written |= next.written;
            view.range.end = next.range.end;
            views_.erase(views_.begin() + static_cast<std::ptrdiff_t>(index));
        } else {
            view.range.end = std::min(view.range.end, next.range.begin);
        }
    }
}

void RunMemory::place_views() {
    std::uint64_t bytes = kGuardBytes;
    for (const View& view : views_) bytes += round_up(bytes_of(view.range), kPageBytes) + kGuardBytes;
    addresses_ = Mapping(bytes, PROT_NONE);
    std::byte* next = addresses_.data() + kGuardBytes;
    for (View& view : views_) {
        place(view, next);
        next += round_up(bytes_of(view.range), kPageBytes) + kGuardBytes;
    }
    guard_.emplace(addresses_.data(), addresses_.bytes());
}

void RunMemory::place(View& view, std::byte* begin) {
    const std::uint64_t bytes = bytes_of(view.range), whole = round_up(bytes, kPageBytes);
    view.is_copy = view.range.begin % kPageBytes != 0 || bytes != whole;
    const int flags = view.is_copy ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_POPULATE;
    const auto offset = view.is_copy ? 0 : static_cast<off_t>(memory_.file_offset(view.range.begin));
    const int file = view.is_copy ? -1 : memory_.file();
    if (mmap(begin, whole, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, offset) == MAP_FAILED) {
        throw SystemError(errno, "emulated card: a run's memory");
    }
    view.memory = begin + (whole - bytes);
    const std::byte* device = memory_.at(view.range.begin);
    if (view.is_copy) std::memcpy(view.memory, device, bytes);
    if (view.written && (view.is_copy || !find_host_(view.range.begin).empty())) {
        view.before.assign(device, device + bytes);
    }
}

void RunMemory::finish() {
    for (const View& view : views_) finish(view);
}

void RunMemory::finish(const View& view) {
    if (view.before.empty()) return;
    const std::span<std::byte> host = find_host_(view.range.begin);
    for (std::size_t offset = 0; offset < view.before.size(); offset += kBeatBytes) {
        const std::byte* beat = view.memory + offset;
        if (std::memcmp(beat, view.before.data() + offset, kBeatBytes) == 0) continue;
        if (view.is_copy) std::memcpy(memory_.at(view.range.begin + offset), beat, kBeatBytes);
        if (offset < host.size()) {
            std::memset(host.data() + offset, kHostPoison, std::min(kBeatBytes, host.size() - offset));
        }
    }
}

void RunMemory::poison_written() {
    for (const View& view : views_) {
        if (view.written) std::memset(view.memory, kDevicePoison, bytes_of(view.range));
    }
}

std::string RunMemory::trespass() const {
    const std::uintptr_t fault = guard_ ? guard_->first_fault() : 0;
    if (fault == 0) return {};
    // The kernel left the nearest buffer, since guards are longer than any buffer.
    std::size_t nearest = 0;
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (std::size_t index = 0; index < views_.size(); ++index) {
        const auto begin = reinterpret_cast<std::uintptr_t>(views_[index].memory);
        const auto past = static_cast<std::int64_t>(fault - begin - bytes_of(views_[index].range));
        const std::int64_t distance = fault < begin ? static_cast<std::int64_t>(begin - fault) : past;
        if (distance < least) nearest = index, least = distance;
    }
    const View& view = views_[nearest];
    const auto pointer = std::ranges::find(pointers_, view.range.begin) - pointers_.begin();
    const bool before = fault < reinterpret_cast<std::uintptr_t>(view.memory);
    std::ostringstream text;
    text << named(static_cast<std::size_t>(pointer), view.range.begin) << ": the kernel went "
         << (before ? "before its buffer" : "past its buffer") << " of " << bytes_of(view.range) << " bytes";
    return text.str();
}

std::uint64_t RunMemory::bytes() const {
    std::uint64_t sum = 0;
    for (const View& view : views_) sum += bytes_of(view.range);
    return sum;
}

std::uint64_t RunMemory::address(std::size_t pointer, std::uint64_t offset) const {
    const View& view = views_[view_of(pointers_.at(pointer))];
    if (offset >= bytes_of(view.range)) throw std::out_of_range("the buffer ends before the byte to corrupt");
    return view.range.begin + offset;
}

std::size_t RunMemory::view_of(std::uint64_t address) const {
    const auto found = std::ranges::find(views_, address, [](const View& view) { return view.range.begin; });
    return static_cast<std::size_t>(found - views_.begin());
}

}  // namespace smart_infinity::emulator
