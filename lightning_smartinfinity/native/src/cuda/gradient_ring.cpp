#include "cuda/gradient_ring.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "base/stopwatch.hpp"
#include "kernels/instruction_set.hpp"

namespace smart_infinity {
namespace {

constexpr std::chrono::milliseconds kPollInterval{50};
constexpr std::size_t kPieceAlignment = 64;

std::size_t row_of(DType dtype) { return static_cast<std::size_t>(dtype); }

std::size_t travelling_bytes(const TravellingGradient& gradient) { return gradient.numel * item_bytes(gradient.dtype); }

GradientRing::Options checked_ring(const GradientRing::Options& options) {
    // A slot has room for a run that the squares may be cut at.
    const bool fits = options.slot_bytes >= kSquareLanes * sizeof(float) && options.slot_bytes % kPieceAlignment == 0;
    if (!fits || options.num_slots == 0 || options.num_threads == 0) {
        throw std::invalid_argument("GradientRing: a slot, a number of slots or of threads is out of range");
    }
    return options;
}

}  // namespace

GradientRing::GradientRing(const std::shared_ptr<const CudaDevice>& device, const Options& options)
    : device_(device), stream_(device), options_(checked_ring(options)), slots_(options_.num_slots) {
    memory_.emplace(options_.num_slots * options_.slot_bytes);
    (void)memory_->try_register(device_);
    report_.ring_bytes = memory_->bytes();
    for (std::size_t index = options_.num_slots; index-- > 0;) {
        slots_[index].copied = std::make_unique<CudaEvent>(device_);
        free_.push_back(index);
    }
    pool_.emplace("smart-inf-grad", options_.num_threads, [this](const std::size_t& index) { work(index); });
}

GradientRing::Ticket GradientRing::push(const TravellingGradient& gradient, CudaStreamHandle after, const Poll& poll) {
    std::unique_lock lock(mutex_);
    const std::size_t bytes = travelling_bytes(gradient);
    const auto has_room = [&] { return travels_.empty() || bytes_ + bytes <= options_.most_bytes; };
    if (!has_room()) {
        const Stopwatch stopwatch;
        await(lock, poll, has_room);
        report_.wait_seconds += stopwatch.seconds();
    }
    if (failure_ || gradient.numel == 0) return num_done_ + travels_.size();
    try {
        auto exists = std::make_unique<CudaEvent>(device_);
        exists->record(after);
        travels_.push_back({gradient, std::move(exists)});
    } catch (const CudaError& error) {
        fail(error);
        return num_done_ + travels_.size();
    }
    travels_.back().left = gradient.numel;
    bytes_ += bytes;
    fill_slots();
    return num_done_ + travels_.size();
}

GradientRing::Ticket GradientRing::pushed() const {
    const std::lock_guard lock(mutex_);
    return num_done_ + travels_.size();
}

bool GradientRing::done(Ticket ticket) const {
    const std::lock_guard lock(mutex_);
    return num_done_ >= ticket;
}

void GradientRing::wait(Ticket ticket, const Poll& poll) {
    std::unique_lock lock(mutex_);
    await(lock, poll, [&] { return num_done_ >= ticket; });
    if (failure_) throw CudaError(*failure_);
}

std::vector<std::pair<std::uint64_t, double>> GradientRing::take_squares() {
    const std::lock_guard lock(mutex_);
    return std::exchange(squares_, {});
}

void GradientRing::reset(const Poll& poll) {
    std::unique_lock lock(mutex_);
    await(lock, poll, [&] { return travels_.empty() && free_.size() == slots_.size(); });
    sending_.clear();  // after a failure it has keys of travels that were given up
    squares_.clear();
    failure_.reset();
}

GradientRing::Report GradientRing::report() const {
    const std::lock_guard lock(mutex_);
    return report_;
}

void GradientRing::close() {
    reset();
    pool_.reset();
    memory_.reset();
}

template <typename Condition>
void GradientRing::await(std::unique_lock<std::mutex>& lock, const Poll& poll, const Condition& condition) {
    while (!changed_.wait_for(lock, kPollInterval, condition)) {
        lock.unlock();
        poll();
        lock.lock();
    }
}

// Called with the mutex held.
void GradientRing::fill_slots() {
    while (!failure_ && !free_.empty() && num_sent_ < travels_.size()) {
        // An earlier gradient of the same parameter has to be in the sum before this one is added.
        const Travel& next = travels_[num_sent_];
        if (next.sent == 0 && sending_.contains(next.gradient.key)) return;
        const std::size_t index = free_.back();
        free_.pop_back();
        try {
            fill(index);
            slots_[index].copied->record(stream_.handle());
        } catch (const CudaError& error) {
            fail(error);
            record_sent(slots_[index]);
        }
        pool_->push(index);
    }
}

// Copies that started before one failed still use the slot.
void GradientRing::record_sent(const Slot& slot) const {
    try {
        slot.copied->record(stream_.handle());
    } catch (const CudaError&) {
        return;  // the device and its copies are lost; the first failure states the reason
    }
}

void GradientRing::fill(std::size_t index) {
    std::byte* const data = memory_->data() + index * options_.slot_bytes;
    std::vector<Piece>& pieces = slots_[index].pieces;
    std::size_t offset = 0;
    while (num_sent_ < travels_.size()) {
        Travel& travel = travels_[num_sent_];
        const TravellingGradient& gradient = travel.gradient;
        if (travel.sent == 0 && sending_.contains(gradient.key)) return;
        const std::size_t rest = gradient.numel - travel.sent;
        const std::size_t room = (options_.slot_bytes - offset) / item_bytes(gradient.dtype);
        const std::size_t numel = rest <= room ? rest : room / kSquareLanes * kSquareLanes;
        if (numel == 0) return;
        const Piece piece{&travel, travel.sent, numel, data + offset};
        send(piece);
        pieces.push_back(piece);
        offset = std::min(options_.slot_bytes, align_up(offset + numel * item_bytes(gradient.dtype), kPieceAlignment));
        if (travel.sent == gradient.numel) ++num_sent_;
    }
}

void GradientRing::send(const Piece& piece) {
    Travel& travel = *piece.travel;
    const std::size_t item = item_bytes(travel.gradient.dtype);
    if (travel.sent == 0) travel.exists->hold(stream_.handle());
    device_->copy_to_host(piece.data, travel.gradient.source + piece.begin * item, piece.numel * item,
                          stream_.handle());
    sending_.insert(travel.gradient.key);
    travel.sent += piece.numel;
}

// Runs on a thread of the pool. A slot's pieces do not change before it is free. The threads take slots in the order in
// which they were filled, so the pieces that add() waits for are with other threads.
void GradientRing::work(std::size_t index) {
    Slot& slot = slots_[index];
    std::optional<CudaError> failure;
    try {
        slot.copied->synchronize();
        for (const Piece& piece : slot.pieces) add(piece);
    } catch (const CudaError& error) {
        failure = error;
    }
    const std::lock_guard lock(mutex_);
    if (failure) fail(*failure);
    for (const Piece& piece : slot.pieces) {
        piece.travel->left -= piece.numel;
        if (piece.travel->left == 0) sending_.erase(piece.travel->gradient.key);
    }
    slot.pieces.clear();
    free_.push_back(index);
    end_travels();
    fill_slots();
    changed_.notify_all();
}

// Squares a piece in the same pass if it is the piece's turn, and otherwise after the pieces before it were squared.
void GradientRing::add(const Piece& piece) {
    Travel& travel = *piece.travel;
    const TravellingGradient& gradient = travel.gradient;
    std::byte* const sum = gradient.sum + piece.begin * item_bytes(gradient.sum_dtype);
    const std::size_t of_sum = row_of(gradient.sum_dtype);
    std::unique_lock lock(mutex_);
    const auto is_next = [&] { return travel.squared == piece.begin; };
    const bool squares = is_next();
    lock.unlock();
    double total = kernels().accumulate[row_of(gradient.dtype)][of_sum](piece.data, sum, piece.numel, gradient.adds,
                                                                        squares ? &travel.sums : nullptr);
    if (!squares) {
        lock.lock();
        changed_.wait(lock, [&] { return failure_ || is_next(); });
        if (!is_next()) return;
        lock.unlock();
        total = kernels().sum_of_squares[of_sum](sum, piece.numel, &travel.sums);
    }
    lock.lock();
    travel.squares = total;
    travel.squared += piece.numel;
    changed_.notify_all();
}

// Called with the mutex held. Gives up all that was not sent. What was sent is waited for.
void GradientRing::fail(const CudaError& error) {
    if (!failure_) failure_ = error;
    for (; num_sent_ < travels_.size(); ++num_sent_) {
        Travel& travel = travels_[num_sent_];
        travel.left -= travel.gradient.numel - travel.sent;
        travel.sent = travel.gradient.numel;
    }
    end_travels();
    changed_.notify_all();
}

void GradientRing::end_travels() {
    while (!travels_.empty() && travels_.front().left == 0) {
        const Travel& travel = travels_.front();
        if (!failure_) squares_.emplace_back(travel.gradient.key, travel.squares);
        bytes_ -= travelling_bytes(travel.gradient);
        ++num_done_;
        --num_sent_;
        travels_.pop_front();
    }
}

}  // namespace smart_infinity
