#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "batch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {

// What a binding's arguments say: the call runs without the GIL.
using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

inline const void* pointer_to(Address address) { return reinterpret_cast<const void*>(address); }

// Each binds the types and functions of one bind_*.cpp, in this order: a signature names types that are bound already.
void bind_kernels(nb::module_& m);
void bind_cuda(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_batches(nb::module_& m);
void bind_schedule(nb::module_& m);
void bind_transfers(nb::module_& m);

}  // namespace smart_infinity
