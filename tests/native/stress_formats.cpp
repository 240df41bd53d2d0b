// Works tasklets of random formats, types, sizes, borders and segments, without I/O, in memory of exact size, so that a
// sanitizer sees any access beyond it. First compares all checksums with the table's. Built with sanitizers, and for
// ARM, by test_builds.py.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "checksum/crc32c.hpp"
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

// Computes checksums of lengths around the sizes of the loops, at each alignment, continuing another one and in two
// pieces, with every width.
void compare_checksums() {
    constexpr std::size_t kAlignments = 64;
    Random random(0);
    std::vector<unsigned char> bytes(42000);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random.upto(255));
    require(crc32c_by(0, "123456789", 9, 0) == 0xe3069283, "the table gives another checksum", 0);
    for (std::size_t numel = 0; numel + kAlignments <= bytes.size(); numel += numel < 2600 ? 1 : 397) {
        const unsigned char* const data = bytes.data() + numel % kAlignments;
        const auto value = static_cast<std::uint32_t>(numel * 0x9e3779b9u);
        const std::size_t cut = random.upto(numel);
        const std::uint32_t expected = crc32c_by(0, data, numel, value);
        for (const int width : crc32c_widths()) {
            const std::uint32_t first = crc32c_by(width, data, cut, value);
            require(crc32c_by(width, data, numel, value) == expected, "a width gives another checksum", numel);
            require(crc32c_by(width, data + cut, numel - cut, first) == expected, "pieces give another", numel);
        }
        record(&expected, sizeof expected);
    }
}

class Scenario {
 public:
    explicit Scenario(std::uint64_t seed) : seed_(seed), random_(seed) {
        identity_.state_format = static_cast<std::uint32_t>(random_.upto(kNumStateFormats - 1));
        gradient_dtype_ = static_cast<DType>(random_.upto(kNumDTypes - 1));
        parameter_dtype_ = static_cast<DType>(random_.upto(kNumDTypes - 1));
        if (identity_.format().splits_master()) parameter_dtype_ = identity_.format().parameter_dtype;
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
        for (const auto& array : second) record(array.data(), array.size() * sizeof(float));
    }

 private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    using Memory = std::unique_ptr<std::byte, Free>;
    using Bytes = std::vector<std::byte>;

    Memory make_extent() const {
        return Memory(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, tasklet_.extent_bytes)));
    }

    Arrays arrays() const { return Arrays(kMomentArrays, std::vector<float>(tasklet_.numel)); }

    void fill(std::vector<float>& values) {
        for (float& value : values) {
            value = random_.normal();
            value = std::ldexp(value, -static_cast<int>(random_.upto(40)));
        }
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
        std::vector<float> values(tasklet_.numel);
        fill(values);
        Bytes gradients(tasklet_.numel * item_bytes(gradient_dtype_));
        kernels().narrow[static_cast<std::size_t>(gradient_dtype_)](values.data(), gradients.data(), values.size());
        std::vector<Bytes> parameters;
        std::vector<Memory> extents;
        for (const InstructionSet choice : supported_instruction_sets()) {
            select_instruction_set(choice);
            parameters.emplace_back(tasklet_.numel * item_bytes(parameter_dtype_));
            extents.push_back(make_extent());
            std::memcpy(extents.back().get(), extent_.get(), tasklet_.extent_bytes);
            work(Operation::kUpdate, cut(gradients, parameters.back()), extents.back().get());
            require(std::memcmp(extents.back().get(), extents.front().get(), tasklet_.extent_bytes) == 0,
                    "an instruction set gives another extent", seed_);
            require(parameters.back() == parameters.front(), "an instruction set gives other parameters", seed_);
        }
        random_ = Random(seed_);  // as after any number of instruction sets
        extent_ = std::move(extents.front());
        record(parameters.front().data(), parameters.front().size());
        record(extent_.get() + tasklet_.extent_bytes - kTrailerPageBytes, kTrailerPageBytes);  // has all checksums
    }

    std::vector<Segment> cut(const Bytes& gradients, Bytes& parameters) {
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
            segment.gradient = reinterpret_cast<Address>(gradients.data() + first * item_bytes(gradient_dtype_));
            segment.gradient_dtype = gradient_dtype_;
            segment.parameter = reinterpret_cast<Address>(parameters.data() + first * item_bytes(parameter_dtype_));
            segment.parameter_dtype = parameter_dtype_;
            segments.push_back(segment);
            first = last;
        }
        return segments;
    }

    std::uint64_t seed_;
    Random random_;
    Identity identity_;
    DType gradient_dtype_;
    DType parameter_dtype_;
    Tasklet tasklet_;
    std::vector<std::uint64_t> borders_;
    Memory extent_;
};

}  // namespace
}  // namespace smart_infinity

int main(int argc, char** argv) {
    smart_infinity::compare_checksums();
    return smart_infinity::run_scenarios(argc, argv, [](std::uint64_t seed) { smart_infinity::Scenario(seed).run(); });
}
