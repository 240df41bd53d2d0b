#include "journal.hpp"

namespace smart_infinity::emulator {

void Journal::add(std::string line) {
    const std::scoped_lock lock(mutex_);
    if (lines_.size() < kMaxLines) lines_.push_back(std::move(line));
}

std::string Journal::text() const {
    const std::scoped_lock lock(mutex_);
    std::string text;
    for (const std::string& line : lines_) text += line + '\n';
    return text;
}

void Journal::clear() {
    const std::scoped_lock lock(mutex_);
    lines_.clear();
}

Journal& journal() {
    static auto* const journal = new Journal;  // compute units may outlive static objects
    return *journal;
}

}  // namespace smart_infinity::emulator
