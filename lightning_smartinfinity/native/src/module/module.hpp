#pragma once

#include <nanobind/nanobind.h>

#include "extent/batch.hpp"

namespace smart_infinity {

using WithoutGil = nanobind::call_guard<nanobind::gil_scoped_release>;

inline const void* pointer_to(Address address) { return reinterpret_cast<const void*>(address); }

// Each function is in a file of its own. They are called in this order, since a default's type must be bound first.
void bind_kernels(nanobind::module_& m);
void bind_cuda(nanobind::module_& m);
void bind_storage(nanobind::module_& m);
void bind_extents(nanobind::module_& m);
void bind_steps(nanobind::module_& m);
void bind_batch(nanobind::module_& m);
void bind_gradients(nanobind::module_& m);
void bind_schedule(nanobind::module_& m);
void bind_results(nanobind::module_& m);
void bind_card(nanobind::module_& m);
void bind_pipeline(nanobind::module_& m);
void bind_file_queue(nanobind::module_& m);
void bind_tensor_store(nanobind::module_& m);
void bind_watch(nanobind::module_& m);
void bind_testing(nanobind::module_& m);

}  // namespace smart_infinity
