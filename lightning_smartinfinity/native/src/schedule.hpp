#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace smart_infinity {

enum class Work { kRead, kCompute, kWrite };

struct Action {
    Work work;
    std::size_t tasklet;
    std::size_t buffer;
};

// The order of a batch as a pure state machine: no I/O, no clock, no threads, no lock. Each tasklet is read, computed
// and written, in one of `num_buffers` buffers that it holds from its first action to its last.
//
// At any time the actions that can start are preferred in this order: writes, because only they free a buffer; compute,
// because somebody waits for parameters; reads. Among equals, the lowest tasklet.
class TransferSchedule {
 public:
    struct Stages {
        bool reads;
        bool writes;
    };

    // Throws std::invalid_argument without a buffer.
    TransferSchedule(std::size_t num_tasklets, std::size_t num_buffers, Stages stages);

    // The next action to start now, if any; it counts as started.
    std::optional<Action> next();

    // A started action has ended. Throws std::invalid_argument if it had not started.
    void done(Work work, std::size_t tasklet);

    // The tasklet's action in flight, if any, has ended without success: nothing new starts from now on.
    void fail(std::size_t tasklet);

    // Nothing new starts from now on; actions in flight still report done.
    void stop() { stopped_ = true; }

    // All is done, or stopped with nothing in flight.
    bool finished() const;
    bool parameters_out(std::size_t tasklet) const { return parameters_out_.at(tasklet); }
    std::size_t num_tasklets() const { return parameters_out_.size(); }

 private:
    enum class Stage { kFree, kReading, kLoaded, kComputing, kComputed, kWriting };

    struct Buffer {
        Stage stage = Stage::kFree;
        std::size_t tasklet = 0;
    };

    Buffer* lowest_at(Stage stage);
    Buffer* holder_of(std::size_t tasklet);
    Action start(Buffer& buffer, Work work);
    static Stage stage_during(Work work);
    static bool in_flight(Stage stage);
    void advance(Buffer& buffer);

    Stages stages_;
    std::vector<Buffer> buffers_;
    std::vector<bool> parameters_out_;
    std::size_t next_tasklet_ = 0;
    bool stopped_ = false;
};

}  // namespace smart_infinity
