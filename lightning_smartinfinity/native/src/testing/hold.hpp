#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/io_engine.hpp"

namespace smart_infinity {

// Holds `count` requests of one direction, from number `first` on: they do not start before release().
class Hold {
 public:
    Hold(Direction direction, std::uint64_t first, std::uint64_t count)
        : direction_(direction), first_(first), last_(first + count) {}

    // Returns whether it holds the request; release() then calls `begin`, which starts it.
    bool try_hold(const IoRequest& request, std::function<void()> begin);
    std::size_t count() const;
    // Releases all held requests, and holds no further ones.
    void release();

 private:
    const Direction direction_;
    const std::uint64_t first_;
    const std::uint64_t last_;
    mutable std::mutex mutex_;
    std::uint64_t next_ = 0;
    bool released_ = false;
    std::vector<std::function<void()>> held_;
};

// Waits until the hold releases the request, if it holds it.
void wait_for(Hold& hold, const IoRequest& request);

// An engine whose requests take as long as a test decides.
class HoldingEngine final : public IoEngine {
 public:
    HoldingEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Hold> hold)
        : hold_(std::move(hold)), inner_(std::move(inner)) {}
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override { return inner_->usage(); }
    IoEngineKind kind() const override { return inner_->kind(); }

 private:
    const std::shared_ptr<Hold> hold_;
    std::unique_ptr<IoEngine> inner_;
};

}  // namespace smart_infinity
