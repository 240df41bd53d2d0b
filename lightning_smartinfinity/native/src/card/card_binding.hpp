#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace smart_infinity {

// A failed call of a card, described in text; `error` is an errno or 0. Python's class is CardError.
class CardError : public std::runtime_error {
 public:
    explicit CardError(const std::string& problem, int error = 0) : std::runtime_error(problem), error_(error) {}
    int error() const { return error_; }

 private:
    int error_;
};

// The interface of a binding. Every method throws CardError, and may be called from any thread, by one thread at a
// time. Objects keep the objects they need open, so their order of destruction does not matter.

enum class Sync { kToCard, kFromCard };

enum class Memory { kNormal, kPeerToPeer };

// Memory on the card.
class CardBuffer {
 public:
    CardBuffer() = default;
    CardBuffer(const CardBuffer&) = delete;
    CardBuffer& operator=(const CardBuffer&) = delete;
    virtual ~CardBuffer() = default;

    // Returns its address in host memory: of a copy that sync() updates or, for peer to peer, of the card's memory
    // itself, which only a file system may access.
    virtual std::byte* map() = 0;
    virtual void sync(Sync direction, std::size_t bytes, std::size_t offset) = 0;
    // Returns the part of `bytes` bytes at `offset`, which must be a multiple of 4096.
    virtual std::shared_ptr<CardBuffer> part(std::size_t bytes, std::size_t offset) = 0;
};

// The states in XRT's ert.h in which a run is over. In any other state it is in progress.
constexpr int kRunCompleted = 4;
constexpr int kRunError = 5;
constexpr int kRunAborted = 6;

constexpr bool is_over(int state) {
    return (state >= kRunCompleted && state <= kRunAborted) || (state >= 9 && state <= 11);
}

// A call of a kernel, which may be repeated.
class CardRun {
 public:
    CardRun() = default;
    CardRun(const CardRun&) = delete;
    CardRun& operator=(const CardRun&) = delete;
    virtual ~CardRun() = default;

    virtual void set(int argument, std::uint32_t word) = 0;
    virtual void set(int argument, const std::shared_ptr<CardBuffer>& buffer) = 0;
    virtual void start() = 0;
    // Waits until the run is over or the time has passed. Returns the run's state in either case.
    virtual int wait(std::chrono::milliseconds timeout) = 0;
    virtual int state() = 0;
};

class CardKernel {
 public:
    CardKernel() = default;
    CardKernel(const CardKernel&) = delete;
    CardKernel& operator=(const CardKernel&) = delete;
    virtual ~CardKernel() = default;

    virtual std::shared_ptr<CardRun> run() = 0;
    // Returns the number of the memory bank that must hold a buffer for this argument.
    virtual int group(int argument) = 0;
};

// An opened card whose kernels are loaded.
class CardBinding {
 public:
    CardBinding() = default;
    CardBinding(const CardBinding&) = delete;
    CardBinding& operator=(const CardBinding&) = delete;
    virtual ~CardBinding() = default;

    virtual std::shared_ptr<CardKernel> kernel(const std::string& name) = 0;
    virtual std::shared_ptr<CardBuffer> allocate(std::size_t bytes, Memory memory, int group) = 0;
};

}  // namespace smart_infinity
