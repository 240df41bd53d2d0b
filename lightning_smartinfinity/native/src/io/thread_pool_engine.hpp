#pragma once

#include <atomic>

#include "base/worker_pool.hpp"
#include "io/io_engine.hpp"

namespace smart_infinity {

enum class PageCache {
    kKeep,
    kRelease,  // drops transferred pages, which are not needed again and would evict others
};

// Makes blocking system calls in threads. Works on every file system and in every container.
class ThreadPoolEngine final : public IoEngine {
 public:
    explicit ThreadPoolEngine(std::size_t num_threads, PageCache page_cache = PageCache::kKeep);
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override;
    IoEngineKind kind() const override {
        return page_cache_ == PageCache::kRelease ? IoEngineKind::kPlain : IoEngineKind::kThreads;
    }

 private:
    struct Item {
        IoRequest request;
        CompletionHandler* handler;
    };

    void work(const Item& item);

    const PageCache page_cache_;
    std::atomic<std::uint64_t> system_calls_ = 0;
    mutable WorkerPool<Item> pool_;  // last: its destructor waits for threads that use the above
};

}  // namespace smart_infinity
