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

// The order of a batch as a pure state machine: no I/O, no clock, no threads, no lock. Tasklets are begun in the order
// in which they were listed, to which more may be added at any time and in which some may be moved to the front; each
// is read, has its parameters fetched from a device, is computed, and then is written and has its parameters delivered
// to the device, both at a time, in one of `num_buffers` buffers that it holds from its first action to the last to
// end.
//
// Resident tasklets have memory of their own. They wait for no such buffer but for one of as many others, numbered from
// `num_buffers` on, which bound how many of them are worked at a time; each kind is begun in its own order.
//
// At any time the actions that can start are preferred in this order: deliveries and writes, because only they free a
// buffer; compute, because somebody waits for parameters; fetches; reads. Among equals, the lowest tasklet.
class TransferSchedule {
 public:
    struct Stages {
        bool reads;
        bool writes;
        bool fetches = false;
        bool delivers = false;
    };

    // One tasklet's way, where it is not that of the batch.
    struct Way {
        bool reads;
        bool writes;
        bool resident = false;
    };

    // Throws std::invalid_argument without a buffer.
    TransferSchedule(std::size_t num_tasklets, std::size_t num_buffers, Stages stages);

    // More tasklets, behind those there are.
    void extend(std::size_t num_tasklets);
    void extend(const std::vector<Way>& ways);

    // Of these tasklets those that have not begun are begun next, in this order.
    void prefer(const std::vector<std::size_t>& tasklets);

    // The next action to start now, if any; it counts as started.
    std::optional<Action> next();

    // A started action has ended. Throws std::invalid_argument if it had not started.
    void done(Work work, std::size_t tasklet);

    // The tasklet's action, if in flight, has ended without success: nothing new starts, as after stop().
    void fail(Work work, std::size_t tasklet);

    // Nothing new starts from now on but deliveries, whose copies are on their way since the tasklet was computed;
    // actions in flight still report done.
    void stop() { stopped_ = true; }

    // All there is so far is done, or stopped with nothing in flight.
    bool finished() const;
    bool parameters_out(std::size_t tasklet) const { return parameters_out_.at(tasklet); }
    // By tasklet: whether all of it has ended with success.
    const std::vector<bool>& complete() const { return complete_; }
    std::size_t num_tasklets() const { return parameters_out_.size(); }

 private:
    // A buffer's way. What leaves a computed buffer does so on two legs at a time.
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

    // Tasklets to begin, by rank: the lowest first.
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
    bool all_begun() const { return on_storage_.empty() && resident_.empty(); }

    Stages stages_;
    std::size_t num_buffers_;
    std::vector<Buffer> buffers_;  // as many again for resident tasklets, once there are some
    std::vector<Way> ways_;        // by tasklet
    std::vector<bool> parameters_out_;
    std::vector<bool> complete_;
    std::vector<std::int64_t> ranks_;  // by tasklet: its number, or below 0 once it was preferred
    std::int64_t lowest_rank_ = 0;
    Queue on_storage_;
    Queue resident_;
    bool stopped_ = false;
};

}  // namespace smart_infinity
