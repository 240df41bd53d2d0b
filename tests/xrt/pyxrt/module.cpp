// Binds XRT's C++ classes for Python as the pyxrt of XRT 2.13 does, for tests on systems that come without it. Names,
// overloads, enum values and shortcomings are the genuine module's: see signatures_2.13.json and
// test_pyxrt_binding.py.
//
// Signatures depend on the order of registration: a class is bound before those whose functions take it, except where
// the genuine module has it the other way round and a signature shows the C++ name.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl_bind.h>

#include <cstddef>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "experimental/xrt_xclbin.h"
#include "xrt/xrt_bo.h"
#include "xrt/xrt_device.h"
#include "xrt/xrt_kernel.h"
#include "xrt/xrt_uuid.h"

namespace py = pybind11;

PYBIND11_MAKE_OPAQUE(std::vector<xrt::xclbin::ip>);

namespace {

void bind_enums(py::module_& m) {
    py::enum_<xclBOSyncDirection>(m, "xclBOSyncDirection")
        .value("XCL_BO_SYNC_BO_TO_DEVICE", XCL_BO_SYNC_BO_TO_DEVICE)
        .value("XCL_BO_SYNC_BO_FROM_DEVICE", XCL_BO_SYNC_BO_FROM_DEVICE)
        .value("XCL_BO_SYNC_BO_GMIO_TO_AIE", XCL_BO_SYNC_BO_GMIO_TO_AIE)
        .value("XCL_BO_SYNC_BO_AIE_TO_GMIO", XCL_BO_SYNC_BO_AIE_TO_GMIO);

    // RUNNING (3) is missing in the genuine module, too.
    py::enum_<ert_cmd_state>(m, "ert_cmd_state")
        .value("ERT_CMD_STATE_NEW", ERT_CMD_STATE_NEW)
        .value("ERT_CMD_STATE_QUEUED", ERT_CMD_STATE_QUEUED)
        .value("ERT_CMD_STATE_COMPLETED", ERT_CMD_STATE_COMPLETED)
        .value("ERT_CMD_STATE_ERROR", ERT_CMD_STATE_ERROR)
        .value("ERT_CMD_STATE_ABORT", ERT_CMD_STATE_ABORT)
        .value("ERT_CMD_STATE_SUBMITTED", ERT_CMD_STATE_SUBMITTED)
        .value("ERT_CMD_STATE_TIMEOUT", ERT_CMD_STATE_TIMEOUT)
        .value("ERT_CMD_STATE_NORESPONSE", ERT_CMD_STATE_NORESPONSE)
        .value("ERT_CMD_STATE_SKERROR", ERT_CMD_STATE_SKERROR)
        .value("ERT_CMD_STATE_SKCRASHED", ERT_CMD_STATE_SKCRASHED);
}

using Info = xrt::info::device;

// Python gets a string, whatever the type of the value.
template <Info key>
std::string info_of(const xrt::device& device) {
    const auto value = device.get_info<key>();
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, std::string>) {
        return value;
    } else if constexpr (std::is_same_v<Value, xrt::uuid>) {
        return value.to_string();
    } else {
        return std::to_string(value);
    }
}

struct InfoEntry {
    const char* name;
    Info key;
    std::string (*get)(const xrt::device&);
};

template <Info key>
constexpr InfoEntry entry(const char* name) {
    return {name, key, info_of<key>};
}

constexpr InfoEntry kInfo[] = {
    entry<Info::bdf>("bdf"),
    entry<Info::interface_uuid>("interface_uuid"),
    entry<Info::kdma>("kdma"),
    entry<Info::max_clock_frequency_mhz>("max_clock_frequency_mhz"),
    entry<Info::m2m>("m2m"),
    entry<Info::name>("name"),
    entry<Info::nodma>("nodma"),
    entry<Info::offline>("offline"),
    entry<Info::electrical>("electrical"),
    entry<Info::thermal>("thermal"),
    entry<Info::mechanical>("mechanical"),
    entry<Info::memory>("memory"),
    entry<Info::platform>("platform"),
    entry<Info::pcie_info>("pcie_info"),
    entry<Info::host>("host"),
    entry<Info::dynamic_regions>("dynamic_regions"),
    entry<Info::vmr>("vmr"),
};

std::string get_info(const xrt::device& device, Info key) {
    for (const InfoEntry& known : kInfo) {
        if (known.key == key) return known.get(device);
    }
    return "NA";
}

void bind_device(py::module_& m) {
    py::enum_<Info> info(m, "xrt_info_device");
    for (const InfoEntry& known : kInfo) info.value(known.name, known.key);

    py::class_<xrt::uuid>(m, "uuid").def(py::init<const std::string&>()).def("to_string", &xrt::uuid::to_string);

    py::class_<xrt::device>(m, "device")
        .def(py::init<>())
        .def(py::init<unsigned int>())
        .def(py::init<const std::string&>())
        .def("load_xclbin", py::overload_cast<const std::string&>(&xrt::device::load_xclbin))
        .def("load_xclbin", py::overload_cast<const xrt::xclbin&>(&xrt::device::load_xclbin))
        .def("get_xclbin_uuid", &xrt::device::get_xclbin_uuid)
        .def("get_info", get_info);
}

void bind_run(py::module_& m) {
    // None of these lets go of the GIL: a thread that waits here stops every other thread of Python.
    py::class_<xrt::run>(m, "run")
        .def(py::init<>())
        .def(py::init<const xrt::kernel&>())
        .def("start", [](xrt::run& run) { run.start(); })
        .def("set_arg", [](xrt::run& run, int index, xrt::bo& buffer) { run.set_arg(index, buffer); })
        .def("set_arg", [](xrt::run& run, int index, int word) { run.set_arg(index, word); })
        .def("wait", [](const xrt::run& run) { return run.wait(0); })
        .def("wait", [](const xrt::run& run, unsigned int milliseconds) { return run.wait(milliseconds); })
        .def("state", &xrt::run::state)
        .def("add_callback", &xrt::run::add_callback);
}

// An argument of an unsuitable type, or one too many, is silently ignored.
void set_if_possible(xrt::run& run, int index, py::handle argument) {
    try {
        if (py::isinstance<xrt::bo>(argument)) {
            run.set_arg(index, argument.cast<const xrt::bo&>());
        } else {
            run.set_arg(index, argument.cast<int>());
        }
    } catch (const std::exception&) {
    }
}

xrt::run call(const xrt::kernel& kernel, const py::args& arguments) {
    xrt::run run(kernel);
    int index = 0;
    for (const py::handle argument : arguments) set_if_possible(run, index++, argument);
    run.start();
    return run;
}

void bind_kernel(py::module_& m) {
    using Mode = xrt::kernel::cu_access_mode;
    py::class_<xrt::kernel> kernel(m, "kernel");
    py::enum_<Mode>(kernel, "cu_access_mode")
        .value("exclusive", Mode::exclusive)
        .value("shared", Mode::shared)
        .value("none", Mode::none)
        .export_values();
    kernel.def(py::init<const xrt::device&, const xrt::uuid&, const std::string&, Mode>())
        .def(py::init([](const xrt::device& device, const xrt::uuid& uuid, const std::string& name) {
            return xrt::kernel(device, uuid, name);
        }))
        .def("__call__", call)
        .def("group_id", &xrt::kernel::group_id);
}

void write(xrt::bo& buffer, const py::buffer& source, std::size_t seek) {
    const py::buffer_info info = source.request();
    // Strides are ignored: data that are not contiguous arrive wrong.
    buffer.write(info.ptr, static_cast<std::size_t>(info.itemsize * info.size), seek);
}

py::array_t<char> read(xrt::bo& buffer, std::size_t size, std::size_t skip) {
    py::array_t<char> bytes(static_cast<py::ssize_t>(size));
    buffer.read(bytes.mutable_data(), size, skip);
    return bytes;
}

// The view knows only the address, so it does not keep the buffer alive.
py::memoryview map(xrt::bo& buffer) {
    return py::memoryview::from_memory(buffer.map(), static_cast<py::ssize_t>(buffer.size()));
}

void bind_buffer(py::module_& m) {
    using Flags = xrt::bo::flags;
    py::class_<xrt::bo> buffer(m, "bo");
    py::enum_<Flags>(buffer, "flags")
        .value("normal", Flags::normal)
        .value("cacheable", Flags::cacheable)
        .value("device_only", Flags::device_only)
        .value("host_only", Flags::host_only)
        .value("p2p", Flags::p2p)
        .value("svm", Flags::svm)
        .export_values();
    buffer.def(py::init<xrt::device, std::size_t, Flags, xrt::memory_group>())
        .def(py::init<xrt::bo, std::size_t, std::size_t>())
        .def("write", write)
        .def("read", read)
        .def("sync", [](xrt::bo& self, xclBOSyncDirection direction, std::size_t size,
                        std::size_t offset) { self.sync(direction, size, offset); })
        .def("map", map)
        .def("size", &xrt::bo::size)
        .def("address", &xrt::bo::address);
}

void bind_xclbin(py::module_& m) {
    using Xclbin = xrt::xclbin;
    py::class_<Xclbin> xclbin(m, "xclbin");
    py::class_<Xclbin::ip>(xclbin, "xclbinip").def(py::init<>()).def("get_name", &Xclbin::ip::get_name);
    py::bind_vector<std::vector<Xclbin::ip>>(m, "xclbinip_vector");
    py::class_<Xclbin::kernel>(xclbin, "xclbinkernel")
        .def(py::init<>())
        .def("get_name", &Xclbin::kernel::get_name)
        .def("get_num_args", &Xclbin::kernel::get_num_args);
    py::class_<Xclbin::mem>(xclbin, "xclbinmem")
        .def(py::init<>())
        .def("get_tag", &Xclbin::mem::get_tag)
        .def("get_base_address", &Xclbin::mem::get_base_address)
        .def("get_size_kb", &Xclbin::mem::get_size_kb)
        .def("get_used", &Xclbin::mem::get_used)
        .def("get_index", &Xclbin::mem::get_index);
    xclbin.def(py::init<>())
        .def(py::init<const std::string&>())
        .def(py::init<const axlf*>())
        .def("get_kernels", &Xclbin::get_kernels)
        .def("get_ips", &Xclbin::get_ips)
        .def("get_mems", &Xclbin::get_mems)
        .def("get_xsa_name", &Xclbin::get_xsa_name)
        .def("get_uuid", &Xclbin::get_uuid);
}

}  // namespace

PYBIND11_MODULE(pyxrt, m) {
    m.doc() = "XRT's C++ classes, bound as the pyxrt of XRT 2.13 binds them.";
    bind_enums(m);
    bind_device(m);
    bind_run(m);
    bind_kernel(m);
    bind_buffer(m);
    bind_xclbin(m);
}
