#include "card/card_passes.hpp"

#include <optional>

namespace smart_infinity {
namespace {

// A pass under construction. Runs that pass elements through, and runs without parameters, fit into every pass.
struct OpenPass {
    std::optional<DType> gradient_dtype;
    std::optional<DType> parameter_dtype;
    std::vector<RunRange> runs;

    bool fits(const Segment& segment) const {
        return gradient_dtype.value_or(segment.gradient_dtype) == segment.gradient_dtype &&
               (segment.parameter == 0 || parameter_dtype.value_or(segment.parameter_dtype) == segment.parameter_dtype);
    }
    // If the pass gives out no parameters, the kernel still writes some, in the shortest type.
    CardPass close() const {
        return {gradient_dtype.value_or(DType::kFloat32), parameter_dtype.value_or(DType::kBFloat16), runs};
    }
};

class PassBuilder {
 public:
    explicit PassBuilder(const Tasklet& tasklet) {
        for (const Segment& segment : tasklet.segments) {
            if (segment.numel == 0) continue;
            pass_through(segment.offset);
            if (segment.step == kNoStep) {
                pass_through(segment.offset + segment.numel);
            } else {
                update(segment);
            }
        }
        pass_through(tasklet.numel);
        close();
    }

    std::vector<CardPass> passes;

 private:
    void pass_through(std::uint64_t end) { run(end, kNoStep); }

    void update(const Segment& segment) {
        if (!pass_.fits(segment)) close();
        pass_.gradient_dtype = segment.gradient_dtype;
        if (segment.parameter != 0) pass_.parameter_dtype = segment.parameter_dtype;
        run(segment.offset + segment.numel, segment.step);
        pass_.runs.back().segments.push_back(&segment);
    }

    // Adds the elements up to `end`: to the last run if it has the same step, otherwise to a new one.
    void run(std::uint64_t end, std::int64_t step) {
        if (end <= end_) return;
        const auto last = static_cast<std::uint32_t>(end);
        if (!pass_.runs.empty() && pass_.runs.back().step == step) {
            pass_.runs.back().last = last;
        } else {
            pass_.runs.push_back({static_cast<std::uint32_t>(end_), last, step, {}});
        }
        end_ = end;
    }

    void close() {
        if (!pass_.runs.empty()) passes.push_back(pass_.close());
        pass_ = {};
    }

    OpenPass pass_;
    std::uint64_t end_ = 0;
};

}  // namespace

std::vector<Stretch> stretches_of(const CardPass& pass) {
    std::vector<Stretch> stretches;
    for (const RunRange& run : pass.runs) {
        if (run.step == kNoStep) continue;
        if (!stretches.empty() && stretches.back().last == run.first) {
            stretches.back().last = run.last;
        } else {
            stretches.push_back({run.first, run.last});
        }
    }
    return stretches;
}

std::vector<CardPass> card_passes(const Tasklet& tasklet) { return PassBuilder(tasklet).passes; }

}  // namespace smart_infinity
