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
#include "io/io_scheduler.hpp"
#include "kernels/update_step.hpp"

namespace smart_infinity {

class CudaStream;
class GradientCodec;
class GradientWindow;
class ReadyPoint;

constexpr std::size_t kMaxArrays = kMaxRegions;  // fp32 has one region per array

enum class Operation { kUpdate, kRead, kWrite, kModify };

constexpr std::int64_t kNoStep = -1;

using Address = std::uint64_t;  // in host memory, or in device memory for parameters of a batch with a stream; 0: none

// Elements [offset, offset + numel) of a tasklet. Addresses are those of the first element.
struct Segment {
    std::uint64_t offset = 0;
    std::uint64_t numel = 0;
    std::int64_t step = kNoStep;  // index into Batch::steps
    Address gradient = 0;
    DType gradient_dtype = DType::kFloat32;
    Address parameter = 0;
    DType parameter_dtype = DType::kFloat32;
    std::array<Address, kMaxArrays> arrays{};  // addresses of fp32 values
    std::size_t num_arrays = 0;                // number of `arrays` that were given
};

using ElementRange = std::pair<std::uint64_t, std::uint64_t>;  // offset, number of elements

// A slice of the partition. Its state is one extent on storage, which a write may move to another file. Segments are in
// ascending order and do not overlap.
struct Tasklet {
    std::uint64_t index = 0;
    std::uint64_t numel = 0;
    std::uint64_t num_arrays = 0;
    std::uint64_t extent_bytes = 0;
    std::uint64_t read_file = 0;  // index of the file
    std::uint64_t read_offset = 0;
    std::uint64_t read_generation = 0;
    std::uint64_t write_file = 0;
    std::uint64_t write_offset = 0;
    std::uint64_t write_generation = 0;
    std::vector<Segment> segments;
    bool master_in_parameter = false;
    std::uint64_t offset = 0;              // position in the partition, for stochastic rounding
    std::shared_ptr<const Blocks> blocks;  // for formats with blocks; none: the grid
    // Address of the compressed gradient of all segments; 0: each segment has its own gradient. With the batch's codec,
    // the address to which these gradients are compressed.
    Address payload = 0;
    std::uint64_t payload_bytes = 0;    // with a codec, the capacity at `payload`
    Address residual = 0;               // fp32 residual of each element, which earlier payloads did not send; 0: none
    std::vector<ElementRange> padding;  // elements that a codec skips, in ascending order
    std::shared_ptr<GradientWindow> gradient;  // gradient memory that exists only during use; none: permanent memory
};

struct Batch {
    Operation operation = Operation::kUpdate;
    std::vector<Tasklet> tasklets;
    std::vector<UpdateStep> steps;
    // Stream that copies parameters, which are in its device's memory; none: parameters are in host memory.
    std::shared_ptr<const CudaStream> stream;
    // Codec that compresses every tasklet's gradient just before the update, which uses the compressed one; none: the
    // update uses gradients uncompressed.
    std::shared_ptr<const GradientCodec> codec = nullptr;
    float residual_scale = 1;            // scale of the gradients; residuals are not scaled
    IoClass io_class = IoClass::kState;  // of tasklets that were not preferred
    // Before these points are reached, gradients may still be in transit to the host, and work on a device may use
    // parameters from before the update.
    std::vector<std::shared_ptr<const ReadyPoint>> ready;
    // Parameter bytes of the largest tasklet that extend() may add to the batch, if it has a stream.
    std::uint64_t slot_bytes = 0;
    // Whether resident tasklets are changed in memory only, although they have places on storage.
    bool writes_back = false;
};

constexpr bool reads(Operation operation) { return operation != Operation::kWrite; }
constexpr bool writes(Operation operation) { return operation != Operation::kRead; }

}  // namespace smart_infinity
