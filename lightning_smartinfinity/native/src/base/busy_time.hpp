#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>

#include "base/stopwatch.hpp"

namespace smart_infinity {

// Measures the time during which at least one of several, possibly overlapping spans was in progress.
class BusyTime {
 public:
    // Adds a span of `seconds` that ends now. The caller must serialize these calls.
    void ended(double seconds) {
        const double end = since_.seconds();
        add({end - seconds, end, seconds});
    }
    double seconds() const { return total_; }

 private:
    struct Span {
        double begin;
        double end;
        double busy;  // less than end - begin if gaps were forgotten
    };

    // Spans arrive in the order of their ends, so a new one can overlap only the last known ones.
    void add(Span span) {
        double known = 0;
        while (!spans_.empty() && spans_.back().end >= span.begin) {
            known += spans_.back().busy;
            span.begin = std::min(span.begin, spans_.back().begin);
            spans_.pop_back();
        }
        span.busy = std::max(known, span.end - span.begin);
        spans_.push_back(span);
        total_ += span.busy - known;
        if (spans_.size() > kMaxSpans) forget_oldest_gap();
    }

    // A long span on a slow disk may overlap many short ones on a fast disk. Merging the two oldest spans keeps their
    // busy time, so that it is not counted twice.
    void forget_oldest_gap() {
        const Span oldest = spans_.front();
        spans_.pop_front();
        spans_.front().begin = oldest.begin;
        spans_.front().busy += oldest.busy;
    }

    static constexpr std::size_t kMaxSpans = 64;

    Stopwatch since_;
    std::deque<Span> spans_;  // disjoint, in ascending order
    double total_ = 0;
};

}  // namespace smart_infinity
