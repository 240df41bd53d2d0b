// A CUDA driver without a device, for tests: the entry points that the native core opens, over host memory.
//
// A stream does its operations in order on its own thread, after random delays. An event is a point in a stream.
// "Device memory" is any host memory, unless fake_device_memory() says otherwise. Registration is checked as by the
// driver: copies from and to unregistered memory are synchronous, ranges do not overlap, and a mapping must still exist
// when its registration ends. Every call is logged. Tests use the functions fake_* below beside the driver's own calls.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Result : int {
    kSuccess = 0,
    kInvalidValue = 1,
    kDeinitialized = 4,
    kInvalidDevice = 101,
    kInvalidContext = 201,
    kInvalidHandle = 400,
    kNotReady = 600,
    kAlreadyRegistered = 712,
    kNotRegistered = 713,
};

constexpr int kNumDevices = 2;

// A point in a stream that an event recorded. Waiting calls share it, so that it outlives the event.
struct Point {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
    std::chrono::steady_clock::time_point reached_at;
    int result = kSuccess;

    void reach(int outcome) {
        const std::lock_guard lock(mutex);
        reached = true;
        reached_at = std::chrono::steady_clock::now();
        result = outcome;
        changed.notify_all();
    }
    int wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return reached; });
        return result;
    }
};

class Stream {
 public:
    Stream() : thread_([this] { run(); }) {}
    // Like the driver's, a stream finishes its work before it ends.
    ~Stream() {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    void push(std::function<int()> operation) {
        {
            const std::lock_guard lock(mutex_);
            operations_.push_back(std::move(operation));
        }
        changed_.notify_all();
    }
    int result() const { return result_; }
    std::shared_ptr<Point> point() {
        auto point = std::make_shared<Point>();
        push([this, point] {
            point->reach(result_);
            return 0;
        });
        return point;
    }

 private:
    void run() {
        for (;;) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return closing_ || !operations_.empty(); });
            if (operations_.empty()) return;
            const auto operation = std::move(operations_.front());
            operations_.pop_front();
            lock.unlock();
            // After a failure nothing else is done, as in a failed context, but points are still reached.
            if (const int result = operation(); result != 0 && result_ == 0) result_ = result;
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<int()>> operations_;
    bool closing_ = false;
    std::atomic<int> result_{0};
    std::thread thread_;
};

struct Event {
    std::shared_ptr<Point> point;
};

struct Context {
    int device;
    int retained = 0;
    std::unique_ptr<Stream> default_stream;
};

class Driver {
 public:
    std::mutex mutex;
    bool deinitialized = false;
    std::vector<std::string> log;
    std::map<std::string, std::pair<int, int>> failures;  // by call: remaining calls, result
    Context contexts[kNumDevices] = {{0, 0, {}}, {1, 0, {}}};
    std::map<void*, std::unique_ptr<Stream>> streams;
    std::map<void*, Event> events;
    std::map<std::uintptr_t, std::size_t> registered;
    std::mt19937_64 generator{0};
    int max_delay_us = 0;
    int fail_copy_in = -1;  // remaining copies until one fails on its stream
    bool unmapped = false;  // memory was unmapped while it was registered
    // The addresses of device memory, and what is added to one to get an address that may be used; no bytes: any.
    std::uintptr_t device_begin = 0;
    std::size_t device_bytes = 0;
    std::uintptr_t device_shift = 0;

    // Begins every call: locks the mutex, logs the call and returns an injected failure.
    int enter(const char* call, std::unique_lock<std::mutex>& lock, const std::string& detail = "") {
        lock = std::unique_lock(mutex);
        log.push_back(detail.empty() ? call : std::string(call) + " " + detail);
        if (deinitialized) return kDeinitialized;
        const auto failure = failures.find(call);
        if (failure != failures.end() && failure->second.first-- == 0) {
            const int result = failure->second.second;
            failures.erase(failure);
            return result;
        }
        return kSuccess;
    }

    int delay_us() { return max_delay_us > 0 ? std::uniform_int_distribution<int>(0, max_delay_us)(generator) : 0; }
    bool next_copy_fails() { return fail_copy_in >= 0 && fail_copy_in-- == 0; }

    bool is_registered(const void* data, std::size_t bytes) const {
        const auto address = reinterpret_cast<std::uintptr_t>(data);
        auto after = registered.upper_bound(address);
        if (after == registered.begin()) return false;
        const auto& [begin, length] = *std::prev(after);
        return address + bytes <= begin + length;
    }
};

// The driver is never destroyed, because calls may come while the process ends.
Driver& driver() {
    static auto* const instance = new Driver;
    return *instance;
}

thread_local std::vector<Context*> context_stack;

Context* current() { return context_stack.empty() ? nullptr : context_stack.back(); }

std::string text(std::uint64_t value) { return std::to_string(value); }
std::string text(const void* pointer) { return text(reinterpret_cast<std::uintptr_t>(pointer)); }

// The caller must hold the mutex.
Stream* find_stream(void* handle) {
    Context* const context = current();
    if (context == nullptr) return nullptr;
    if (handle == nullptr) {
        if (!context->default_stream) context->default_stream = std::make_unique<Stream>();
        return context->default_stream.get();
    }
    const auto found = driver().streams.find(handle);
    return found == driver().streams.end() ? nullptr : found->second.get();
}

bool is_of_device(const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) - driver().device_begin < driver().device_bytes;
}

// Returns an address at which the bytes of device or host memory may be used.
void* reachable(const void* data) {
    const auto address = reinterpret_cast<std::uintptr_t>(data);
    return reinterpret_cast<void*>(is_of_device(data) ? address + driver().device_shift : address);
}

int copy(const char* call, void* to, const void* from, std::size_t bytes, void* handle, const void* host) {
    std::unique_lock<std::mutex> lock;
    Driver& self = driver();
    const std::string detail = text(host) + " " + text(bytes) + " stream=" + text(handle);
    if (const int result = self.enter(call, lock, detail)) return result;
    if (current() == nullptr) return kInvalidContext;
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return kInvalidHandle;
    const void* const device = host == to ? from : to;
    if (self.device_bytes > 0 && (is_of_device(host) || !is_of_device(device))) return kInvalidValue;
    to = reachable(to);
    from = reachable(from);
    const int delay_us = self.delay_us();
    const bool fails = self.next_copy_fails();
    stream->push([=] {
        if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
        if (stream->result() != 0) return stream->result();
        if (fails) return 700;  // CUDA_ERROR_ILLEGAL_ADDRESS
        std::memcpy(to, from, bytes);
        return 0;
    });
    if (self.is_registered(host, bytes)) return kSuccess;
    const auto point = stream->point();
    lock.unlock();
    return point->wait();
}

// Returns an event's point, or null if it has none.
std::shared_ptr<Point> point_of(void* event, bool& exists) {
    const auto found = driver().events.find(event);
    exists = found != driver().events.end();
    return exists ? found->second.point : nullptr;
}

}  // namespace

extern "C" {

int cuInit(unsigned) {
    std::unique_lock<std::mutex> lock;
    return driver().enter("cuInit", lock);
}

int cuGetErrorName(int result, const char** name) {
    *name = result == kNotRegistered ? "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" : "CUDA_ERROR_FAKE";
    return kSuccess;
}

int cuGetErrorString(int result, const char** description) {
    *description = result == 2 ? "out of memory" : "made up for a test";
    return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuDeviceGet", lock)) return result;
    if (ordinal < 0 || ordinal >= kNumDevices) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuDevicePrimaryCtxRetain", lock)) return result;
    *context = &driver().contexts[device];
    ++driver().contexts[device].retained;
    return kSuccess;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuDevicePrimaryCtxRelease_v2", lock)) return result;
    --driver().contexts[device].retained;
    return kSuccess;
}

int cuCtxPushCurrent_v2(void* context) {
    {
        const std::lock_guard lock(driver().mutex);
        if (driver().deinitialized) return kDeinitialized;
    }
    context_stack.push_back(static_cast<Context*>(context));
    return kSuccess;
}

int cuCtxPopCurrent_v2(void** context) {
    if (context_stack.empty()) return kInvalidContext;
    *context = context_stack.back();
    context_stack.pop_back();
    return kSuccess;
}

int cuMemHostRegister_v2(void* data, std::size_t bytes, unsigned) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuMemHostRegister_v2", lock, text(data) + " " + text(bytes))) {
        return result;
    }
    if (current() == nullptr) return kInvalidContext;
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    for (const auto& [other, length] : driver().registered) {
        if (begin < other + length && other < begin + bytes) return kAlreadyRegistered;
    }
    driver().registered[begin] = bytes;
    return kSuccess;
}

int cuMemHostUnregister(void* data) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuMemHostUnregister", lock, text(data))) return result;
    if (current() == nullptr) return kInvalidContext;
    const auto found = driver().registered.find(reinterpret_cast<std::uintptr_t>(data));
    if (found == driver().registered.end()) return kNotRegistered;
    std::vector<unsigned char> resident((found->second + 4095) / 4096);
    if (::mincore(data, found->second, resident.data()) != 0) driver().unmapped = true;
    driver().registered.erase(found);
    return kSuccess;
}

int cuMemcpyHtoDAsync_v2(unsigned long long device, const void* host, std::size_t bytes, void* stream) {
    return copy("cuMemcpyHtoDAsync_v2", reinterpret_cast<void*>(device), host, bytes, stream, host);
}

int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, std::size_t bytes, void* stream) {
    return copy("cuMemcpyDtoHAsync_v2", host, reinterpret_cast<const void*>(device), bytes, stream, host);
}

int cuStreamCreate(void** stream, unsigned) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuStreamCreate", lock)) return result;
    if (current() == nullptr) return kInvalidContext;
    auto made = std::make_unique<Stream>();
    *stream = made.get();
    driver().streams[*stream] = std::move(made);
    return kSuccess;
}

int cuStreamDestroy_v2(void* stream) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuStreamDestroy_v2", lock)) return result;
    if (current() == nullptr) return kInvalidContext;
    auto node = driver().streams.extract(stream);
    lock.unlock();
    return node.empty() ? kInvalidHandle : kSuccess;
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuStreamWaitEvent", lock, "stream=" + text(stream))) return result;
    Stream* const waiting = find_stream(stream);
    bool exists = false;
    const auto point = point_of(event, exists);
    if (waiting == nullptr || !exists) return kInvalidHandle;
    if (point) waiting->push([point] { return point->wait(); });
    return kSuccess;
}

int cuStreamSynchronize(void* stream) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuStreamSynchronize", lock, "stream=" + text(stream))) return result;
    Stream* const found = find_stream(stream);
    if (found == nullptr) return kInvalidHandle;
    const auto point = found->point();
    lock.unlock();
    return point->wait();
}

int cuEventCreate(void** event, unsigned) {
    static std::uintptr_t next = 0;
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuEventCreate", lock)) return result;
    if (current() == nullptr) return kInvalidContext;
    *event = reinterpret_cast<void*>(++next);
    driver().events[*event];
    return kSuccess;
}

int cuEventDestroy_v2(void* event) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuEventDestroy_v2", lock)) return result;
    if (current() == nullptr) return kInvalidContext;
    return driver().events.erase(event) == 1 ? kSuccess : kInvalidHandle;
}

int cuEventRecord(void* event, void* stream) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuEventRecord", lock, "stream=" + text(stream))) return result;
    Stream* const found = find_stream(stream);
    const auto entry = driver().events.find(event);
    if (found == nullptr || entry == driver().events.end()) return kInvalidHandle;
    entry->second.point = found->point();
    return kSuccess;
}

int cuEventQuery(void* event) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuEventQuery", lock)) return result;
    if (current() == nullptr) return kInvalidContext;
    bool exists = false;
    const auto point = point_of(event, exists);
    lock.unlock();
    if (!exists) return kInvalidHandle;
    if (!point) return kSuccess;
    const std::lock_guard point_lock(point->mutex);
    return point->reached ? point->result : static_cast<int>(kNotReady);
}

int cuEventSynchronize(void* event) {
    std::unique_lock<std::mutex> lock;
    if (const int result = driver().enter("cuEventSynchronize", lock)) return result;
    if (current() == nullptr) return kInvalidContext;
    bool exists = false;
    const auto point = point_of(event, exists);
    lock.unlock();
    if (!exists) return kInvalidHandle;
    return point ? point->wait() : static_cast<int>(kSuccess);
}

// ---- controls and observations for tests

// Makes operations wait a random time of up to max_delay_us.
void fake_delay(std::uint64_t seed, int max_delay_us) {
    const std::lock_guard lock(driver().mutex);
    driver().generator.seed(seed);
    driver().max_delay_us = max_delay_us;
}

// Declares these addresses the device's memory: copies use the bytes that lie `shift` behind them.
void fake_device_memory(std::uintptr_t begin, std::size_t bytes, std::uintptr_t shift) {
    const std::lock_guard lock(driver().mutex);
    driver().device_begin = begin;
    driver().device_bytes = bytes;
    driver().device_shift = shift;
}

// Makes the call of this name return `result` after `skipped` other calls of it.
void fake_fail(const char* call, int skipped, int result) {
    const std::lock_guard lock(driver().mutex);
    driver().failures[call] = {skipped, result};
}

// Makes a copy fail on its stream after `skipped` other copies.
void fake_fail_copy(int skipped) {
    const std::lock_guard lock(driver().mutex);
    driver().fail_copy_in = skipped;
}

// Removes the driver with all that it holds until fake_reset(), as at the end of a process.
void fake_deinitialize() {
    std::map<void*, std::unique_ptr<Stream>> streams;
    const std::lock_guard lock(driver().mutex);
    driver().deinitialized = true;
    driver().events.clear();
    driver().registered.clear();
    for (Context& context : driver().contexts) context.retained = 0;
    streams.swap(driver().streams);
}

// Returns the calls since the last fake_clear(), one per line. The text is valid until the next call.
const char* fake_log() {
    static std::string lines;
    const std::lock_guard lock(driver().mutex);
    lines.clear();
    for (const std::string& line : driver().log) lines += line + "\n";
    return lines.c_str();
}

// Restores the state before the first test, except objects that tests and the package hold.
void fake_reset() {
    const std::lock_guard lock(driver().mutex);
    driver().log.clear();
    driver().failures.clear();
    driver().max_delay_us = 0;
    driver().fail_copy_in = -1;
    driver().deinitialized = false;
}

void fake_clear() {
    const std::lock_guard lock(driver().mutex);
    driver().log.clear();
}

int fake_num_events() {
    const std::lock_guard lock(driver().mutex);
    return static_cast<int>(driver().events.size());
}
int fake_num_streams() {
    const std::lock_guard lock(driver().mutex);
    return static_cast<int>(driver().streams.size());
}
int fake_num_registered() {
    const std::lock_guard lock(driver().mutex);
    return static_cast<int>(driver().registered.size());
}
int fake_num_contexts() {
    const std::lock_guard lock(driver().mutex);
    return driver().contexts[0].retained + driver().contexts[1].retained;
}
int fake_unmapped() {
    const std::lock_guard lock(driver().mutex);
    return driver().unmapped ? 1 : 0;
}

// Makes a stream of another user of the device, such as torch.
void* fake_stream() {
    context_stack.push_back(&driver().contexts[0]);
    void* stream = nullptr;
    cuStreamCreate(&stream, 0);
    context_stack.pop_back();
    return stream;
}

int fake_destroy(void* stream) {
    context_stack.push_back(&driver().contexts[0]);
    const int result = cuStreamDestroy_v2(stream);
    context_stack.pop_back();
    return result;
}

// Starts a kernel on a stream: it works for `microseconds`, then does to = from.
void fake_kernel(void* stream, int microseconds, float* to, const float* from, std::size_t numel) {
    context_stack.push_back(&driver().contexts[0]);
    const std::lock_guard lock(driver().mutex);
    find_stream(stream)->push([=] {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        std::copy_n(from, numel, to);
        return 0;
    });
    context_stack.pop_back();
}

// Stops a stream at a gate until the gate is opened. A gate is opened once.
void* fake_gate(void* stream) {
    auto* const gate = new std::shared_ptr<Point>(std::make_shared<Point>());
    context_stack.push_back(&driver().contexts[0]);
    const std::lock_guard lock(driver().mutex);
    find_stream(stream)->push([point = *gate] { return point->wait(); });
    context_stack.pop_back();
    return gate;
}

void fake_open(void* opaque) {
    auto* const gate = static_cast<std::shared_ptr<Point>*>(opaque);
    (*gate)->reach(kSuccess);
    delete gate;
}

// Waits until a stream has done all its work, which tests may do but the package may not.
void fake_wait(void* stream) {
    context_stack.push_back(&driver().contexts[0]);
    std::unique_lock lock(driver().mutex);
    const auto point = find_stream(stream)->point();
    lock.unlock();
    point->wait();
    context_stack.pop_back();
}

}  // extern "C"
