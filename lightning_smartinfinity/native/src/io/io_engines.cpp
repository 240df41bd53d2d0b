#include "io/io_engines.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>

#include "base/numa.hpp"
#include "base/system_error.hpp"
#include "io/device_engines.hpp"
#include "io/thread_pool_engine.hpp"
#include "io/uring_engine.hpp"

namespace smart_infinity {
namespace {

// Returns all files that requests will use, as far as they are known.
std::vector<StateFile> known_files(const IoOptions& options) {
    std::vector<StateFile> files = options.files;
    files.insert(files.end(), options.unregistered.begin(), options.unregistered.end());
    return files;
}

std::unique_ptr<IoEngine> make_thread_pool(const IoOptions& options, PageCache page_cache) {
    const OnNode on_node(node_of(known_files(options)));
    return std::make_unique<ThreadPoolEngine>(options.threads, page_cache);
}

// Files of a queue, which closes them while the ring exists, are not registered: the kernel would keep them open.
std::unique_ptr<IoEngine> make_rings(const IoOptions& options) {
    return std::make_unique<DeviceEngines>(known_files(options), [&options](const std::vector<StateFile>& held) {
        const OnNode on_node(node_of(held));
        return make_uring_engine(options.files.empty() ? options.files : held, options.memory);
    });
}

std::unique_ptr<IoEngine> make_fastest(const IoOptions& options) {
    // For buffered files, io_uring passes every request to kernel threads, which is no faster.
    const bool buffered = std::any_of(options.files.begin(), options.files.end(),
                                      [](const StateFile& file) { return file.access() == Access::kBuffered; });
    if (buffered) return make_thread_pool(options, PageCache::kRelease);
    try {
        return make_rings(options);
    } catch (const SystemError&) {  // unavailable in this build or system, or the limit on rings is reached
        return make_thread_pool(options, PageCache::kKeep);
    }
}

}  // namespace

const char* name_of(IoEngineKind kind) {
    switch (kind) {
        case IoEngineKind::kUring:
            return "io_uring";
        case IoEngineKind::kThreads:
            return "threads";
        case IoEngineKind::kPlain:
            break;
    }
    return "plain";
}

IoEngineKind io_engine_named(const std::string& name) {
    for (const IoEngineKind kind : kIoEngineKinds) {
        if (name == name_of(kind)) return kind;
    }
    throw std::invalid_argument("there is no I/O engine '" + name + "'");
}

std::optional<std::string> unavailable(IoEngineKind kind) {
    return kind == IoEngineKind::kUring ? uring_unavailable() : std::nullopt;
}

std::unique_ptr<IoEngine> make_io_engine(const IoOptions& options) {
    if (options.threads < 1 || options.threads > kMaxThreads) {
        throw std::invalid_argument("io_threads must be in [1, " + std::to_string(kMaxThreads) + "]");
    }
    if (!options.kind) return make_fastest(options);
    const IoEngineKind kind = *options.kind;
    if (const auto reason = unavailable(kind)) throw SystemError(ENOSYS, std::string(name_of(kind)) + ": " + *reason);
    if (kind == IoEngineKind::kUring) return make_rings(options);
    return make_thread_pool(options, kind == IoEngineKind::kPlain ? PageCache::kRelease : PageCache::kKeep);
}

}  // namespace smart_infinity
