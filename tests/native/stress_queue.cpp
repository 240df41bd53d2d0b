// Lets several threads use one TensorStore and one FileQueue at random: they share extents, cancel requests, interrupt
// waits, drop the last references to extents while files grow and shrink, and look at counters. In every other scenario
// both are closed meanwhile. Everything that is read must have been written. In some scenarios a request is abandoned,
// and returns later. Built with sanitizers by test_builds.py.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "io/file_queue.hpp"
#include "io/io_scheduler.hpp"
#include "stress.hpp"
#include "tensor/memory_pool.hpp"
#include "tensor/tensor_store.hpp"
#include "testing/fault_injection.hpp"
#include "testing/hold.hpp"
#include "testing/seams.hpp"

namespace smart_infinity {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMostBlocks = 12;     // of a transfer
constexpr std::size_t kLongestBlocks = 48;  // of an extent
constexpr std::size_t kPartBlocks = 1024;
constexpr std::size_t kNumSlots = 4;
constexpr std::size_t kNumThreads = 3;
constexpr std::size_t kNumRounds = 12;

struct Interrupted {};

// Every other pair of scenarios uses a ring, if the system has them: then other threads compute the checksums.
IoEngineKind engine_of(std::uint64_t seed) {
    return seed / 2 % 2 && !unavailable(IoEngineKind::kUring) ? IoEngineKind::kUring : IoEngineKind::kThreads;
}

IoClass any_class(Random& random) { return static_cast<IoClass>(random.upto(kNumIoClasses - 1)); }

std::unique_ptr<IoEngine> with_faults(std::unique_ptr<IoEngine> engine, std::uint64_t seed, bool fails) {
    Faults faults;
    faults.seed = seed;
    faults.max_delay_us = 100;
    faults.short_transfer_every = static_cast<std::int64_t>(seed % 4);
    if (fails) faults.fail_write_at = static_cast<std::int64_t>(seed % 20);
    return std::make_unique<FaultInjectingEngine>(std::move(engine), faults);
}

// Whether each block is filled with one byte, as by a single write.
bool is_whole(const std::byte* data, std::size_t bytes) {
    for (std::size_t begin = 0; begin < bytes; begin += kBlockBytes) {
        if (std::memcmp(data + begin, data + begin + 1, kBlockBytes - 1) != 0) return false;
    }
    return true;
}

class Scenario {
 public:
    Scenario(const std::string& folder, std::uint64_t seed)
        : folder_(folder),
          seed_(seed),
          scheduler_(std::make_shared<IoScheduler>((1 + seed % 8) * kBlockBytes)),
          files_{open_file(), open_file()},
          queue_file_(open_file()),
          pool_(std::make_shared<MemoryPool>()),
          store_(files_, 2, engine_of(seed), (1 + seed % 4) * kBlockBytes),
          queue_(2, engine_of(seed)) {
        Seams::decorate_engine(store_, [seed](std::unique_ptr<IoEngine> engine) {
            return with_faults(std::move(engine), seed, seed % 3 == 0);
        });
        Seams::decorate_engine(
            queue_, [seed](std::unique_ptr<IoEngine> engine) { return with_faults(std::move(engine), seed, false); });
        // A thread that shrinks a file may outlive the scenario.
        const auto num_resized = std::make_shared<std::atomic<std::uint64_t>>(0);
        Seams::put_before_resizing(store_, [seed, num_resized] {
            std::this_thread::sleep_for(std::chrono::microseconds(Random(seed + (*num_resized)++).upto(2000)));
        });
    }

    void run() {
        std::vector<std::thread> threads;
        for (std::size_t thread = 0; thread < kNumThreads; ++thread) {
            threads.emplace_back([this, thread] { until_closed([&] { use_tensors(Random(seed_ * 16 + thread)); }); });
            threads.emplace_back([this, thread] { until_closed([&] { use_queue(thread); }); });
        }
        std::thread watcher([this] { watch(); });
        if (seed_ % 2) {
            std::this_thread::sleep_for(std::chrono::microseconds(Random(seed_).upto(5000)));
            close();
        }
        for (std::thread& thread : threads) thread.join();
        ended_ = true;
        watcher.join();
        close();
        for (Slot& slot : slots_) slot.extent.reset();
        require(store_.taken_bytes() == 0, "a place was not given back", seed_);
        for (auto waited = 0ms; length() != store_.file_bytes(); waited += 1ms) {
            require(waited < 60s, "a file has another length", seed_);
            std::this_thread::sleep_for(1ms);
        }
        if (seed_ % 4 == 0) abandon();
    }

 private:
    struct Slot {
        std::mutex mutex;
        std::shared_ptr<TensorExtent> extent;
    };

    StateFile open_file() const {
        const std::string path = make_file(folder_, "queue", 0, seed_);
        StateFile file(path, Access::kBuffered, scheduler_);
        ::unlink(path.c_str());
        return file;
    }

    std::uint64_t length() const {
        std::uint64_t sum = 0;
        for (const StateFile& file : files_) {
            struct stat status{};
            require(::fstat(file.descriptor(), &status) == 0, "no status", seed_);
            sum += static_cast<std::uint64_t>(status.st_size);
        }
        return sum;
    }

    // Ends quietly what finds the store or the queue closed.
    void until_closed(const std::function<void()>& work) {
        try {
            work();
        } catch (const std::invalid_argument&) {
            require(closed_, "a request was refused", seed_);
        } catch (const std::runtime_error&) {
            require(closed_, "something failed", seed_);
        }
    }

    void close() {
        closed_ = true;
        std::thread other([this] { store_.close(); });
        queue_.close();
        store_.close();
        other.join();
    }

    std::shared_ptr<TensorExtent> some_extent(Random& random) {
        Slot& slot = slots_[random.upto(kNumSlots - 1)];
        std::shared_ptr<TensorExtent> made;
        // Now and then it is larger than the parts that a request is cut into.
        const std::size_t most = random.one_in(16) ? kPartBlocks + 16 : kLongestBlocks;
        if (random.one_in(3)) made = store_.allocate((1 + random.upto(most - 1)) * kBlockBytes);
        const std::lock_guard lock(slot.mutex);
        if (made || !slot.extent) slot.extent.swap(made);  // what was there goes, if nobody else has it
        return slot.extent;
    }

    void use_tensors(Random random) {
        for (std::size_t round = 0; round < kNumRounds; ++round) {
            const auto extent = some_extent(random);
            if (!extent) continue;
            const std::size_t blocks = extent->bytes() / kBlockBytes, first = random.upto(blocks - 1);
            const std::size_t most = random.one_in(8) ? blocks : kMostBlocks;
            const std::size_t bytes = (1 + random.upto(std::min(blocks - first, most) - 1)) * kBlockBytes;
            const auto written = pool_->take(bytes), read = pool_->take(bytes);
            std::memset(written->data(), static_cast<int>(random.upto(255)), bytes);
            const auto submit = [&](Direction direction, std::byte* data) {
                return store_.submit(direction, extent, first * kBlockBytes, data, bytes, any_class(random));
            };
            const auto writing = submit(Direction::kWrite, written->data());
            if (random.one_in(4)) (void)store_.cancel(writing);
            std::optional<TensorStore::Ticket> reading;
            try {
                reading = submit(Direction::kRead, read->data());
            } catch (const std::invalid_argument&) {  // it was closed: the memory is free when the write has ended
            }
            (void)store_.done(writing);
            const auto failure = waited(store_, writing, random);
            if (!reading) throw std::invalid_argument("closed");
            // A block whose last write failed is not read, and neither is one of another thread's failed write.
            const bool is_read = !waited(store_, *reading, random);
            require(is_read || seed_ % 3 == 0, "a read failed", seed_);
            require(!failure || (failure->error == EIO && ++num_failed_ == 1), "a write failed", seed_);
            if (!is_read) continue;
            require(is_whole(read->data(), bytes), "a block has bytes of two writes", seed_);
        }
    }

    // Each thread has blocks of its own in the file, and its reads follow its writes.
    void use_queue(std::size_t thread) {
        Random random(seed_ * 16 + 8 + thread);
        const std::size_t bytes = (1 + random.upto(kMostBlocks - 1)) * kBlockBytes;
        const std::uint64_t offset = thread * kMostBlocks * kBlockBytes;
        const auto written = pool_->take(bytes), read = pool_->take(bytes);
        std::atomic<std::size_t> num_ended = 0;
        const auto ended = [&num_ended](const IoRequest&, std::optional<Failure> failure) {
            ++num_ended;
            return failure;
        };
        for (std::size_t round = 0; round < kNumRounds; ++round) {
            const int value = static_cast<int>(random.upto(255));
            std::memset(written->data(), value, bytes);
            const FileQueue::Options first{any_class(random), {}, ended};
            const auto writing = queue_.submit(Direction::kWrite, queue_file_, offset, written->data(), bytes, first);
            std::optional<FileQueue::Ticket> reading;
            try {
                const FileQueue::Options second{any_class(random), {writing}, ended};
                reading = queue_.submit(Direction::kRead, queue_file_, offset, read->data(), bytes, second);
            } catch (const std::invalid_argument&) {
            }
            require(!waited(queue_, writing, random), "a write of the queue failed", seed_);
            if (!reading) throw std::invalid_argument("closed");
            require(!waited(queue_, *reading, random), "a read of the queue failed", seed_);
            require(std::memcmp(read->data(), written->data(), bytes) == 0, "the content differs", seed_);
        }
        require(num_ended == 2 * kNumRounds, "a request has not ended once", seed_);
    }

    // Waits as a thread does that Ctrl-C interrupts now and then.
    template <class Queue>
    static std::optional<Failure> waited(Queue& queue, typename Queue::Ticket ticket, Random& random) {
        if (random.one_in(3)) {
            try {
                return queue.wait(ticket, [] { throw Interrupted(); });
            } catch (const Interrupted&) {
            }
        }
        return queue.wait(ticket);
    }

    void watch() {
        while (!ended_) {
            require(store_.taken_bytes() <= kNumSlots * (kNumThreads + 2) * 2 * kPartBlocks * kBlockBytes, "too much",
                    seed_);
            (void)store_.file_bytes();
            (void)store_.report();
            (void)queue_.report();
            (void)scheduler_->waits();
            scheduler_->widen(16 * kBlockBytes);
            require(!store_.busy() && !queue_.busy(), "something was abandoned", seed_);
            scheduler_->narrow(16 * kBlockBytes);
            std::this_thread::yield();
        }
    }

    // A request that is never answered is abandoned, and keeps its memory until it returns.
    void abandon() {
        const auto memory = std::make_shared<HostBuffer>(kBlockBytes);
        const auto hold = std::make_shared<Hold>(Direction::kWrite, 0, 1);
        {
            FileQueue queue(1, IoEngineKind::kThreads, {}, FileQueue::Deadline{1ms, memory});
            Seams::decorate_engine(queue, [&hold](std::unique_ptr<IoEngine> engine) {
                return std::make_unique<HoldingEngine>(std::move(engine), hold);
            });
            const auto ticket = queue.submit(Direction::kWrite, queue_file_, 0, memory->data(), kBlockBytes);
            std::thread late([&] {
                if (seed_ % 8) std::this_thread::sleep_for(5ms);
                while (!queue.done(ticket)) std::this_thread::yield();
                hold->release();
            });
            const auto failure = queue.wait(ticket);
            require(failure && failure->kind == FailureKind::kTimeout, "it was not abandoned", seed_);
            late.join();
            while (queue.busy()) std::this_thread::yield();
        }
    }

    const std::string folder_;
    const std::uint64_t seed_;
    const std::shared_ptr<IoScheduler> scheduler_;
    const std::vector<StateFile> files_;
    const StateFile queue_file_;
    const std::shared_ptr<MemoryPool> pool_;
    std::array<Slot, kNumSlots> slots_;
    std::atomic<int> num_failed_ = 0;
    std::atomic<bool> closed_ = false;
    std::atomic<bool> ended_ = false;
    TensorStore store_;
    FileQueue queue_;
};

}  // namespace
}  // namespace smart_infinity

int main(int argc, char** argv) {
    return smart_infinity::run_scenarios(argc, argv,
                                         [argv](std::uint64_t seed) { smart_infinity::Scenario(argv[1], seed).run(); });
}
