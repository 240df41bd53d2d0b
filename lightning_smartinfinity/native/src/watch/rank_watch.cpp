#include "watch/rank_watch.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <stdexcept>

#include "base/ending.hpp"
#include "base/system_error.hpp"
#include "base/worker_pool.hpp"

namespace smart_infinity {
namespace {

using namespace std::chrono_literals;

constexpr char kReceivedSigterm[] = "received SIGTERM";

int new_event() {
    const int event = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0) throw SystemError(errno, "eventfd");
    return event;
}

long whole_seconds(WatchOptions::Duration duration) {
    return std::chrono::duration_cast<std::chrono::seconds>(duration).count();
}

// Writes as much as stderr accepts without waiting, and removes it from the text. A pipe without a reader accepts
// nothing.
void write_without_waiting(std::string& text) {
    while (!text.empty()) {
        pollfd writable{STDERR_FILENO, POLLOUT, 0};
        if (::poll(&writable, 1, 0) <= 0) return;
        // A writable pipe accepts at least PIPE_BUF bytes.
        const ssize_t written = ::write(STDERR_FILENO, text.data(), std::min<std::size_t>(text.size(), PIPE_BUF));
        if (written < 0 && (errno == EINTR || errno == EAGAIN)) return;
        // If stderr has no reader any more, the text is discarded.
        text.erase(0, written < 0 ? text.size() : static_cast<std::size_t>(written));
    }
}

}  // namespace

void end_process(Ending ending) {
    if (ending == Ending::kSigterm) end_by_sigterm();
    if (ending == Ending::kLostRank) ::_exit(kRankLostStatus);
}

RankWatch::RankWatch(WatchOptions options)
    : options_(std::move(options)),
      interval_(std::clamp<WatchOptions::Duration>(options_.silence / 10, 10ms, 1000ms)),
      event_(new_event()),
      beaten_at_(),
      awake_at_(Clock::now()) {
    for (const auto& [rank, descriptor] : options_.sockets) peers_.push_back(std::make_unique<Peer>(rank, descriptor));
    sigterm_.emplace(event_);
    const BlockedSignals blocked;
    thread_ = std::thread([this] { run(); });
}

RankWatch::~RankWatch() {
    close();
    sigterm_.reset();
    ::close(event_);
}

void RankWatch::close() {
    {
        const std::lock_guard lock(mutex_);
        if (closing_) return;
        closing_ = true;
    }
    wake();
    thread_.join();
    sigterm_.reset();
    // The thread may have missed a last SIGTERM, which must still end the process if there is no other handler.
    const std::lock_guard lock(mutex_);
    const bool missed = SigtermListener::heard() && !told_sigterm_;
    if (missed && SigtermListener::is_alone()) options_.end(Ending::kSigterm);
}

void RankWatch::begin_training() {
    const std::lock_guard lock(mutex_);
    training_ = true;
    batch_began_.reset();
    longest_batch_ = {};
    if (report_.lost || report_.diverged) end_of_grace_ = Clock::now() + options_.grace;
    relay({Word::kTraining, options_.rank, {}}, options_.rank);
}

void RankWatch::end_training() {
    const std::lock_guard lock(mutex_);
    training_ = false;
    told_sigterm_ = false;
    SigtermListener::forget();
    report_.asked.reset();
    report_.failed.reset();
    end_of_grace_.reset();
    end_of_patience_.reset();
    relay({Word::kIdle, options_.rank, {}}, options_.rank);
}

void RankWatch::hear_sigterm() {
    const std::lock_guard lock(mutex_);
    if (!closing_) SigtermListener::step_in_front();
}

void RankWatch::tell_sigterm() {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(told_sigterm_, true)) hear_asked(options_.rank);
}

void RankWatch::tell_failure(const std::string& why) {
    const std::lock_guard lock(mutex_);
    relay({Word::kFailed, options_.rank, why}, options_.rank);
}

void RankWatch::note_batch() {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    if (batch_began_) longest_batch_ = std::max(longest_batch_, now - *batch_began_);
    batch_began_ = now;
    renew_patience(now);
}

void RankWatch::begin_saving() {
    const std::lock_guard lock(mutex_);
    ++saving_;
}

void RankWatch::end_saving() {
    const std::lock_guard lock(mutex_);
    --saving_;
    renew_patience(Clock::now());
}

// After an error of another rank, the patience is not renewed.
void RankWatch::renew_patience(Clock::time_point now) {
    if (!end_of_patience_ || report_.failed) return;
    end_of_patience_ = now + std::max<Clock::duration>(options_.patience, 2 * longest_batch_);
}

void RankWatch::agree() {
    const std::lock_guard lock(mutex_);
    end_of_patience_.reset();
}

void RankWatch::tell_place(const std::string& where) {
    const std::lock_guard lock(mutex_);
    places_[options_.rank] = {where, Clock::now()};
    if (options_.rank != 0) relay({Word::kPlace, options_.rank, where}, options_.rank);
}

std::map<int, RankPlace> RankWatch::places() const {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    std::map<int, RankPlace> places;
    for (const auto& [rank, place] : places_) {
        places[rank] = {place.first, std::chrono::duration<double>(now - place.second).count()};
    }
    return places;
}

void RankWatch::tell_divergence(const std::string& where) {
    const std::lock_guard lock(mutex_);
    diverge({Word::kDiverged, options_.rank, where}, options_.rank);
}

WatchReport RankWatch::wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit,
                      [this] { return report_.lost || report_.failed || report_.left || report_.diverged; });
    return report_;
}

WatchReport RankWatch::report() const {
    const std::lock_guard lock(mutex_);
    return report_;
}

void RankWatch::run() {
    std::unique_lock lock(mutex_);
    while (!closing_) {
        wait_for_events(lock);
        notice_sigterm();
        for (const auto& peer : peers_) listen(*peer);
        const Clock::time_point now = Clock::now();
        // If this process or its machine was suspended, messages of the others could not be received: their time starts
        // anew.
        if (now - awake_at_ > 3 * interval_ + 100ms) {
            for (const auto& peer : peers_) peer->heard = now;
        }
        awake_at_ = now;
        beat(now);
        notice_silence(now);
        end_if_due(now);
    }
    write_without_waiting(unsaid_);
    say_farewell();
}

void RankWatch::wait_for_events(std::unique_lock<std::mutex>& lock) {
    std::vector<pollfd> events{{event_, POLLIN, 0}};
    for (const auto& peer : peers_) {
        const short wanted = peer->has_unsent() ? POLLIN | POLLOUT : POLLIN;
        if (peer->open()) events.push_back({peer->descriptor(), wanted, 0});
    }
    std::string text = std::exchange(unsaid_, {});
    lock.unlock();
    write_without_waiting(text);
    ::poll(events.data(), events.size(), static_cast<int>(interval_.count()));
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(event_, &count, sizeof count);  // nothing, if another event woke us
    lock.lock();
    unsaid_.insert(0, text);
    for (const auto& peer : peers_) peer->send_unsent();
}

void RankWatch::beat(Clock::time_point now) {
    if (now - beaten_at_ < interval_) return;
    beaten_at_ = now;
    relay({Word::kBeat, options_.rank, {}}, options_.rank);
}

void RankWatch::listen(Peer& peer) {
    if (!peer.open()) return;
    peer.receive();
    while (const auto message = peer.next()) take(peer, *message);
    if (peer.open() || !std::exchange(peer.training, false)) return;
    lose(peer.rank(), peer.last_words.empty() ? "was killed or crashed" : peer.last_words);
}

void RankWatch::take(Peer& peer, const Message& message) {
    switch (message.word) {
        case Word::kTraining:
            if (message.rank == peer.rank()) {
                peer.training = true;
                peer.last_words.clear();
            }
            // The rank survived its error.
            if (report_.failed && report_.failed->rank == message.rank) {
                report_.failed.reset();
                if (!report_.asked) end_of_patience_.reset();
                if (options_.rank == 0) relay(message, message.rank);
            }
            break;
        case Word::kIdle:
            peer.training = false;
            // The request to end applied to the training that is now over everywhere, not to the next one.
            if (!training_ && report_.asked && (options_.rank != 0 || report_.asked->rank == peer.rank())) {
                report_.asked.reset();
            }
            break;
        case Word::kFarewell:
            peer.training = false;
            if (!report_.left) report_.left = RankNotice{peer.rank(), "has ended"};
            changed_.notify_all();
            peer.close();
            break;
        case Word::kAsked:
            if (message.rank == peer.rank()) peer.last_words = kReceivedSigterm;
            hear_asked(message.rank);
            break;
        case Word::kFailed:
            if (message.rank == peer.rank()) peer.last_words = message.why;
            if (options_.rank == 0) relay(message, message.rank);
            // All ranks may have failed together; they are then about to end their training, too.
            if (!training_ || report_.failed) break;
            report_.failed = RankNotice{message.rank, message.why};
            // During saving, the patience after SIGTERM may have passed.
            if (!end_of_patience_ || saving_ > 0) end_of_patience_ = Clock::now() + options_.patience;
            changed_.notify_all();
            break;
        case Word::kLost:
            lose(message.rank, message.why);
            break;
        case Word::kPlace:
            places_[peer.rank()] = {message.why, Clock::now()};
            break;
        case Word::kDiverged:
            diverge(message, peer.rank());
            break;
        default:
            break;
    }
}

void RankWatch::notice_silence(Clock::time_point now) {
    for (const auto& peer : peers_) {
        if (!peer->open() || now - peer->heard < options_.silence) continue;
        const std::string why = "has not answered for " + std::to_string(whole_seconds(options_.silence)) + " s";
        peer->send({Word::kLost, peer->rank(), why});  // informs it in case it wakes up
        peer->training = false;
        peer->close();
        lose(peer->rank(), why);
    }
}

void RankWatch::notice_sigterm() {
    if (!SigtermListener::heard() || told_sigterm_) return;
    // Outside of a training, only the other handler reacts. The signal must not end a later training.
    if (!training_ && !SigtermListener::is_alone()) return SigtermListener::forget();
    told_sigterm_ = true;
    hear_asked(options_.rank);
    if (!SigtermListener::is_alone()) return;
    flush(1000ms);
    write_without_waiting(unsaid_);
    options_.end(Ending::kSigterm);
}

void RankWatch::hear_asked(int rank) {
    if (report_.asked) return;
    report_.asked = RankNotice{rank, kReceivedSigterm};
    ask_to_end();  // this rank may be waiting for a disk that does not answer
    say(named(rank) + " received SIGTERM.");
    if (training_) {
        end_of_patience_ = Clock::now();
        renew_patience(*end_of_patience_);
    }
    if (rank == options_.rank || options_.rank == 0) relay({Word::kAsked, rank, {}}, rank);
}

void RankWatch::lose(int rank, const std::string& why) {
    if (report_.lost) return;
    report_.lost = RankNotice{rank, why};
    end_of_grace_ = Clock::now() + options_.grace;
    changed_.notify_all();
    say(named(rank) + " is lost: it " + why + ".");
    if (options_.rank == 0) relay({Word::kLost, rank, why}, rank);
}

void RankWatch::diverge(const Message& message, int except) {
    if (report_.diverged) return;
    report_.diverged = message.why;
    end_of_grace_ = Clock::now() + options_.grace;
    changed_.notify_all();
    say(message.why);
    relay(message, except);
}

void RankWatch::end_if_due(Clock::time_point now) {
    const bool saves = saving_ > 0 && !report_.failed;
    const bool over =
        (end_of_grace_ && now >= *end_of_grace_) || (end_of_patience_ && now >= *end_of_patience_ && !saves);
    if (!training_ || !over) return;
    std::string cause = "the ranks wait for each other at different places";
    if (const auto& notice = report_.lost ? report_.lost : report_.failed ? report_.failed : report_.asked) {
        cause = named(notice->rank) + " " + notice->why;
    }
    say("this process still waits for others, and ends now, because " + cause + ".");
    write_without_waiting(unsaid_);
    end_of_grace_.reset();
    end_of_patience_.reset();
    options_.end(Ending::kLostRank);
}

void RankWatch::relay(const Message& message, int except) {
    for (const auto& peer : peers_) {
        if (peer->open() && peer->rank() != except) peer->send(message);
    }
}

void RankWatch::say_farewell() {
    relay({Word::kFarewell, options_.rank, {}}, options_.rank);
    flush(1000ms);
    for (const auto& peer : peers_) peer->close();
}

// Sends waiting messages to ranks that accept them within the time limit.
void RankWatch::flush(std::chrono::milliseconds limit) {
    const Clock::time_point until = Clock::now() + limit;
    for (const auto& peer : peers_) {
        while (peer->open() && peer->has_unsent() && Clock::now() < until) {
            pollfd writable{peer->descriptor(), POLLOUT, 0};
            ::poll(&writable, 1, 10);
            peer->send_unsent();
        }
    }
}

void RankWatch::wake() const {
    const std::uint64_t one = 1;
    // If this fails, the counter is full, and the thread is awake.
    [[maybe_unused]] const ssize_t written = ::write(event_, &one, sizeof one);
}

std::string RankWatch::named(int rank) const {
    const auto index = static_cast<std::size_t>(rank);
    const std::string host = index < options_.hosts.size() ? options_.hosts[index] : "an unknown host";
    return "rank " + std::to_string(rank) + " on " + host;
}

// The thread writes the text, since other threads may not wait for stderr.
void RankWatch::say(const std::string& text) {
    unsaid_ += "smart_infinity, rank " + std::to_string(options_.rank) + ": " + text + "\n";
    wake();
}

}  // namespace smart_infinity
