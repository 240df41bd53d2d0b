#pragma once

#include <nanobind/nanobind.h>

namespace smart_infinity {

void bind_card(nanobind::module_& m);

}  // namespace smart_infinity
