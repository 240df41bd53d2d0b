#include "io/thread_pool_engine.hpp"

#include <fcntl.h>
#include <sys/types.h>

#include "base/buffer.hpp"
#include "io/blocking_transfer.hpp"

namespace smart_infinity {
namespace {

// Advises the kernel to start writing written pages to storage, and to drop pages that were read. It may decline. It
// keeps a page of which only a part is named, as at the border of two requests.
void release_pages(const IoRequest& request) {
    const std::size_t first = request.offset / page_bytes() * page_bytes();
    const auto offset = static_cast<off_t>(first);
    const auto bytes = static_cast<off_t>(align_up(request.offset + request.bytes, page_bytes()) - first);
    if (request.direction == Direction::kWrite) {
        (void)::sync_file_range(request.descriptor, offset, bytes, SYNC_FILE_RANGE_WRITE);
    } else {
        (void)::posix_fadvise(request.descriptor, offset, bytes, POSIX_FADV_DONTNEED);
    }
}

}  // namespace

ThreadPoolEngine::ThreadPoolEngine(std::size_t num_threads, PageCache page_cache)
    : page_cache_(page_cache), pool_("smart-inf-io", num_threads, [this](const Item& item) { work(item); }) {}

void ThreadPoolEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    pool_.push(Item{request, &handler});
}

IoUsage ThreadPoolEngine::usage() const { return {system_calls_, pool_.cpu_seconds(), 0}; }

void ThreadPoolEngine::work(const Item& item) {
    const IoResult result = attempt(item.request);
    ++system_calls_;
    if (page_cache_ == PageCache::kRelease && result.transferred > 0) {
        release_pages(item.request);
        ++system_calls_;
    }
    item.handler->completed(item.request, result);
}

}  // namespace smart_infinity
