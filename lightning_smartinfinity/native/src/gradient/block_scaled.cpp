#include "gradient/block_scaled.hpp"

#include <algorithm>
#include <cstring>

#include "gradient/block_scaled_gradient.hpp"
#include "gradient/gradient_source.hpp"
#include "kernels/instruction_set.hpp"

namespace smart_infinity {

std::size_t BlockScaled::payload_bytes(std::uint64_t numel, DType) const { return BlockScaledParts(numel).bytes(); }

std::size_t BlockScaled::encode(const GradientSource& source, std::byte* payload) const {
    constexpr std::size_t kBlocksAtATime = GradientSource::kChunkNumel / kCellNumel;
    const BlockScaledParts parts(source.numel());
    const auto kernel = kernels().encode_gradient;
    const PayloadHeader header = parts.header();
    auto* const exponents = reinterpret_cast<std::uint8_t*>(payload + kBeatBytes);
    auto* const codes = reinterpret_cast<std::int8_t*>(payload + parts.codes_at());
    alignas(64) float values[GradientSource::kChunkNumel];
    std::memcpy(payload, &header, sizeof header);
    for (std::size_t block = 0; block < parts.num_blocks; ++block) {
        const std::uint64_t first = block * kCellNumel;
        const std::size_t skipped = block % kBlocksAtATime * kCellNumel;
        if (skipped == 0) {
            source.read(first, std::min<std::uint64_t>(parts.numel, first + GradientSource::kChunkNumel), values);
        }
        kernel(values + skipped, std::min<std::uint64_t>(kCellNumel, parts.numel - first), codes + first,
               exponents + block);
    }
    std::memset(exponents + parts.num_blocks, 0, parts.exponent_bytes - parts.num_blocks);
    std::memset(codes + parts.numel, 0, parts.code_bytes - parts.numel);
    return parts.bytes();
}

}  // namespace smart_infinity
