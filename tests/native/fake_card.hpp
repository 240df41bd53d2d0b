// A card in this process: it uses the host's memory and the kernels of hls/, and fails on request.
#pragma once

#include <card_kernels.hpp>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/flush_subnormals.hpp"
#include "base/worker_pool.hpp"
#include "card/card_binding.hpp"

namespace smart_infinity::fake {

enum class CardFault {
    kNone,
    kHang,   // the run, and those behind it, return only after release()
    kError,  // the run does nothing and ends in this state
    kAbort,
    kNoStatus,        // the run does nothing and completes
    kOtherArray,      // a bit of the first array changes before it is read
    kOtherParameter,  // a bit of the parameters changes after they were written
    kOtherGradient,   // a bit of the gradient changes before it is read
    kFailedStart,     // a call fails
    kFailedSync,
    kStalledSync,  // the transfer moves data only after release()
};

// The state that all parts of the card share.
class Core {
 public:
    // Makes the run with this number, counted from now on, have the fault.
    void inject(CardFault fault, int at) {
        const std::lock_guard lock(mutex_);
        fault_ = fault;
        at_ = at;
        happened_ = false;
        held_ = fault == CardFault::kHang || fault == CardFault::kStalledSync;
    }
    // Whether the fault has occurred.
    bool happened() {
        const std::lock_guard lock(mutex_);
        return happened_;
    }
    void release() {
        const std::lock_guard lock(mutex_);
        held_ = false;
        changed_.notify_all();
    }
    CardFault next_run() {
        const std::lock_guard lock(mutex_);
        return !is_of_syncs() && is_now() ? fault_ : CardFault::kNone;
    }
    CardFault next_sync() {
        const std::lock_guard lock(mutex_);
        return is_of_syncs() && is_now() ? fault_ : CardFault::kNone;
    }
    void hang() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !held_; });
    }

 private:
    bool is_of_syncs() const { return fault_ == CardFault::kFailedSync || fault_ == CardFault::kStalledSync; }
    bool is_now() {
        if (at_-- != 0) return false;
        happened_ = fault_ != CardFault::kNone;
        return true;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool happened_ = false;
    CardFault fault_ = CardFault::kNone;
    int at_ = -1;
    bool held_ = false;
};

class Buffer final : public CardBuffer, public std::enable_shared_from_this<Buffer> {
 public:
    Buffer(std::shared_ptr<Core> core, std::size_t bytes, bool p2p)
        : core_(std::move(core)), memory_(std::make_shared<HostBuffer>(bytes)), data_(memory_->data()), bytes_(bytes) {
        std::memset(data_, 0xa5, bytes);
        if (!p2p) copy_ = std::make_unique<HostBuffer>(bytes);
    }
    Buffer(std::shared_ptr<Buffer> whole, std::size_t bytes, std::size_t offset)
        : core_(whole->core_), memory_(whole->memory_), data_(whole->data_ + offset), bytes_(bytes) {
        if (offset % 4096 != 0 || offset + bytes > whole->bytes_) throw CardError("a part leaves its buffer", EINVAL);
    }

    std::byte* map() override { return copy_ ? copy_->data() : data_; }
    void sync(Sync direction, std::size_t bytes, std::size_t offset) override {
        const CardFault fault = core_->next_sync();
        if (fault == CardFault::kFailedSync || offset + bytes > bytes_ || !copy_) throw CardError("sync failed", EIO);
        if (fault == CardFault::kStalledSync) core_->hang();
        if (direction == Sync::kToCard) {
            std::memcpy(data_ + offset, copy_->data() + offset, bytes);
        } else {
            std::memcpy(copy_->data() + offset, data_ + offset, bytes);
        }
    }
    std::shared_ptr<CardBuffer> part(std::size_t bytes, std::size_t offset) override {
        return std::make_shared<Buffer>(shared_from_this(), bytes, offset);
    }
    std::byte* data() const { return data_; }

 private:
    std::shared_ptr<Core> core_;
    std::shared_ptr<HostBuffer> memory_;
    std::byte* data_;
    std::size_t bytes_;
    std::unique_ptr<HostBuffer> copy_;
};

using Pointers = std::vector<std::shared_ptr<Buffer>>;

template <class... Parameters, std::size_t... Index>
void call_with(void (*kernel)(Parameters...), const Pointers& pointers, const std::vector<std::uint32_t>& words,
               std::index_sequence<Index...>) {
    const auto argument = [&]<class Parameter>(std::size_t index, Parameter*) {
        if constexpr (std::is_pointer_v<Parameter>) {
            return reinterpret_cast<Parameter>(pointers.at(index)->data());
        } else {
            return words.at(index - pointers.size());
        }
    };
    kernel(argument(Index, static_cast<std::remove_reference_t<Parameters>*>(nullptr))...);
}

template <class... Parameters>
void call(void (*kernel)(Parameters...), const Pointers& pointers, const std::vector<std::uint32_t>& words) {
    call_with(kernel, pointers, words, std::index_sequence_for<Parameters...>());
}

// A call that has been started.
struct Started {
    std::string kernel;
    Pointers pointers;
    std::vector<std::uint32_t> words;
    CardFault fault = CardFault::kNone;
    std::shared_ptr<Core> core;
    std::mutex mutex;
    std::condition_variable changed;
    int state = 3;

    void finish(int result) {
        const std::lock_guard lock(mutex);
        state = result;
        changed.notify_all();
    }
};

inline void flip(const std::shared_ptr<Buffer>& buffer, std::uint32_t element) {
    buffer->data()[2 * element] ^= std::byte{4};
}

inline void compute(const Started& run) {
    const std::size_t num_arrays = (run.pointers.size() - 3) / 2;
    const std::uint32_t first = run.words[1];
    if (run.fault == CardFault::kOtherArray) flip(run.pointers[1], 2 * first);
    if (run.fault == CardFault::kOtherGradient) flip(run.pointers[0], first);
    const FlushSubnormals flush;
#define CALL(function, number) \
    if (run.kernel == #function) call(function, run.pointers, run.words);
    CARD_KERNELS(CALL)
#undef CALL
    if (run.fault == CardFault::kOtherParameter) {
        flip(run.pointers[1 + 2 * num_arrays], run.words[4] == 0 ? 2 * first : first);
    }
}

inline void work(const std::shared_ptr<Started>& run) {
    if (run->fault == CardFault::kHang) run->core->hang();
    if (run->fault == CardFault::kError) return run->finish(5);
    if (run->fault == CardFault::kAbort) return run->finish(6);
    if (run->fault != CardFault::kNoStatus) compute(*run);
    run->finish(4);
}

using Unit = WorkerPool<std::shared_ptr<Started>>;  // runs its kernel's calls one after the other

class Run final : public CardRun {
 public:
    Run(std::shared_ptr<Core> core, std::shared_ptr<Unit> unit, std::string kernel)
        : core_(std::move(core)), unit_(std::move(unit)), kernel_(std::move(kernel)) {}

    void set(int argument, std::uint32_t word) override { words_[argument] = word; }
    void set(int argument, const std::shared_ptr<CardBuffer>& buffer) override {
        pointers_[argument] = std::static_pointer_cast<Buffer>(buffer);
    }
    void start() override {
        started_ = std::make_shared<Started>();
        started_->fault = core_->next_run();
        if (started_->fault == CardFault::kFailedStart) throw CardError("start failed", ENODEV);
        started_->kernel = kernel_;
        started_->core = core_;
        for (const auto& [argument, buffer] : pointers_) started_->pointers.push_back(buffer);
        for (const auto& [argument, word] : words_) started_->words.push_back(word);
        unit_->push(started_);
    }
    int wait(std::chrono::milliseconds timeout) override {
        std::unique_lock lock(started_->mutex);
        started_->changed.wait_for(lock, timeout, [this] { return started_->state != 3; });
        return started_->state == 3 ? 8 : started_->state;
    }
    int state() override {
        const std::lock_guard lock(started_->mutex);
        return started_->state;
    }

 private:
    std::shared_ptr<Core> core_;
    std::shared_ptr<Unit> unit_;
    std::string kernel_;
    std::map<int, std::shared_ptr<Buffer>> pointers_;
    std::map<int, std::uint32_t> words_;
    std::shared_ptr<Started> started_;
};

class Kernel final : public CardKernel {
 public:
    Kernel(std::shared_ptr<Core> core, std::shared_ptr<Unit> unit, std::string name)
        : core_(std::move(core)), unit_(std::move(unit)), name_(std::move(name)) {}
    std::shared_ptr<CardRun> run() override { return std::make_shared<Run>(core_, unit_, name_); }
    int group(int) override { return 0; }

 private:
    std::shared_ptr<Core> core_;
    std::shared_ptr<Unit> unit_;
    std::string name_;
};

class Binding final : public CardBinding {
 public:
    explicit Binding(std::shared_ptr<Core> core) : core_(std::move(core)) {}
    std::shared_ptr<CardKernel> kernel(const std::string& name) override {
        return std::make_shared<Kernel>(core_, unit_, name);
    }
    std::shared_ptr<CardBuffer> allocate(std::size_t bytes, Memory memory, int) override {
        return std::make_shared<Buffer>(core_, bytes, memory == Memory::kPeerToPeer);
    }

 private:
    std::shared_ptr<Core> core_;
    std::shared_ptr<Unit> unit_ = std::make_shared<Unit>("fake-card", 1, work);
};

}  // namespace smart_infinity::fake
