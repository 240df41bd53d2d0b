#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "card/card_calls.hpp"
#include "card/card_options.hpp"
#include "card/card_passes.hpp"
#include "card/card_ring.hpp"
#include "card/card_status.hpp"
#include "gradient/gradient_payload.hpp"
#include "pipeline/device_traffic.hpp"

namespace smart_infinity {

// Sends a tasklet's gradient to the card, from host memory or through a file.
class CardGradient {
 public:
    CardGradient(const Tasklet& tasklet, const CardOptions& options, CardRing& ring, std::size_t buffer,
                 CardCalls& calls);

    // send_payload() sends a compressed gradient once, send() the segments' gradients of one pass. Both throw
    // CardError.
    void send_payload();
    void send(const CardPass& pass);

    std::uint32_t form(const CardPass& pass) const;
    // Returns the checksums that the kernel must report.
    SentGradient sent_for(const CardPass& pass, const RunRange& run) const;
    const DeviceTraffic& traffic() const { return traffic_; }

 private:
    std::byte* memory() const;
    void send_bytes(std::size_t begin, std::size_t end, std::size_t payload);
    void send_through_file(std::size_t begin, std::size_t end) const;
    void transfer(Direction direction, std::size_t begin, std::size_t end, std::byte* data) const;

    const Tasklet& tasklet_;
    const CardOptions& options_;
    CardRing& ring_;
    std::size_t buffer_;
    CardCalls& calls_;
    const MappedBuffer& on_card_;
    std::unique_ptr<const GradientPayload> payload_;
    SentGradient sent_payload_;
    DeviceTraffic traffic_;
};

}  // namespace smart_infinity
