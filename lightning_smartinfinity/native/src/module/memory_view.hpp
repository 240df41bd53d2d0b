#pragma once

#include <nanobind/nanobind.h>

#include "module/module.hpp"

namespace smart_infinity {

// Implements the buffer protocol for a class with data() and bytes(): a memoryview holds a reference to the object.
template <class Memory>
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Memory* const memory = nanobind::inst_ptr<Memory>(self);
    return PyBuffer_FillInfo(view, self, memory->data(), static_cast<Py_ssize_t>(memory->bytes()), 0, flags);
}

// The slots of such a class.
template <class Memory>
PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer<Memory>)}, {0, nullptr}};

// Binds the Python members of such a class.
template <class Memory, class... Options>
nanobind::class_<Memory, Options...>& bind_memory_view(nanobind::class_<Memory, Options...>& bound) {
    bound.def_prop_ro("address", [](const Memory& self) { return reinterpret_cast<Address>(self.data()); });
    bound.def_prop_ro("nbytes", &Memory::bytes);
    bound.def(
        "memoryview",
        [](nanobind::handle self) {
            PyObject* const view = PyMemoryView_FromObject(self.ptr());
            if (view == nullptr) throw nanobind::python_error();
            return nanobind::steal(view);
        },
        nanobind::sig("def memoryview(self) -> builtins.memoryview"),
        "Return the writable bytes; the view keeps the memory alive.");
    return bound;
}

}  // namespace smart_infinity
