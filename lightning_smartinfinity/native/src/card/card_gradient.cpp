#include "card/card_gradient.hpp"

#include <cstring>
#include <system_error>

#include "checksum/crc32c.hpp"
#include "gradient/payload_header.hpp"
#include "io/blocking_transfer.hpp"
#include "io/transfer.hpp"

namespace smart_infinity {
namespace {

const std::byte* memory_at(Address address) { return reinterpret_cast<const std::byte*>(address); }

std::uint32_t checksum(const PayloadBytes& part) { return crc32c(part.data, part.bytes); }

std::string describe_transfer(Direction direction, const StateFile& file) {
    return std::string(direction == Direction::kRead ? "reading" : "writing") + " the gradient in " + file.path();
}

void transfer_all(const IoRequest& whole, const StateFile& file) {
    Transfer transfer(whole, file.access());
    Transfer::Progress progress = Transfer::Progress::kAgain;
    while (progress == Transfer::Progress::kAgain) progress = transfer.advance(attempt(transfer.rest()));
    if (progress == Transfer::Progress::kDone) return;
    const int error = progress == Transfer::Progress::kError ? transfer.error() : 0;
    throw CardError(describe_transfer(whole.direction, file) +
                        " failed: " + (error == 0 ? "the file ends before it" : std::generic_category().message(error)),
                    error);
}

std::size_t align_down(std::size_t value, std::size_t alignment) { return value / alignment * alignment; }

}  // namespace

CardGradient::CardGradient(const Tasklet& tasklet, const CardOptions& options, CardRing& ring, std::size_t buffer,
                           CardCalls& calls)
    : tasklet_(tasklet),
      options_(options),
      ring_(ring),
      buffer_(buffer),
      calls_(calls),
      on_card_(ring.buffers(buffer).gradient()) {
    if (tasklet.payload == 0) return;
    payload_ = open_payload(memory_at(tasklet.payload), tasklet.payload_bytes, tasklet.numel);
}

std::uint32_t CardGradient::form(const CardPass& pass) const {
    return payload_ ? payload_->card_form() : static_cast<std::uint32_t>(pass.gradient_dtype);
}

// Elements that pass through need no gradient.
SentGradient CardGradient::sent_for(const CardPass& pass, const RunRange& run) const {
    if (run.step == kNoStep) return {};
    if (payload_) return sent_payload_;
    SentGradient sent;
    for (const Segment* segment : run.segments) {
        sent.gradient =
            crc32c(memory_at(segment->gradient), segment->numel * item_bytes(pass.gradient_dtype), sent.gradient);
    }
    return sent;
}

void CardGradient::send_payload() {
    if (!payload_) return;
    const PayloadParts parts = payload_->parts();
    sent_payload_ = {checksum(parts.values), checksum(parts.indices), checksum(parts.header_and_counts)};
    std::memcpy(memory(), memory_at(tasklet_.payload), parts.bytes());
    send_bytes(0, parts.bytes(), parts.bytes());
}

void CardGradient::send(const CardPass& pass) {
    if (payload_) return;
    const std::size_t item = item_bytes(pass.gradient_dtype);
    for (const RunRange& run : pass.runs) {
        for (const Segment* segment : run.segments) {
            std::memcpy(memory() + segment->offset * item, memory_at(segment->gradient), segment->numel * item);
        }
    }
    for (const Stretch& stretch : stretches_of(pass)) {
        send_bytes(stretch.first * item, stretch.last * item, (stretch.last - stretch.first) * item);
    }
}

// Returns the memory that the host writes to: the copy of the card's memory that sync() sends, or the source of file
// writes.
std::byte* CardGradient::memory() const { return options_.gradient_file ? ring_.staging(buffer_) : on_card_.data; }

void CardGradient::send_bytes(std::size_t begin, std::size_t end, std::size_t payload) {
    const std::size_t unit = options_.gradient_file ? kBlockBytes : kBeatBytes;
    const std::size_t first = align_down(begin, unit);
    const std::size_t last = align_up(end, unit);
    const std::size_t padding = last - first - payload;
    traffic_.shared_write_bytes += payload;
    traffic_.padding_bytes += padding;
    if (!options_.gradient_file) return sync(calls_, on_card_, Sync::kToCard, last - first, first);
    send_through_file(first, last);
    traffic_.gradient_file_bytes += last - first;
    traffic_.internal_read_bytes += payload;
    traffic_.padding_bytes += padding;
}

void CardGradient::send_through_file(std::size_t begin, std::size_t end) const {
    transfer(Direction::kWrite, begin, end, ring_.staging(buffer_));
    transfer(Direction::kRead, begin, end, on_card_.data);
}

void CardGradient::transfer(Direction direction, std::size_t begin, std::size_t end, std::byte* data) const {
    const StateFile& file = *options_.gradient_file;
    const IoRequest whole{direction,    file.descriptor(), ring_.gradient_offset(buffer_) + begin,
                          data + begin, end - begin,       0};
    calls_.transfer(describe_transfer(direction, file), whole, [whole, file] { transfer_all(whole, file); });
}

}  // namespace smart_infinity
