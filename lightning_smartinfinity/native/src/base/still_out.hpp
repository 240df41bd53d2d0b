#pragma once

#include <memory>

namespace smart_infinity {

// Held for something that was given up for its time, until it has returned. While there is any, the process ends
// without XRT's static destructors, which would abort it.
class StillOut {
 public:
    StillOut();
    ~StillOut();
    StillOut(const StillOut&) = delete;
    StillOut& operator=(const StillOut&) = delete;
};

// What is used by something that is still out: neither may it be freed, nor can the end of that be waited for. It
// counts as out itself.
void keep_for_ever(std::shared_ptr<void> used);

}  // namespace smart_infinity
