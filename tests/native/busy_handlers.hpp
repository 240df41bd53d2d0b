// Whether io_uring gives the disk what is queued while a handler computes.

#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/buffer.hpp"
#include "io/io_engines.hpp"

namespace smart_infinity {

// Calls a function when a request has ended.
class CalledBack final : public CompletionHandler {
 public:
    explicit CalledBack(std::function<void()> function) : function_(std::move(function)) {}

    void completed(const IoRequest&, const IoResult&) override {
        function_();
        done_ = true;
        done_.notify_all();
    }

    void wait() const { done_.wait(false); }

 private:
    const std::function<void()> function_;
    std::atomic<bool> done_ = false;
};

// Three reads end together, since the handler of another one takes long meanwhile. The handler of the first queues a
// write to a pipe and computes; the others, on the same thread, wait until the pipe has it. Returns false if it never
// came.
inline bool disk_gets_requests_while_handlers_compute(const std::string& folder) {
    if (unavailable(IoEngineKind::kUring)) return true;
    const std::string path = folder + "/busy_handlers";
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int pipe[2];
    if (file < 0 || ::ftruncate(file, kBlockBytes) != 0 || ::pipe(pipe) != 0) return false;
    HostBuffer memory(2 * kBlockBytes);
    bool came = true;
    {
        const auto engine = make_io_engine({IoEngineKind::kUring, 1, {}, {}});
        CalledBack nothing([] {});
        const auto request = [&](Direction direction, int descriptor, std::size_t tag) {
            return IoRequest{direction, descriptor, 0, memory.data() + (tag == 5) * kBlockBytes, kBlockBytes, tag};
        };
        const auto takes_long = [] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); };
        CalledBack first_slow(takes_long);
        CalledBack second_slow(takes_long);
        CalledBack queues([&] {
            engine->submit(request(Direction::kWrite, pipe[1], 5), nothing);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        });
        const auto waits = [&] {
            pollfd readable{pipe[0], POLLIN, 0};
            came = came && ::poll(&readable, 1, 20'000) == 1;
        };
        CalledBack second(waits);
        CalledBack third(waits);
        engine->submit(request(Direction::kRead, file, 0), first_slow);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // all others are queued while its handler runs
        engine->submit(request(Direction::kRead, file, 1), second_slow);
        engine->submit(request(Direction::kRead, file, 2), queues);
        engine->submit(request(Direction::kRead, file, 3), second);
        engine->submit(request(Direction::kRead, file, 4), third);
        for (const CalledBack* each : {&first_slow, &second_slow, &queues, &second, &third, &nothing}) each->wait();
    }
    for (const int descriptor : {file, pipe[0], pipe[1]}) ::close(descriptor);
    ::unlink(path.c_str());
    return came;
}

}  // namespace smart_infinity
