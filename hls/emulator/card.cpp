#include "card.hpp"

#include <xrt_mem.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/system_error.hpp"
#include "journal.hpp"
#include "xclbin_reader.hpp"

namespace smart_infinity::emulator {
namespace {

constexpr unsigned kBankMask = 0xff'ffff;
constexpr std::int64_t kMiB = 1 << 20;

void check_within(const Buffer& buffer, std::size_t bytes, std::size_t offset) {
    if (offset > buffer.bytes() || bytes > buffer.bytes() - offset) throw SystemError(EINVAL, "outside of the buffer");
}

}  // namespace

void Card::load(const axlf& file) {
    check_present();
    const Xclbin xclbin(file);
    if (xclbin.uuid == uuid_) return;
    if (buffers_.num_buffers() > 0) throw SystemError(EBUSY, "the card holds buffers of another xclbin");
    std::vector<std::unique_ptr<ComputeUnit>> units;  // made first: if one cannot be, the card stays as it was
    for (const std::string& name : xclbin.compute_units) {
        units.push_back(std::make_unique<ComputeUnit>(
            name, [this](const ComputeUnit& unit, const Run& run) { execute(unit, run); }));
    }
    release();  // without it, threads of hung runs would never end
    units_ = std::move(units);
    banks_.clear();
    for (const Bank& bank : xclbin.banks) {
        banks_.push_back(bank.bytes > 0 ? std::make_shared<CardMemory>(bank.base, bank.bytes) : nullptr);
    }
    uuid_ = xclbin.uuid;
}

void Card::check_present() const {
    if (lost_) throw SystemError(ENODEV, "the card is lost");
}

BufferKind Card::kind_of(unsigned flags) const {
    if ((flags & XCL_BO_FLAGS_EXECBUF) != 0) return BufferKind::kCommand;
    if ((flags & (XCL_BO_FLAGS_HOST_ONLY | XCL_BO_FLAGS_SVM)) != 0)
        throw SystemError(EOPNOTSUPP, "the card cannot reach host memory");
    if ((flags & XCL_BO_FLAGS_P2P) != 0) {
        if (settings_.p2p == 0) throw SystemError(EINVAL, "P2P is not enabled");
        return BufferKind::kP2p;
    }
    return (flags & XCL_BO_FLAGS_DEV_ONLY) != 0 ? BufferKind::kDeviceOnly : BufferKind::kNormal;
}

unsigned Card::allocate(std::size_t bytes, unsigned flags, void* user_memory) {
    check_present();
    const BufferKind kind = kind_of(flags);
    if (bytes == 0 || reinterpret_cast<std::uintptr_t>(user_memory) % kPageBytes != 0)
        throw SystemError(EINVAL, "buffer");
    std::shared_ptr<CardMemory> bank;
    if (kind != BufferKind::kCommand) {
        const std::size_t index = flags & kBankMask;
        if (index >= banks_.size() || banks_[index] == nullptr)
            throw SystemError(EINVAL, "the card has no such memory bank");
        if (strikes(FaultKind::kAlloc)) throw std::bad_alloc();
        bank = banks_[index];
    }
    const auto limit = static_cast<std::uint64_t>(settings_.dram_mib * kMiB);
    const auto buffer = std::make_shared<Buffer>(kind, bytes, flags, user_memory, bank, limit);
    const unsigned handle = buffers_.add(buffer);
    if (buffer->on_card()) {
        journal().note(index_, "alloc", buffer->address(), bytes);
        const std::scoped_lock lock(mutex_);
        counters_.peak_bytes = std::max(counters_.peak_bytes.load(), static_cast<std::int64_t>(buffers_.card_bytes()));
    }
    return handle;
}

void Card::free(unsigned handle) {
    const auto buffer = buffers_.get(handle);
    if (buffer->on_card()) journal().note(index_, "free", buffer->address(), buffer->bytes());
    buffers_.remove(handle);
}

void* Card::map(unsigned handle) const {
    const auto buffer = buffers_.get(handle);
    if (buffer->host() == nullptr) throw SystemError(EINVAL, "the buffer has no host memory");
    return buffer->host();
}

void Card::sync(unsigned handle, Direction direction, std::size_t bytes, std::size_t offset) {
    check_present();
    const auto buffer = buffers_.get(handle);
    check_within(*buffer, bytes, offset);
    if (buffer->kind() == BufferKind::kP2p) return;  // host and device memory are the same
    if (buffer->host() == nullptr || !buffer->on_card()) throw SystemError(EOPNOTSUPP, "the buffer cannot be synced");
    if (strikes(FaultKind::kSync)) throw SystemError(EIO, "injected failure of a sync");

    const bool to_card = direction == Direction::kToCard;
    const std::uint64_t address = buffer->address() + offset;
    const std::int64_t before = releases();
    journal().note(index_, to_card ? "to-begin" : "from-begin", address, bytes);
    if (strikes(FaultKind::kStall)) await_release("sync-stalled", address);
    move(*buffer, direction, bytes, offset, before);
    (to_card ? counters_.syncs_to : counters_.syncs_from) += 1;
    (to_card ? counters_.bytes_to : counters_.bytes_from) += static_cast<std::int64_t>(bytes);
    journal().note(index_, to_card ? "to-end" : "from-end", address, bytes);
}

void Card::move(const Buffer& buffer, Direction direction, std::size_t bytes, std::size_t offset, std::int64_t before) {
    const bool to_card = direction == Direction::kToCard;
    const std::scoped_lock channel(to_card ? to_card_ : from_card_);
    const auto begin = Clock::now();
    std::byte* const host = buffer.host() + offset;
    std::byte* const device = buffer.device() + offset;
    std::memcpy(to_card ? device : host, to_card ? host : device, bytes);
    wait_for_channel(begin, time_of(bytes, settings_.channel_mib_per_s), before);
    pause(begin + time_of(bytes, settings_.dma_mib_per_s) - Clock::now(), before);
}

// The syncs of all cards share the channel fairly: they take short turns.
void Card::wait_for_channel(Clock::time_point begin, Clock::duration time, std::int64_t before) {
    constexpr Clock::duration kTurn = std::chrono::milliseconds(1);
    for (Clock::time_point end = begin; time > Clock::duration::zero(); time -= kTurn) {
        const Clock::duration turn = std::min(time, kTurn);
        end = end_of_turn(end, turn);
        journal().note(index_, "turn", (end - turn).time_since_epoch().count(), end.time_since_epoch().count());
        if (pause(end - Clock::now(), before)) return;
    }
}

// A turn begins where the previous one ended, even if its thread woke up later: the channel loses no time.
Card::Clock::time_point Card::end_of_turn(Clock::time_point begin, Clock::duration time) {
    static std::mutex mutex;
    static Clock::time_point end{};
    const std::scoped_lock lock(mutex);
    end = std::max(end, begin) + time;
    return end;
}

Card::Clock::duration Card::time_of(std::uint64_t bytes, std::int64_t mib_per_s) {
    if (mib_per_s <= 0) return {};
    const std::chrono::duration<double> time(static_cast<double>(bytes) / static_cast<double>(mib_per_s * kMiB));
    return std::chrono::duration_cast<Clock::duration>(time);
}

bool Card::pause(Clock::duration time, std::int64_t before) {
    std::unique_lock lock(mutex_);
    return released_.wait_for(lock, time, [&] { return num_releases_ != before; });
}

void Card::await_release(const char* event, std::uint64_t what) {
    std::unique_lock lock(mutex_);
    const std::int64_t before = num_releases_;
    journal().note(index_, event, what);
    released_.wait(lock, [&] { return num_releases_ != before; });
}

std::int64_t Card::releases() const {
    const std::scoped_lock lock(mutex_);
    return num_releases_;
}

void Card::copy(unsigned to, unsigned from, std::size_t bytes, std::size_t to_offset, std::size_t from_offset) {
    check_present();
    const auto target = buffers_.get(to), source = buffers_.get(from);
    check_within(*target, bytes, to_offset);
    check_within(*source, bytes, from_offset);
    if (!target->on_card() || !source->on_card()) throw SystemError(EINVAL, "not on the card");
    std::memmove(target->device() + to_offset, source->device() + from_offset, bytes);
    counters_.bytes_copied += static_cast<std::int64_t>(bytes);
}

void Card::lose() {
    lost_ = true;
    release();
}

void Card::release() {
    const std::scoped_lock lock(mutex_);
    ++num_releases_;
    released_.notify_all();
}

void Card::reset() {
    faults_.clear();
    release();
    lost_ = false;
    counters_.clear();
    const std::scoped_lock lock(mutex_);
    next_run_ = 0;
}

std::int64_t Card::counter(std::string_view name) const {
    if (name == "num_buffers") return static_cast<std::int64_t>(buffers_.num_buffers());
    if (name == "card_bytes") return static_cast<std::int64_t>(buffers_.card_bytes());
    const auto value = counters_.get(name);
    if (!value) throw std::invalid_argument("an emulated card has no counter " + std::string(name));
    return *value;
}

Card& card(unsigned index) {
    static std::mutex mutex;
    static std::array<Card*, kMaxCards> cards{};
    const std::scoped_lock lock(mutex);
    Card*& found = cards.at(index);
    if (found == nullptr) found = new Card(index);
    return *found;
}

}  // namespace smart_infinity::emulator
