#include "base/buffer.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>

#include "base/system_error.hpp"

namespace smart_infinity {
namespace {

void unmap(std::byte* first, std::byte* last) {
    if (first != last) ::munmap(first, static_cast<std::size_t>(last - first));
}

// Maps more than needed, and unmaps the parts before and after the aligned range.
std::byte* map_aligned(std::size_t bytes, std::size_t alignment, Reserve reserve) {
    const std::size_t mapped = bytes + alignment - page_bytes();
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reserve == Reserve::kNothing ? MAP_NORESERVE : 0);
    void* const address = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (address == MAP_FAILED) throw SystemError(errno, "HostBuffer: mmap of " + std::to_string(bytes) + " bytes");
    auto* const first = static_cast<std::byte*>(address);
    const auto misalignment = reinterpret_cast<std::uintptr_t>(first) % alignment;
    std::byte* const data = misalignment == 0 ? first : first + (alignment - misalignment);
    unmap(first, data);
    unmap(data + bytes, first + mapped);
    return data;
}

}  // namespace

std::size_t page_bytes() {
    static const std::size_t bytes = std::max(kBlockBytes, static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
    return bytes;
}

HostBuffer::HostBuffer(std::size_t bytes, Reserve reserve) : data_(nullptr), bytes_(bytes) {
    if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() / 2) {
        throw std::invalid_argument("HostBuffer: cannot map " + std::to_string(bytes) + " bytes");
    }
    const std::size_t mapped = align_up(bytes, page_bytes());
    data_ = map_aligned(mapped, bytes >= kHugePageBytes ? kHugePageBytes : page_bytes(), reserve);
    // Failure is ignored: huge pages only add speed, and a kernel may be built without them.
    (void)::madvise(data_, mapped, MADV_HUGEPAGE);
    if (::madvise(data_, mapped, MADV_DONTFORK) != 0) {
        const int error = errno;
        unmap(data_, data_ + mapped);
        throw SystemError(error, "HostBuffer: madvise(MADV_DONTFORK)");
    }
}

HostBuffer::~HostBuffer() {
    unregister();
    // A forked child does not have this mapping, and another one may be at its address there.
    if (process_.is_current()) unmap(data_, data_ + align_up(bytes_, page_bytes()));
}

bool HostBuffer::give_back(std::size_t offset, std::size_t bytes) noexcept {
    // madvise cannot fail for memory that is mapped and not locked. If it does, the memory keeps its content.
    return process_.is_current() && ::madvise(data_ + offset, bytes, MADV_DONTNEED) == 0;
}

bool HostBuffer::try_register(std::shared_ptr<const HostRegistrar> registrar) {
    if (registrar_) throw std::invalid_argument("HostBuffer: it is registered already");
    if (!registrar->register_host(data_, align_up(bytes_, page_bytes()))) return false;
    registrar_ = std::move(registrar);
    return true;
}

void HostBuffer::unregister() {
    if (registrar_ && process_.is_current()) registrar_->unregister_host(data_);
    registrar_.reset();
}

}  // namespace smart_infinity
