// Memory of the sequential simulation's streams. Streams reuse it, so that it stays in the caches and is not allocated
// again for every run.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

namespace sim {

class Chunks {
 public:
    static constexpr std::size_t kBytes = 16384;

    static Chunks& of_this_thread() {
        thread_local Chunks chunks;
        return chunks;
    }

    void* take() {
        if (free_.empty()) return allocated();
        void* const chunk = free_.back();
        free_.pop_back();
        return chunk;
    }

    void give(void* chunk) {
        if (free_.size() < kMostKept) {
            free_.push_back(chunk);
        } else {
            std::free(chunk);
        }
    }

    Chunks(const Chunks&) = delete;
    Chunks& operator=(const Chunks&) = delete;
    ~Chunks() {
        for (void* chunk : free_) std::free(chunk);
    }

 private:
    static constexpr std::size_t kMostKept = 4096;

    Chunks() = default;

    static void* allocated() {
        void* chunk = nullptr;
        if (::posix_memalign(&chunk, 64, kBytes) != 0) throw std::bad_alloc();
        return chunk;
    }

    std::vector<void*> free_;
};

}  // namespace sim
