#pragma once

#include <cstddef>

#include "extent/batch.hpp"
#include "extent/extent.hpp"
#include "kernels/kernels.hpp"

namespace smart_infinity {

// Reads and writes the arrays of an extent as fp32, whatever its format. Elements are numbered as in the tasklet.
class Codec {
 public:
    Codec(const Extent& extent, const StateFormat& format, const Tasklet& tasklet, const Kernels& kernels)
        : extent_(extent), format_(format), tasklet_(tasklet), kernels_(kernels) {}

    // Returns an array that is stored as fp32, or null if the array must be decoded.
    float* in_place(std::size_t array) const;
    // Decodes any elements.
    void decode(std::size_t array, std::size_t first, std::size_t numel, float* out) const;
    // Encodes whole blocks, rounding to nearest: values from decode() are stored without a change.
    void encode(std::size_t array, std::size_t first, std::size_t numel, const float* values) const;

    // Copies the parameters, which contain the masters or a part of them, to the region that was not read.
    void take_masters(std::size_t first, std::size_t numel, const void* parameters) const;
    // Updates whole blocks. Moments that are not stored as fp32 are rounded stochastically; only AdamStep has such
    // moments.
    void update(const UpdateStep& step, std::size_t first, std::size_t numel, const Segment& segment,
                const std::byte* gradient, std::byte* parameter) const;

 private:
    struct Chunk;

    template <class Step>
    void update_in_place(const Step& step, std::size_t first, std::size_t numel, const Segment& segment,
                         const std::byte* gradient, std::byte* parameter) const;
    void update_chunks(const AdamStep& step, std::size_t first, std::size_t numel, const Segment& segment,
                       const std::byte* gradient, std::byte* parameter) const;

    void open(Chunk& chunk) const;
    void close(const Chunk& chunk, std::uint32_t seed) const;
    template <class Item>
    Item* items(std::size_t region, std::size_t first) const;
    const Blocks& blocks() const;
    std::size_t region_of(std::size_t array) const;
    Codes codes(std::size_t array, std::size_t block, std::size_t first) const;
    CellPart cell(std::uint32_t seed, std::size_t first, std::size_t last) const;

    const Extent& extent_;
    const StateFormat& format_;
    const Tasklet& tasklet_;
    const Kernels& kernels_;
};

}  // namespace smart_infinity
