// One run of a kernel: its arguments, the beats that follow from them, and its results.
//
// A run passes from process to process twice, along one chain of streams. It passes first as the order: no process
// starts before the reader of the gradient has found its payload valid. Then it passes as the report: each process adds
// the checksum of the data that it moved, and the last one writes it to card memory.
#pragma once

#include <hls_stream.h>

#include "number_formats.hpp"

namespace card {

constexpr std::uint32_t kInterfaceVersion = 2;
constexpr std::uint32_t kStatusMagic = 0x5349534cu;

// Words of the status beat.
enum StatusWord : std::uint32_t {
    kWordMagic = 0,
    kWordVersionAndKernel = 1,  // the version is in the lower half
    kWordCount = 2,
    kWordErrors = 3,
    kWordGradientRead = 4,
    kWordArrayRead = 5,  // and the next three words, by array
    kWordParameterWritten = 9,
    kWordArrayWritten = 10,  // and the next three words, by array
    kWordIndicesRead = 14,
    kWordHeaderRead = 15,
};

enum Error : std::uint32_t {
    kBadIndex = 1,
    kBadHeader = 2,
    kBadRange = 4,
    kUnknownForm = 8,
    kWrongCounts = 16,
    kBadCode = 32,
};

// How a gradient is compressed: sparse is combined with the dtype of its values, block-scaled stands alone.
enum Compression : std::uint32_t { kSparse = 0x100, kBlockScaled = 0x200 };

struct Run {
    // Range of elements.
    std::uint32_t numel;
    std::uint32_t first;
    std::uint32_t last;
    // Types of the gradient and the parameter.
    std::uint32_t gradient_dtype;
    std::uint32_t parameter_dtype;
    bool sparse;        // the gradient has some elements, with their indices
    bool block_scaled;  // the gradient has all elements, in 8 bits
    bool active;
    // Numbers of a sparse gradient's blocks and values.
    std::uint32_t num_blocks;
    std::uint32_t count;
    // Beats of an array: [begin, end) are read, [begin, stored_end) are written.
    std::uint32_t begin;
    std::uint32_t end;
    std::uint32_t stored_end;

    std::uint32_t status[kLanes];
};

inline std::uint32_t rounded_up(std::uint32_t value, std::uint32_t multiple) {
#pragma HLS INLINE
    return (value + multiple - 1) / multiple * multiple;
}

// Leaves a run nothing to do except to report.
inline void refuse(Run& run, std::uint32_t errors) {
#pragma HLS INLINE
    run.status[kWordErrors] |= errors;
    run.active = false;
    run.begin = run.end = run.stored_end = 0;
}

inline Run plan_run(std::uint32_t kernel, std::uint32_t numel, std::uint32_t first, std::uint32_t last,
                    std::uint32_t gradient_form, std::uint32_t parameter_form, std::uint32_t active) {
#pragma HLS INLINE
    const bool bad_range = first > last || last > numel || numel > kLargestNumel;
    const bool block_scaled = gradient_form == kBlockScaled;
    const bool known_gradient = block_scaled || (gradient_form & ~kSparse) < kNumDTypes;
    const bool known_form = known_gradient && parameter_form < kNumDTypes;
    Run run = {};
    run.numel = numel;
    run.first = first;
    run.last = last;
    run.gradient_dtype = block_scaled ? kFloat32 : gradient_form & ~kSparse;
    run.parameter_dtype = parameter_form;
    run.sparse = (gradient_form & kSparse) != 0;
    run.block_scaled = block_scaled;
    run.active = active != 0 && first != last;
    if (first != last) {
        run.begin = first / kGroup * (kGroup / kLanes);
        run.end = rounded_up(last, kGroup) / kLanes;
        run.stored_end = last == numel ? rounded_up(numel, kPadding) / kLanes : run.end;
    }
    run.status[kWordMagic] = kStatusMagic;
    run.status[kWordVersionAndKernel] = kInterfaceVersion | kernel << 16;
    run.status[kWordCount] = last - first;
    if (bad_range) refuse(run, kBadRange);
    if (!known_form) refuse(run, kUnknownForm);
    return run;
}

inline bool is_compressed(const Run& run) {
#pragma HLS INLINE
    return run.sparse || run.block_scaled;
}

// Returns whether the run updates this element.
inline bool covers(const Run& run, std::uint32_t element) {
#pragma HLS INLINE
    return element - run.first < run.last - run.first;
}

// Returns the value that an element of an array gets.
inline float stored_value(const Run& run, std::uint32_t element, float before, float updated) {
#pragma HLS INLINE
    if (element >= run.numel) return 0.0f;
    return run.active && covers(run, element) ? updated : before;
}

// Returns the next beat, or zeros if there is none.
inline Floats next_beat(hls::stream<Floats>& beats, bool given) {
#pragma HLS INLINE
    Floats beat(0.0f);
    if (given) beat = beats.read();
    return beat;
}

// Receives the order and passes it on at once.
inline Run pass_on(hls::stream<Run>& runs_in, hls::stream<Run>& runs_out) {
#pragma HLS INLINE
    const Run run = runs_in.read();
    runs_out.write(run);
    return run;
}

// Passes the report on, for a process that has nothing to add.
inline void report(hls::stream<Run>& runs_in, hls::stream<Run>& runs_out) {
#pragma HLS INLINE
    runs_out.write(runs_in.read());
}

inline void report(hls::stream<Run>& runs_in, hls::stream<Run>& runs_out, std::uint32_t word, std::uint32_t value) {
#pragma HLS INLINE
    Run run = runs_in.read();
    run.status[word] = value;
    runs_out.write(run);
}

inline void report_errors(hls::stream<Run>& runs_in, hls::stream<Run>& runs_out, std::uint32_t errors) {
#pragma HLS INLINE
    Run run = runs_in.read();
    run.status[kWordErrors] |= errors;
    runs_out.write(run);
}

}  // namespace card
