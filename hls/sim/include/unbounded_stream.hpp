// Streams of the sequential simulation.
#pragma once

#include <cstddef>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace hls {

template <class T, int kDepth = 0>
class stream;

template <class T>
class stream<T, 0> {
 public:
    stream(const char* name, int) : name_(name) {}
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;

    void write(const T& value) { values_.push_back(value); }

    T read() {
        if (next_ == values_.size()) throw std::logic_error(std::string("nothing to read in stream ") + name_);
        const T value = values_[next_++];
        if (next_ == values_.size()) {
            values_.clear();
            next_ = 0;
        }
        return value;
    }

 private:
    const char* name_;
    std::vector<T> values_;
    std::size_t next_ = 0;
};

}  // namespace hls
