// Works tasklets of random formats, sizes, borders and segments, without I/O, in memory of exact size, so that a
// sanitizer sees any access beyond it. Built with sanitizers by test_builds.py.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "pipeline/compute.hpp"
#include "stress.hpp"
#include "testing/seams.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace smart_infinity {
namespace {

// arithmetic() returns how this thread computes. The work treats subnormals as zeros, which must not change the
// caller's arithmetic. On x86 that is MXCSR without its exception flags. begin_with() chooses whether the caller itself
// keeps subnormals or treats them as zeros.
#if defined(__x86_64__)
std::uint32_t arithmetic() { return _mm_getcsr() & ~0x3fu; }
void begin_with(bool zeros) { _mm_setcsr(zeros ? 0x1fc0 : 0x1f80); }
#else
bool arithmetic() {
    const volatile float tiny = 1e-30f;
    return tiny * 1e-10f > 0;
}
void begin_with(bool) {}
#endif

const AdamStep kStep{0.5f, 0.1f, 0.999f, 0.001f, 0.9999f, 0.0f, 1e-2f, 3.0f, 1e-8f, 5};

using Arrays = std::vector<std::vector<float>>;

class Scenario {
 public:
    explicit Scenario(std::uint64_t seed) : seed_(seed), random_(seed) {
        identity_.state_format = static_cast<std::uint32_t>(random_.upto(kNumStateFormats - 1));
        tasklet_.num_arrays = kMomentArrays;
        tasklet_.numel = 1 + random_.upto(random_.upto(3) == 0 ? 30000 : 1500);
        tasklet_.offset = random_.upto(1 << 20) * kCellNumel;
        std::vector<std::uint64_t> borders;
        for (std::size_t i = random_.upto(40); i > 0; --i) borders.push_back(random_.upto(tasklet_.numel));
        tasklet_.blocks = std::make_shared<const Blocks>(borders);
        borders_ = std::move(borders);
        tasklet_.extent_bytes = extent_bytes(regions_of(identity_.format(), tasklet_));
        extent_ = make_extent();
    }

    void run() {
        begin_with(random_.upto(1) == 0);
        Arrays first = arrays(), second = arrays();
        for (auto& array : first) fill(array);
        for (float& value : first[2]) value = value * value;
        copy(Operation::kWrite, first);
        copy(Operation::kRead, first);
        copy(Operation::kWrite, first);
        copy(Operation::kRead, second);
        require(first == second, "what was read becomes other values when it is written", seed_);
        update();
        modify();
        copy(Operation::kRead, second);
    }

 private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    using Memory = std::unique_ptr<std::byte, Free>;

    Memory make_extent() const {
        return Memory(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, tasklet_.extent_bytes)));
    }

    Arrays arrays() const { return Arrays(kMomentArrays, std::vector<float>(tasklet_.numel)); }

    void fill(std::vector<float>& values) {
        for (float& value : values) value = std::ldexp(random_.normal(), -static_cast<int>(random_.upto(40)));
    }

    void work(Operation operation, const std::vector<Segment>& segments, std::byte* extent) {
        Tasklet tasklet = tasklet_;
        tasklet.segments = segments;
        const Batch batch{operation, {tasklet}, {kStep}, nullptr};
        const auto before = arithmetic();
        require(!compute(batch, batch.tasklets.front(), identity_, extent, nullptr), "an extent is refused", seed_);
        require(arithmetic() == before, "the thread computes in another way than before", seed_);
    }

    Segment segment(std::size_t first, std::size_t last, const Arrays& values) const {
        Segment segment;
        segment.offset = first;
        segment.numel = last - first;
        segment.num_arrays = kMomentArrays;
        for (std::size_t array = 0; array < kMomentArrays; ++array) {
            segment.arrays[array] = reinterpret_cast<Address>(values[array].data());
        }
        return segment;
    }

    void copy(Operation operation, const Arrays& values) {
        work(operation, {segment(0, tasklet_.numel, values)}, extent_.get());
    }

    // Modifies some elements from memory that holds no others.
    void modify() {
        const std::size_t first = random_.upto(tasklet_.numel - 1);
        const std::size_t last = first + random_.upto(tasklet_.numel - first);
        Arrays values(kMomentArrays, std::vector<float>(last - first));
        for (auto& array : values) fill(array);
        work(Operation::kModify, {segment(first, last, values)}, extent_.get());
    }

    // Updates on every instruction set, with other segments each time. All must give the same extent.
    void update() {
        std::vector<float> gradients(tasklet_.numel);
        fill(gradients);
        std::vector<std::vector<std::uint16_t>> parameters;
        std::vector<Memory> extents;
        for (const InstructionSet choice : supported_instruction_sets()) {
            select_instruction_set(choice);
            parameters.emplace_back(tasklet_.numel);
            extents.push_back(make_extent());
            std::memcpy(extents.back().get(), extent_.get(), tasklet_.extent_bytes);
            work(Operation::kUpdate, cut(gradients, parameters.back()), extents.back().get());
            require(std::memcmp(extents.back().get(), extents.front().get(), tasklet_.extent_bytes) == 0,
                    "an instruction set gives another extent", seed_);
            require(parameters.back() == parameters.front(), "an instruction set gives other parameters", seed_);
        }
        extent_ = std::move(extents.front());
    }

    std::vector<Segment> cut(const std::vector<float>& gradients, std::vector<std::uint16_t>& parameters) {
        std::vector<std::uint64_t> cuts{tasklet_.numel};
        for (const std::uint64_t border : borders_) {
            if (random_.upto(1) == 0) cuts.push_back(border);
        }
        for (std::size_t i = random_.upto(3); i > 0; --i)
            cuts.push_back(random_.upto(tasklet_.numel / kCellNumel) * kCellNumel);
        std::sort(cuts.begin(), cuts.end());
        std::vector<Segment> segments;
        std::uint64_t first = 0;
        for (const std::uint64_t last : cuts) {
            Segment segment;
            segment.offset = first;
            segment.numel = last - first;
            segment.step = 0;
            segment.gradient = reinterpret_cast<Address>(gradients.data() + first);
            segment.parameter = reinterpret_cast<Address>(parameters.data() + first);
            segment.parameter_dtype = DType::kBFloat16;
            segments.push_back(segment);
            first = last;
        }
        return segments;
    }

    std::uint64_t seed_;
    Random random_;
    Identity identity_;
    Tasklet tasklet_;
    std::vector<std::uint64_t> borders_;
    Memory extent_;
};

}  // namespace
}  // namespace smart_infinity

int main(int argc, char** argv) {
    return smart_infinity::run_scenarios(argc, argv, [](std::uint64_t seed) { smart_infinity::Scenario(seed).run(); });
}
