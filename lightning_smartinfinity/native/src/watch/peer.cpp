#include "watch/peer.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>

#include "base/system_error.hpp"

namespace smart_infinity {
namespace {

struct Header {
    Word word;
    std::uint8_t reserved;
    std::uint16_t why_bytes;
    std::int32_t rank;
};
static_assert(sizeof(Header) == 8, "all ranks send the same header");

constexpr std::size_t kLongestWhy = 4000;

// Descriptors that a forked child closes. The lock is held during a fork, so that the child gets a consistent set.
class Descriptors {
 public:
    static Descriptors& all() {
        static auto* descriptors = new Descriptors;  // never freed: a fork may happen at exit
        return *descriptors;
    }
    void add(int descriptor) {
        const std::lock_guard lock(mutex_);
        open_.insert(descriptor);
    }
    void close(int descriptor) {
        const std::lock_guard lock(mutex_);
        open_.erase(descriptor);
        ::close(descriptor);
    }

 private:
    Descriptors() {
        pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().end_in_child(); });
    }
    void end_in_child() {
        for (const int descriptor : open_) ::close(descriptor);
        open_.clear();
        mutex_.unlock();
    }

    std::mutex mutex_;
    std::set<int> open_;
};

}  // namespace

Peer::Peer(int rank, int descriptor) : heard(Clock::now()), rank_(rank), descriptor_(descriptor) {
    Descriptors::all().add(descriptor);
    const int flags = ::fcntl(descriptor, F_GETFL);
    if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) < 0 ||
        ::fcntl(descriptor, F_SETFD, FD_CLOEXEC) < 0) {
        const int error = errno;
        close();
        throw SystemError(error, "fcntl");
    }
}

Peer::~Peer() { close(); }

void Peer::close() {
    if (descriptor_ >= 0) Descriptors::all().close(descriptor_);
    descriptor_ = -1;
    unsent_.clear();
}

void Peer::send(const Message& message) {
    if (message.word == Word::kBeat && has_unsent()) return;
    const std::size_t nbytes = std::min(message.why.size(), kLongestWhy);
    const Header header{message.word, 0, static_cast<std::uint16_t>(nbytes), message.rank};
    unsent_.append(reinterpret_cast<const char*>(&header), sizeof header).append(message.why, 0, nbytes);
    send_unsent();
}

void Peer::send_unsent() {
    while (open() && has_unsent()) {
        const ssize_t sent = ::send(descriptor_, unsent_.data(), unsent_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) {
            // First read the bytes that arrived before the connection closed; receive() then finds that it is closed.
            if (errno != EAGAIN && errno != EWOULDBLOCK) unsent_.clear();
            return;
        }
        unsent_.erase(0, static_cast<std::size_t>(sent));
    }
}

void Peer::receive() {
    std::array<char, 4096> buffer;
    while (open()) {
        const ssize_t got = ::recv(descriptor_, buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (got <= 0) {
            close();
            return;
        }
        received_.append(buffer.data(), static_cast<std::size_t>(got));
        heard = Clock::now();
    }
}

std::optional<Message> Peer::next() {
    Header header;
    if (received_.size() < sizeof header) return std::nullopt;
    std::memcpy(&header, received_.data(), sizeof header);
    if (header.word >= Word::kCount || header.why_bytes > kLongestWhy) {  // no watch sends this
        received_.clear();
        close();
        return std::nullopt;
    }
    const std::size_t nbytes = sizeof header + header.why_bytes;
    if (received_.size() < nbytes) return std::nullopt;
    Message message{header.word, header.rank, received_.substr(sizeof header, header.why_bytes)};
    received_.erase(0, nbytes);
    return message;
}

}  // namespace smart_infinity
