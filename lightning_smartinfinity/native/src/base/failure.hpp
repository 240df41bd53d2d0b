#pragma once

#include <cstdint>
#include <string>

namespace smart_infinity {

enum class FailureKind {
    kIo,          // a system call failed
    kShort,       // the file ends inside an extent
    kChecksum,    // the bytes differ from the written ones
    kForeign,     // an extent of another job, rank or tasklet
    kGeneration,  // an extent of another step
    kFormat,      // no extent, or one with another format or shape
    kCuda,        // a copy from or to a CUDA device failed
    kDevice,      // a card failed, returned wrong bytes, or did not return from a call or transfer in time
    kTimeout,     // a storage device did not answer in time
    kGradient,    // a compressed gradient contradicts its header
};

const char* name_of(FailureKind kind);

// The reason why a batch stopped. `error` is an errno (for kCuda, the driver's number), or zero.
struct Failure {
    FailureKind kind;
    std::string path;
    std::uint64_t offset;
    int error;
    std::uint64_t tasklet;
    std::string message;
};

}  // namespace smart_infinity
