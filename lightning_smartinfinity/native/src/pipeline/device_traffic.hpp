#pragma once

#include <cstdint>

namespace smart_infinity {

// Bytes moved by a device that updates next to the storage. The first four counters count only payload.
struct DeviceTraffic {
    std::uint64_t shared_read_bytes = 0;  // from the device to the host
    std::uint64_t shared_write_bytes = 0;
    std::uint64_t internal_read_bytes = 0;  // from storage to the device
    std::uint64_t internal_write_bytes = 0;
    std::uint64_t padding_bytes = 0;
    std::uint64_t control_bytes = 0;        // trailers and status beats
    std::uint64_t gradient_file_bytes = 0;  // whole blocks, written to and read from the gradient file
    double kernel_seconds = 0;              // total of completed runs, each from its start to its end

    DeviceTraffic& operator+=(const DeviceTraffic& other) {
        shared_read_bytes += other.shared_read_bytes;
        shared_write_bytes += other.shared_write_bytes;
        internal_read_bytes += other.internal_read_bytes;
        internal_write_bytes += other.internal_write_bytes;
        padding_bytes += other.padding_bytes;
        control_bytes += other.control_bytes;
        gradient_file_bytes += other.gradient_file_bytes;
        kernel_seconds += other.kernel_seconds;
        return *this;
    }
};

}  // namespace smart_infinity
