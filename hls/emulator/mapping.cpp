#include "mapping.hpp"

#include <sys/mman.h>

#include <cerrno>

#include "base/system_error.hpp"

namespace smart_infinity::emulator {

Mapping::Mapping(std::size_t bytes, int protection, int file) : bytes_(bytes) {
    const int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    void* data = mmap(nullptr, bytes, protection, flags | MAP_NORESERVE, file, 0);
    if (data == MAP_FAILED) throw SystemError(errno, "emulated card: mmap");
    data_ = static_cast<std::byte*>(data);
}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace smart_infinity::emulator
