// Binds the contents of extents: state formats, identities and trailers.

#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "extent/extent.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

nb::object none_if_empty(std::string_view text) { return text.empty() ? nb::none() : nb::object(nb::cast(text)); }

nb::tuple array_names_of(const StateFormat& format) {
    if (format.rule == nullptr) return nb::tuple();
    nb::list arrays;
    for (std::size_t array = 0; array < format.rule->num_arrays; ++array)
        arrays.append(format.rule->array_names[array]);
    return nb::tuple(arrays);
}

nb::tuple item_bytes_of(const StateFormat& format, std::size_t num_arrays) {
    nb::list bytes;
    for (std::size_t region = 0; region < format.num_regions(num_arrays); ++region) {
        if (format.item_bytes_in(region) != 0) bytes.append(format.item_bytes_in(region));
    }
    return nb::tuple(bytes);
}

// Returns the smallest number of elements for which no region but the exponents needs padding, in whole cells.
std::size_t granule_of(const StateFormat& format) {
    std::size_t least = sizeof(float);
    for (const std::size_t bytes : format.item_bytes) {
        if (bytes != 0) least = std::min(least, bytes);
    }
    return kBlockBytes / least;
}

std::size_t extent_bytes_of(const StateFormat& format, std::size_t numel, std::size_t num_arrays,
                            std::size_t num_borders) {
    const std::size_t num_blocks = Blocks::grid().count(numel) + num_borders;
    return regions_bytes(format, num_arrays, numel, num_blocks) + kTrailerPageBytes;
}

std::vector<const StateFormat*> state_formats() {
    std::vector<const StateFormat*> formats;
    for (const StateFormat& format : kStateFormats) formats.push_back(&format);
    return formats;
}

void bind_state_format(nb::module_& m) {
    nb::class_<StateFormat>(
        m, "StateFormat",
        "How an extent holds the state of its elements.\n\n"
        "Attributes:\n"
        "    number: The number in every extent's trailer.\n"
        "    name: The name that users choose.\n"
        "    arrays: Names of the arrays that it holds; empty: any arrays.\n"
        "    step: Class name of the only step that can update it; None: any step can.\n"
        "    parameter_dtype: Type of parameters that equal the first region of an extent, so that\n"
        "        a step need not read that region.\n"
        "    required_parameters: The only type that parameters may have, if the master is stored as\n"
        "        a parameter and a remainder; None: any type.\n"
        "    has_blocks: Whether blocks of elements share an exponent.\n"
        "    in_place: Whether every array is stored in fp32, so that nothing is rounded.\n"
        "    on_cards: Whether SmartSSDs can update it.\n"
        "    granule: Number of elements of which tasklets hold a multiple, so that no region of\n"
        "        elements needs padding and no cell is divided.")
        .def_ro("number", &StateFormat::number)
        .def_ro("name", &StateFormat::name)
        .def_prop_ro("arrays", &array_names_of, nb::sig("def arrays(self) -> tuple[str, ...]"))
        .def_prop_ro(
            "step", [](const StateFormat& self) { return none_if_empty(self.rule == nullptr ? "" : self.rule->step); },
            nb::sig("def step(self) -> str | None"))
        .def_ro("parameter_dtype", &StateFormat::parameter_dtype)
        .def_prop_ro(
            "required_parameters",
            [](const StateFormat& self) {
                return none_if_empty(self.splits_master() ? name_of(self.parameter_dtype) : "");
            },
            nb::sig("def required_parameters(self) -> str | None"))
        .def_prop_ro("has_blocks", &StateFormat::has_blocks)
        .def_prop_ro("in_place", &StateFormat::in_place)
        .def_ro("on_cards", &StateFormat::on_cards)
        .def_prop_ro("granule", &granule_of)
        .def("item_bytes", &item_bytes_of, "num_arrays"_a,
             nb::sig("def item_bytes(self, num_arrays: int) -> tuple[int, ...]"),
             "Return the bytes of an element in each region except the region of exponents.")
        .def("extent_bytes", &extent_bytes_of, "numel"_a, "num_arrays"_a, "num_borders"_a = 0,
             "Return the bytes of an extent: its block-aligned regions and the page that ends in the trailer.\n\n"
             "num_borders counts the blocks beyond one for each cell.");
    m.def("state_formats", &state_formats, nb::rv_policy::reference, "Return every state format, by number.");
}

Identity make_identity(const nb::bytes& job, std::uint32_t rank, std::uint32_t state_format) {
    Identity identity{{}, rank, state_format};
    if (job.size() != kJobBytes) {
        throw std::invalid_argument("Identity: job has " + std::to_string(job.size()) + " bytes, it must have 16");
    }
    std::copy_n(static_cast<const std::uint8_t*>(job.data()), kJobBytes, identity.job.begin());
    return identity;
}

void bind_identity(nb::module_& m) {
    nb::class_<Identity>(
        m, "Identity",
        "The identity of a store, which all its extents carry.\n\nRaises:\n    ValueError: job is not 16 bytes.")
        .def(
            "__init__",
            [](Identity* self, const nb::bytes& job, std::uint32_t rank, std::uint32_t state_format) {
                new (self) Identity(make_identity(job, rank, state_format));
            },
            nb::kw_only(), "job"_a, "rank"_a, "state_format"_a)
        .def_prop_ro("job",
                     [](const Identity& self) {
                         return nb::bytes(reinterpret_cast<const char*>(self.job.data()), self.job.size());
                     })
        .def_ro("rank", &Identity::rank)
        .def_ro("state_format", &Identity::state_format);
}

bool is_trailer_of(const nb::bytes& trailer, const Identity& identity, std::uint64_t index, std::uint64_t generation,
                   std::uint64_t numel, std::uint64_t num_arrays, std::uint64_t extent_bytes) {
    Tasklet tasklet{.index = index, .numel = numel, .num_arrays = num_arrays, .extent_bytes = extent_bytes};
    tasklet.read_generation = generation;
    return trailer.size() == kTrailerBytes &&
           !verify_trailer(static_cast<const std::byte*>(trailer.data()), identity, tasklet);
}

}  // namespace

void bind_extents(nb::module_& m) {
    m.attr("BLOCK_BYTES") = kBlockBytes;
    m.attr("CELL_NUMEL") = kCellNumel;
    m.attr("TRAILER_BYTES") = kTrailerBytes;
    bind_state_format(m);
    bind_identity(m);
    m.def("is_trailer_of", &is_trailer_of, "trailer"_a, "identity"_a, nb::kw_only(), "index"_a, "generation"_a,
          "numel"_a, "num_arrays"_a, "extent_bytes"_a,
          "Return whether these are the TRAILER_BYTES that end a tasklet's extent of this generation.");
}

}  // namespace smart_infinity
