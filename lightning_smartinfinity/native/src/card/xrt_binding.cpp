#include "card/xrt_binding.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "card/xrt_library.hpp"

namespace smart_infinity {
namespace {

constexpr std::uint64_t kPeerToPeerFlag = std::uint64_t{1} << 30;  // XRT_BO_FLAGS_P2P

[[noreturn]] void fail(const std::string& call, int error) {
    const std::string reason =
        error == 0 ? "" : ": " + std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
    throw CardError(call + " failed" + reason, error);
}

// Calls an entry point that returns a handle or an address; null is a failure.
template <class Function, class... Arguments>
void* pointer_from(const XrtEntry<Function>& entry, const std::string& what, Arguments... arguments) {
    errno = 0;
    void* const handle = entry.function(arguments...);
    if (handle == nullptr) fail(entry.name + what, errno);
    return handle;
}

// Calls an entry point that returns 0, or reports an error by a negative result, a positive errno, or errno itself.
template <class Function, class... Arguments>
void call(const XrtEntry<Function>& entry, const std::string& what, Arguments... arguments) {
    errno = 0;
    const int result = entry.function(arguments...);
    if (result != 0) fail(entry.name + what, result > 0 ? result : std::max(errno, result == -1 ? 0 : -result));
}

std::string parenthesised(const std::string& argument) { return std::string("(").append(argument).append(")"); }

std::string of_bytes(std::size_t bytes) { return " of " + std::to_string(bytes) + " bytes"; }

struct Device {
    Device(const std::string& path, const CardAddress& card) : library(path) {
        if (const unsigned* const index = std::get_if<unsigned>(&card)) {
            handle = pointer_from(library.device_open, parenthesised(std::to_string(*index)), *index);
        } else {
            const std::string& bdf = std::get<std::string>(card);
            handle = pointer_from(library.device_open_by_bdf, parenthesised(bdf), bdf.c_str());
        }
    }
    ~Device() { (void)library.device_close.function(handle); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const XrtLibrary library;
    XrtDevice handle = nullptr;
    XrtUuid uuid{};
};

class Buffer final : public CardBuffer, public std::enable_shared_from_this<Buffer> {
 public:
    Buffer(std::shared_ptr<const Device> device, XrtBuffer handle, std::shared_ptr<const Buffer> whole = nullptr)
        : device_(std::move(device)), whole_(std::move(whole)), handle_(handle) {}
    ~Buffer() override { (void)device_->library.buffer_free.function(handle_); }

    std::byte* map() override {
        return static_cast<std::byte*>(pointer_from(device_->library.buffer_map, "", handle_));
    }

    void sync(Sync direction, std::size_t bytes, std::size_t offset) override {
        const bool to_card = direction == Sync::kToCard;
        call(device_->library.buffer_sync, of_bytes(bytes) + (to_card ? " to the card" : " from the card"), handle_,
             to_card ? 0 : 1, bytes, offset);
    }

    std::shared_ptr<CardBuffer> part(std::size_t bytes, std::size_t offset) override {
        XrtBuffer const part = pointer_from(device_->library.buffer_part, of_bytes(bytes), handle_, bytes, offset);
        return std::make_shared<Buffer>(device_, part, shared_from_this());
    }

    XrtBuffer handle() const { return handle_; }

 private:
    std::shared_ptr<const Device> device_;
    std::shared_ptr<const Buffer> whole_;  // the buffer that this one is a part of
    XrtBuffer handle_;
};

class Kernel;

constexpr std::chrono::milliseconds kLongestWait(10);

class Run final : public CardRun {
 public:
    Run(std::shared_ptr<const Device> device, std::shared_ptr<const Kernel> kernel, XrtRun handle)
        : device_(std::move(device)), kernel_(std::move(kernel)), handle_(handle) {}
    ~Run() override { (void)device_->library.run_close.function(handle_); }

    void set(int argument, std::uint32_t word) override {
        call(device_->library.run_set, of(argument), handle_, argument, word);
    }
    void set(int argument, const std::shared_ptr<CardBuffer>& buffer) override {
        call(device_->library.run_set, of(argument), handle_, argument, static_cast<const Buffer&>(*buffer).handle());
    }
    void start() override { call(device_->library.run_start, "", handle_); }
    // During a wait XRT holds a lock of the whole card, so no other thread can see that its run is over. Waits are
    // short for this reason: otherwise a hanging run would delay all others until its timeout.
    int wait(std::chrono::milliseconds timeout) override {
        const auto until = std::chrono::steady_clock::now() + timeout;
        while (true) {
            // A wait of 0 ms would never end.
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
            const auto slice = std::clamp(left, std::chrono::milliseconds(1), kLongestWait);
            const int state = device_->library.run_wait.function(handle_, static_cast<unsigned>(slice.count()));
            if (is_over(state) || left <= kLongestWait) return state;
        }
    }
    int state() override { return device_->library.run_state.function(handle_); }

 private:
    static std::string of(int argument) { return " of argument " + std::to_string(argument); }

    std::shared_ptr<const Device> device_;
    std::shared_ptr<const Kernel> kernel_;
    XrtRun handle_;
};

class Kernel final : public CardKernel, public std::enable_shared_from_this<Kernel> {
 public:
    Kernel(std::shared_ptr<const Device> device, const std::string& name)
        : device_(std::move(device)),
          handle_(pointer_from(device_->library.kernel_open, parenthesised(name), device_->handle, device_->uuid,
                               name.c_str())) {}
    ~Kernel() override { (void)device_->library.kernel_close.function(handle_); }

    std::shared_ptr<CardRun> run() override {
        return std::make_shared<Run>(device_, shared_from_this(), pointer_from(device_->library.run_open, "", handle_));
    }
    int group(int argument) override {
        errno = 0;
        const int group = device_->library.kernel_group.function(handle_, argument);
        if (group < 0) fail("xrtKernelArgGroupId of argument " + std::to_string(argument), errno);
        return group;
    }

 private:
    std::shared_ptr<const Device> device_;
    XrtKernel handle_;
};

class Binding final : public CardBinding {
 public:
    Binding(const std::string& library, const CardAddress& card, const std::string& xclbin) {
        auto device = std::make_shared<Device>(library, card);
        call(device->library.device_load, parenthesised(xclbin), device->handle, xclbin.c_str());
        call(device->library.device_uuid, "", device->handle, device->uuid);
        device_ = std::move(device);
    }

    std::shared_ptr<CardKernel> kernel(const std::string& name) override {
        return std::make_shared<Kernel>(device_, name);
    }
    std::shared_ptr<CardBuffer> allocate(std::size_t bytes, Memory memory, int group) override {
        const std::uint64_t flags = memory == Memory::kPeerToPeer ? kPeerToPeerFlag : 0;
        const std::string what = of_bytes(bytes) + (flags != 0 ? ", peer to peer," : "");
        XrtBuffer const buffer = pointer_from(device_->library.buffer_allocate, what, device_->handle, bytes, flags,
                                              static_cast<std::uint32_t>(group));
        return std::make_shared<Buffer>(device_, buffer);
    }

 private:
    std::shared_ptr<const Device> device_;
};

}  // namespace

std::shared_ptr<CardBinding> open_xrt_binding(const std::string& library, const CardAddress& card,
                                              const std::string& xclbin) {
    return std::make_shared<Binding>(library, card, xclbin);
}

}  // namespace smart_infinity
