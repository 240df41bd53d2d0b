#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/closable.hpp"
#include "pipeline/transfer_loop.hpp"

namespace smart_infinity {

// A TransferLoop with an end.
class Pipeline {
 public:
    explicit Pipeline(PipelineOptions options);

    // Of the buffers, and of the slots for parameters on a device from the first batch that has some.
    std::size_t ring_bytes() const;
    // Of the places of resident tasklets.
    std::size_t cache_bytes() const;

    // Returns at once. Throws std::invalid_argument for a batch that cannot be worked, or while another is active.
    void submit(Batch batch);
    // Adds tasklets behind those of the active batch; returns at once. Throws std::invalid_argument where that cannot
    // be.
    void extend(Batch more);
    // Of these tasklets of the active batch those that have not begun are begun next, in this order.
    void prefer(const std::vector<std::size_t>& positions);
    // Until tasklets [first, last) of the batch have their parameters and arrays out, or the batch has failed.
    std::optional<Failure> wait(
        std::size_t first, std::optional<std::size_t> last, const TransferLoop::Poll& poll = [] {});
    // The same for tasklets anywhere in the batch, which are preferred to others.
    std::optional<Failure> wait_for(const std::vector<std::size_t>& positions, const TransferLoop::Poll& poll = [] {});
    // Until nothing is in flight: the batch is over.
    std::optional<Failure> drain(const TransferLoop::Poll& poll = [] {});
    // Ends the batch, whose waiters get a failure, once nothing is in flight: what has not begun is not done.
    void abandon();
    // Of the active batch, or the last one: what is wholly done, parameters out and extent written.
    std::vector<std::size_t> complete() const { return loop_.get()->complete(); }
    // Whether something of a card's that was given up has not returned.
    bool busy() const { return loop_.get()->busy(); }
    // Those of it that write to the file.
    std::vector<IoRequest> writes_out() const { return loop_.get()->writes_out(); }
    Counters counters() const;
    IoEngineKind io_engine() const { return loop_.get()->io_engine(); }
    // Abandons the batch, whose waiters get a failure, and gives back threads, ring and descriptors once nothing is in
    // flight. Idempotent.
    void close();
    void decorate_engine(const TransferLoop::Decorate& decorate);
    void put_before_transfers(std::function<void(const IoRequest&)> gate);

 private:
    Closable<TransferLoop, TransferLoop::Report> loop_;
};

}  // namespace smart_infinity
