// A kernel with pages of EMULATED_PAGE_BYTES, for a process that preloads this library: memory is mapped, unmapped and
// given back in whole pages, and the end of a range is rounded up to one, as by Linux. Linux does not drop a part of a
// page from its cache of files: such a call ends the process.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>

namespace {

std::size_t page() {
    static const std::size_t bytes = std::strtoul(std::getenv("EMULATED_PAGE_BYTES"), nullptr, 10);
    return bytes;
}

std::size_t whole(std::size_t bytes) { return (bytes + page() - 1) / page() * page(); }

bool begins_a_page(const void* address) {
    if (reinterpret_cast<std::uintptr_t>(address) % page() == 0) return true;
    errno = EINVAL;
    return false;
}

struct Mapped {
    std::mutex mutex;
    std::map<void*, std::size_t> bytes;  // of each range, by its begin

    bool has(void* address) const {
        const auto after = bytes.upper_bound(address);
        if (after == bytes.begin()) return false;
        const auto [begin, size] = *std::prev(after);
        return address < static_cast<char*>(begin) + size;
    }
};

Mapped& mapped_here() {
    static Mapped& mapped = *new Mapped;  // as long as the process
    return mapped;
}

template <typename Function>
Function* real(Function*, const char* name) {
    return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

long sysconf(int name) noexcept {
    return name == _SC_PAGESIZE ? static_cast<long>(page()) : real(sysconf, "sysconf")(name);
}

void* mmap(void* hint, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
    const auto map = real(mmap, "mmap");
    if ((flags & MAP_FIXED) != 0) return map(hint, bytes, protection, flags, file, offset);
    // A file, too, gets whole pages of its own: munmap() below would take what is beside it.
    const int reserving = file >= 0 ? MAP_PRIVATE | MAP_ANONYMOUS : flags;
    void* const mapped = map(hint, whole(bytes) + page(), protection, reserving, -1, 0);
    if (mapped == MAP_FAILED) return mapped;
    void* const begin = reinterpret_cast<void*>(whole(reinterpret_cast<std::uintptr_t>(mapped)));
    const std::scoped_lock lock(mapped_here().mutex);
    mapped_here().bytes[begin] = whole(bytes);
    return file >= 0 ? map(begin, bytes, protection, flags | MAP_FIXED, file, offset) : begin;
}

int munmap(void* address, std::size_t bytes) noexcept {
    const auto unmap = real(munmap, "munmap");
    const std::scoped_lock lock(mapped_here().mutex);
    // The C library maps memory without this library, in pages of the real kernel.
    if (!mapped_here().has(address)) return unmap(address, bytes);
    mapped_here().bytes.erase(address);
    return begins_a_page(address) ? unmap(address, whole(bytes)) : -1;
}

int madvise(void* address, std::size_t bytes, int advice) noexcept {
    return begins_a_page(address) ? real(madvise, "madvise")(address, whole(bytes), advice) : -1;
}

int posix_fadvise(int file, off_t offset, off_t bytes, int advice) noexcept {
    if (static_cast<std::size_t>(offset | bytes) % page() != 0) std::abort();
    return real(posix_fadvise, "posix_fadvise")(file, offset, bytes, advice);
}
}
