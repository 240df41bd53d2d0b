#include "pipeline/compute.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "base/flush_subnormals.hpp"
#include "checksum/crc32c.hpp"
#include "extent/codec.hpp"
#include "gradient/gradient_payload.hpp"
#include "kernels/instruction_set.hpp"

namespace smart_infinity {
namespace {

// Number of elements processed at a time: a chunk's arrays, gradient and parameter stay in the second-level cache
// between the update and the checksums. 48 KiB per fp32 array is also a whole number of the checksum's stretches, and
// the elements are a whole number of cells.
constexpr std::size_t kChunkNumel = 12288;
static_assert(kChunkNumel % kCellNumel == 0, "no chunk may end inside a block");

// The elements that a segment and a chunk have in common.
struct Part {
    const Segment& segment;
    std::size_t first;   // in the segment
    std::size_t offset;  // in the tasklet
    std::size_t numel;
    std::byte* slot;  // null: parameters are at the segment's address

    template <class Type>
    Type* at(Address address, DType dtype = DType::kFloat32) const {
        return address == 0 ? nullptr : reinterpret_cast<Type*>(address + first * item_bytes(dtype));
    }
    float* array(std::size_t index) const { return at<float>(segment.arrays[index]); }
    std::byte* parameter() const {
        if (slot == nullptr || segment.parameter == 0) return at<std::byte>(segment.parameter, segment.parameter_dtype);
        return slot + offset * item_bytes(segment.parameter_dtype);
    }
    const std::byte* gradient() const { return at<const std::byte>(segment.gradient, segment.gradient_dtype); }
};

std::size_t index_of(DType dtype) { return static_cast<std::size_t>(dtype); }

class TaskletWork {
 public:
    TaskletWork(const Batch& batch, const Tasklet& tasklet, const Identity& identity, std::byte* buffer,
                std::byte* slot, Guards guards)
        : batch_(batch),
          tasklet_(tasklet),
          identity_(identity),
          extent_(buffer, identity.format(), tasklet),
          slot_(slot),
          guards_{guards.verifies && reads(batch.operation), guards.seals && writes(batch.operation)},
          kernels_(kernels()),
          codec_(extent_, identity.format(), tasklet, kernels_) {}

    std::optional<Refusal> run() {
        if (guards_.verifies) {
            if (auto refusal = extent_.verify(identity_, tasklet_.master_in_parameter ? 1 : 0)) return refusal;
        }
        if (tasklet_.payload != 0) {
            if (auto problem = open_payload()) return Refusal{FailureKind::kGradient, *problem};
        }
        work_chunks();
        if (guards_.seals) extent_.seal(identity_, checksums_);
        return std::nullopt;
    }

 private:
    std::optional<std::string> open_payload() {
        payload_ = smart_infinity::open_payload(reinterpret_cast<const std::byte*>(tasklet_.payload),
                                                tasklet_.payload_bytes, tasklet_.numel);
        dense_.resize(kChunkNumel * item_bytes(payload_->dtype()));
        return payload_->check();
    }

    void work_chunks() {
        auto segment = tasklet_.segments.begin();
        for (std::size_t begin = 0; begin < tasklet_.numel; begin += kChunkNumel) {
            const std::size_t end = std::min<std::size_t>(begin + kChunkNumel, tasklet_.numel);
            if (takes_arrays()) open_chunk(begin, end);
            if (payload_) payload_->decode(begin, end, dense_.data());
            for (; segment != tasklet_.segments.end(); ++segment) {
                work_part(*segment, begin, end);
                if (segment->offset + segment->numel > end) break;  // the segment continues in the next chunk
            }
            if (takes_arrays()) close_chunk(begin, end);
            if (guards_.seals) extend_checksums(begin, end);
        }
    }

    void work_part(const Segment& segment, std::size_t begin, std::size_t end) {
        const std::size_t first = std::max<std::size_t>(segment.offset, begin);
        const std::size_t last = std::min<std::size_t>(segment.offset + segment.numel, end);
        if (first >= last) return;
        const Part part{segment, first - segment.offset, first, last - first, slot_};
        switch (batch_.operation) {
            case Operation::kUpdate:
                return update(part, begin);
            case Operation::kRead:
                return copy_out(part);
            case Operation::kWrite:
            case Operation::kModify:
                return copy_in(part, begin);
        }
    }

    void update(const Part& part, std::size_t begin) const {
        if (tasklet_.master_in_parameter) codec_.take_masters(part.offset, part.numel, part.parameter());
        if (part.segment.step == kNoStep) return;
        const UpdateStep& step = batch_.steps[static_cast<std::size_t>(part.segment.step)];
        const std::byte* const gradient =
            payload_ ? dense_.data() + (part.offset - begin) * item_bytes(payload_->dtype()) : part.gradient();
        codec_.update(step, part.offset, part.numel, part.segment, gradient, part.parameter());
    }

    void copy_out(const Part& part) {
        for (std::size_t array = 0; array < part.segment.num_arrays; ++array) {
            if (float* const out = part.array(array)) codec_.decode(array, part.offset, part.numel, out);
        }
        if (void* const parameter = part.parameter()) {
            kernels_.narrow[index_of(part.segment.parameter_dtype)](masters(part), parameter, part.numel);
        }
    }

    const float* masters(const Part& part) {
        if (const float* const stored = codec_.in_place(kMaster)) return stored + part.offset;
        float* const decoded = memory(kMaster);
        codec_.decode(kMaster, part.offset, part.numel, decoded);
        return decoded;
    }

    // WRITE and MODIFY assemble arrays in fp32, because segments may end inside blocks. A MODIFY without segments
    // changes nothing: encoding decoded values again might.
    bool takes_arrays() const {
        return batch_.operation == Operation::kWrite ||
               (batch_.operation == Operation::kModify && !tasklet_.segments.empty());
    }

    void open_chunk(std::size_t begin, std::size_t end) {
        for (std::size_t array = 0; array < tasklet_.num_arrays; ++array) {
            float* const stored = codec_.in_place(array);
            values_[array] = stored != nullptr ? stored + begin : memory(array);
            if (batch_.operation == Operation::kWrite) {
                std::fill(values_[array], values_[array] + (end - begin), 0.0f);
            } else if (stored == nullptr) {
                codec_.decode(array, begin, end - begin, values_[array]);
            }
        }
    }

    void copy_in(const Part& part, std::size_t begin) const {
        const std::size_t offset = part.offset - begin;
        if (const void* const parameter = part.parameter()) {
            kernels_.widen[index_of(part.segment.parameter_dtype)](parameter, values_[kMaster] + offset, part.numel);
        }
        for (std::size_t array = 0; array < part.segment.num_arrays; ++array) {
            if (const float* const in = part.array(array)) std::copy_n(in, part.numel, values_[array] + offset);
        }
    }

    void close_chunk(std::size_t begin, std::size_t end) const {
        for (std::size_t array = 0; array < tasklet_.num_arrays; ++array) {
            if (codec_.in_place(array) == nullptr) codec_.encode(array, begin, end - begin, values_[array]);
        }
    }

    // Returns memory for a chunk of an array that is not stored as fp32.
    float* memory(std::size_t array) {
        memory_[array].resize(kChunkNumel);
        return memory_[array].data();
    }

    void extend_checksums(std::size_t begin, std::size_t end) {
        const Regions& regions = extent_.regions();
        for (std::size_t index = 0; index < regions.count(); ++index) {
            const std::size_t first = regions.bytes_before(index, begin);
            const std::size_t last = regions.bytes_before(index, end);
            checksums_[index] = crc32c(extent_.region(index) + first, last - first, checksums_[index]);
        }
    }

    const Batch& batch_;
    const Tasklet& tasklet_;
    const Identity& identity_;
    Extent extent_;
    std::byte* slot_;
    Guards guards_;
    const Kernels& kernels_;
    Codec codec_;
    std::unique_ptr<GradientPayload> payload_;  // null unless the tasklet's gradient is compressed
    std::vector<std::byte> dense_;              // the payload's elements in the current chunk
    std::array<float*, kMaxArrays> values_{};   // by array: the current chunk in fp32
    std::array<std::vector<float>, kMaxArrays> memory_;
    Checksums checksums_{};
};

}  // namespace

std::optional<Refusal> compute(const Batch& batch, const Tasklet& tasklet, const Identity& identity, std::byte* buffer,
                               std::byte* slot, Guards guards) {
    const FlushSubnormals flush;
    return TaskletWork(batch, tasklet, identity, buffer, slot, guards).run();
}

}  // namespace smart_infinity
