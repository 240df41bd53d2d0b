// Streams of the sequential simulation.
#pragma once

#include <cstddef>
#include <deque>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "chunks.hpp"
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
        if (!empty()) sim::note_leftover(name_);
        for (T* chunk : chunks_) memory_.give(chunk);
    }

    void write(const T& value) {
        if (to_ == to_end_) append_chunk();
        new (to_++) T(value);
    }

    T read() {
        if (empty()) throw std::logic_error(std::string("nothing to read in stream ") + name_);
        if (from_ == from_end_) drop_chunk();
        return *from_++;
    }

 private:
    static_assert(std::is_trivially_copyable<T>::value, "chunks are handed on as they are");
    static constexpr std::size_t kPerChunk = sim::Chunks::kBytes / sizeof(T);

    // A second chunk is never empty, and its end may be the address where the first begins.
    bool empty() const { return chunks_.size() < 2 && from_ == to_; }

    void append_chunk() {
        to_ = static_cast<T*>(memory_.take());
        to_end_ = to_ + kPerChunk;
        chunks_.push_back(to_);
        if (chunks_.size() == 1) start_chunk();
    }

    void drop_chunk() {
        memory_.give(chunks_.front());
        chunks_.pop_front();
        start_chunk();
    }

    void start_chunk() {
        from_ = chunks_.front();
        from_end_ = from_ + kPerChunk;
    }

    const char* name_;
    sim::Chunks& memory_ = sim::Chunks::of_this_thread();
    std::deque<T*> chunks_;
    T* to_ = nullptr;
    T* to_end_ = nullptr;
    T* from_ = nullptr;
    T* from_end_ = nullptr;
};

}  // namespace hls
