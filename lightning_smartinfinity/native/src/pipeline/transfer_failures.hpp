#pragma once

#include <optional>
#include <string>

#include "base/failure.hpp"
#include "extent/batch.hpp"
#include "extent/extent.hpp"
#include "io/transfer.hpp"

// Failures with messages that explain why a batch stops. `path` is the path of the tasklet's file.
namespace smart_infinity {

Failure stopped();
Failure refused(const Refusal& refusal, const Tasklet& tasklet, const std::string& path);
Failure not_copied(const Tasklet& tasklet, int error, const std::string& reason);

// `rest` is the last request of the transfer: the part that was not moved. `kind` is kDevice for a card's pipeline,
// otherwise kTimeout.
Failure not_returned(const IoRequest& rest, const Tasklet& tasklet, const std::string& path, const IoResult& result,
                     FailureKind kind);

// Returns nothing if the transfer continues or is done.
std::optional<Failure> failure_of(const Transfer& transfer, Transfer::Progress progress, const Tasklet& tasklet,
                                  const std::string& path);

}  // namespace smart_infinity
