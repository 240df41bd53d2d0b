// XRT's C API without XRT, for tests: the entry points that the native core opens, over host memory.
//
// Handles are numbers, and every call is logged with its arguments. Tests use the functions fake_* beside the API's own
// calls.

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace {

constexpr unsigned char kUuid = 0x5a;
constexpr std::size_t kPageBytes = 4096;

struct Failure {
    int result;
    int error;
};

struct Memory {
    explicit Memory(std::size_t bytes) : data(std::aligned_alloc(kPageBytes, bytes)) {}
    ~Memory() { std::free(data); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void* data;
};

struct State {
    std::mutex mutex;
    std::string log;
    std::map<std::string, Failure> failures;
    std::map<void*, std::unique_ptr<Memory>> buffers;
    std::uintptr_t num_handles = 0;
};

State& state() {
    static State* const state = new State;
    return *state;
}

void append(const std::string& line) { state().log += line + "\n"; }

// Returns the failure injected for the call, or null, and sets errno.
const Failure* failure_of(const char* call) {
    const auto found = state().failures.find(call);
    if (found == state().failures.end()) return nullptr;
    errno = found->second.error;
    return &found->second;
}

void* make(const char* call, const std::string& arguments) {
    const std::lock_guard lock(state().mutex);
    append(std::string(call) + " " + arguments);
    return failure_of(call) != nullptr ? nullptr : reinterpret_cast<void*>(++state().num_handles);
}

int done(const char* call, const std::string& arguments = "") {
    const std::lock_guard lock(state().mutex);
    append(std::string(call) + (arguments.empty() ? "" : " " + arguments));
    const Failure* const failure = failure_of(call);
    return failure != nullptr ? failure->result : 0;
}

template <class Number>
std::string text(Number number) {
    return std::to_string(number);
}

}  // namespace

extern "C" {

void* xrtDeviceOpen(unsigned index) { return make("xrtDeviceOpen", text(index)); }

void* xrtDeviceOpenByBDF(const char* bdf) { return make("xrtDeviceOpenByBDF", bdf); }

int xrtDeviceClose(void*) { return done("xrtDeviceClose"); }

int xrtDeviceLoadXclbinFile(void*, const char* path) { return done("xrtDeviceLoadXclbinFile", path); }

int xrtDeviceGetXclbinUUID(void*, unsigned char* uuid) {
    for (int byte = 0; byte < 16; ++byte) uuid[byte] = kUuid;
    return done("xrtDeviceGetXclbinUUID");
}

void* xrtPLKernelOpen(void*, const unsigned char* uuid, const char* name) {
    return make("xrtPLKernelOpen", std::string(name) + (uuid[0] == kUuid && uuid[15] == kUuid ? "" : " of another"));
}

int xrtKernelClose(void*) { return done("xrtKernelClose"); }

// Each argument has a different group, so that they can be told apart.
int xrtKernelArgGroupId(void*, int argument) {
    const int failed = done("xrtKernelArgGroupId", text(argument));
    return failed != 0 ? failed : 100 + argument;
}

void* xrtBOAlloc(void*, std::size_t bytes, std::uint64_t flags, std::uint32_t group) {
    void* const handle = make("xrtBOAlloc", text(bytes) + " flags " + text(flags) + " group " + text(group));
    const std::lock_guard lock(state().mutex);
    if (handle != nullptr) state().buffers.emplace(handle, std::make_unique<Memory>(bytes));
    return handle;
}

void* xrtBOSubAlloc(void*, std::size_t bytes, std::size_t offset) {
    return make("xrtBOSubAlloc", text(bytes) + " at " + text(offset));
}

int xrtBOFree(void* buffer) {
    {
        const std::lock_guard lock(state().mutex);
        state().buffers.erase(buffer);
    }
    return done("xrtBOFree");
}

void* xrtBOMap(void* buffer) {
    if (done("xrtBOMap") != 0) return nullptr;
    const std::lock_guard lock(state().mutex);
    return state().buffers.at(buffer)->data;
}

int xrtBOSync(void*, int direction, std::size_t bytes, std::size_t offset) {
    return done("xrtBOSync", text(direction) + " " + text(bytes) + " at " + text(offset));
}

void* xrtRunOpen(void*) { return make("xrtRunOpen", ""); }

int xrtRunClose(void*) { return done("xrtRunClose"); }

int xrtRunSetArg(void*, int argument, ...) { return done("xrtRunSetArg", text(argument)); }

int xrtRunStart(void*) { return done("xrtRunStart"); }

int xrtRunWaitFor(void*, unsigned) { return done("xrtRunWaitFor"); }

int xrtRunState(void*) { return done("xrtRunState"); }

void fake_reset() {
    const std::lock_guard lock(state().mutex);
    state().log.clear();
    state().failures.clear();
}

void fake_fail(const char* call, int result, int error) {
    const std::lock_guard lock(state().mutex);
    state().failures[call] = {result, error};
}

const char* fake_log() {
    const std::lock_guard lock(state().mutex);
    static std::string copy;
    copy = state().log;
    return copy.c_str();
}
}
