#include "mapping.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

namespace smart_infinity::emulator {

Mapping::Mapping(std::size_t bytes, int protection, int flags, int file) : bytes_(bytes) {
    void* data = mmap(nullptr, bytes, protection, flags | MAP_NORESERVE, file, 0);
    if (data == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "emulated card: mmap");
    data_ = static_cast<std::byte*>(data);
}

Mapping::~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
}

Mapping Mapping::of_file(int file, std::size_t bytes) { return {bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file}; }

Mapping Mapping::anonymous(std::size_t bytes) {
    return {bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1};
}

Mapping Mapping::inaccessible(std::size_t bytes) { return {bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1}; }

}  // namespace smart_infinity::emulator
