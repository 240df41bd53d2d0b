#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace smart_infinity {

enum class Word : std::uint8_t {
    kBeat,      // the sender is alive
    kTraining,  // the sender trains: if its connection closes, it is lost
    kIdle,      // the sender does not train
    kAsked,     // a rank received SIGTERM
    kFailed,    // a rank ends its training because of an error
    kLost,      // a rank was killed or does not answer
    kFarewell,  // the sender ends as it should
    kPlace,     // where the sender has been for a while
    kDiverged,  // ranks wait for each other at different places
    kCount,
};

struct Message {
    Word word;
    int rank;  // of which rank it tells
    std::string why;
};

// The connection to another rank's watch. Its descriptor does not stay open in forked children, where it would keep a
// killed rank's connection open.
class Peer {
 public:
    using Clock = std::chrono::steady_clock;

    // Takes the descriptor of a connected socket over.
    Peer(int rank, int descriptor);
    ~Peer();
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    int rank() const { return rank_; }
    bool open() const { return descriptor_ >= 0; }
    int descriptor() const { return descriptor_; }
    bool has_unsent() const { return !unsent_.empty(); }

    // Sends what the socket takes now, and the rest later. A beat is left out if something else waits.
    void send(const Message& message);
    void send_unsent();
    // Reads all that has come.
    void receive();
    // Returns the next whole message.
    std::optional<Message> next();
    void close();

    // These say what the rank told last.
    Clock::time_point heard;
    bool training = false;
    std::string last_words;  // why it said that it would end

 private:
    const int rank_;
    int descriptor_;
    std::string unsent_, received_;
};

}  // namespace smart_infinity
