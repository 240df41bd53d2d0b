// What the stress programs share. Each is called with FOLDER FIRST_SEED NUM_SEEDS FAKE_CUDA_LIBRARY.

#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "checksum/crc32c.hpp"
#include "testing/seams.hpp"

namespace smart_infinity {

// Checksum of results that must have the same bits on every CPU. The programs print it, for comparison.
inline std::uint32_t digest = 0;

inline void record(const void* data, std::size_t bytes) { digest = crc32c(data, bytes, digest); }

inline void require(bool condition, const char* what, std::uint64_t seed) {
    if (condition) return;
    std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), what);
    std::_Exit(1);
}

// Draw at most one number in the arguments of a call: compilers choose the order of their evaluation.
class Random {
 public:
    explicit Random(std::uint64_t seed) : generator_(seed) {}
    std::size_t upto(std::size_t last) { return std::uniform_int_distribution<std::size_t>(0, last)(generator_); }
    std::size_t between(std::size_t first, std::size_t last) { return first + upto(last - first); }
    bool one_in(std::size_t number) { return upto(number - 1) == 0; }
    bool coin() { return one_in(2); }
    // Returns roughly a normal number. That of the standard library depends on the library's logarithm.
    float normal() {
        float sum = 0;
        for (int i = 0; i < 4; ++i) sum += std::ldexp(static_cast<float>(upto(1 << 22)), -20) - 2;
        return sum / 2;
    }
    template <class Item>
    void shuffle(std::vector<Item>& items) {
        std::shuffle(items.begin(), items.end(), generator_);
    }
    void fill(std::vector<float>& values) {
        for (float& value : values) value = normal();
    }

 private:
    std::mt19937_64 generator_;
};

// Makes a file of this length and returns its path, which the caller unlinks.
inline std::string make_file(const std::string& folder, const char* name, std::size_t bytes, std::uint64_t seed) {
    const std::string path = folder + "/" + name + "-" + std::to_string(::getpid());
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    require(descriptor >= 0 && ::ftruncate(descriptor, static_cast<off_t>(bytes)) == 0, "no file", seed);
    ::close(descriptor);
    return path;
}

// The controls of the fake driver.
struct FakeCuda {
    explicit FakeCuda(const char* library) {
        void* const handle = ::dlopen(library, RTLD_NOW);
        delay = reinterpret_cast<void (*)(std::uint64_t, int)>(::dlsym(handle, "fake_delay"));
        fail = reinterpret_cast<void (*)(const char*, int, int)>(::dlsym(handle, "fake_fail"));
        reset = reinterpret_cast<void (*)()>(::dlsym(handle, "fake_reset"));
        use_cuda_library(library);
    }
    void (*delay)(std::uint64_t seed, int max_delay_us);
    void (*fail)(const char* call, int skipped, int result);
    void (*reset)();  // removes delays and failures
};

inline int run_scenarios(int argc, char** argv, const std::function<void(std::uint64_t)>& run) {
    if (argc != 5) return 2;
    const std::uint64_t first = std::strtoull(argv[2], nullptr, 10), number = std::strtoull(argv[3], nullptr, 10);
    for (std::uint64_t seed = first; seed < first + number; ++seed) run(seed);
    std::printf("%llu scenarios, digest %08x\n", static_cast<unsigned long long>(number), digest);
    return 0;
}

}  // namespace smart_infinity
