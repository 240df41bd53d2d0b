// Streams of the threaded simulation: they connect two processes and are as deep as on the card.
#pragma once

#include <deque>
#include <mutex>
#include <string>

#include "dataflow.hpp"
#include "leftovers.hpp"

namespace hls {

template <class T, int kDepth = 0>
class stream;

template <class T>
class stream<T, 0> {
 public:
    stream(const char* name, int depth) : name_(name), depth_(depth) {}
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;
    ~stream() {
        if (!values_.empty()) sim::note_leftover(name_.c_str());
    }

    void write(const T& value) {
        std::unique_lock<std::mutex> lock(dataflow_.mutex());
        if (values_.size() == depth_) dataflow_.wait(lock, waiter_, "write " + name_);
        values_.push_back(value);
        dataflow_.serve(waiter_);
    }

    T read() {
        std::unique_lock<std::mutex> lock(dataflow_.mutex());
        if (values_.empty()) dataflow_.wait(lock, waiter_, "read " + name_);
        const T value = values_.front();
        values_.pop_front();
        dataflow_.serve(waiter_);
        return value;
    }

 private:
    const std::string name_;
    const std::size_t depth_;
    sim::Dataflow& dataflow_ = *sim::Dataflow::current();
    std::deque<T> values_;
    sim::Dataflow::Waiter* waiter_ = nullptr;  // only one of the two processes can wait
};

}  // namespace hls
