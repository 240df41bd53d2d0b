#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "base/buffer.hpp"
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
    std::int64_t delay_us = 0;        // added to each request's time, as by a slow device
    std::int64_t flip_read_at = -1;   // number of the read in whose data one bit is flipped
    std::int64_t misread_at = -1;     // number of the read that returns what lies elsewhere in the file,
    std::int64_t misread_by = 4096;   // so many bytes before its place, or behind it at the start of the file
    std::int64_t lose_write_at = -1;  // number of the write that is reported done, but was not made
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
        std::int64_t at_most = 0;  // limit of the result: bytes, or a negative errno
        std::int64_t delay_us = 0;
        bool flips = false;
        std::shared_ptr<HostBuffer> lost = nullptr;  // a lost write: memory for what is read in its stead
    };

    void completed(const IoRequest& request, const IoResult& result) override;
    IoRequest real_request(const Pending& pending, std::int64_t number) const;
    void flip_bit(const IoRequest& request, std::int64_t transferred);
    Pending decide(const IoRequest& request, CompletionHandler& handler, std::int64_t number);
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
