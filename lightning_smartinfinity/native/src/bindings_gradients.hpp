#pragma once

#include <nanobind/nanobind.h>

namespace smart_infinity {

// Before the classes that have a codec, and after them.
void bind_gradient_codecs(nanobind::module_& m);
void bind_gradients(nanobind::module_& m);

}  // namespace smart_infinity
