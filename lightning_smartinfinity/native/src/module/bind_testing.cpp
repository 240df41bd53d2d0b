// Binds functions for tests, which change workers and devices or expose parts of the core.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/ending.hpp"
#include "base/numa.hpp"
#include "checksum/crc32c.hpp"
#include "gradient/compression.hpp"
#include "gradient/gradient_codec.hpp"
#include "gradient/gradient_payload.hpp"
#include "gradient/validate_batch.hpp"
#include "kernels/instruction_set.hpp"
#include "module/module.hpp"
#include "module/workers.hpp"
#include "pipeline/schedule.hpp"
#include "testing/fault_injection.hpp"
#include "testing/hold.hpp"
#include "testing/seams.hpp"
#include "testing/throttle.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

template <class Worker>
void put_faults(Worker& worker, const Faults& faults, const std::shared_ptr<FaultCounts>& counts, bool gradients) {
    if (gradients) {
        if constexpr (std::is_same_v<Worker, PythonPipeline>) {
            const auto gate = std::make_shared<FaultInjectingGate>(faults, counts);
            Seams::put_before_transfers(*worker.get(), [gate](const IoRequest& request) { (*gate)(request); });
            return;
        }
        throw std::invalid_argument("inject: gradients are transferred by pipelines only");
    }
    Seams::decorate_engine(*worker.get(), [&faults, &counts](std::unique_ptr<IoEngine> engine) {
        return std::make_unique<FaultInjectingEngine>(std::move(engine), faults, counts);
    });
}

template <class Worker>
void bind_inject(nb::module_& m, const char* name) {
    m.def(
        "inject",
        [](Worker& worker, std::uint64_t seed, std::int64_t max_delay_us, std::int64_t fail_read_at,
           std::int64_t fail_write_at, std::int64_t short_transfer_every, int error, std::int64_t delay_us,
           std::int64_t flip_read_at, std::int64_t misread_at, std::int64_t misread_by, std::int64_t lose_write_at,
           bool gradients) {
            const Faults faults{seed,     max_delay_us, fail_read_at, fail_write_at, short_transfer_every, error,
                                delay_us, flip_read_at, misread_at,   misread_by,    lose_write_at};
            auto counts = std::make_shared<FaultCounts>();
            put_faults(worker, faults, counts, gradients);
            return counts;
        },
        nb::arg(name), nb::kw_only(), "seed"_a = 0, "max_delay_us"_a = 0, "fail_read_at"_a = -1, "fail_write_at"_a = -1,
        "short_transfer_every"_a = 0, "errno"_a = EIO, "delay_us"_a = 0, "flip_read_at"_a = -1, "misread_at"_a = -1,
        "misread_by"_a = 4096, "lose_write_at"_a = -1, "gradients"_a = false, WithoutGil(),
        "Inject faults from now on, for tests, and count them. Requests are counted from 0, reads and writes\n"
        "separately.\n\n"
        "One bit of read flip_read_at is flipped. Read misread_at returns the bytes misread_by before its offset, or\n"
        "after it if there are too few before. Write lose_write_at is reported done, but not made. delay_us is added\n"
        "to the time of every request. With `gradients`, faults other than short transfers are injected into\n"
        "requests to a card's gradient file; otherwise, faults are injected into all other requests.");
}

void bind_counts(nb::module_& m) {
    nb::class_<FaultCounts> counts(m, "FaultCounts",
                                   "Counts requests, and for each fault the requests on which it had an effect. A\n"
                                   "misread or lost request counts only if that changed a byte.");
    const auto add = [&counts](const char* name, FaultCounts::Count FaultCounts::* count) {
        counts.def_prop_ro(name, [count](const FaultCounts& self) { return (self.*count).load(); });
    };
    add("reads", &FaultCounts::reads);
    add("writes", &FaultCounts::writes);
    add("failed", &FaultCounts::failed);
    add("shortened", &FaultCounts::shortened);
    add("delayed", &FaultCounts::delayed);
    add("flipped", &FaultCounts::flipped);
    add("misread", &FaultCounts::misread);
    add("lost", &FaultCounts::lost);
}

std::shared_ptr<Hold> hold_of(std::int64_t read_at, std::int64_t write_at, std::uint64_t count) {
    const bool read = read_at >= 0;
    return std::make_shared<Hold>(read ? Direction::kRead : Direction::kWrite,
                                  static_cast<std::uint64_t>(read ? read_at : write_at), count);
}

template <class Worker>
std::shared_ptr<Hold> hold_in_engine(Worker& worker, std::int64_t read_at, std::int64_t write_at, std::uint64_t count) {
    const auto hold = hold_of(read_at, write_at, count);
    Seams::decorate_engine(*worker.get(), [&hold](std::unique_ptr<IoEngine> engine) {
        return std::make_unique<HoldingEngine>(std::move(engine), hold);
    });
    return hold;
}

void bind_hold(nb::module_& m) {
    nb::class_<Hold>(
        m, "Hold",
        "Holds `count` reads or writes of a pipeline or queue, for tests: counted from now, those from number\n"
        "`read_at` or `write_at` on do not start until release(). With `gradients`, it holds only those of a card's\n"
        "gradient file; otherwise, all others.")
        .def(nb::new_([](PythonPipeline& pipeline, std::int64_t read_at, std::int64_t write_at, std::uint64_t count,
                         bool gradients) {
                 if (!gradients) return hold_in_engine(pipeline, read_at, write_at, count);
                 const auto hold = hold_of(read_at, write_at, count);
                 Seams::put_before_transfers(*pipeline.get(),
                                             [hold](const IoRequest& request) { wait_for(*hold, request); });
                 return hold;
             }),
             "pipeline"_a, nb::kw_only(), "read_at"_a = -1, "write_at"_a = -1, "count"_a = 1, "gradients"_a = false)
        .def(nb::new_(&hold_in_engine<PythonFileQueue>), "queue"_a, nb::kw_only(), "read_at"_a = -1, "write_at"_a = -1,
             "count"_a = 1)
        .def(nb::new_(&hold_in_engine<PythonTensorStore>), "store"_a, nb::kw_only(), "read_at"_a = -1,
             "write_at"_a = -1, "count"_a = 1)
        .def_static(
            "of_resizing",
            [](PythonTensorStore& store) {
                const auto hold = hold_of(-1, 0, std::numeric_limits<std::uint64_t>::max());
                Seams::put_before_resizing(*store.get(), [hold] { wait_for(*hold, {.direction = Direction::kWrite}); });
                return hold;
            },
            "store"_a, "Hold every change of the length of a store's files.")
        .def_prop_ro("count", &Hold::count, "Number of requests that are held now.")
        .def("release", &Hold::release, WithoutGil(), "Release all held requests, and hold no more.");
}

template <class Worker>
void slow_down(const std::shared_ptr<Throttle>& throttle, Worker& worker, const std::vector<const StateFile*>& files) {
    std::set<int> descriptors;
    for (const StateFile* file : files) descriptors.insert(file->descriptor());
    Seams::decorate_engine(*worker.get(), [&](std::unique_ptr<IoEngine> engine) {
        return std::make_unique<ThrottledEngine>(std::move(engine), throttle, std::move(descriptors));
    });
}

template <class Worker>
std::shared_ptr<Throttle> put_throttle(Worker& worker, const std::vector<const StateFile*>& files) {
    auto throttle = std::make_shared<Throttle>();
    slow_down(throttle, worker, files);
    return throttle;
}

void bind_throttle(nb::module_& m) {
    nb::class_<Throttle>(m, "Throttle",
                         "Makes files of a pipeline or of a store slow, for tests: their requests take turns.")
        .def(nb::new_(&put_throttle<PythonPipeline>), "pipeline"_a, "files"_a)
        .def(nb::new_(&put_throttle<PythonTensorStore>), "store"_a, "files"_a)
        .def("share", &slow_down<PythonTensorStore>, "store"_a, "files"_a,
             "Throttle a store's files together with those already throttled.")
        .def_prop_rw(
            "bytes_per_second", [](const Throttle& self) { return self.bytes_per_second.load(); },
            [](Throttle& self, double rate) { self.bytes_per_second = rate; },
            "Total speed of all files; 0: unlimited.");
}

// Reads an extent, and returns the name of the thread that compared its checksums.
std::string checking_thread(const PythonTensorStore& store, const std::shared_ptr<TensorExtent>& extent,
                            Address address) {
    std::promise<std::string> name;
    store.get()->read(extent, reinterpret_cast<std::byte*>(address), extent->bytes(), IoClass::kAwaited, nullptr,
                      [&name](const std::optional<Failure>&) {
                          char text[16] = {};
                          pthread_getname_np(pthread_self(), text, sizeof text);
                          name.set_value(text);
                      });
    return name.get_future().get();
}

EndingClock::Clock::time_point moment(double seconds) {
    return EndingClock::Clock::time_point(
        std::chrono::duration_cast<EndingClock::Clock::duration>(std::chrono::duration<double>(seconds)));
}

void bind_ending_clock(nb::module_& m) {
    using Seconds = std::chrono::duration<double>;
    nb::class_<EndingClock>(m, "EndingClock",
                            "A clock like the process's own. Moments are seconds since an arbitrary one.")
        .def(nb::init<>())
        .def(
            "ask", [](EndingClock& self, double now) { self.ask(moment(now)); }, "now"_a)
        .def("take_back", &EndingClock::take_back)
        .def(
            "limit",
            [](const EndingClock& self, double now) -> std::optional<std::pair<double, double>> {
                const auto limit = self.limit(moment(now));
                if (!limit) return std::nullopt;
                return std::pair(Seconds(limit->time).count(), Seconds(limit->from.time_since_epoch()).count());
            },
            "now"_a, "Return the limit of a wait, and the earliest moment from which it counts.")
        .def(
            "abandon", [](EndingClock& self, double since, double now) { self.abandon(moment(since), moment(now)); },
            "since"_a, "now"_a);
}

void bind_use_cuda_library(nb::module_& m) {
    m.def("use_cuda_library", &use_cuda_library, "path"_a.none(),
          "Open this library instead of libcuda.so.1 from now on; None: libcuda.so.1. Existing devices keep theirs.");
}

void bind_instruction_sets(nb::module_& m) {
    nb::enum_<InstructionSet>(m, "InstructionSet", "Instruction sets of the kernels; all give the same bits.")
        .value("SCALAR", InstructionSet::kScalar)
        .value("AVX2", InstructionSet::kAvx2)
        .value("AVX512", InstructionSet::kAvx512);
    m.def("supported_instruction_sets", &supported_instruction_sets,
          "Return the instruction sets that this CPU supports, slowest first.");
    m.def(
        "select_instruction_set",
        [](std::optional<InstructionSet> choice) {
            select_instruction_set(choice.value_or(supported_instruction_sets().back()));
            return selected_instruction_set().load();
        },
        "choice"_a.none(),
        "Use an instruction set from now on, in every thread; None is the best. Return it.\n\n"
        "Raises:\n    ValueError: This CPU does not support it.");
}

void sync(const PythonCardBuffer& buffer, Sync direction, std::size_t nbytes, std::size_t offset) {
    if (offset > buffer.bytes || nbytes > buffer.bytes - offset) {
        throw std::invalid_argument("CardBuffer: " + std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                                    " leave its " + std::to_string(buffer.bytes));
    }
    buffer.buffer->sync(direction, nbytes, offset);
}

void bind_sync(nb::module_& m) {
    m.def(
        "sync_to_card",
        [](const PythonCardBuffer& buffer, std::size_t nbytes, std::size_t offset) {
            sync(buffer, Sync::kToCard, nbytes, offset);
        },
        "buffer"_a, "nbytes"_a, "offset"_a = 0, WithoutGil(), "Copy bytes of a card's memory to the card.");
    m.def(
        "sync_from_card",
        [](const PythonCardBuffer& buffer, std::size_t nbytes, std::size_t offset) {
            sync(buffer, Sync::kFromCard, nbytes, offset);
        },
        "buffer"_a, "nbytes"_a, "offset"_a = 0, WithoutGil(), "Copy bytes of a card's memory from the card.");
}

std::size_t encode(const std::shared_ptr<const GradientCodec>& codec, const Tasklet& tasklet, float residual_scale) {
    const Batch batch{Operation::kUpdate, {tasklet}, {}, nullptr, codec, residual_scale};
    validate_gradients(batch);
    return compress(batch, batch.tasklets.front()).payload_bytes;
}

DType decode(Address payload, std::size_t nbytes, std::uint64_t numel, Address out, std::uint64_t first,
             std::optional<std::uint64_t> last) {
    const std::uint64_t end = last.value_or(numel);
    if (first > end || end > numel) throw std::invalid_argument("decode_gradient: first and last leave the gradient");
    const auto gradient = open_payload(reinterpret_cast<const std::byte*>(payload), nbytes, numel);
    if (const auto problem = gradient->check()) throw std::invalid_argument("decode_gradient: " + *problem);
    gradient->decode(first, end, reinterpret_cast<void*>(out));
    return gradient->dtype();
}

std::uint32_t crc32c_of_width(Address address, std::size_t nbytes, std::uint32_t value, int width) {
    const std::vector<int> widths = crc32c_widths();
    if (std::find(widths.begin(), widths.end(), width) == widths.end()) {
        throw std::invalid_argument("crc32c_by: this CPU does not support the width " + std::to_string(width));
    }
    return crc32c_by(width, pointer_to(address), nbytes, value);
}

// Binds functions that the package uses only inside the core.
void bind_parts(nb::module_& m) {
    m.def("crc32c_by", &crc32c_of_width, "address"_a, "nbytes"_a, "value"_a, "width"_a, WithoutGil(),
          "Return the CRC-32C of memory, continuing `value`, computed with one of crc32c_widths().\n\n"
          "Raises:\n    ValueError: This CPU does not support the width.");
    m.def("crc32c_widths", &crc32c_widths,
          "Return the register widths, in bits, that can compute CRC-32C on this CPU, slowest first; 0 is the table.");
    m.def(
        "leave_out_crc32c", [](bool left_out) { crc32c_left_out().store(left_out); }, "left_out"_a,
        "Make every CRC-32C of this process 0, both in writing and in comparing, or compute them again.");
    m.def(
        "use_system_folder",
        [](std::optional<std::string> path) { system_folder() = std::move(path).value_or("/sys"); }, "path"_a.none(),
        "Read NUMA nodes from this folder instead of /sys from now on; None: from /sys.");
    m.def("crc32c_combine", &crc32c_combine, "first"_a, "second"_a, "nbytes"_a,
          "Return the CRC-32C of two consecutive pieces of memory from that of each; nbytes is the second's size.");
    m.def("checking_thread", &checking_thread, "store"_a, "extent"_a, "address"_a, WithoutGil(),
          "Read an extent to this address, and return the name of the thread that compared its checksums.");
    m.def("encode_gradient", &encode, "codec"_a, "tasklet"_a, nb::kw_only(), "residual_scale"_a = 1.0f, WithoutGil(),
          "Compress a tasklet's gradient into its payload now, as UPDATE does for a batch with this codec.\n\n"
          "Returns:\n    Bytes of the payload.\n\n"
          "Raises:\n    ValueError: The gradient cannot be compressed.");
    m.def("decode_gradient", &decode, "payload"_a, "nbytes"_a, "numel"_a, "out"_a, nb::kw_only(), "first"_a = 0,
          "last"_a = nb::none(), WithoutGil(),
          "Write elements [first, last) of a payload's gradient to `out`, dense, in the type that is returned.\n\n"
          "Args:\n"
          "    payload: Address of the payload, a multiple of 4.\n"
          "    nbytes: Size of the payload.\n"
          "    numel: Number of the tasklet's elements.\n"
          "    out: Address of memory for (last - first) elements of up to 4 bytes.\n"
          "    first: First element.\n"
          "    last: Element after the last one; None is numel.\n\n"
          "Raises:\n    ValueError: It is not a payload for this many elements.");
    m.def(
        "extend_resident",
        [](TransferSchedule& schedule, std::size_t num_tasklets, bool reads, bool writes) {
            schedule.extend(std::vector<TransferSchedule::Way>(num_tasklets, {reads, writes, true}));
        },
        "schedule"_a, "num_tasklets"_a, nb::kw_only(), "reads"_a, "writes"_a,
        "Append resident tasklets; their buffers are numbered from `num_buffers` on.");
}

}  // namespace

void bind_testing(nb::module_& m) {
    bind_counts(m);
    bind_inject<PythonPipeline>(m, "pipeline");
    bind_inject<PythonFileQueue>(m, "queue");
    bind_inject<PythonTensorStore>(m, "store");
    bind_throttle(m);
    bind_hold(m);
    bind_ending_clock(m);
    bind_use_cuda_library(m);
    bind_instruction_sets(m);
    bind_sync(m);
    bind_parts(m);
}

}  // namespace smart_infinity
