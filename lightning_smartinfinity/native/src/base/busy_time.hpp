#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>

#include "base/stopwatch.hpp"

namespace smart_infinity {

// How long at least one of several overlapping spans of time lasted.
class BusyTime {
 public:
    // A span of so many seconds ends now. Whoever calls sees to it that one call follows the other.
    void ended(double seconds) {
        const double end = since_.seconds();
        add({end - seconds, end});
    }
    double seconds() const { return total_; }

 private:
    struct Span {
        double begin;
        double end;
        double seconds() const { return end - begin; }
    };

    // Spans come in the order of their ends, and so swallow what they overlap from behind.
    void add(Span span) {
        double known = 0;
        while (!spans_.empty() && spans_.back().end >= span.begin) {
            known += spans_.back().seconds();
            span.begin = std::min(span.begin, spans_.back().begin);
            spans_.pop_back();
        }
        spans_.push_back(span);
        total_ += std::max(0.0, span.seconds() - known);
        // What ended long ago is overlapped by nothing that still lasts.
        if (spans_.size() > kMostSpans) spans_.pop_front();
    }

    static constexpr std::size_t kMostSpans = 64;

    Stopwatch since_;
    std::deque<Span> spans_;  // apart from each other, in order
    double total_ = 0;
};

}  // namespace smart_infinity
