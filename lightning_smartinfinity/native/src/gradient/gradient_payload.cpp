#include "gradient/gradient_payload.hpp"

#include <stdexcept>

#include "gradient/block_scaled_gradient.hpp"
#include "gradient/payload_header.hpp"
#include "gradient/sparse_gradient.hpp"

namespace smart_infinity {

std::unique_ptr<GradientPayload> open_payload(const std::byte* payload, std::size_t bytes, std::uint64_t numel) {
    if (magic_of(payload, bytes) == kBlockScaledMagic) {
        return std::make_unique<BlockScaledGradient>(payload, bytes, numel);
    }
    return std::make_unique<SparseGradient>(payload, bytes, numel);
}

std::size_t payload_bytes(const std::byte* memory, std::size_t capacity) {
    const PayloadHeader header = header_of(memory, capacity);
    std::uint64_t bytes = sizeof header;
    for (const std::size_t part : {kFirstPart, kFirstPart + 1, kFirstPart + 2}) {
        bytes += std::uint64_t{header[part]} * kBeatBytes;
    }
    if (bytes > capacity) {
        throw std::invalid_argument("the payload takes " + std::to_string(bytes) + " bytes of " +
                                    std::to_string(capacity));
    }
    return bytes;
}

}  // namespace smart_infinity
