#pragma once

#include "card/card_options.hpp"
#include "pipeline/pipeline_options.hpp"

namespace smart_infinity {

// Returns the options of a pipeline whose tasklets a card updates.
//
// Throws std::invalid_argument if no card can have these options. The pipeline throws it for invalid options of the
// card, and CardError if the card lacks the resources that they ask for.
PipelineOptions with_card(PipelineOptions options, CardOptions card);

}  // namespace smart_infinity
