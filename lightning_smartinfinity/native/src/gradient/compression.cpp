#include "gradient/compression.hpp"

#include <cmath>

#include "base/flush_subnormals.hpp"
#include "gradient/gradient_codec.hpp"
#include "gradient/gradient_source.hpp"
#include "gradient/payload_header.hpp"

namespace smart_infinity {
namespace {

using Problem = std::optional<std::string>;

Problem problem_of_segments(const Tasklet& tasklet) {
    const DType dtype = gradient_dtype_of(tasklet);
    for (const Segment& segment : tasklet.segments) {
        if (segment.step == kNoStep) continue;
        if (segment.gradient == 0) return "a segment to compress has no gradient address";
        if (segment.gradient_dtype != dtype) return "gradients to compress together are of one type";
    }
    return std::nullopt;
}

Problem problem_of_padding(const Tasklet& tasklet) {
    std::uint64_t end = 0;
    for (const auto& [offset, numel] : tasklet.padding) {
        if (offset < end) return "padding must be in ascending order and must not overlap";
        if (offset > tasklet.numel || numel > tasklet.numel - offset) {
            return "padding of " + std::to_string(numel) + " elements at " + std::to_string(offset) + " leaves its " +
                   std::to_string(tasklet.numel) + " elements";
        }
        end = offset + numel;
    }
    return std::nullopt;
}

Problem problem_of_residual(const Tasklet& tasklet, float scale) {
    if (tasklet.residual % sizeof(float) != 0) return "the residual's address is misaligned";
    if (tasklet.residual != 0 && !(std::isfinite(scale) && scale > 0)) {
        return "residual_scale " + std::to_string(scale) + " is not a positive number";
    }
    return std::nullopt;
}

Problem problem_of_capacity(const GradientCodec& codec, const Tasklet& tasklet) {
    const std::size_t needed = codec.payload_bytes(tasklet.numel, gradient_dtype_of(tasklet));
    if (tasklet.payload_bytes >= needed) return std::nullopt;
    return "payload_bytes is " + std::to_string(tasklet.payload_bytes) + ", its gradient may take " +
           std::to_string(needed) + " by " + codec.name();
}

}  // namespace

DType gradient_dtype_of(const Tasklet& tasklet) {
    for (const Segment& segment : tasklet.segments) {
        if (segment.step != kNoStep) return segment.gradient_dtype;
    }
    return DType::kBFloat16;
}

Problem problem_of_compression(const Batch& batch, const Tasklet& tasklet) {
    if (batch.operation != Operation::kUpdate) return "gradients are compressed for UPDATE only";
    if (tasklet.payload == 0) return "a payload address is needed, for its gradient to be compressed to";
    if (tasklet.payload % sizeof(float) != 0) return "the payload's address is misaligned";
    if (tasklet.numel > kLargestPayloadNumel) return "a payload is of less than 2**32 elements";
    if (auto problem = problem_of_segments(tasklet)) return problem;
    if (auto problem = problem_of_padding(tasklet)) return problem;
    if (auto problem = problem_of_residual(tasklet, batch.residual_scale)) return problem;
    return batch.codec ? problem_of_capacity(*batch.codec, tasklet) : std::nullopt;
}

Tasklet compress(const Batch& batch, const Tasklet& tasklet) {
    const KeepSubnormals keep;
    Tasklet compressed = tasklet;
    const GradientSource source(tasklet, batch.residual_scale);
    compressed.payload_bytes = batch.codec->encode(source, reinterpret_cast<std::byte*>(tasklet.payload));
    for (Segment& segment : compressed.segments) {
        segment.gradient = 0;
        segment.gradient_dtype = batch.codec->value_dtype(source.dtype());
    }
    return compressed;
}

}  // namespace smart_infinity
