#include "pipeline.hpp"

#include <stdexcept>
#include <utility>

namespace smart_infinity {

Pipeline::Pipeline(PipelineOptions options) : loop_(std::make_shared<TransferLoop>(std::move(options))) {}

Pipeline::~Pipeline() {
    if (process_.is_current()) {
        close();
    } else {
        (void)new std::shared_ptr<TransferLoop>(std::move(loop_));  // lost on purpose: it cannot be destroyed here
    }
}

void Pipeline::submit(Batch batch) { loop()->submit(std::move(batch)); }

void Pipeline::extend(Batch more) { loop()->extend(std::move(more)); }

std::optional<Failure> Pipeline::wait(std::size_t first, std::optional<std::size_t> last,
                                      const TransferLoop::Poll& poll) {
    return loop()->wait(first, last, poll);
}

std::optional<Failure> Pipeline::wait_for(const std::vector<std::size_t>& positions, const TransferLoop::Poll& poll) {
    return loop()->wait_for(positions, poll);
}

std::optional<Failure> Pipeline::drain(const TransferLoop::Poll& poll) { return loop()->drain(poll); }

void Pipeline::abandon() { loop()->abandon(); }

Counters Pipeline::counters() const {
    process_.require_current("Pipeline");
    const std::lock_guard lock(mutex_);
    return loop_ ? loop_->counters() : final_counters_;
}

std::size_t Pipeline::ring_bytes() const {
    process_.require_current("Pipeline");
    const std::lock_guard lock(mutex_);
    return loop_ ? loop_->ring_bytes() : final_ring_bytes_;
}

void Pipeline::close() {
    if (!process_.is_current()) return;
    std::shared_ptr<TransferLoop> closing;
    {
        const std::lock_guard lock(mutex_);
        closing = loop_;
    }
    if (!closing) return;
    closing->close();
    const std::lock_guard lock(mutex_);
    final_counters_ = closing->counters();
    final_ring_bytes_ = closing->ring_bytes();
    loop_.reset();
}

void Pipeline::decorate_engine(const TransferLoop::Decorate& decorate) { loop()->decorate_engine(decorate); }

std::shared_ptr<TransferLoop> Pipeline::loop() const {
    process_.require_current("Pipeline");
    const std::lock_guard lock(mutex_);
    if (!loop_) throw std::invalid_argument("Pipeline: it is closed");
    return loop_;
}

}  // namespace smart_infinity
