#pragma once

#include <memory>

namespace smart_infinity {

// Exists until an abandoned call returns. While one exists, the process exits without XRT's static destructors, which
// would abort it.
class AbandonedCall {
 public:
    AbandonedCall();
    ~AbandonedCall();
    AbandonedCall(const AbandonedCall&) = delete;
    AbandonedCall& operator=(const AbandonedCall&) = delete;
};

// Keeps an object that abandoned calls use for ever, because their return cannot be awaited. The kept object counts as
// an abandoned call itself.
void keep_for_ever(std::shared_ptr<void> used);

}  // namespace smart_infinity
