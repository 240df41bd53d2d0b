#include "gradient/validate_batch.hpp"

#include <stdexcept>
#include <string>

#include "extent/extent.hpp"
#include "gradient/compression.hpp"
#include "gradient/gradient_payload.hpp"

namespace smart_infinity {
namespace {

constexpr std::uint64_t kMaxNumel = std::uint64_t{1} << 40;  // keeps every product below far from overflow
constexpr std::uint64_t kMaxOffset = std::uint64_t{1} << 62;

class Checker {
 public:
    Checker(const Batch& batch, const StateFormat& format, const Tasklet& tasklet)
        : batch_(batch), format_(format), tasklet_(tasklet) {}

    void check(std::size_t num_files, std::size_t buffer_bytes) const {
        check_sizes(num_files, buffer_bytes);
        check_operation();
        check_compression();
        std::uint64_t end = 0;
        for (const Segment& segment : tasklet_.segments) {
            check_range(segment, end);
            check_addresses(segment);
            if (batch_.operation == Operation::kUpdate) check_update(segment);
            end = segment.offset + segment.numel;
        }
        if (batch_.stream) check_parameter_dtypes();
    }

    void check_gradients() const {
        std::uint64_t end = 0;
        for (const Segment& segment : tasklet_.segments) {
            check_range(segment, end);
            check_addresses(segment);
            end = segment.offset + segment.numel;
        }
        if (const auto problem = problem_of_compression(batch_, tasklet_)) refuse(*problem);
    }

 private:
    [[noreturn]] void refuse(const std::string& problem) const {
        throw std::invalid_argument("Batch: tasklet " + std::to_string(tasklet_.index) + ": " + problem);
    }

    void check_sizes(std::size_t num_files, std::size_t buffer_bytes) const {
        if (tasklet_.numel < 1 || tasklet_.numel > kMaxNumel) {
            refuse("numel " + std::to_string(tasklet_.numel) + " is not in [1, 2**40]");
        }
        if (tasklet_.num_arrays < 1 || tasklet_.num_arrays > kMaxArrays) {
            refuse("num_arrays " + std::to_string(tasklet_.num_arrays) + " is not in [1, " +
                   std::to_string(kMaxArrays) + "]");
        }
        if (format_.rule != nullptr) check_moments(*format_.rule);
        const std::size_t expected = extent_bytes(regions_of(format_, tasklet_));
        if (tasklet_.extent_bytes != expected) {
            refuse("extent_bytes is " + std::to_string(tasklet_.extent_bytes) + ", its arrays take " +
                   std::to_string(expected));
        }
        if (expected > buffer_bytes) {
            refuse("its extent of " + std::to_string(expected) + " bytes does not fit a buffer of " +
                   std::to_string(buffer_bytes));
        }
        for (const std::uint64_t file : {tasklet_.read_file, tasklet_.write_file}) {
            if (file >= num_files) refuse("there is no file " + std::to_string(file));
        }
        if (reads(batch_.operation)) check_offset("read_offset", tasklet_.read_offset);
        if (writes(batch_.operation)) check_offset("write_offset", tasklet_.write_offset);
    }

    void check_moments(const UpdateRule& rule) const {
        if (tasklet_.num_arrays != rule.num_arrays) {
            refuse("this state format needs " + std::to_string(rule.num_arrays) + " arrays: " + rule.arrays);
        }
        if (tasklet_.offset % kCellNumel != 0) {
            refuse("offset " + std::to_string(tasklet_.offset) + " is not a multiple of 256");
        }
    }

    void check_offset(const char* name, std::uint64_t offset) const {
        if (offset % kBlockBytes != 0 || offset > kMaxOffset) {
            refuse(std::string(name) + " " + std::to_string(offset) + " is not a multiple of " +
                   std::to_string(kBlockBytes) + " below 2**62");
        }
    }

    void check_operation() const {
        if (!tasklet_.master_in_parameter) return;
        if (batch_.operation != Operation::kUpdate) refuse("master_in_parameter is for UPDATE only");
        std::uint64_t covered = 0;
        for (const Segment& segment : tasklet_.segments) covered += segment.numel;
        if (covered != tasklet_.numel) refuse("master_in_parameter needs segments that cover the whole tasklet");
    }

    void check_compression() const {
        if (batch_.codec) {
            if (const auto problem = problem_of_compression(batch_, tasklet_)) refuse(*problem);
            return;
        }
        if (tasklet_.residual != 0 || !tasklet_.padding.empty())
            refuse("residual and padding are for a batch with a codec");
        if (tasklet_.payload != 0) check_payload();
    }

    void check_payload() const {
        if (batch_.operation != Operation::kUpdate) refuse("a payload is for UPDATE only");
        if (tasklet_.payload % sizeof(float) != 0) refuse("the payload's address is misaligned");
        const DType dtype = payload_dtype();
        for (const Segment& segment : tasklet_.segments) {
            if (segment.gradient != 0) refuse("a segment has a gradient address beside the tasklet's payload");
            if (segment.step != kNoStep && segment.gradient_dtype != dtype) {
                refuse("a segment's gradient is of another type than the payload's values");
            }
        }
    }

    DType payload_dtype() const {
        try {
            const auto* const payload = reinterpret_cast<const std::byte*>(tasklet_.payload);
            return open_payload(payload, tasklet_.payload_bytes, tasklet_.numel)->dtype();
        } catch (const std::invalid_argument& error) {
            refuse(error.what());
        }
    }

    void check_range(const Segment& segment, std::uint64_t end) const {
        if (segment.offset > tasklet_.numel || segment.numel > tasklet_.numel - segment.offset) {
            refuse("a segment of " + std::to_string(segment.numel) + " elements at " + std::to_string(segment.offset) +
                   " leaves its " + std::to_string(tasklet_.numel) + " elements");
        }
        if (segment.offset < end) refuse("segments must be in ascending order and must not overlap");
    }

    void check_addresses(const Segment& segment) const {
        if (segment.num_arrays > tasklet_.num_arrays) refuse("a segment has more arrays than the tasklet");
        if (segment.gradient % item_bytes(segment.gradient_dtype) != 0) refuse("a gradient address is misaligned");
        if (segment.parameter % item_bytes(segment.parameter_dtype) != 0) refuse("a parameter address is misaligned");
        for (const Address address : segment.arrays) {
            if (address % sizeof(float) != 0) refuse("an array address is misaligned");
        }
    }

    // A slot holds parameters at their offsets, so parameters of different item sizes would overlap.
    void check_parameter_dtypes() const {
        const Segment* first = nullptr;
        for (const Segment& segment : tasklet_.segments) {
            if (segment.parameter == 0) continue;
            if (first == nullptr) first = &segment;
            if (segment.parameter_dtype != first->parameter_dtype) refuse("parameters on a device are of one dtype");
        }
    }

    void check_update(const Segment& segment) const {
        if (segment.step < kNoStep || segment.step >= static_cast<std::int64_t>(batch_.steps.size())) {
            refuse("there is no step " + std::to_string(segment.step));
        }
        if (segment.step != kNoStep) check_rule(batch_.steps[static_cast<std::size_t>(segment.step)]);
        if (segment.step != kNoStep && segment.gradient == 0 && tasklet_.payload == 0) {
            refuse("a segment to update has no gradient address");
        }
        if (format_.has_blocks()) check_blocks(segment);
        if (tasklet_.master_in_parameter) check_master(segment);
    }

    void check_rule(const UpdateStep& step) const {
        const UpdateRule& rule = rule_of(step);
        if (format_.rule != nullptr && format_.rule != &rule) {
            refuse(std::string("this state format is for ") + format_.rule->step + " only, not for " + rule.step);
        }
        if (tasklet_.num_arrays != rule.num_arrays) {
            refuse(std::string("UPDATE by ") + rule.step + " needs " + std::to_string(rule.num_arrays) +
                   " arrays: " + rule.arrays);
        }
    }

    // Blocks are rounded as a whole, so no segment may end inside one.
    void check_blocks(const Segment& segment) const {
        const Blocks& blocks = blocks_of(tasklet_);
        const std::uint64_t end = segment.offset + segment.numel;
        if (segment.numel == 0) return;
        if (!blocks.begins_at(segment.offset) || (end != tasklet_.numel && !blocks.begins_at(end))) {
            refuse("a segment to update ends inside a block");
        }
    }

    void check_master(const Segment& segment) const {
        if (segment.parameter == 0 || segment.parameter_dtype != format_.parameter_dtype) {
            refuse(std::string("master_in_parameter needs the address of ") + name_of(format_.parameter_dtype) +
                   " parameters in every segment");
        }
    }

    const Batch& batch_;
    const StateFormat& format_;
    const Tasklet& tasklet_;
};

}  // namespace

void validate(const Batch& batch, const StateFormat& format, std::size_t num_files, std::size_t buffer_bytes) {
    for (const Tasklet& tasklet : batch.tasklets) Checker(batch, format, tasklet).check(num_files, buffer_bytes);
}

void validate_gradients(const Batch& batch) {
    for (const Tasklet& tasklet : batch.tasklets) Checker(batch, kFp32, tasklet).check_gradients();
}

}  // namespace smart_infinity
