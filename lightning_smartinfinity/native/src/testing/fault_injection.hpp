#pragma once

#include <atomic>
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

// The faults to inject. Requests are numbered from zero, reads and writes separately.
struct Faults {
    std::uint64_t seed = 0;
    std::int64_t max_delay_us = 0;   // longest random delay of a completion, so that completions overtake each other
    std::int64_t fail_read_at = -1;  // number of the read that fails
    std::int64_t fail_write_at =
        -1;  // number of the write that fails after its first block, which leaves a torn extent
    std::int64_t short_transfer_every = 0;  // one in this many transfers stops in the middle
    int error = EIO;
    std::int64_t delay_us = 0;        // added to each request's time, like a slow device
    std::int64_t flip_read_at = -1;   // number of the read in whose data one bit is flipped
    std::int64_t misread_at = -1;     // number of the read that returns data from elsewhere in the file,
    std::int64_t misread_by = 4096;   // this many bytes before its place, or after it at the start of the file
    std::int64_t lose_write_at = -1;  // number of the write that is reported as done but not made
};

// Number of requests, and the number of them on which each fault had an effect. A misread or lost request counts only
// if that changed a byte.
struct FaultCounts {
    using Count = std::atomic<std::int64_t>;
    Count reads = 0;
    Count writes = 0;
    Count failed = 0;
    Count shortened = 0;
    Count delayed = 0;
    Count flipped = 0;
    Count misread = 0;
    Count lost = 0;
};

// An engine that injects faults, for tests.
class FaultInjectingEngine final : public IoEngine, private CompletionHandler {
 public:
    FaultInjectingEngine(std::unique_ptr<IoEngine> inner, const Faults& faults,
                         std::shared_ptr<FaultCounts> counts = std::make_shared<FaultCounts>());
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
        bool misread = false;
        std::shared_ptr<HostBuffer> lost = nullptr;  // of a lost write: memory for a read that replaces it
    };

    void completed(const IoRequest& request, const IoResult& result) override;
    IoRequest real_request(const Pending& pending) const;
    void flip_bit(const IoRequest& request, std::int64_t transferred);
    void count(const Pending& pending, std::int64_t transferred);
    Pending decide(const IoRequest& request, CompletionHandler& handler, std::int64_t number);

    const Faults faults_;
    const std::shared_ptr<FaultCounts> counts_;
    std::mutex mutex_;
    std::mt19937_64 generator_;
    std::map<std::size_t, Pending> pending_;  // by tag: one request per tag is in flight
    std::unique_ptr<IoEngine> inner_;         // last member: its destructor waits for completions
};

// Injects faults into transfers without an engine: called before each transfer, and changes the file before a read. No
// transfer is short.
class FaultInjectingGate {
 public:
    FaultInjectingGate(const Faults& faults, std::shared_ptr<FaultCounts> counts);
    // Throws CardError for a transfer that should fail.
    void operator()(const IoRequest& request);

 private:
    void fail(const char* what);
    void change(const IoRequest& read, std::int64_t number);
    void replace(const IoRequest& read, const std::byte* content, FaultCounts::Count& count);

    const Faults faults_;
    const std::shared_ptr<FaultCounts> counts_;
    std::mutex mutex_;
    std::mt19937_64 generator_;
    std::map<std::uint64_t, std::unique_ptr<HostBuffer>> lost_;  // by offset: contents that lost writes did not replace
};

}  // namespace smart_infinity
