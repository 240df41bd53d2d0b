// Runs kernels for another process. It serves builds with a sanitizer, which Python cannot load.
//
// For each run it reads from stdin: uint32 kernel; uint32 number of buffers, and for each its uint64 size and its bytes
// (gradient, arrays, parameter, status); uint32 number of words, and the words. It answers on stdout: uint64 size of
// the message, the message, and the bytes of the buffers.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "csim.hpp"

namespace {

void receive(void* bytes, std::size_t size) {
    if (std::fread(bytes, 1, size, stdin) != size) std::exit(2);
}

template <class T>
T received() {
    T value;
    receive(&value, sizeof value);
    return value;
}

void send(const void* bytes, std::size_t size) {
    if (std::fwrite(bytes, 1, size, stdout) != size) std::exit(2);
}

// It is on the heap and not a byte longer than requested, so that access beyond its end is an error.
struct Buffer {
    std::uint64_t size = received<std::uint64_t>();
    std::unique_ptr<void, decltype(&std::free)> bytes{std::aligned_alloc(64, size), &std::free};

    Buffer() { receive(bytes.get(), size); }
};

void serve(std::uint32_t kernel) {
    std::vector<Buffer> buffers(received<std::uint32_t>());
    std::vector<std::uint32_t> words(received<std::uint32_t>());
    receive(words.data(), words.size() * sizeof words[0]);

    std::vector<void*> addresses;
    for (const Buffer& buffer : buffers) addresses.push_back(buffer.bytes.get());
    const std::string message = sim::simulate(kernel, addresses.data(), words.data());

    const std::uint64_t size = message.size();
    send(&size, sizeof size);
    send(message.data(), size);
    for (const Buffer& buffer : buffers) send(buffer.bytes.get(), buffer.size);
    std::fflush(stdout);
}

}  // namespace

int main() {
    std::uint32_t kernel;
    while (std::fread(&kernel, sizeof kernel, 1, stdin) == 1) serve(kernel);
}
