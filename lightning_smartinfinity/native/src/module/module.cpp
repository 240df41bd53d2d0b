// The Python module. The bindings of its parts are in the other files of this folder.

#include "module/module.hpp"

#include <exception>
#include <system_error>

#include "base/system_error.hpp"
#include "cuda/cuda_device.hpp"

namespace nb = nanobind;

namespace smart_infinity {
namespace {

void raise_os_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const SystemError& error) {
        const nb::object path = error.path().empty() ? nb::none() : nb::object(nb::str(error.path().c_str()));
        const nb::tuple arguments = nb::make_tuple(error.code().value(), error.what(), path);
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    } catch (const std::system_error& error) {  // thrown when a thread cannot be started
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
}

// Raises the package's own error, which includes a remedy for the user.
void raise_cuda_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const CudaError& error) {
        const nb::object type = nb::module_::import_("lightning_smartinfinity.errors").attr("CudaError");
        const nb::object remedy = type.attr("REMEDY");
        PyErr_SetObject(type.ptr(), nb::make_tuple(error.what(), remedy).ptr());
    }
}

// Lists all names bound so far, which the package exports.
nb::list public_names(const nb::module_& m) {
    nb::list names;
    for (const nb::handle name : nb::steal<nb::list>(PyObject_Dir(m.ptr()))) {
        if (nb::borrow<nb::str>(name).c_str()[0] != '_') {
            names.append(name);
        }
    }
    return names;
}

}  // namespace

}  // namespace smart_infinity

NB_MODULE(_core, m) {
    using namespace smart_infinity;
    m.doc() = "The native core: I/O, update kernels, checksums and the transfer schedule.";
    // At interpreter exit a traceback or a module may still hold objects; a warning would not help users.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(raise_os_error);
    nb::register_exception_translator(raise_cuda_error);
    bind_kernels(m);
    bind_cuda(m);
    bind_storage(m);
    bind_extents(m);
    bind_steps(m);
    bind_batch(m);
    bind_gradients(m);
    bind_schedule(m);
    bind_results(m);
    bind_card(m);
    bind_pipeline(m);
    bind_file_queue(m);
    bind_tensor_store(m);
    bind_watch(m);
    m.attr("__all__") = public_names(m);
#ifdef SMART_INFINITY_TESTING
    bind_testing(m);
#endif
}
