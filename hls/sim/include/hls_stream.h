// The part of Vitis HLS's hls::stream that the kernels use, for simulation.
//
// The sequential simulation works like the vendor's C simulation: processes run one after the other, and streams have
// no bounds. In the threaded one (SMART_INFINITY_THREADED_SIMULATION, simulated_process.hpp) they connect two
// processes and are as deep as on the card.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>

#include "dataflow.hpp"

namespace sim {

#ifdef SMART_INFINITY_THREADED_SIMULATION
constexpr bool kThreaded = true;
#else
constexpr bool kThreaded = false;
#endif

// Names of this thread's streams that were not empty when their simulated kernel ended.
inline std::string& leftovers() {
    thread_local std::string names;
    return names;
}

}  // namespace sim

namespace hls {

template <class T, int kDepth = 0>
class stream;

template <class T>
class stream<T, 0> {
 public:
    stream(const char* name, std::size_t depth) : name_(name), depth_(depth) {}
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;
    ~stream() {
        if (num_read_ < num_written_) sim::leftovers() += (sim::leftovers().empty() ? "" : ", ") + name_;
    }

    void write(const T& value) {
        const auto turn = begin("write ", [this] { return num_written_ - num_read_ < depth_; });
        if (num_written_++ % kPerChunk == 0) {
            chunks_.emplace_back(new T[kPerChunk]);
            to_ = chunks_.back().get();
        }
        *to_++ = value;
        end();
    }

    T read() {
        const auto turn = begin("read ", [this] { return num_read_ < num_written_; });
        if (num_read_ == num_written_) throw std::logic_error("nothing to read in stream " + name_);
        const T value = chunks_.front()[num_read_++ % kPerChunk];
        if (num_read_ % kPerChunk == 0) chunks_.pop_front();
        end();
        return value;
    }

 private:
    // With the small chunks of a plain deque a run takes 35 to 50 % longer.
    static constexpr std::size_t kPerChunk = 1024;

    // Waits until the stream is ready, and keeps other processes out.
    template <class Ready>
    std::unique_lock<std::mutex> begin(const char* what, const Ready& ready) {
        if (!sim::kThreaded) return {};
        std::unique_lock<std::mutex> lock(dataflow_->mutex());
        if (!ready()) dataflow_->wait(lock, what + name_, ready);
        return lock;
    }

    void end() {
        if (sim::kThreaded) dataflow_->wake_ready();
    }

    const std::string name_;
    const std::size_t depth_;
    sim::Dataflow* const dataflow_ = sim::Dataflow::current();
    std::deque<std::unique_ptr<T[]>> chunks_;
    T* to_ = nullptr;
    std::size_t num_written_ = 0;
    std::size_t num_read_ = 0;
};

template <class T, int kDepth>
class stream : public stream<T> {
 public:
    explicit stream(const char* name) : stream<T>(name, kDepth) {}
};

}  // namespace hls
