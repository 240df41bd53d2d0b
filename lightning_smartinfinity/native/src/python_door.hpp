#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "card_door.hpp"

namespace smart_infinity {

// A card behind callables of Python, which are called with the interpreter's lock, from any thread.
std::shared_ptr<CardDoor> make_python_door(nanobind::object door);

}  // namespace smart_infinity
