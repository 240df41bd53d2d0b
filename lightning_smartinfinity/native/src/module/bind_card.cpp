// Binds cards, their memory and their options.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "card/card_options.hpp"
#include "card/xrt_binding.hpp"
#include "module/module.hpp"
#include "module/python_binding.hpp"
#include "module/workers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

constexpr std::size_t kQueueThreads = 4;

// Holds a binding until it is closed; objects made through the binding keep it open.
class Card {
 public:
    explicit Card(std::shared_ptr<CardBinding> binding) : binding_(std::move(binding)) {}

    std::shared_ptr<CardBinding> binding() const {
        const std::lock_guard lock(mutex_);
        if (!binding_) throw std::invalid_argument("Card: it is closed");
        return binding_;
    }

    void close() {
        std::shared_ptr<CardBinding> closing;
        const std::lock_guard lock(mutex_);
        closing.swap(binding_);
    }

 private:
    mutable std::mutex mutex_;
    std::shared_ptr<CardBinding> binding_;
};

void bind_opened_card(nb::module_& m) {
    nb::class_<Card>(m, "Card",
                     "A card whose kernels are loaded. It is reached through the methods of `binding` (see "
                     "devices/smartssd), which\n"
                     "need the interpreter's lock, or, after open(), through XRT's public C API, without the lock.\n\n"
                     "Every call of it, and of the objects that it returns, raises CardError if the card fails.")
        .def(
            "__init__",
            [](Card* self, nb::object binding) { new (self) Card(make_python_binding(std::move(binding))); },
            "binding"_a)
        .def_static(
            "open",
            [](const CardAddress& device, const std::string& xclbin, const std::string& library) {
                return std::make_unique<Card>(open_xrt_binding(library, device, xclbin));
            },
            "device"_a, nb::kw_only(), "xclbin"_a, "library"_a = "libxrt_coreutil.so.2", WithoutGil(),
            "Open a device by its index or PCIe address and load the kernels of a file.")
        .def(
            "group",
            [](const Card& self, const std::string& kernel, int argument) {
                return self.binding()->kernel(kernel)->group(argument);
            },
            "kernel"_a, "argument"_a, WithoutGil(),
            "Return the number of the memory in which a kernel's argument must be allocated.")
        .def(
            "allocate",
            [](const Card& self, std::size_t nbytes, int group, bool p2p) {
                auto buffer = self.binding()->allocate(nbytes, p2p ? Memory::kPeerToPeer : Memory::kNormal, group);
                std::byte* const data = buffer->map();
                return PythonCardBuffer{std::move(buffer), nbytes, data};
            },
            "nbytes"_a, nb::kw_only(), "group"_a, "p2p"_a = false, WithoutGil(), "Allocate memory on the card.")
        .def("close", &Card::close, WithoutGil(),
             "Close the card; idempotent. The device closes with the last buffer or pipeline that uses it.");
}

void bind_card_buffer(nb::module_& m) {
    nb::class_<PythonCardBuffer>(
        m, "CardBuffer",
        "Memory on the card. If it is peer to peer, only a file system may touch the bytes at `address`:\n"
        "they are the card's own memory.")
        .def_prop_ro("address",
                     [](const PythonCardBuffer& self) { return reinterpret_cast<std::uintptr_t>(self.data); })
        .def_ro("nbytes", &PythonCardBuffer::bytes)
        .def(
            "queue",
            [](const PythonCardBuffer& self, std::int64_t timeout_ms) {
                if (timeout_ms < 1) throw std::invalid_argument("CardBuffer: timeout_ms must be at least 1");
                return std::make_unique<PythonFileQueue>(
                    "FileQueue", std::make_shared<FileQueue>(kQueueThreads, IoEngineKind::kThreads, MemoryRange{},
                                                             FileQueue::Deadline{std::chrono::milliseconds(timeout_ms),
                                                                                 self.buffer, FailureKind::kDevice}));
            },
            nb::kw_only(), "timeout_ms"_a, WithoutGil(),
            "Return a queue that moves bytes between files and this memory only. A request that does not return in\n"
            "time is abandoned: its failure is of kind \"device\", and until it returns it keeps the memory and its "
            "file.");
}

void bind_card_options(nb::module_& m) {
    nb::class_<CardOptions>(
        m, "CardOptions",
        "A card that works the batches of a pipeline: UPDATE only, with fp32 state in one file.\n\n"
        "Args:\n"
        "    card: The card.\n"
        "    kernel: Name of the update rule's kernel.\n"
        "    gradient_buffer_bytes: Card memory for gradients for each buffer of the ring: the largest gradient or "
        "payload.\n"
        "    parameter_bytes: Card memory for parameters for each buffer: at least two bytes for each element.\n"
        "    timeout_ms: Longest time of a kernel's run, a transfer of state or gradients, or a sync.\n"
        "    dram_bytes: Largest number of bytes of card memory for the ring; None: all of it.\n"
        "    gradient_file: File on the card's own storage through which gradients go, with gradient_buffer_bytes\n"
        "        (a multiple of 4096) for each buffer; None: gradients come from host memory.\n\n"
        "Raises:\n    ValueError: The card is closed.")
        .def(
            "__init__",
            [](CardOptions* self, const Card& card, std::string kernel, std::size_t gradient_buffer_bytes,
               std::size_t parameter_bytes, std::int64_t timeout_ms, std::optional<std::size_t> dram_bytes,
               std::optional<StateFile> gradient_file) {
                new (self) CardOptions{card.binding(),
                                       std::move(kernel),
                                       gradient_buffer_bytes,
                                       parameter_bytes,
                                       std::chrono::milliseconds(timeout_ms),
                                       dram_bytes,
                                       std::move(gradient_file)};
            },
            nb::kw_only(), "card"_a, "kernel"_a, "gradient_buffer_bytes"_a, "parameter_bytes"_a, "timeout_ms"_a,
            "dram_bytes"_a = nb::none(), "gradient_file"_a = nb::none());
}

}  // namespace

void bind_card(nb::module_& m) {
    nb::exception<CardError>(m, "CardError", PyExc_RuntimeError).doc() = "A call at a card failed.";
    bind_opened_card(m);
    bind_card_buffer(m);
    bind_card_options(m);
}

}  // namespace smart_infinity
