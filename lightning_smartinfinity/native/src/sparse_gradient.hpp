#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "card_kernel.hpp"
#include "dtype.hpp"

namespace smart_infinity {

// A part of a payload.
struct PayloadBytes {
    const std::byte* data;
    std::size_t bytes;
};

// A tasklet's compressed gradient, the largest of its elements: a header, how many there are in each block of 65,536
// elements, their indices in their blocks, ascending, and their values. Each part is padded to 64 bytes. The others
// are zero.
//
// A payload comes from outside: nothing is read past its end, nothing written that is not there.
class SparseGradient {
 public:
    // Reads the header. Throws std::invalid_argument, saying why, unless it is that of a payload of so many bytes for a
    // tasklet of so many elements.
    SparseGradient(const std::byte* payload, std::size_t bytes, std::uint64_t numel);

    DType dtype() const { return dtype_; }
    std::size_t bytes() const { return header_and_counts().bytes + indices().bytes + values().bytes; }

    // What a card checks by itself: the parts, padding included.
    PayloadBytes header_and_counts() const { return {payload_, kBeatBytes + count_bytes_}; }
    PayloadBytes indices() const { return {payload_ + kBeatBytes + count_bytes_, index_bytes_}; }
    PayloadBytes values() const { return {payload_ + kBeatBytes + count_bytes_ + index_bytes_, value_bytes_}; }

    // Looks at every count and index, and returns what is wrong with the first that is not in order.
    std::optional<std::string> check();
    // After a check() that found nothing: elements [first, last), dense.
    void decode(std::uint64_t first, std::uint64_t last, void* out) const;

 private:
    static constexpr std::uint64_t kBlockNumel = 65536;

    std::uint32_t count_of(std::size_t block) const;
    std::uint16_t index_at(std::size_t position) const;
    std::optional<std::string> check_counts();
    std::optional<std::string> check_block(std::size_t block) const;
    std::size_t position_of(std::uint64_t element) const;

    const std::byte* payload_;
    std::uint64_t numel_;
    std::size_t num_blocks_ = 0;
    std::size_t count_ = 0;
    DType dtype_ = DType::kFloat32;
    std::size_t count_bytes_ = 0;
    std::size_t index_bytes_ = 0;
    std::size_t value_bytes_ = 0;
    std::vector<std::size_t> starts_;  // by block: the position of its first index; and one more
};

}  // namespace smart_infinity
