#include "card_memory.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/system_error.hpp"

namespace smart_infinity::emulator {
namespace {

int make_file(std::uint64_t bytes) {
    const int file = memfd_create("smart-infinity-card", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
        throw SystemError(errno, "emulated card: memory");
    }
    return file;
}

}  // namespace

CardMemory::CardMemory(std::uint64_t base, std::uint64_t bytes)
    : base_(base), bytes_(bytes), file_(make_file(bytes)), mapping_(bytes, PROT_READ | PROT_WRITE, file_) {}

CardMemory::~CardMemory() { close(file_); }

std::uint64_t CardMemory::allocate(std::uint64_t bytes, std::uint64_t limit_bytes) {
    const std::uint64_t whole = round_up(bytes, kPageBytes);
    const std::scoped_lock lock(mutex_);
    std::uint64_t address = base_;
    for (const auto& [begin, used] : allocations_) {
        if (begin - address >= whole) break;
        address = begin + round_up(used, kPageBytes);
    }
    if (whole < bytes || address - base_ + whole > std::min(bytes_, limit_bytes)) throw std::bad_alloc();
    std::memset(at(address), kDevicePoison, whole);
    allocations_.emplace(address, bytes);
    return address;
}

void CardMemory::release(std::uint64_t address) {
    const std::scoped_lock lock(mutex_);
    const auto found = allocations_.find(address);
    const auto whole = static_cast<off_t>(round_up(found->second, kPageBytes));
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(file_offset(address)), whole);
    allocations_.erase(found);
}

Range CardMemory::allocation(std::uint64_t address) const {
    const std::scoped_lock lock(mutex_);
    auto after = allocations_.upper_bound(address);
    if (after == allocations_.begin()) return {};
    const auto& [begin, bytes] = *--after;
    return address < begin + bytes ? Range{begin, begin + bytes} : Range{};
}

}  // namespace smart_infinity::emulator
