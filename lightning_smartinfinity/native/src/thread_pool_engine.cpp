#include "thread_pool_engine.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

#include "stopwatch.hpp"

namespace smart_infinity {
namespace {

IoResult transfer(const IoRequest& request) {
    const Stopwatch stopwatch;
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t transferred = request.direction == Direction::kRead
                                    ? ::pread(request.descriptor, request.data, request.bytes, offset)
                                    : ::pwrite(request.descriptor, request.data, request.bytes, offset);
    const std::int64_t result = transferred >= 0 ? transferred : -errno;
    return IoResult{result, stopwatch.seconds()};
}

}  // namespace

ThreadPoolEngine::ThreadPoolEngine(std::size_t num_threads)
    : pool_("smart-inf-io", num_threads,
            [](const Item& item) { item.handler->completed(item.request, transfer(item.request)); }) {}

void ThreadPoolEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    pool_.push(Item{request, &handler});
}

}  // namespace smart_infinity
