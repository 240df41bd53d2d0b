#include "compute.hpp"

#include <algorithm>
#include <cstring>

#include "crc32c.hpp"
#include "flush_subnormals.hpp"
#include "instruction_set.hpp"

namespace smart_infinity {
namespace {

// Elements worked at a time: three arrays, gradient and parameter of a block stay in the second-level cache between the
// update and the checksums. 48 KiB per array is also a whole number of the checksum's stretches.
constexpr std::size_t kBlockNumel = 12288;

constexpr std::size_t kMaster = 0;
constexpr std::size_t kExpAvg = 1;
constexpr std::size_t kExpAvgSq = 2;

// The elements that a segment and a block share.
struct Part {
    const Segment& segment;
    std::size_t first;   // in the segment
    std::size_t offset;  // in the tasklet
    std::size_t numel;
    std::byte* slot;  // null: parameters lie at the segment's address

    template <class Type>
    Type* at(Address address, DType dtype = DType::kFloat32) const {
        return address == 0 ? nullptr : reinterpret_cast<Type*>(address + first * item_bytes(dtype));
    }
    float* array(std::size_t index) const { return at<float>(segment.arrays[index]); }
    void* parameter() const {
        if (slot == nullptr || segment.parameter == 0) return at<void>(segment.parameter, segment.parameter_dtype);
        return slot + offset * item_bytes(segment.parameter_dtype);
    }
    const void* gradient() const { return at<const void>(segment.gradient, segment.gradient_dtype); }
};

void copy(const float* from, float* to, std::size_t numel) { std::memcpy(to, from, numel * sizeof(float)); }

std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

class TaskletWork {
 public:
    TaskletWork(const Batch& batch, const Tasklet& tasklet, std::byte* buffer, std::byte* slot)
        : batch_(batch), tasklet_(tasklet), extent_(buffer, tasklet), slot_(slot), kernels_(kernels()) {}

    std::optional<Refusal> run(const Identity& identity) {
        if (reads(batch_.operation)) {
            const std::size_t first_array = tasklet_.master_in_parameter ? kMaster + 1 : kMaster;
            if (auto refusal = extent_.verify(identity, first_array)) return refusal;
        }
        work_blocks();
        if (writes(batch_.operation)) extent_.seal(identity, checksums_);
        return std::nullopt;
    }

 private:
    void work_blocks() {
        auto segment = tasklet_.segments.begin();
        for (std::size_t begin = 0; begin < tasklet_.numel; begin += kBlockNumel) {
            const std::size_t end = std::min<std::size_t>(begin + kBlockNumel, tasklet_.numel);
            if (batch_.operation == Operation::kWrite) clear(begin, end);
            for (; segment != tasklet_.segments.end(); ++segment) {
                work_part(*segment, begin, end);
                if (segment->offset + segment->numel > end) break;  // goes on in the next block
            }
            if (writes(batch_.operation)) extend_checksums(begin, end);
        }
    }

    void work_part(const Segment& segment, std::size_t begin, std::size_t end) {
        const std::size_t first = std::max<std::size_t>(segment.offset, begin);
        const std::size_t last = std::min<std::size_t>(segment.offset + segment.numel, end);
        if (first >= last) return;
        const Part part{segment, first - segment.offset, first, last - first, slot_};
        switch (batch_.operation) {
            case Operation::kUpdate:
                return update(part);
            case Operation::kRead:
                return copy_out(part);
            case Operation::kWrite:
            case Operation::kModify:
                return copy_in(part);
        }
    }

    float* state(const Part& part, std::size_t index) const { return extent_.array(index) + part.offset; }

    void update(const Part& part) const {
        const Segment& segment = part.segment;
        if (tasklet_.master_in_parameter) {
            copy(static_cast<const float*>(part.parameter()), state(part, kMaster), part.numel);
        }
        if (segment.step == kNoStep) return;
        const std::size_t parameter_column = segment.parameter == 0 ? kNoParameter : index_of(segment.parameter_dtype);
        const AdamArrays arrays{state(part, kMaster), state(part, kExpAvg), state(part, kExpAvgSq), part.gradient(),
                                part.parameter()};
        const AdamStep& step = batch_.steps[static_cast<std::size_t>(segment.step)];
        kernels_.adam[index_of(segment.gradient_dtype)][parameter_column](step, arrays, part.numel);
    }

    void copy_out(const Part& part) const {
        for (std::size_t index = 0; index < part.segment.num_arrays; ++index) {
            if (float* const array = part.array(index)) copy(state(part, index), array, part.numel);
        }
        if (void* const parameter = part.parameter()) {
            kernels_.narrow[index_of(part.segment.parameter_dtype)](state(part, kMaster), parameter, part.numel);
        }
    }

    void copy_in(const Part& part) const {
        if (const void* const parameter = part.parameter()) {
            kernels_.widen[index_of(part.segment.parameter_dtype)](parameter, state(part, kMaster), part.numel);
        }
        for (std::size_t index = 0; index < part.segment.num_arrays; ++index) {
            if (const float* const array = part.array(index)) copy(array, state(part, index), part.numel);
        }
    }

    void clear(std::size_t begin, std::size_t end) const {
        for (std::size_t index = 0; index < tasklet_.num_arrays; ++index) {
            std::fill(extent_.array(index) + begin, extent_.array(index) + end, 0.0f);
        }
    }

    void extend_checksums(std::size_t begin, std::size_t end) {
        for (std::size_t index = 0; index < tasklet_.num_arrays; ++index) {
            const float* const block = extent_.array(index) + begin;
            checksums_[index] = crc32c(block, (end - begin) * sizeof(float), checksums_[index]);
        }
    }

    const Batch& batch_;
    const Tasklet& tasklet_;
    Extent extent_;
    std::byte* slot_;
    const Kernels& kernels_;
    Checksums checksums_{};
};

}  // namespace

std::optional<Refusal> compute(const Batch& batch, const Tasklet& tasklet, const Identity& identity, std::byte* buffer,
                               std::byte* slot) {
    const FlushSubnormals flush;
    return TaskletWork(batch, tasklet, buffer, slot).run(identity);
}

}  // namespace smart_infinity
