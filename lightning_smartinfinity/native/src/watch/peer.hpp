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
    kFarewell,  // the sender ends normally
    kPlace,     // where the sender has been waiting for a while
    kDiverged,  // ranks wait for each other at different places
    kCount,
};

struct Message {
    Word word;
    int rank;  // the rank that the message is about
    std::string why;
};

// The connection to another rank's watch. Its descriptor is closed in forked children, where it would keep a killed
// rank's connection open.
class Peer {
 public:
    using Clock = std::chrono::steady_clock;

    // Takes ownership of the descriptor of a connected socket.
    Peer(int rank, int descriptor);
    ~Peer();
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;

    int rank() const { return rank_; }
    bool open() const { return descriptor_ >= 0; }
    int descriptor() const { return descriptor_; }
    bool has_unsent() const { return !unsent_.empty(); }

    // Sends as much as the socket accepts now, and the rest later. A beat is omitted if other messages wait.
    void send(const Message& message);
    void send_unsent();
    // Reads all bytes that have arrived.
    void receive();
    // Returns the next complete message, or nothing.
    std::optional<Message> next();
    void close();

    // The rank's last reports.
    Clock::time_point heard;
    bool training = false;
    std::string last_words;  // its reason for ending

 private:
    const int rank_;
    int descriptor_;
    std::string unsent_, received_;
};

}  // namespace smart_infinity
