#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace smart_infinity {

enum class Work { kRead, kFetch, kCompute, kWrite, kDeliver };

struct Action {
    Work work;
    std::size_t tasklet;
    std::size_t buffer;
};

// The order of a batch as a pure state machine: no I/O, no clock, no threads, no lock. Tasklets start in the order of
// the list. More may be appended at any time, and some may be moved to the front. Each tasklet is read, has its
// parameters fetched from a device, and is computed; then it is written and, at the same time, its parameters are
// delivered to the device. It holds one of `num_buffers` buffers from the start of its first action to the end of its
// last.
//
// Resident tasklets have memory of their own. Instead of these buffers they use the same number of others, numbered
// from `num_buffers` on, which limit how many of them are processed at a time. Each kind of tasklet has its own order.
//
// If several actions can start, the order is: deliveries and writes, because only they free a buffer; compute, because
// a caller waits for parameters; fetches; reads. Among equals, the lowest tasklet comes first.
class TransferSchedule {
 public:
    struct Stages {
        bool reads;
        bool writes;
        bool fetches = false;
        bool delivers = false;
    };

    // The stages of one tasklet, if they differ from the batch's.
    struct Way {
        bool reads;
        bool writes;
        bool resident = false;
    };

    // Throws std::invalid_argument if there is no buffer.
    TransferSchedule(std::size_t num_tasklets, std::size_t num_buffers, Stages stages);

    // Appends tasklets.
    void extend(std::size_t num_tasklets);
    void extend(const std::vector<Way>& ways);

    // Moves these tasklets, in this order, before all others that have not started.
    void prefer(const std::vector<std::size_t>& tasklets);
    // Returns whether a tasklet was ever preferred, before or after its start.
    bool preferred(std::size_t tasklet) const { return ranks_.at(tasklet) < 0; }

    // Returns the next action that can start, or nothing; the action counts as started.
    std::optional<Action> next();

    // Records that a started action has ended. Throws std::invalid_argument if it had not started.
    void done(Work work, std::size_t tasklet);

    // Records that the tasklet's action, if in flight, has failed: no action starts any more, as after stop().
    void fail(Work work, std::size_t tasklet);

    // Starts no more actions except deliveries, whose copies began when the tasklet was computed. The end of actions in
    // flight is still reported by done().
    void stop() { stopped_ = true; }

    // Returns whether all tasklets so far are done or, after stop(), nothing is in flight.
    bool finished() const;
    bool parameters_out(std::size_t tasklet) const { return parameters_out_.at(tasklet); }
    // Returns, by tasklet, whether all of its actions have ended without failure.
    const std::vector<bool>& complete() const { return complete_; }
    std::size_t num_tasklets() const { return parameters_out_.size(); }

 private:
    // The stages of a buffer. A computed buffer is written and delivered at the same time, as two legs.
    enum class Stage { kFree, kReading, kRead, kFetching, kLoaded, kComputing, kComputed };
    enum class Leg { kDone, kWaiting, kInFlight };

    struct Buffer {
        Stage stage = Stage::kFree;
        std::size_t tasklet = 0;
        Leg write = Leg::kDone;
        Leg deliver = Leg::kDone;
        bool failed = false;

        bool is_held() const;
        bool works(Work work) const;
    };

    // Tasklets that have not started, as (rank, tasklet); the lowest rank starts first.
    using Queue = std::set<std::pair<std::int64_t, std::size_t>>;

    template <class Predicate>
    Buffer* lowest(const Predicate& predicate);
    Buffer* holder_of(std::size_t tasklet);
    Action start(Buffer& buffer, Work work);
    void advance(Buffer& buffer, Work work);
    std::optional<Action> begin(bool resident);
    Queue& queue_of(std::size_t tasklet) { return ways_[tasklet].resident ? resident_ : on_storage_; }
    Stage after_read() const { return stages_.fetches ? Stage::kRead : Stage::kLoaded; }
    Work first_work(const Way& way) const;
    bool all_started() const { return on_storage_.empty() && resident_.empty(); }

    Stages stages_;
    std::size_t num_buffers_;
    std::vector<Buffer> buffers_;  // twice as many once there are resident tasklets
    std::vector<Way> ways_;        // by tasklet
    std::vector<bool> parameters_out_;
    std::vector<bool> complete_;
    std::vector<std::int64_t> ranks_;  // by tasklet: its number, or a number below 0 once it was preferred
    std::int64_t lowest_rank_ = 0;
    Queue on_storage_;
    Queue resident_;
    bool stopped_ = false;
};

}  // namespace smart_infinity
