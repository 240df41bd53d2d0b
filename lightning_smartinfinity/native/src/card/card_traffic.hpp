#pragma once

#include <cstdint>

#include "io/counters.hpp"

namespace smart_infinity {

// What a card's pipeline moves. Payload only, but for the last three.
struct CardTraffic {
    std::uint64_t shared_read_bytes = 0;  // from the card to the host
    std::uint64_t shared_write_bytes = 0;
    std::uint64_t internal_read_bytes = 0;  // from storage to the card
    std::uint64_t internal_write_bytes = 0;
    std::uint64_t padding_bytes = 0;
    std::uint64_t control_bytes = 0;        // trailers and status beats
    std::uint64_t gradient_file_bytes = 0;  // whole blocks, written to the file of gradients and read from it

    void add_to(Counters& counters) const {
        counters.shared_read_bytes += shared_read_bytes;
        counters.shared_write_bytes += shared_write_bytes;
        counters.internal_read_bytes += internal_read_bytes;
        counters.internal_write_bytes += internal_write_bytes;
        counters.padding_bytes += padding_bytes;
        counters.control_bytes += control_bytes;
        counters.gradient_file_bytes += gradient_file_bytes;
    }

    CardTraffic& operator+=(const CardTraffic& other) {
        shared_read_bytes += other.shared_read_bytes;
        shared_write_bytes += other.shared_write_bytes;
        internal_read_bytes += other.internal_read_bytes;
        internal_write_bytes += other.internal_write_bytes;
        padding_bytes += other.padding_bytes;
        control_bytes += other.control_bytes;
        gradient_file_bytes += other.gradient_file_bytes;
        return *this;
    }
};

}  // namespace smart_infinity
