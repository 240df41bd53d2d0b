#include "pipeline/pipeline.hpp"

#include <utility>

namespace smart_infinity {

Pipeline::Pipeline(PipelineOptions options) : loop_("Pipeline", std::make_shared<TransferLoop>(std::move(options))) {}

void Pipeline::submit(Batch batch) { loop_.get()->submit(std::move(batch)); }

void Pipeline::extend(Batch more) { loop_.get()->extend(std::move(more)); }

void Pipeline::prefer(const std::vector<std::size_t>& positions) { loop_.get()->prefer(positions); }

std::optional<Failure> Pipeline::wait(std::size_t first, std::optional<std::size_t> last,
                                      const TransferLoop::Poll& poll) {
    return loop_.get()->wait(first, last, poll);
}

std::optional<Failure> Pipeline::wait_for(const std::vector<std::size_t>& positions, const TransferLoop::Poll& poll) {
    return loop_.get()->wait_for(positions, poll);
}

std::optional<Failure> Pipeline::drain(const TransferLoop::Poll& poll) { return loop_.get()->drain(poll); }

void Pipeline::abandon() { loop_.get()->abandon(); }

Counters Pipeline::counters() const { return loop_.report().counters; }

std::size_t Pipeline::ring_bytes() const { return loop_.report().ring_bytes; }

std::size_t Pipeline::cache_bytes() const { return loop_.report().cache_bytes; }

void Pipeline::close() { loop_.close(); }

void Pipeline::decorate_engine(const TransferLoop::Decorate& decorate) { loop_.get()->decorate_engine(decorate); }

void Pipeline::put_before_transfers(std::function<void(const IoRequest&)> gate) {
    loop_.get()->put_before_transfers(std::move(gate));
}

}  // namespace smart_infinity
