#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "card/card_calls.hpp"
#include "card/card_gradient.hpp"
#include "card/card_options.hpp"
#include "card/card_passes.hpp"
#include "card/card_ring.hpp"
#include "card/card_status.hpp"
#include "pipeline/device_traffic.hpp"
#include "pipeline/updater.hpp"

namespace smart_infinity {

// Updates one tasklet on the card: sends its gradient, runs kernels and receives its parameters.
class CardJob {
 public:
    CardJob(const Job& job, const CardOptions& options, const Identity& identity, CardRing& ring, CardCalls& calls);

    // Returns why the extent is refused, or nothing. Throws CardError if the card fails.
    std::optional<Refusal> run();

    // Returns the bytes moved so far, even after a failure.
    DeviceTraffic traffic() const;
    // Returns the abandoned run, which uses its memory until it returns, or null.
    std::shared_ptr<CardRun> abandoned_run() { return std::move(abandoned_); }

 private:
    void work(const CardPass& pass, bool is_last);
    void work(const CardPass& pass, const RunRange& run);
    void set_arguments(const CardPass& pass, const RunRange& run, CardRun& call);
    void clear_status();
    void execute(const std::shared_ptr<CardRun>& call);
    void start(const std::shared_ptr<CardRun>& call);
    int state_after(CardRun& call);
    CardStatus take_status();
    void take_checksums(const CardStatus& status, const RunRange& run);
    void check_arrays_read() const;
    void receive(const CardPass& pass);
    void give_out(const Segment& segment) const;

    const Job& job_;
    const CardOptions& options_;
    const CardKernelType type_;
    const Identity& identity_;
    CardBufferSet& buffers_;
    CardCalls& calls_;
    const Regions regions_;
    CardGradient gradient_;
    Checksums read_{};
    Checksums written_{};
    std::vector<std::uint32_t> parameters_;  // by run of the pass: checksum of the parameters that the kernel wrote
    DeviceTraffic traffic_;
    std::shared_ptr<CardRun> abandoned_;
};

}  // namespace smart_infinity
