// Fills a stream whose second chunk ends where its first begins, and checks that everything written is read.
#include <hls_stream.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

int main() {
    constexpr std::size_t kBytes = sim::Chunks::kBytes;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, 2 * kBytes) != 0) return 1;
    char* const lower = static_cast<char*>(memory);
    sim::Chunks& chunks = sim::Chunks::of_this_thread();
    chunks.give(lower);
    chunks.give(lower + kBytes);  // taken first

    constexpr std::uint32_t kNumel = 2 * kBytes / sizeof(std::uint32_t);
    hls::stream<std::uint32_t, 2> numbers("numbers");
    for (std::uint32_t number = 0; number < kNumel; ++number) numbers.write(number);
    for (std::uint32_t number = 0; number < kNumel; ++number) {
        if (numbers.read() != number) return 2;
    }
    std::puts("all read");
    std::fflush(stdout);
    std::_Exit(0);  // the two halves cannot be freed apart
}
