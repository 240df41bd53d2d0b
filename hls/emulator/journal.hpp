#pragma once

#include <cstdint>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace smart_infinity::emulator {

// Events of all cards in one order, one "<card> <event> <fields>" per line.
class Journal {
 public:
    template <class... Fields>
    void note(unsigned card, const char* event, const Fields&... fields) {
        std::ostringstream line;
        line << card << ' ' << event;
        ((line << ' ' << fields), ...);
        add(std::move(line).str());
    }

    std::string text() const;
    void clear();

 private:
    // Limits memory: the events of a long training are not read.
    static constexpr std::size_t kMaxLines = 100'000;

    void add(std::string line);

    mutable std::mutex mutex_;
    std::vector<std::string> lines_;
};

Journal& journal();

}  // namespace smart_infinity::emulator
