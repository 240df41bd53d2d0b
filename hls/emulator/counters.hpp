#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

namespace smart_infinity::emulator {

// Counts of a card's events since it was reset.
struct Counters {
    std::atomic<std::int64_t> runs_begun, runs_completed, runs_failed;
    std::atomic<std::int64_t> syncs_to, syncs_from, bytes_to, bytes_from, bytes_copied;
    std::atomic<std::int64_t> peak_bytes;

    std::optional<std::int64_t> get(std::string_view name) const {
        if (name == "runs_begun") return runs_begun;
        if (name == "runs_completed") return runs_completed;
        if (name == "runs_failed") return runs_failed;
        if (name == "syncs_to") return syncs_to;
        if (name == "syncs_from") return syncs_from;
        if (name == "bytes_to") return bytes_to;
        if (name == "bytes_from") return bytes_from;
        if (name == "bytes_copied") return bytes_copied;
        if (name == "peak_bytes") return peak_bytes;
        return std::nullopt;
    }

    void clear() {
        for (auto* counter : {&runs_begun, &runs_completed, &runs_failed, &syncs_to, &syncs_from, &bytes_to,
                              &bytes_from, &bytes_copied, &peak_bytes}) {
            *counter = 0;
        }
    }
};

}  // namespace smart_infinity::emulator
