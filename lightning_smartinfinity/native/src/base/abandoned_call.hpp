#pragma once

#include <memory>

namespace smart_infinity {

// Lives as long as a call that was abandoned has not returned. While there is any, the process ends without XRT's
// static destructors, which would abort it.
class AbandonedCall {
 public:
    AbandonedCall();
    ~AbandonedCall();
    AbandonedCall(const AbandonedCall&) = delete;
    AbandonedCall& operator=(const AbandonedCall&) = delete;
};

// Keeps what an abandoned call uses: it can neither be freed, nor can the call's return be waited for. It counts as an
// abandoned call itself.
void keep_for_ever(std::shared_ptr<void> used);

}  // namespace smart_infinity
