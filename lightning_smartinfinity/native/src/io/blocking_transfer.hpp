#pragma once

#include "io/io_engine.hpp"

namespace smart_infinity {

// One attempt, in the calling thread.
IoResult attempt(const IoRequest& request);

}  // namespace smart_infinity
