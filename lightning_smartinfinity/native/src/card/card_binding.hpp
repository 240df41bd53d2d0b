#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace smart_infinity {

// A call at a card that failed, in words; `error` is an errno or 0. Becomes Python's CardError.
class CardError : public std::runtime_error {
 public:
    explicit CardError(const std::string& problem, int error = 0) : std::runtime_error(problem), error_(error) {}
    int error() const { return error_; }

 private:
    int error_;
};

// What a binding is asked for. All of it throws CardError, may be called from any thread, and is used by one at a time;
// what a binding gives out keeps open what it needs, so that the order of destruction does not matter.

enum class Sync { kToCard, kFromCard };

enum class Memory { kNormal, kPeerToPeer };

// Memory on the card.
class CardBuffer {
 public:
    CardBuffer() = default;
    CardBuffer(const CardBuffer&) = delete;
    CardBuffer& operator=(const CardBuffer&) = delete;
    virtual ~CardBuffer() = default;

    // Where it is in the address space: a copy in host memory that sync() brings up to date, or, peer to peer, the
    // card's memory itself, which only a file system may touch.
    virtual std::byte* map() = 0;
    virtual void sync(Sync direction, std::size_t bytes, std::size_t offset) = 0;
    // A part of it, at a multiple of 4096.
    virtual std::shared_ptr<CardBuffer> part(std::size_t bytes, std::size_t offset) = 0;
};

// The numbers of XRT's ert.h that say that a run is over; after any other it is still out.
constexpr int kRunCompleted = 4;
constexpr int kRunError = 5;
constexpr int kRunAborted = 6;

constexpr bool is_over(int state) {
    return (state >= kRunCompleted && state <= kRunAborted) || (state >= 9 && state <= 11);
}

// A kernel's call, which may be repeated.
class CardRun {
 public:
    CardRun() = default;
    CardRun(const CardRun&) = delete;
    CardRun& operator=(const CardRun&) = delete;
    virtual ~CardRun() = default;

    virtual void set(int argument, std::uint32_t word) = 0;
    virtual void set(int argument, const std::shared_ptr<CardBuffer>& buffer) = 0;
    virtual void start() = 0;
    // Until it is over, or the time is. Returns its state, whatever it is.
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
    // The memory that a buffer for this argument must lie in.
    virtual int group(int argument) = 0;
};

// The way to a card whose kernels are loaded.
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
