// Streams of the sequential simulation.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>

#include "leftovers.hpp"

namespace hls {

template <class T, int kDepth = 0>
class stream;

template <class T>
class stream<T, 0> {
 public:
    stream(const char* name, int) : name_(name) {}
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;
    ~stream() {
        if (num_read_ < num_written_) sim::note_leftover(name_);
    }

    void write(const T& value) {
        if (num_written_++ % kPerChunk == 0) {
            chunks_.emplace_back(new T[kPerChunk]);
            to_ = chunks_.back().get();
        }
        *to_++ = value;
    }

    T read() {
        if (num_read_ == num_written_) throw std::logic_error(std::string("nothing to read in stream ") + name_);
        const T value = chunks_.front()[num_read_++ % kPerChunk];
        if (num_read_ % kPerChunk == 0) chunks_.pop_front();
        return value;
    }

 private:
    // With the small chunks of a plain deque a run takes 35 to 50 % longer.
    static constexpr std::size_t kPerChunk = 1024;

    const char* name_;
    std::deque<std::unique_ptr<T[]>> chunks_;
    T* to_ = nullptr;
    std::size_t num_written_ = 0;
    std::size_t num_read_ = 0;
};

}  // namespace hls
