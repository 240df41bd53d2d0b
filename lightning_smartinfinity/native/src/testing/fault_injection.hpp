#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "io/io_engine.hpp"

namespace smart_infinity {

// The faults to inject. Requests are counted from zero, reads and writes separately.
struct Faults {
    std::uint64_t seed = 0;
    std::int64_t max_delay_us = 0;   // longest random delay of a completion, so that completions overtake each other
    std::int64_t fail_read_at = -1;  // number of the read that fails
    std::int64_t fail_write_at =
        -1;  // number of the write that fails after its first block, which leaves a torn extent
    std::int64_t short_transfer_every = 0;  // one in this many transfers stops somewhere in the middle
    int error = EIO;
};

// An engine that injects faults, for tests.
class FaultInjectingEngine final : public IoEngine, private CompletionHandler {
 public:
    FaultInjectingEngine(std::unique_ptr<IoEngine> inner, const Faults& faults);
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override { return inner_->usage(); }
    IoEngineKind kind() const override { return inner_->kind(); }

 private:
    struct Pending {
        IoRequest request;
        CompletionHandler* handler;
        std::int64_t at_most;  // limit of the result: bytes, or a negative errno
        std::int64_t delay_us;
    };

    void completed(const IoRequest& request, const IoResult& result) override;
    Pending decide(const IoRequest& request, CompletionHandler& handler);
    std::int64_t random(std::int64_t first, std::int64_t last);

    const Faults faults_;
    std::mutex mutex_;
    std::mt19937_64 generator_;
    std::int64_t num_reads_ = 0;
    std::int64_t num_writes_ = 0;
    std::map<std::size_t, Pending> pending_;  // by tag: one request per tag is in flight
    std::unique_ptr<IoEngine> inner_;         // last member: its destructor waits for completions
};

}  // namespace smart_infinity
