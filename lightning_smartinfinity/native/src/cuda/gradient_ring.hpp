#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/dtype.hpp"
#include "base/worker_pool.hpp"
#include "cuda/cuda_device.hpp"
#include "extent/ready_point.hpp"
#include "kernels/kernels.hpp"

namespace smart_infinity {

// A gradient in a CUDA device's memory, and the sum in host memory that it is stored as or added to.
struct TravellingGradient {
    std::uint64_t key;  // gradients of one key are added in the order of push()
    Address source;
    std::size_t numel;
    DType dtype;
    std::byte* sum;
    DType sum_dtype;
    bool adds;
};

// Carries gradients from a CUDA device to host memory of any kind, through a ring of registered slots whose size does
// not depend on the model. A gradient travels in its own type and in pieces, on a stream of the ring's own. Threads add
// the pieces to the sum, and square the sum in the order of sum_of_squares(): the number of threads and the size of the
// slots change no bit.
//
// The thread that empties a slot starts the copies of the next pieces into it, so push() never waits for a slot.
class GradientRing {
 public:
    struct Options {
        std::size_t slot_bytes;
        std::size_t num_slots;
        std::size_t num_threads;
        // Bytes of gradients on the device that may be on their way at once; a single gradient may be larger.
        std::size_t most_bytes;
    };
    struct Report {
        std::size_t ring_bytes = 0;
        double wait_seconds = 0;  // for room, in push()
    };
    using Ticket = std::uint64_t;  // number of gradients pushed so far
    using Poll = std::function<void()>;

    // Throws std::invalid_argument if an option is out of range, and the exceptions of HostBuffer and CudaStream.
    GradientRing(const std::shared_ptr<const CudaDevice>& device, const Options& options);
    ~GradientRing() { close(); }
    GradientRing(const GradientRing&) = delete;
    GradientRing& operator=(const GradientRing&) = delete;

    // Starts to carry a gradient that exists after the present work of stream `after`, and returns its ticket. The
    // memory of both must stay until the ticket is done. Waits if too many bytes are on their way. After a failure it
    // does nothing. Like the waits below, it calls `poll` now and then, which may throw to end the wait.
    Ticket push(const TravellingGradient& gradient, CudaStreamHandle after, const Poll& poll = [] {});
    // Returns the ticket of the last gradient.
    Ticket pushed() const;
    // Returns whether all gradients up to the ticket's are in the sums, or never will be.
    bool done(Ticket ticket) const;
    // Waits until that is so. Throws CudaError if a copy has failed since the last reset().
    void wait(Ticket ticket, const Poll& poll = [] {});
    // Returns the sums of squares of the gradients that are done, by key in the order of push(), and forgets them.
    std::vector<std::pair<std::uint64_t, double>> take_squares();
    // Waits until nothing is on its way, and forgets squares and failures.
    void reset(const Poll& poll = [] {});

    Report report() const;
    // Waits as reset() does, and frees memory and threads; nothing may be pushed afterwards. Idempotent.
    void close();

 private:
    struct Travel {
        TravellingGradient gradient;
        std::unique_ptr<CudaEvent> exists;  // on the device
        std::size_t sent = 0;               // elements whose copies have started
        std::size_t squared = 0;            // elements in `sums`
        std::size_t left = 0;               // elements that are neither in the sum nor given up
        SquareSums sums{};
        double squares = 0;
    };
    struct Piece {
        Travel* travel;
        std::size_t begin;
        std::size_t numel;
        std::byte* data;
    };
    struct Slot {
        std::unique_ptr<CudaEvent> copied;
        std::vector<Piece> pieces;
    };

    template <typename Condition>
    void await(std::unique_lock<std::mutex>& lock, const Poll& poll, const Condition& condition);
    void fill_slots();
    void fill(std::size_t index);
    void record_sent(const Slot& slot) const;
    void send(const Piece& piece);
    void work(std::size_t index);
    void add(const Piece& piece);
    void fail(const CudaError& error);
    void end_travels();

    std::shared_ptr<const CudaDevice> device_;
    CudaStream stream_;
    Options options_;
    std::optional<HostBuffer> memory_;
    mutable std::mutex mutex_;  // guards the members below
    std::condition_variable changed_;
    std::vector<Slot> slots_;
    std::vector<std::size_t> free_;
    std::deque<Travel> travels_;                 // in the order of push(); the first is not done
    std::size_t num_sent_ = 0;                   // of these, from the front, all pieces of which were sent
    std::unordered_set<std::uint64_t> sending_;  // keys of travels that have begun and are not done
    std::size_t bytes_ = 0;                      // of all travels
    Ticket num_done_ = 0;
    std::vector<std::pair<std::uint64_t, double>> squares_;
    std::optional<CudaError> failure_;
    Report report_;
    std::optional<WorkerPool<std::size_t>> pool_;
};

// The point after which all gradients up to a ticket's are in host memory.
class GradientsArrived final : public ReadyPoint {
 public:
    GradientsArrived(std::shared_ptr<GradientRing> ring, GradientRing::Ticket ticket)
        : ring_(std::move(ring)), ticket_(ticket) {}
    void synchronize() const override { ring_->wait(ticket_); }

 private:
    std::shared_ptr<GradientRing> ring_;
    GradientRing::Ticket ticket_;
};

}  // namespace smart_infinity
