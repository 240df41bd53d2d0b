#pragma once

#include "card/card_options.hpp"
#include "pipeline/pipeline_options.hpp"

namespace smart_infinity {

// Returns the options of a pipeline whose tasklets a card updates.
//
// Throws std::invalid_argument for options that no card can have. The pipeline throws it for options that this card
// cannot have, and CardError if the card lacks the resources.
PipelineOptions with_card(PipelineOptions options, CardOptions card);

}  // namespace smart_infinity
