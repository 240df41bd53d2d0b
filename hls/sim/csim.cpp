#include "csim.hpp"

#include <hls_stream.h>
#include <xmmintrin.h>

#include <card_kernels.hpp>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

namespace sim {
namespace {

// Flushes subnormals to zero, as the card's operators do.
class FlushedSubnormals {
 public:
    FlushedSubnormals() { _mm_setcsr(before_ | 0x8040); }
    ~FlushedSubnormals() { _mm_setcsr(before_); }

 private:
    unsigned before_ = _mm_getcsr();
};

// A kernel's arguments: pointers come before words.
struct Arguments {
    void* const* buffers;
    const std::uint32_t* words;
    std::size_t num_arrays = 0;
    std::size_t next_pointer = 0;

    // The in and out pointers of an array are the same.
    void* pointer() {
        const std::size_t index = next_pointer++;
        return buffers[index <= num_arrays ? index : index - num_arrays];
    }

    template <class T>
    T next() {
        if constexpr (std::is_pointer_v<T>) {
            return static_cast<T>(pointer());
        } else {
            return *words++;
        }
    }
};

template <class... Types>
void call(void (*kernel)(Types...), Arguments arguments) {
    // An array has two pointers; gradient, parameter and status have one each.
    arguments.num_arrays = ((std::is_pointer_v<Types> + ...) - 3) / 2;
    std::apply(kernel, std::tuple<Types...>{arguments.next<Types>()...});  // braces keep the order
}

void call(std::uint32_t kernel, const Arguments& arguments) {
    switch (kernel) {
#define CALL(function, number) \
    case number:               \
        return call(function, arguments);
        CARD_KERNELS(CALL)
#undef CALL
    }
    throw std::invalid_argument("there is no kernel " + std::to_string(kernel));
}

std::string failure_of(std::uint32_t kernel, const Arguments& arguments) {
#ifdef SMART_INFINITY_THREADED_SIMULATION
    Dataflow dataflow;
    Dataflow::current() = &dataflow;
    call(kernel, arguments);
    Dataflow::current() = nullptr;
    return dataflow.failure();
#else
    try {
        call(kernel, arguments);
    } catch (const std::exception& error) {
        return error.what();
    }
    return {};
#endif
}

}  // namespace

std::string simulate(std::uint32_t kernel, void* const* buffers, const std::uint32_t* words) {
    const FlushedSubnormals flushed;
    leftovers().clear();
    const std::string failure = failure_of(kernel, {buffers, words});
    if (!failure.empty() || leftovers().empty()) return failure;
    return "not read to the end: " + leftovers();
}

}  // namespace sim

extern "C" {

// Interface for ctypes. Puts the failure into `message`, cut to `capacity` bytes; empty if there was none.
void csim_run(std::uint32_t kernel, void* const* buffers, const std::uint32_t* words, char* message,
              std::size_t capacity) {
    const std::string failure = sim::simulate(kernel, buffers, words);
    message[failure.copy(message, capacity - 1)] = '\0';
}
}
