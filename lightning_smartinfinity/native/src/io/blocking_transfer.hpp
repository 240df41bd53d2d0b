#pragma once

#include "io/io_engine.hpp"

namespace smart_infinity {

// Makes one attempt at a transfer, in the calling thread.
IoResult attempt(const IoRequest& request);

}  // namespace smart_infinity
