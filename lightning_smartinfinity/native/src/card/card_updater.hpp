#pragma once

#include <cstddef>
#include <memory>

#include "card/card_options.hpp"
#include "extent/trailer.hpp"
#include "pipeline/updater.hpp"

namespace smart_infinity {

// A card, over a ring in its DRAM: what is in it is only ever touched by the card and by reads and writes of files.
//
// `num_threads` call work(). While busy(), it may not be destroyed.
//
// Throws std::invalid_argument for options that make no sense, CardError if the card does not have what they ask for.
std::unique_ptr<Updater> make_card_updater(CardOptions options, const Identity& identity, std::size_t num_buffers,
                                           std::size_t buffer_bytes, std::size_t num_threads);

}  // namespace smart_infinity
