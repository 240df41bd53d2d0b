#include "pipeline/pipeline_options.hpp"

#include <stdexcept>
#include <string>

namespace smart_infinity {
namespace {

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument("Pipeline: " + problem);
}

}  // namespace

PipelineOptions checked(PipelineOptions options) {
    require(!options.files.empty(), "at least one file is needed");
    require(options.num_buffers >= 1 && options.num_buffers <= kMaxBuffers,
            "num_buffers must be in [1, " + std::to_string(kMaxBuffers) + "]");
    require(options.buffer_bytes >= 2 * kBlockBytes && options.buffer_bytes % kBlockBytes == 0 &&
                options.buffer_bytes <= std::size_t{1} << 40,
            "buffer_bytes must be a multiple of " + std::to_string(kBlockBytes) + ", from " +
                std::to_string(2 * kBlockBytes) + " on");
    require(options.compute_threads >= 1 && options.compute_threads <= kMaxThreads,
            "compute_threads must be in [1, " + std::to_string(kMaxThreads) + "]");
    (void)options.identity.format();
    for (const StateFile& file : options.files) (void)file.descriptor();
    return options;
}

}  // namespace smart_infinity
