#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "watch/peer.hpp"
#include "watch/sigterm.hpp"

namespace smart_infinity {

// A rank and what happened to it.
struct RankNotice {
    int rank;
    std::string why;
};

struct WatchReport {
    std::optional<RankNotice> lost;       // it was killed or does not answer: no training with it can continue
    std::optional<RankNotice> failed;     // an error ends its training
    std::optional<RankNotice> asked;      // it received SIGTERM
    std::optional<RankNotice> left;       // it ended normally
    std::optional<std::string> diverged;  // ranks wait for each other at different places, which the text names
};

// Where a rank has been waiting for a while, in its own words, and how long ago it reported this.
struct RankPlace {
    std::string where;  // empty: it makes progress
    double seconds;
};

enum class Ending { kLostRank, kSigterm };

// Exit status of a process that ends because of another rank. It is EX_TEMPFAIL of sysexits.h: try again.
constexpr int kRankLostStatus = 75;

// Ends the process at once.
void end_process(Ending ending);

struct WatchOptions {
    using Duration = std::chrono::milliseconds;

    int rank;
    std::vector<std::string> hosts;            // of all ranks
    std::vector<std::pair<int, int>> sockets;  // connected, by rank: rank 0 has all other ranks, the others have rank 0
    Duration silence;                          // after which a rank is lost
    Duration grace;                            // for Python to end the process after a rank is lost
    Duration patience;                         // for all ranks to end a training together after SIGTERM or an error
    // Called with a lock held. Tests pass a function that ends nothing.
    std::function<void(Ending)> end = end_process;
};

// Watches whether the other ranks' processes are alive. A thread that does not need Python sends heartbeats and
// receives those of others, so a rank that computes, compiles, or waits in a Python debugger still answers.
//
// Rank 0 watches all others, and they watch rank 0, which forwards messages to them. When a rank is lost, every rank
// reports it on stderr. Python may then raise. A process that still trains after a grace period, because it waits in a
// collective, is ended. After SIGTERM it may take the longer patience.
class RankWatch {
 public:
    explicit RankWatch(WatchOptions options);
    ~RankWatch();
    RankWatch(const RankWatch&) = delete;
    RankWatch& operator=(const RankWatch&) = delete;

    // From now on this rank, which trains or evaluates, is reported lost if it ends, and is ended if another one is
    // lost.
    void begin_training();
    // From now on this rank may end, and is not ended. Lost ranks stay lost.
    void end_training();
    // Installs a SIGTERM handler that runs before the present one.
    void hear_sigterm();
    // Informs all ranks that this rank received SIGTERM.
    void tell_sigterm();
    // Informs the other ranks that an error ends this rank's training.
    void tell_failure(const std::string& why);
    // Records the start of a batch of training or validation. After SIGTERM the process may continue for the patience,
    // or for twice the longest batch if that is more, counted from the last start.
    void note_batch();
    // While a checkpoint is saved, SIGTERM does not end the process; afterwards, the patience starts anew.
    void begin_saving();
    void end_saving();
    // Cancels the end of this process after the patience, because all ranks have agreed to end their training.
    void agree();
    // Reports to rank 0 where this rank has been waiting for a while; empty text: it makes progress.
    void tell_place(const std::string& where);
    // Returns the last reported place of each rank. Only rank 0 knows those of others.
    std::map<int, RankPlace> places() const;
    // Informs all ranks that they wait for each other at different places: they end as if one of them were lost.
    void tell_divergence(const std::string& where);
    // Waits until a rank is lost or has left, or the time has passed.
    WatchReport wait(std::chrono::milliseconds limit);
    WatchReport report() const;
    // Sends a farewell and ends the thread.
    void close();

 private:
    using Clock = Peer::Clock;

    void run();
    void beat(Clock::time_point now);
    void listen(Peer& peer);
    void take(Peer& peer, const Message& message);
    void notice_silence(Clock::time_point now);
    void notice_sigterm();
    void end_if_due(Clock::time_point now);
    void lose(int rank, const std::string& why);
    void hear_asked(int rank);
    void diverge(const Message& message, int except);
    void relay(const Message& message, int except);
    void say_farewell();
    void renew_patience(Clock::time_point now);
    void wait_for_events(std::unique_lock<std::mutex>& lock);
    void flush(std::chrono::milliseconds limit);
    void wake() const;
    std::string named(int rank) const;
    void say(const std::string& text);

    const WatchOptions options_;
    const WatchOptions::Duration interval_;
    const int event_;
    std::optional<SigtermListener> sigterm_;

    mutable std::mutex mutex_;  // guards the members below
    std::condition_variable changed_;
    std::vector<std::unique_ptr<Peer>> peers_;
    WatchReport report_;
    std::map<int, std::pair<std::string, Clock::time_point>> places_;
    bool training_ = false, closing_ = false, told_sigterm_ = false;
    int saving_ = 0;
    std::string unsaid_;  // goes to stderr as soon as stderr accepts it
    std::optional<Clock::time_point> batch_began_;
    Clock::duration longest_batch_{};
    std::optional<Clock::time_point> end_of_grace_, end_of_patience_;
    Clock::time_point beaten_at_, awake_at_;
    std::thread thread_;  // last, as it uses the others
};

}  // namespace smart_infinity
