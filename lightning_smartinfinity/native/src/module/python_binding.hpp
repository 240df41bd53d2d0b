#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "card/card_binding.hpp"

namespace smart_infinity {

// A card behind callables of Python, which are called with the interpreter's lock, from any thread.
std::shared_ptr<CardBinding> make_python_binding(nanobind::object binding);

}  // namespace smart_infinity
