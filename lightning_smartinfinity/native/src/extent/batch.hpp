#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "extent/blocks.hpp"
#include "extent/state_format.hpp"
#include "kernels/update_step.hpp"

namespace smart_infinity {

class CudaStream;
class GradientCodec;

constexpr std::size_t kMaxArrays = 8;

enum class Operation { kUpdate, kRead, kWrite, kModify };

constexpr std::int64_t kNoStep = -1;

using Address = std::uint64_t;  // 0: none. Of host memory, but for parameters of a batch with a stream

// Elements [offset, offset + numel) of a tasklet. Addresses are those of the first element.
struct Segment {
    std::uint64_t offset = 0;
    std::uint64_t numel = 0;
    std::int64_t step = kNoStep;  // index into Batch::steps
    Address gradient = 0;
    DType gradient_dtype = DType::kFloat32;
    Address parameter = 0;
    DType parameter_dtype = DType::kFloat32;
    std::array<Address, kMaxArrays> arrays{};  // fp32
    std::size_t num_arrays = 0;                // of `arrays`, as given
};

using ElementRange = std::pair<std::uint64_t, std::uint64_t>;  // offset, elements

// A slice of the partition: one extent on storage, which a write may move to another file. Segments are in ascending
// order and do not overlap.
struct Tasklet {
    std::uint64_t index = 0;
    std::uint64_t numel = 0;
    std::uint64_t num_arrays = 0;
    std::uint64_t extent_bytes = 0;
    std::uint64_t read_file = 0;  // index
    std::uint64_t read_offset = 0;
    std::uint64_t read_generation = 0;
    std::uint64_t write_file = 0;
    std::uint64_t write_offset = 0;
    std::uint64_t write_generation = 0;
    std::vector<Segment> segments;
    bool master_in_parameter = false;
    std::uint64_t offset = 0;              // of the first element in the partition, for stochastic rounding
    std::shared_ptr<const Blocks> blocks;  // of a format that has some; none: the grid
    // Of a compressed gradient, that of all segments; 0: they have theirs. With the batch's codec, where theirs are
    // compressed to.
    Address payload = 0;
    std::uint64_t payload_bytes = 0;    // with a codec, those there are
    Address residual = 0;               // fp32, of every element: what earlier payloads did not send; 0: none
    std::vector<ElementRange> padding;  // elements that a codec leaves out, in ascending order
};

struct Batch {
    Operation operation = Operation::kUpdate;
    std::vector<Tasklet> tasklets;
    std::vector<UpdateStep> steps;
    // Parameters are in the memory of its device and travel through it; none: they are in host memory.
    std::shared_ptr<const CudaStream> stream;
    // Every tasklet's gradient is compressed just before it is updated by what was sent; none: as it is.
    std::shared_ptr<const GradientCodec> codec = nullptr;
    float residual_scale = 1;  // of the gradients; residuals are not scaled
};

constexpr bool reads(Operation operation) { return operation != Operation::kWrite; }
constexpr bool writes(Operation operation) { return operation != Operation::kRead; }

}  // namespace smart_infinity
