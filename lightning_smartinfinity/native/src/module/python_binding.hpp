#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "card/card_binding.hpp"

namespace smart_infinity {

// Returns a binding that calls Python callables, with the interpreter's lock, from any thread.
std::shared_ptr<CardBinding> make_python_binding(nanobind::object binding);

}  // namespace smart_infinity
