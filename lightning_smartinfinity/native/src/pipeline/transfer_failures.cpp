#include "pipeline/transfer_failures.hpp"

#include <cerrno>
#include <system_error>

namespace smart_infinity {

namespace {

std::string refusal_prefix(FailureKind kind, const Tasklet& tasklet, const std::string& path) {
    const std::string name = "tasklet " + std::to_string(tasklet.index);
    if (kind == FailureKind::kDevice) return "the card did not update " + name + " of " + path + ": ";
    if (kind == FailureKind::kGradient) return "the compressed gradient of " + name + " is refused: ";
    return "the extent of " + name + " at offset " + std::to_string(tasklet.read_offset) + " of " + path +
           " is refused: ";
}

std::string place_of(const IoRequest& rest, const Tasklet& tasklet, const std::string& path) {
    return std::to_string(rest.bytes) + " bytes at offset " + std::to_string(rest.offset) + " of " + path +
           " (tasklet " + std::to_string(tasklet.index) + ")";
}

const char* verb_of(const IoRequest& request) {
    return request.direction == Direction::kRead ? "reading " : "writing ";
}

}  // namespace

Failure stopped() { return Failure{FailureKind::kIo, "", 0, ECANCELED, 0, "the batch was stopped before it was done"}; }

Failure refused(const Refusal& refusal, const Tasklet& tasklet, const std::string& path) {
    return Failure{refusal.kind,  path,          tasklet.read_offset,
                   refusal.error, tasklet.index, refusal_prefix(refusal.kind, tasklet, path) + refusal.message};
}

Failure not_copied(const Tasklet& tasklet, int error, const std::string& reason) {
    const std::string message =
        "copying the parameters of tasklet " + std::to_string(tasklet.index) + " failed: " + reason;
    return Failure{FailureKind::kCuda, "", 0, error, tasklet.index, message};
}

Failure not_returned(const IoRequest& rest, const Tasklet& tasklet, const std::string& path, const IoResult& result,
                     FailureKind kind) {
    const std::string message = verb_of(rest) + place_of(rest, tasklet, path) + " " + not_returned_text(result, kind);
    return Failure{kind, path, rest.offset, 0, tasklet.index, message};
}

std::optional<Failure> failure_of(const Transfer& transfer, Transfer::Progress progress, const Tasklet& tasklet,
                                  const std::string& path) {
    if (progress == Transfer::Progress::kDone || progress == Transfer::Progress::kAgain) return std::nullopt;
    const IoRequest& rest = transfer.rest();
    const std::string where = place_of(rest, tasklet, path);
    if (progress == Transfer::Progress::kEndOfFile) {
        return Failure{FailureKind::kShort, path, rest.offset, 0, tasklet.index, "the file ends before " + where};
    }
    const std::string reason = std::generic_category().message(transfer.error());
    return Failure{FailureKind::kIo, path,          rest.offset,
                   transfer.error(), tasklet.index, verb_of(rest) + where + " failed: " + reason};
}

}  // namespace smart_infinity
