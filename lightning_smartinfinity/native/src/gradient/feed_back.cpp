#include "gradient/feed_back.hpp"

#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/flush_subnormals.hpp"
#include "base/worker_pool.hpp"
#include "gradient/gradient_payload.hpp"
#include "gradient/gradient_source.hpp"
#include "gradient/payload_header.hpp"
#include "gradient/validate_batch.hpp"
#include "kernels/instruction_set.hpp"

namespace smart_infinity {
namespace {

// Calls work(index) for each index below `count`, on up to `threads` threads: fewer if no more can be started. At the
// end it rethrows the first exception.
template <class Work>
void for_each_index(std::size_t count, std::size_t threads, const Work& work) {
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::exception_ptr error;
    const auto run = [&] {
        try {
            for (std::size_t index = next++; index < count; index = next++) work(index);
        } catch (...) {
            const std::lock_guard lock(mutex);
            if (!error) error = std::current_exception();
        }
    };
    {
        const BlockedSignals blocked;
        std::vector<std::jthread> others;
        others.reserve(std::min(threads, count));
        try {
            while (others.size() + 1 < std::min(threads, count)) others.emplace_back(run);
        } catch (const std::exception&) {
            // No further thread can be started. The started ones already work, so continue with them.
        }
        run();
    }
    if (error) std::rethrow_exception(error);
}

std::byte* memory_of(const Tasklet& tasklet) { return reinterpret_cast<std::byte*>(tasklet.payload); }

bool is_fed_back(const Tasklet& tasklet) {
    return tasklet.payload_bytes >= sizeof(PayloadHeader) &&
           magic_of(memory_of(tasklet), tasklet.payload_bytes) == kFedBackMagic;
}

std::unique_ptr<GradientPayload> checked_payload(const Tasklet& tasklet) {
    const auto refuse = [&](const std::string& problem) {
        throw std::invalid_argument("feed_back: the compressed gradient of tasklet " + std::to_string(tasklet.index) +
                                    " is refused: " + problem);
    };
    std::unique_ptr<GradientPayload> payload;
    try {
        const std::byte* const memory = memory_of(tasklet);
        payload = open_payload(memory, payload_bytes(memory, tasklet.payload_bytes), tasklet.numel);
    } catch (const std::invalid_argument& error) {
        refuse(error.what());
    }
    if (const auto problem = payload->check()) refuse(*problem);
    return payload;
}

// The work for one tasklet. Its construction does everything that can fail, so nothing fails after a residual changes.
struct Feeding {
    Feeding(const Tasklet& tasklet, float scale) : payload(checked_payload(tasklet)), source(tasklet, scale) {}

    std::unique_ptr<GradientPayload> payload;
    GradientSource source;
};

void feed(const Feeding& feeding, float scale) {
    const KeepSubnormals keep;
    const GradientSource& source = feeding.source;
    const GradientPayload& payload = *feeding.payload;
    const Kernels& table = kernels();
    const auto feed_residual = table.feed_residual[static_cast<std::size_t>(source.dtype())];
    const auto widen = table.widen[static_cast<std::size_t>(payload.dtype())];
    alignas(64) float values[GradientSource::kChunkNumel];
    alignas(64) float sent[GradientSource::kChunkNumel];
    const bool widens = payload.dtype() != DType::kFloat32;
    source.for_each_stored([&](std::uint64_t first, std::size_t numel, const std::byte* gradient, float* residual) {
        payload.decode(first, first + numel, widens ? values : sent);
        if (widens) widen(values, sent, numel);
        feed_residual(gradient, sent, scale, residual, numel);
    });
}

}  // namespace

void feed_back(const std::vector<Tasklet>& tasklets, float residual_scale, std::size_t threads) {
    if (threads < 1) throw std::invalid_argument("feed_back: threads must be at least 1");
    const Batch batch{Operation::kUpdate, tasklets, {}, nullptr, nullptr, residual_scale};
    std::vector<const Tasklet*> fed;
    for (const Tasklet& tasklet : batch.tasklets) {
        if (tasklet.residual != 0) fed.push_back(&tasklet);
    }
    validate_gradients(batch);
    std::erase_if(fed, [](const Tasklet* tasklet) { return is_fed_back(*tasklet); });
    std::vector<std::unique_ptr<Feeding>> feedings(fed.size());
    for_each_index(fed.size(), threads, [&](std::size_t index) {
        feedings[index] = std::make_unique<Feeding>(*fed[index], residual_scale);
    });
    for_each_index(fed.size(), threads, [&](std::size_t index) { feed(*feedings[index], residual_scale); });
    for (const Tasklet* tasklet : fed) std::memcpy(memory_of(*tasklet), &kFedBackMagic, sizeof kFedBackMagic);
}

}  // namespace smart_infinity
