// Binds the tensor store and its memory.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_device.hpp"
#include "module/memory_view.hpp"
#include "module/module.hpp"
#include "module/workers.hpp"
#include "tensor/gradient_memory.hpp"
#include "tensor/memory_pool.hpp"
#include "tensor/tensor_extent.hpp"
#include "tensor/tensor_store.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

using Lease = MemoryPool::Lease;

void bind_memory(nb::module_& m) {
    nb::class_<Lease> lease(m, "MemoryLease", nb::type_slots(buffer_slots<Lease>),
                            "Memory of a pool, returned to it when the last reference or view is gone.");
    bind_memory_view(lease);
    nb::class_<MemoryPool>(
        m, "MemoryPool",
        "Lends page-aligned memory of any length, absent from forked children. With `device`, it is\n"
        "registered there, if the device permits.")
        .def(nb::new_([](std::shared_ptr<const CudaDevice> device) {
                 return std::make_shared<MemoryPool>(std::move(device));
             }),
             nb::kw_only(), "device"_a = nb::none())
        .def("take", &MemoryPool::take, "nbytes"_a,
             "Lend whole blocks with any content.\n\n"
             "Raises:\n    ValueError: nbytes is 0.\n    OSError: The memory cannot be mapped.")
        .def_prop_rw("limit", &MemoryPool::limit, &MemoryPool::set_limit,
                     "Bytes above which idle memory is given back to the system. More is used as long as it is lent.")
        .def_prop_ro("nbytes", &MemoryPool::used_bytes, "Bytes that are lent, and idle ones that still use memory.")
        .def_prop_ro("lent_bytes", &MemoryPool::lent_bytes);
}

void bind_gradient_memory(nb::module_& m) {
    nb::class_<GradientMemory> memory(
        m, "GradientMemory", nb::type_slots(buffer_slots<GradientMemory>),
        "Addresses for all gradients of a rank. A block uses memory only while it is taken. Memory is returned to the\n"
        "system in granules, each when none of its blocks is taken. Forked children do not have it.\n\n"
        "Raises:\n    ValueError: nbytes is 0, or a granule is not made of whole blocks.\n"
        "    OSError: There is not enough address space.");
    bind_memory_view(memory)
        .def(nb::new_([](std::size_t nbytes, std::size_t granule) {
                 return std::make_shared<GradientMemory>(nbytes, granule);
             }),
             "nbytes"_a, nb::kw_only(), "granule"_a = kBlockBytes)
        .def("take", &GradientMemory::take, "offset"_a, "nbytes"_a, WithoutGil(), "Provide memory for whole blocks.")
        .def("drop", &GradientMemory::drop, "offset"_a, "nbytes"_a, WithoutGil(),
             "Drop the memory of whole blocks; their content is undefined afterwards.");
    nb::class_<GradientWindow>(
        m, "GradientWindow",
        "The gradient of a tasklet during one step: where its memory is, the extent from which it is read before the\n"
        "update, if any, and whether the memory is dropped after it.\n\n"
        "Raises:\n    ValueError: These are not whole blocks of the memory and of the extent.")
        .def(nb::new_([](const std::shared_ptr<GradientMemory>& memory, std::size_t offset, std::size_t nbytes,
                         PythonTensorStore* store, std::shared_ptr<TensorExtent> extent, bool drops) {
                 const auto afterwards = drops ? GradientWindow::Afterwards::kDrop : GradientWindow::Afterwards::kKeep;
                 return std::make_shared<GradientWindow>(
                     memory, offset, nbytes, store != nullptr ? store->get() : nullptr, std::move(extent), afterwards);
             }),
             "memory"_a, nb::kw_only(), "offset"_a, "nbytes"_a, "store"_a = nb::none(), "extent"_a = nb::none(),
             "drops"_a)
        .def_prop_ro("is_stored", &GradientWindow::is_stored, "Whether it is read before the update.")
        .def_prop_ro("is_used", &GradientWindow::is_used,
                     "Whether the update has used it; its memory was then dropped, or may be changed.");
}

void bind_extent(nb::module_& m) {
    nb::class_<TensorExtent>(m, "TensorExtent",
                             "One tensor's place on storage, which is freed with its last reference.")
        .def_prop_ro("path", [](const TensorExtent& self) { return self.file().file().path(); })
        .def_prop_ro("offset", &TensorExtent::offset, "Offset in the file.")
        .def_prop_ro("nbytes", &TensorExtent::bytes, "Size in whole blocks.")
        .def_prop_ro("generation", &TensorExtent::generation, "Number of writes that have begun.");
}

TensorStore::Ticket submit(const PythonTensorStore& store, Direction direction,
                           const std::shared_ptr<TensorExtent>& extent, std::uint64_t offset, Address address,
                           std::size_t nbytes, IoClass io_class) {
    return store.get()->submit(direction, extent, offset, reinterpret_cast<std::byte*>(address), nbytes, io_class);
}

void bind_store(nb::module_& m) {
    nb::class_<PythonTensorStore>(
        m, "TensorStore",
        "Tensors of any length in files that are empty at first and do not outlive the process. Reads find what was\n"
        "written, or fail with kind \"checksum\" if it verifies them. Not usable in a forked child.\n\n"
        "A request that does not return within timeout_ms is abandoned; None: no limit. While the store is busy, the\n"
        "caller keeps the memory of such requests.\n\n"
        "Raises:\n    ValueError: A number is out of range.\n"
        "    OSError: Threads or the I/O engine are unavailable.")
        .def(
            "__init__",
            [](PythonTensorStore* self, const std::vector<const StateFile*>& files, std::size_t io_threads,
               const std::string& io_engine, std::uint64_t step_bytes, std::optional<std::int64_t> timeout_ms,
               bool verifies) {
                std::vector<StateFile> copies;
                for (const StateFile* file : files) copies.push_back(*file);
                std::optional<FileQueue::Deadline> deadline;
                if (const auto timeout = timeout_of(timeout_ms)) deadline = FileQueue::Deadline{*timeout};
                const auto checks = verifies ? TensorExtent::Checks::kChecksums : TensorExtent::Checks::kNone;
                new (self) PythonTensorStore("TensorStore",
                                             std::make_shared<TensorStore>(copies, io_threads, io_engine_of(io_engine),
                                                                           step_bytes, std::move(deadline), checks));
            },
            "files"_a, nb::kw_only(), "io_threads"_a = 4, "io_engine"_a = "auto",
            "step_bytes"_a = TensorStore::kStepBytes, "timeout_ms"_a = nb::none(), "verifies"_a = true)
        .def(
            "allocate", [](PythonTensorStore& self, std::uint64_t nbytes) { return self.get()->allocate(nbytes); },
            "nbytes"_a, WithoutGil(),
            "Reserve an extent in the file that holds least. Its bytes are zero until they are written.\n\n"
            "Raises:\n    OSError: The file system has no room.")
        .def(
            "allocate_free",
            [](PythonTensorStore& self, std::uint64_t nbytes) { return self.get()->allocate_free(nbytes); }, "nbytes"_a,
            WithoutGil(), "Do the same, at once, unless the file would have to grow: then return None.")
        .def("keep_length", method(&TensorStore::keep_length), WithoutGil(),
             "From now on, keep the files at least as long as the extents of this moment need.")
        .def(
            "read",
            [](PythonTensorStore& self, const std::shared_ptr<TensorExtent>& extent, std::uint64_t offset,
               Address address, std::size_t nbytes,
               IoClass io_class) { return submit(self, Direction::kRead, extent, offset, address, nbytes, io_class); },
            "extent"_a, nb::kw_only(), "offset"_a = 0, "address"_a, "nbytes"_a, "io_class"_a = IoClass::kAwaited,
            WithoutGil(),
            "Start reading whole blocks and return a ticket. The memory must stay until the request has ended.\n\n"
            "Raises:\n    ValueError: The bytes cannot be transferred.")
        .def(
            "write",
            [](PythonTensorStore& self, const std::shared_ptr<TensorExtent>& extent, std::uint64_t offset,
               Address address, std::size_t nbytes,
               IoClass io_class) { return submit(self, Direction::kWrite, extent, offset, address, nbytes, io_class); },
            "extent"_a, nb::kw_only(), "offset"_a = 0, "address"_a, "nbytes"_a, "io_class"_a = IoClass::kAwaited,
            WithoutGil(),
            "Start writing whole blocks and return a ticket. The memory must stay, unchanged, until the request has "
            "ended.\n\n"
            "Raises:\n    ValueError: The bytes cannot be transferred.")
        .def("done", method(&TensorStore::done), "ticket"_a, WithoutGil(),
             "Return whether the request has ended.\n\nRaises:\n    ValueError: There is no such ticket.")
        .def("cancel", method(&TensorStore::cancel), "ticket"_a, WithoutGil(),
             "Start no further part of the request, and return whether any part was left out. Its memory is free only\n"
             "after wait().\n\n"
             "Raises:\n    ValueError: There is no such ticket.")
        .def(
            "wait",
            [](PythonTensorStore& self, TensorStore::Ticket ticket) { return self.get()->wait(ticket, check_signals); },
            "ticket"_a, WithoutGil(),
            "Wait until the request has ended. Return its failure, if any, to the first wait only.\n\n"
            "A signal handler that raises, such as that of Ctrl-C, ends the wait; the request continues, its ticket\n"
            "stays open and its memory in use.\n\n"
            "Raises:\n    ValueError: There is no such ticket.")
        .def_prop_ro("taken_bytes", method(&TensorStore::taken_bytes), "Bytes of all extents.")
        .def_prop_ro("file_bytes", method(&TensorStore::file_bytes), "Bytes of all files.")
        .def_prop_ro(
            "io_engine", [](const PythonTensorStore& self) { return name_of(self.get()->io_engine()); },
            "The engine in use: one of io_engines().")
        .def_prop_ro("busy", method(&TensorStore::busy), "Whether an abandoned request has not returned.")
        .def("counters", [](const PythonTensorStore& self) { return PythonCounters{self.report(), {}}; })
        .def("close", &PythonTensorStore::close, WithoutGil(),
             "Wait for requests in flight and close the files. Idempotent.");
}

}  // namespace

void bind_tensor_store(nb::module_& m) {
    bind_memory(m);
    bind_extent(m);
    bind_store(m);
    bind_gradient_memory(m);
}

}  // namespace smart_infinity
