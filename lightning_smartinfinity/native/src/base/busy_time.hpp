#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>

#include "base/stopwatch.hpp"

namespace smart_infinity {

// Measures how long at least one of several spans of time, which may overlap, was in progress.
class BusyTime {
 public:
    // Adds a span of `seconds` that ends now. The caller must serialize these calls.
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

    // Spans come in the order of their ends, so that a new one can only overlap the last ones known.
    void add(Span span) {
        double known = 0;
        while (!spans_.empty() && spans_.back().end >= span.begin) {
            known += spans_.back().seconds();
            span.begin = std::min(span.begin, spans_.back().begin);
            spans_.pop_back();
        }
        spans_.push_back(span);
        total_ += std::max(0.0, span.seconds() - known);
        // No span that is still in progress overlaps one that ended long ago.
        if (spans_.size() > kMaxSpans) spans_.pop_front();
    }

    static constexpr std::size_t kMaxSpans = 64;

    Stopwatch since_;
    std::deque<Span> spans_;  // disjoint, in ascending order
    double total_ = 0;
};

}  // namespace smart_infinity
