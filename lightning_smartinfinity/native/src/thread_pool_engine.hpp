#pragma once

#include "io_engine.hpp"
#include "worker_pool.hpp"

namespace smart_infinity {

// Blocking system calls in threads: works on every file system and in every container.
class ThreadPoolEngine final : public IoEngine {
 public:
    explicit ThreadPoolEngine(std::size_t num_threads);
    void submit(const IoRequest& request, CompletionHandler& handler) override;

 private:
    struct Item {
        IoRequest request;
        CompletionHandler* handler;
    };

    WorkerPool<Item> pool_;
};

}  // namespace smart_infinity
