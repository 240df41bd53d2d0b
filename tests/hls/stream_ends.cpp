// Fills and empties a stream of the sequential simulation wherever its chunks may end, twice, and checks what is read.
#include <hls_stream.h>

#include <cstdint>
#include <cstdio>

namespace {

constexpr std::uint32_t kMostNumbers = 3000;  // more than two chunks

bool is_empty(hls::stream<std::uint32_t, 2>& numbers) {
    try {
        numbers.read();
    } catch (const std::logic_error&) {
        return true;
    }
    return false;
}

bool passes_on(hls::stream<std::uint32_t, 2>& numbers, std::uint32_t count) {
    for (std::uint32_t number = 0; number < count; ++number) numbers.write(number);
    for (std::uint32_t number = 0; number < count; ++number) {
        if (numbers.read() != number) return false;
    }
    return is_empty(numbers);
}

// Returns whether a stream notes that it was left with something in it.
bool notes_leftover(std::uint32_t count) {
    sim::leftovers().clear();
    {
        hls::stream<std::uint32_t, 2> numbers("numbers");
        for (std::uint32_t number = 0; number < count; ++number) numbers.write(number);
    }
    return sim::leftovers() == "numbers";
}

}  // namespace

int main() {
    for (std::uint32_t count = 1; count <= kMostNumbers; ++count) {
        sim::leftovers().clear();
        {
            hls::stream<std::uint32_t, 2> numbers("numbers");
            if (!is_empty(numbers) || !passes_on(numbers, count) || !passes_on(numbers, kMostNumbers)) return 1;
        }
        if (!sim::leftovers().empty() || !notes_leftover(count)) return 2;
    }
    std::puts("all read");
}
