#include "card/card_job.hpp"

#include <cstring>
#include <string>

#include "base/stopwatch.hpp"
#include "checksum/crc32c.hpp"
#include "gradient/payload_header.hpp"

namespace smart_infinity {
namespace {

const char* name_of_state(int state) {
    switch (state) {
        case kRunError:
            return "ERROR";
        case kRunAborted:
            return "ABORT";
        default:
            return "a state of failure";
    }
}

bool gives_parameters(const RunRange& run) {
    for (const Segment* segment : run.segments) {
        if (segment->parameter != 0) return true;
    }
    return false;
}

}  // namespace

CardJob::CardJob(const Job& job, const CardOptions& options, const Identity& identity, CardRing& ring, CardCalls& calls)
    : job_(job),
      options_(options),
      type_(card_kernel_type(options.kernel)),
      identity_(identity),
      buffers_(ring.buffers(job.buffer)),
      calls_(calls),
      regions_(regions_of(identity.format(), job.tasklet)),
      gradient_(job.tasklet, options, ring, job.buffer, calls) {}

DeviceTraffic CardJob::traffic() const {
    DeviceTraffic traffic = traffic_;
    traffic += gradient_.traffic();
    return traffic;
}

std::optional<Refusal> CardJob::run() {
    const TrailerPage trailer(job_.memory.trailer_page);
    if (auto refusal = trailer.verify(identity_, job_.tasklet)) return refusal;
    gradient_.send_payload();
    const std::vector<CardPass> passes = card_passes(job_.tasklet);
    for (const CardPass& pass : passes) work(pass, &pass == &passes.back());
    trailer.write(identity_, job_.tasklet, written_);
    return std::nullopt;
}

// Parameters leave the card only after the checksums of all their inputs have been checked. If types change within a
// tasklet, the parameters of a pass leave earlier, to make room for the next pass.
void CardJob::work(const CardPass& pass, bool is_last) {
    parameters_.clear();
    gradient_.send(pass);
    for (const RunRange& run : pass.runs) work(pass, run);
    if (is_last) check_arrays_read();
    receive(pass);
}

void CardJob::work(const CardPass& pass, const RunRange& run) {
    clear_status();
    std::shared_ptr<CardRun> call = buffers_.take_run();
    set_arguments(pass, run, *call);
    execute(call);
    buffers_.keep(std::move(call));
    const CardStatus status = take_status();
    if (const auto problem = problem_of(status, type_, run.last - run.first, gradient_.sent_for(pass, run))) {
        throw CardError(*problem);
    }
    take_checksums(status, run);
}

void CardJob::set_arguments(const CardPass& pass, const RunRange& run, CardRun& call) {
    const auto& arrays = buffers_.arrays(regions_);
    call.set(type_.gradient(), buffers_.gradient().buffer);
    for (std::size_t array = 0; array < arrays.size(); ++array) {
        call.set(type_.array_in(array), arrays[array]);
        call.set(type_.array_out(array), arrays[array]);
    }
    call.set(type_.parameter(), buffers_.parameter().buffer);
    call.set(type_.status(), buffers_.status().buffer);
    const bool active = run.step != kNoStep;
    int argument = type_.first_word();
    for (const std::uint32_t word :
         {static_cast<std::uint32_t>(job_.tasklet.numel), run.first, run.last, gradient_.form(pass),
          static_cast<std::uint32_t>(pass.parameter_dtype), static_cast<std::uint32_t>(active)}) {
        call.set(argument++, word);
    }
    // A run that passes elements through has no step, so it can use any scalars.
    const StepWords step = active ? words_of(job_.batch.steps[static_cast<std::size_t>(run.step)]) : type_.no_step();
    for (std::size_t word = 0; word < step.count; ++word) call.set(argument++, step.words[word]);
}

// Clears the status, so that the status of an earlier run is not mistaken for this run's.
void CardJob::clear_status() {
    std::memset(buffers_.status().data, 0, sizeof(CardStatus));
    sync(calls_, buffers_.status(), Sync::kToCard, sizeof(CardStatus), 0);
    traffic_.control_bytes += sizeof(CardStatus);
}

// Once started, a run counts as in progress until its state shows that it is over, whatever fails.
void CardJob::execute(const std::shared_ptr<CardRun>& call) {
    const Stopwatch stopwatch;
    start(call);
    int state = 0;
    try {
        state = state_after(*call);
    } catch (const CardError&) {
        abandoned_ = call;
        throw;
    }
    if (state == kRunCompleted) {
        traffic_.kernel_seconds += stopwatch.seconds();
        return;
    }
    if (is_over(state)) {
        throw CardError("a run of kernel " + options_.kernel + " ended with " + name_of_state(state) + " (" +
                        std::to_string(state) + ")");
    }
    abandoned_ = call;
    throw CardError("a run of kernel " + options_.kernel + " did not return within " +
                    std::to_string(options_.timeout.count()) + " ms");
}

// A start that does not return may still begin the run.
void CardJob::start(const std::shared_ptr<CardRun>& call) {
    try {
        calls_.make("the start of a run of kernel " + options_.kernel, [call] { call->start(); });
    } catch (const CallNotReturned&) {
        abandoned_ = call;
        throw;
    }
}

// A wait that ran out of time may return any state.
int CardJob::state_after(CardRun& call) {
    const int state = call.wait(options_.timeout);
    return is_over(state) ? state : call.state();
}

CardStatus CardJob::take_status() {
    sync(calls_, buffers_.status(), Sync::kFromCard, sizeof(CardStatus), 0);
    traffic_.control_bytes += sizeof(CardStatus);
    CardStatus status;
    std::memcpy(&status, buffers_.status().data, sizeof status);
    return status;
}

void CardJob::take_checksums(const CardStatus& status, const RunRange& run) {
    const std::uint64_t bytes = std::uint64_t{run.last - run.first} * sizeof(float);
    for (std::size_t array = 0; array < type_.num_arrays; ++array) {
        read_[array] = crc32c_combine(read_[array], status.arrays_read[array], bytes);
        written_[array] = crc32c_combine(written_[array], status.arrays_written[array], bytes);
    }
    parameters_.push_back(status.parameters);
}

void CardJob::check_arrays_read() const {
    const Checksums stored = TrailerPage(job_.memory.trailer_page).checksums();
    for (std::size_t array = 0; array < type_.num_arrays; ++array) {
        if (read_[array] == stored[array]) continue;
        throw CardError("array " + std::to_string(array) + " arrived with another checksum than it was written with");
    }
}

void CardJob::receive(const CardPass& pass) {
    const std::size_t item = item_bytes(pass.parameter_dtype);
    const MappedBuffer& parameter = buffers_.parameter();
    for (std::size_t index = 0; index < pass.runs.size(); ++index) {
        const RunRange& run = pass.runs[index];
        if (!gives_parameters(run)) continue;
        const std::size_t begin = run.first * item / kBeatBytes * kBeatBytes;
        const std::size_t end = align_up(run.last * item, kBeatBytes);
        sync(calls_, parameter, Sync::kFromCard, end - begin, begin);
        traffic_.padding_bytes += end - begin;
        if (crc32c(parameter.data + run.first * item, (run.last - run.first) * item) != parameters_[index]) {
            throw CardError("the parameters arrived with another checksum than the kernel wrote them with");
        }
        for (const Segment* segment : run.segments) {
            if (segment->parameter == 0) continue;
            give_out(*segment);
            traffic_.shared_read_bytes += segment->numel * item;
            traffic_.padding_bytes -= segment->numel * item;
        }
    }
}

void CardJob::give_out(const Segment& segment) const {
    const std::size_t item = item_bytes(segment.parameter_dtype);
    std::byte* const out =
        job_.slot != nullptr ? job_.slot + segment.offset * item : reinterpret_cast<std::byte*>(segment.parameter);
    std::memcpy(out, buffers_.parameter().data + segment.offset * item, segment.numel * item);
}

}  // namespace smart_infinity
