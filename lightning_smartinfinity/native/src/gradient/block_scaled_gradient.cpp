#include "gradient/block_scaled_gradient.hpp"

#include <algorithm>

#include "kernels/instruction_set.hpp"

namespace smart_infinity {

BlockScaledParts::BlockScaledParts(std::uint64_t elements)
    : numel(elements),
      num_blocks((elements + kCellNumel - 1) / kCellNumel),
      exponent_bytes(align_up(num_blocks, kBeatBytes)),
      code_bytes(align_up(elements, kBeatBytes)) {}

PayloadHeader BlockScaledParts::header() const {
    const auto word = [](std::size_t value) { return static_cast<std::uint32_t>(value); };
    return {kBlockScaledMagic,
            kPayloadVersion,
            word(numel),
            word(num_blocks),
            kCellNumel,
            0,
            word(exponent_bytes / kBeatBytes),
            word(code_bytes / kBeatBytes)};
}

BlockScaledGradient::BlockScaledGradient(const std::byte* payload, std::size_t bytes, std::uint64_t numel)
    : payload_(payload), parts_(numel) {
    const PayloadHeader found = header_of(payload, bytes);
    const PayloadHeader expected = parts_.header();
    constexpr const char* kFields[] = {"the payload's magic",
                                       "the payload's version",
                                       "the payload's number of elements",
                                       "the payload's number of blocks",
                                       "the payload's elements of a block",
                                       "the payload's type of values",
                                       "the payload's beats of exponents",
                                       "the payload's beats of codes"};
    for (std::size_t word = 0; word < std::size(kFields); ++word) {
        require_equal(kFields[word], found[word], expected[word]);
    }
    require_equal("the payload's size", bytes, parts_.bytes());
}

PayloadParts BlockScaledGradient::parts() const {
    return {{payload_, kBeatBytes},
            {payload_ + kBeatBytes, parts_.exponent_bytes},
            {payload_ + parts_.codes_at(), parts_.code_bytes}};
}

const std::uint8_t* BlockScaledGradient::exponents() const {
    return reinterpret_cast<const std::uint8_t*>(payload_ + kBeatBytes);
}

const std::int8_t* BlockScaledGradient::codes() const {
    return reinterpret_cast<const std::int8_t*>(payload_ + parts_.codes_at());
}

std::optional<std::string> BlockScaledGradient::check() {
    for (std::size_t block = 0; block < parts_.num_blocks; ++block) {
        const std::uint8_t exponent = exponents()[block];
        if (exponent < 1 || exponent > kLargestScale) {
            return "exponent " + std::to_string(exponent) + " of block " + std::to_string(block) + " is not in [1, " +
                   std::to_string(kLargestScale) + "]";
        }
    }
    const std::int8_t* const end = codes() + parts_.numel;
    const std::int8_t* const unknown = std::find(codes(), end, std::int8_t{-128});
    if (unknown == end) return std::nullopt;
    return "there is no code -128, that of element " + std::to_string(unknown - codes());
}

void BlockScaledGradient::decode(std::uint64_t first, std::uint64_t last, void* out) const {
    const auto kernel = kernels().decode_gradient;
    auto* values = static_cast<float*>(out);
    while (first < last) {
        const std::uint64_t block = first / kCellNumel;
        const std::size_t numel = std::min<std::uint64_t>(last, (block + 1) * kCellNumel) - first;
        kernel(codes() + first, exponents()[block], values, numel);
        values += numel;
        first += numel;
    }
}

}  // namespace smart_infinity
