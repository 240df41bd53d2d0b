// Compresses gradients of random tasklets, in memory of exact size, by every codec and on every instruction set, and
// compares them with a plain sort. Feeds residuals from several threads, runs batches with a codec, and reads payloads
// with random damage. Allocated bytes are counted. Built with sanitizers by test_builds.py.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gradient/block_scaled.hpp"
#include "gradient/compression.hpp"
#include "gradient/feed_back.hpp"
#include "gradient/gradient_payload.hpp"
#include "gradient/top_k.hpp"
#include "pipeline/compute.hpp"
#include "pipeline/pipeline.hpp"
#include "stress.hpp"
#include "testing/seams.hpp"

namespace {

std::atomic<std::size_t> allocated{0};

}  // namespace

// These count allocated bytes and use the C library's memory, which the sanitizers watch too.
void* operator new(std::size_t bytes) {
    allocated += bytes;
    if (void* const memory = std::malloc(bytes)) return memory;
    throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    allocated += bytes;
    return std::malloc(bytes);
}
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace smart_infinity {
namespace {

const AdamStep kStep{0.5f, 0.1f, 0.999f, 0.001f, 0.9999f, 0.0f, 1e-2f, 3.0f, 1e-8f, 5};

// The memory of one tasklet. Each piece has its exact size.
class Gradient {
 public:
    Gradient(std::uint64_t seed, std::uint64_t numel) : random_(seed) {
        tasklet_.numel = numel;
        dtype_ = static_cast<DType>(random_.upto(kNumDTypes - 1));
        values_.resize(numel * item_bytes(dtype_));
        y_.resize(numel);
        scale_ = random_.coin() ? 1.0f : 8.0f;
        if (random_.coin()) residual_.resize(numel);
        cut();
        fill();
        tasklet_.residual = reinterpret_cast<Address>(residual_.data());
        for (Segment& segment : tasklet_.segments) {
            segment.gradient = reinterpret_cast<Address>(values_.data() + segment.offset * item_bytes(dtype_));
        }
    }

    const Tasklet& tasklet() const { return tasklet_; }
    Tasklet& tasklet() { return tasklet_; }
    DType dtype() const { return dtype_; }
    float scale() const { return scale_; }
    const std::vector<float>& y() const { return y_; }
    const std::vector<bool>& sent() const { return sent_; }
    std::vector<float>& residual() { return residual_; }
    // The bytes allocated by the last encode().
    std::size_t allocated_bytes() const { return allocated_bytes_; }

    std::vector<std::byte> encode(const std::shared_ptr<const GradientCodec>& codec) {
        std::vector<std::byte> payload(codec->payload_bytes(tasklet_.numel, dtype_));
        tasklet_.payload = reinterpret_cast<Address>(payload.data());
        tasklet_.payload_bytes = payload.size();
        const Batch batch{Operation::kUpdate, {}, {}, nullptr, codec, scale_};
        const std::size_t before = allocated;
        const std::size_t bytes = compress(batch, tasklet_).payload_bytes;
        allocated_bytes_ = allocated - before;
        payload.resize(bytes);
        payload.shrink_to_fit();
        return payload;
    }

 private:
    void cut() {
        sent_.assign(tasklet_.numel, false);
        for (std::uint64_t offset = random_.upto(3); offset < tasklet_.numel;) {
            Segment segment;
            segment.offset = offset;
            segment.numel = std::min<std::uint64_t>(1 + random_.upto(tasklet_.numel), tasklet_.numel - offset);
            segment.step = random_.upto(3) == 0 ? kNoStep : 0;
            segment.gradient_dtype = dtype_;
            tasklet_.segments.push_back(segment);
            offset += segment.numel;
            if (segment.step == kNoStep) continue;
            std::fill_n(sent_.begin() + static_cast<std::ptrdiff_t>(segment.offset), segment.numel, true);
        }
        for (std::uint64_t offset = 0; random_.upto(3) > 0 && offset < tasklet_.numel;) {
            const std::uint64_t first = offset + random_.upto(tasklet_.numel - offset);
            const std::uint64_t numel = random_.upto(std::min<std::uint64_t>(200, tasklet_.numel - first));
            tasklet_.padding.emplace_back(first, numel);
            std::fill_n(sent_.begin() + static_cast<std::ptrdiff_t>(first), numel, false);
            offset = first + numel;
        }
    }

    // Fills in numbers whose products and sums are exact in every type.
    void fill() {
        const bool is_sparse = random_.coin();
        for (std::size_t i = 0; i < tasklet_.numel; ++i) {
            const float g = is_sparse && random_.upto(9) > 0 ? 0.0f : std::round(8 * random_.normal()) / 4;
            const auto index = static_cast<std::size_t>(dtype_);
            kernels().narrow[index](&g, values_.data() + i * item_bytes(dtype_), 1);
            const float e = residual_.empty() ? 0.0f : std::round(8 * random_.normal()) / (8 * scale_);
            if (!residual_.empty()) residual_[i] = e;
            y_[i] = sent_[i] ? g + e * scale_ : 0.0f;
        }
    }

    Random random_;
    Tasklet tasklet_;
    DType dtype_;
    float scale_;
    std::vector<std::byte> values_;
    std::vector<float> residual_;
    std::vector<float> y_;
    std::vector<bool> sent_;
    std::size_t allocated_bytes_ = 0;
};

std::vector<float> decoded(const std::vector<std::byte>& payload, std::uint64_t numel, Random& random) {
    const auto gradient = open_payload(payload.data(), payload.size(), numel);
    if (gradient->check()) throw std::invalid_argument("damaged");
    std::vector<float> values(numel);
    for (std::uint64_t first = 0; first < numel;) {
        const std::uint64_t last = std::min<std::uint64_t>(numel, first + 1 + random.upto(20000));
        std::vector<std::byte> part((last - first) * item_bytes(gradient->dtype()));
        gradient->decode(first, last, part.data());
        kernels().widen[static_cast<std::size_t>(gradient->dtype())](part.data(), values.data() + first, last - first);
        first = last;
    }
    return values;
}

class Scenario {
 public:
    Scenario(const std::string& folder, std::uint64_t seed) : folder_(folder), seed_(seed), random_(seed) {
        numel_ = 1 + random_.upto(random_.upto(3) > 0 ? 3000 : 150000);
        constexpr double kRatios[] = {0.001, 0.01, 0.1, 0.5, 1.0};
        const double ratio = kRatios[random_.upto(4)];
        top_k_ =
            std::make_shared<TopK>(ratio, std::nullopt, random_.upto(3) == 0 ? Precision::kSampled : Precision::kExact);
        codec_ = random_.upto(3) == 0 ? std::shared_ptr<const GradientCodec>(std::make_shared<BlockScaled>()) : top_k_;
    }

    void run() {
        Gradient gradient(seed_, numel_);
        const std::vector<std::byte> payload = encode(gradient);
        check(gradient, decoded(payload, numel_, random_));
        feed(gradient, payload);
        update(gradient);
        for (int round = 0; round < 20; ++round) read_damaged(payload);
        work_batch();
    }

 private:
    // Compresses on every instruction set and checks for equal bytes and little memory beside the payload.
    std::vector<std::byte> encode(Gradient& gradient) {
        std::vector<std::vector<std::byte>> payloads;
        for (const InstructionSet choice : supported_instruction_sets()) {
            select_instruction_set(choice);
            payloads.push_back(gradient.encode(codec_));
            require(gradient.allocated_bytes() <= most_allocated(gradient), "compression allocates too much", seed_);
            require(payloads.back() == payloads.front(), "an instruction set gives another payload", seed_);
        }
        record(payloads.front().data(), payloads.front().size());
        return payloads.front();
    }

    std::size_t most_allocated(const Gradient& gradient) const {
        const std::size_t ranges =
            4096 + 400 * (gradient.tasklet().segments.size() + gradient.tasklet().padding.size());
        if (codec_ != top_k_ || top_k_->ratio() == 1) return ranges;
        if (numel_ <= 65536) return ranges + 12 * (2 * numel_ + 8192);
        // Memory for at most two tries with few candidates each, for a sample, or for two tables of counts.
        return ranges + 2 * 12 * (2 * numel_ / 16 + 8192) + 400000;
    }

    void check(const Gradient& gradient, const std::vector<float>& found) {
        const std::vector<float>& y = gradient.y();
        if (codec_ != top_k_) return check_8_bits(y, found);
        const std::size_t wanted = top_k_->count(numel_);
        std::vector<std::size_t> order(numel_);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](std::size_t left, std::size_t right) { return std::abs(y[left]) > std::abs(y[right]); });
        std::vector<float> expected(numel_);
        for (std::size_t i = 0; i < wanted; ++i) expected[order[i]] = y[order[i]];
        if (top_k_->precision() == Precision::kExact || !is_sampled(wanted)) {
            return require(found == expected, "other elements are sent than the largest", seed_);
        }
        for (std::size_t i = 0; i < numel_; ++i) {
            require(found[i] == 0 || found[i] == y[i], "another value is sent", seed_);
        }
    }

    void check_8_bits(const std::vector<float>& y, const std::vector<float>& found) {
        for (std::size_t block = 0; block < numel_; block += kCellNumel) {
            const std::size_t end = std::min<std::size_t>(block + kCellNumel, numel_);
            float largest = 0;
            for (std::size_t i = block; i < end; ++i) largest = std::max(largest, std::abs(y[i]));
            for (std::size_t i = block; i < end; ++i) {
                require(std::abs(found[i] - y[i]) <= largest / 127, "an error is too large", seed_);
            }
        }
    }

    // Feeds back several copies at once. All their residuals must be as expected.
    void feed(Gradient& gradient, const std::vector<std::byte>& payload) {
        if (gradient.residual().empty()) return;
        const std::vector<float> sent = decoded(payload, numel_, random_);
        std::vector<float> expected = gradient.residual();
        for (std::size_t i = 0; i < numel_; ++i) {
            if (gradient.sent()[i]) expected[i] = (gradient.y()[i] - sent[i]) / gradient.scale();
        }
        std::vector<std::vector<float>> residuals(1 + random_.upto(4), gradient.residual());
        std::vector<Tasklet> tasklets;
        for (std::vector<float>& residual : residuals) {
            tasklets.push_back(gradient.tasklet());
            tasklets.back().payload = reinterpret_cast<Address>(payload.data());
            tasklets.back().payload_bytes = payload.size();
            tasklets.back().residual = reinterpret_cast<Address>(residual.data());
        }
        feed_back(tasklets, gradient.scale(), 1 + random_.upto(3));
        for (const std::vector<float>& residual : residuals) {
            require(residual == expected, "a residual is not what was left", seed_);
        }
    }

    // Updates from the payload, which is decoded chunk by chunk, so that no dense gradient is allocated.
    void update(Gradient& gradient) {
        Tasklet empty;
        empty.numel = numel_;
        empty.num_arrays = kMomentArrays;
        empty.extent_bytes = extent_bytes(Regions(kFp32, kMomentArrays, numel_, Blocks::grid()));
        Tasklet tasklet = gradient.tasklet();
        tasklet.num_arrays = empty.num_arrays;
        tasklet.extent_bytes = empty.extent_bytes;
        std::vector<std::byte> payload(codec_->payload_bytes(numel_, gradient.dtype()));
        tasklet.payload = reinterpret_cast<Address>(payload.data());
        tasklet.payload_bytes = payload.size();
        const std::unique_ptr<std::byte, void (*)(void*)> extent(
            static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, empty.extent_bytes)), std::free);
        const Batch write{Operation::kWrite, {}, {}, nullptr};
        require(!compute(write, empty, {}, extent.get(), nullptr), "the first write failed", seed_);
        const Batch batch{Operation::kUpdate, {}, {kStep}, nullptr, codec_, gradient.scale()};
        const Tasklet compressed = compress(batch, tasklet);
        const std::size_t before = allocated;
        require(!compute(batch, compressed, {}, extent.get(), nullptr), "an update failed", seed_);
        require(allocated - before <= 60000, "an update allocates more than a chunk", seed_);
    }

    void read_damaged(std::vector<std::byte> payload) {
        const std::size_t end = random_.coin() ? std::min<std::size_t>(payload.size(), 192) : payload.size();
        for (std::size_t i = random_.upto(3); i > 0; --i) {
            payload[random_.upto(end - 1)] = static_cast<std::byte>(random_.upto(255));
        }
        if (random_.upto(9) == 0) payload.resize(random_.upto(payload.size()));
        payload.shrink_to_fit();
        try {
            const std::size_t bytes = payload_bytes(payload.data(), payload.size());
            require(bytes <= payload.size(), "a payload is larger than its memory", seed_);
            (void)decoded(payload, numel_, random_);
        } catch (const std::invalid_argument&) {
            // The payload is refused.
        }
    }

    // Works a batch of tasklets that several threads compress and update.
    void work_batch() {
        std::vector<std::unique_ptr<Gradient>> gradients;
        std::vector<std::vector<std::byte>> payloads;
        std::vector<std::vector<float>> parameters;
        const std::size_t num_tasklets = 1 + random_.upto(5);
        const std::uint64_t numel = 1 + random_.upto(6000);
        const std::size_t extent = extent_bytes(Regions(kFp32, kMomentArrays, numel, Blocks::grid()));
        const std::string path = make_file(folder_, "gradients", num_tasklets * extent, seed_);
        const StateFile file(path, Access::kBuffered);
        ::unlink(path.c_str());
        Pipeline pipeline({{file}, {}, 1 + random_.upto(2), extent, 2, 1 + random_.upto(3), std::nullopt});
        Batch write{Operation::kWrite, {}, {}, nullptr};
        Batch update{Operation::kUpdate, {}, {kStep}, nullptr, codec_, 0};
        for (std::size_t index = 0; index < num_tasklets; ++index) {
            gradients.push_back(std::make_unique<Gradient>(seed_ * 100 + index, numel));
            Tasklet tasklet = gradients.back()->tasklet();
            payloads.emplace_back(codec_->payload_bytes(numel, gradients.back()->dtype()));
            parameters.emplace_back(numel);
            tasklet.index = index;
            tasklet.num_arrays = kMomentArrays;
            tasklet.extent_bytes = extent;
            tasklet.read_offset = tasklet.write_offset = index * extent;
            tasklet.payload = reinterpret_cast<Address>(payloads.back().data());
            tasklet.payload_bytes = payloads.back().size();
            for (Segment& segment : tasklet.segments) {
                segment.parameter = reinterpret_cast<Address>(parameters.back().data() + segment.offset);
            }
            update.tasklets.push_back(tasklet);
            tasklet.segments.clear();
            tasklet.padding.clear();
            tasklet.payload = tasklet.payload_bytes = tasklet.residual = 0;
            write.tasklets.push_back(tasklet);
        }
        update.residual_scale = gradients.front()->scale();
        pipeline.submit(write);
        require(!pipeline.finish(), "the first write failed", seed_);
        pipeline.submit(update);
        require(!pipeline.finish(), "an update failed", seed_);
        check_updated(gradients, update, parameters);
        feed_back(update.tasklets, update.residual_scale, 2);
    }

    // Checks that, from a state of zeros, sent elements move against their sign and no others move.
    void check_updated(const std::vector<std::unique_ptr<Gradient>>& gradients, const Batch& update,
                       const std::vector<std::vector<float>>& parameters) {
        for (std::size_t index = 0; index < gradients.size(); ++index) {
            const Tasklet& tasklet = update.tasklets[index];
            const auto* const memory = reinterpret_cast<const std::byte*>(tasklet.payload);
            const std::vector<std::byte> payload(memory, memory + payload_bytes(memory, tasklet.payload_bytes));
            const std::vector<float> sent = decoded(payload, tasklet.numel, random_);
            for (std::size_t i = 0; i < tasklet.numel; ++i) {
                const float moved = parameters[index][i];
                const bool is_updated = gradients[index]->sent()[i];
                require(is_updated || sent[i] == 0, "an element is sent that must not be", seed_);
                require((moved < 0) == (sent[i] > 0) && (moved > 0) == (sent[i] < 0), "an update is another", seed_);
            }
        }
    }

    const std::string folder_;
    const std::uint64_t seed_;
    Random random_;
    std::uint64_t numel_ = 0;
    std::shared_ptr<const TopK> top_k_;
    std::shared_ptr<const GradientCodec> codec_;
};

}  // namespace
}  // namespace smart_infinity

int main(int argc, char** argv) {
    return smart_infinity::run_scenarios(argc, argv,
                                         [argv](std::uint64_t seed) { smart_infinity::Scenario(argv[1], seed).run(); });
}
