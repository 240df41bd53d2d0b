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
    std::optional<RankNotice> lost;       // it was killed or does not answer: no training with it can go on
    std::optional<RankNotice> failed;     // an error ends its training
    std::optional<RankNotice> asked;      // it received SIGTERM
    std::optional<RankNotice> left;       // it ended as it should
    std::optional<std::string> diverged;  // ranks wait for each other at different places; the words say where
};

// Where a rank has been for a while, in words of its own, and how long ago it told this.
struct RankPlace {
    std::string where;  // empty: it moves
    double seconds;
};

enum class Ending { kLostRank, kSigterm };

// The exit status of a process that ends because of another rank. It is EX_TEMPFAIL of sysexits.h: try again.
constexpr int kRankLostStatus = 75;

// Ends the process at once.
void end_process(Ending ending);

struct WatchOptions {
    using Duration = std::chrono::milliseconds;

    int rank;
    std::vector<std::string> hosts;            // of all ranks
    std::vector<std::pair<int, int>> sockets;  // connected ones, by rank: rank 0 has all other ranks, these have rank 0
    Duration silence;                          // after which a rank is lost
    Duration grace;                            // for Python to end the process after a rank is lost
    Duration patience;                         // for all ranks to end a training together after SIGTERM or an error
    // Called with a lock held. Tests pass something that ends nothing.
    std::function<void(Ending)> end = end_process;
};

// Watches whether the other ranks' processes live. A thread, which needs nothing of Python, sends heartbeats and
// listens to those of others: a rank that computes, compiles or waits in a debugger of Python's answers.
//
// Rank 0 watches all others, and they watch rank 0, which tells them what it knows. When a rank is lost, every rank
// says so on stderr. Python may then raise; a process that still trains after a grace period, as it waits in a
// collective, is ended. After SIGTERM it may take the longer patience.
class RankWatch {
 public:
    explicit RankWatch(WatchOptions options);
    ~RankWatch();
    RankWatch(const RankWatch&) = delete;
    RankWatch& operator=(const RankWatch&) = delete;

    // From now on this rank, which trains or evaluates, is missed if it ends, and ended if it misses another one.
    void begin_training();
    // From now on it may end, and is not ended. What was lost stays lost.
    void end_training();
    // Hears SIGTERM before the present handler does.
    void hear_sigterm();
    // Tells all ranks that this rank received SIGTERM.
    void tell_sigterm();
    // Tells the other ranks that an error ends this rank's training.
    void tell_failure(const std::string& why);
    // Notes the begin of a batch, of training or validation: after SIGTERM the process may go on for the patience, or
    // for twice the longest batch, from the last begin on.
    void note_batch();
    // While a checkpoint is saved, SIGTERM does not end the process; after it, it has the patience anew.
    void begin_saving();
    void end_saving();
    // Takes back that SIGTERM ends this process after the patience: all ranks have agreed to end their training.
    void agree();
    // Tells rank 0 where this rank has been for a while; an empty text says that it moves.
    void tell_place(const std::string& where);
    // Returns the last place of each rank that told one. Only rank 0 knows those of others.
    std::map<int, RankPlace> places() const;
    // Tells all ranks that they wait for each other at different places: they end as if one of them was lost.
    void tell_divergence(const std::string& where);
    // Waits until a rank is lost or has left, or the time has passed.
    WatchReport wait(std::chrono::milliseconds limit);
    WatchReport report() const;
    // Says farewell and ends the thread.
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
    std::string unsaid_;  // goes to stderr as soon as that takes it
    std::optional<Clock::time_point> batch_began_;
    Clock::duration longest_batch_{};
    std::optional<Clock::time_point> end_of_grace_, end_of_patience_;
    Clock::time_point beaten_at_, awake_at_;
    std::thread thread_;  // last, as it uses the others
};

}  // namespace smart_infinity
