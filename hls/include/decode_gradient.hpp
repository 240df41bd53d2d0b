// Decodes the beats of a gradient in card memory to fp32: to beats of all elements, or to the elements that are kept.
#pragma once

#include "payload.hpp"

namespace card {

// An element that a sparse gradient keeps.
struct Entry {
    std::uint16_t index;
    float value;
};

inline void widen_dense(hls::stream<Words>& values, hls::stream<Floats>& dense, const Run& run) {
#pragma HLS INLINE
    if (run.gradient_dtype == kFloat32) {
    same:
        for (std::uint32_t beat = run.begin; beat < run.end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
            dense.write(floats_of(values.read()));
        }
    } else {
    groups:
        for (std::uint32_t beat = run.begin; beat < run.end; beat += kGroup / kLanes) {
#pragma HLS PIPELINE II = 16
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 131072
            const Words halves = values.read();
            dense.write(widen_part(halves, 0, run.gradient_dtype));
            dense.write(widen_part(halves, 1, run.gradient_dtype));
        }
    }
}

inline void pair_entries(hls::stream<Words>& values, hls::stream<Words>& indices, hls::stream<Entry>& entries,
                         const Run& run) {
#pragma HLS INLINE
    const bool wide = run.gradient_dtype == kFloat32;
    Words index_beat;
    Words value_beat;
pairs:
    for (std::uint32_t number = 0; number < run.count; ++number) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 4194304
        if (number % kGroup == 0) index_beat = indices.read();
        if (number % (wide ? kLanes : kGroup) == 0) value_beat = values.read();
        const std::uint32_t half = half_of(value_beat, number % kGroup);
        Entry entry;
        entry.index = static_cast<std::uint16_t>(half_of(index_beat, number % kGroup));
        entry.value = wide ? float_of(value_beat[number % kLanes]) : widen_half(half, run.gradient_dtype);
        entries.write(entry);
    }
}

// Multiplies codes by their blocks' scales. An element of the run with an invalid code or scale becomes zero and is
// reported.
inline std::uint32_t scale_codes(hls::stream<Words>& values, hls::stream<Words>& indices, hls::stream<Floats>& dense,
                                 const Run& run) {
#pragma HLS INLINE
    Words exponents;
    Words codes;
    std::uint32_t errors = 0;
scale:
    for (std::uint32_t beat = run.begin; beat < run.end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
        if (beat == run.begin || beat % kBeatsOfExponents == 0) exponents = indices.read();
        if (beat == run.begin || beat % kBeatsOfCodes == 0) codes = values.read();
        const std::uint32_t scale = byte_of(exponents, beat / kBeatsOfBlock % kBeatBytes);
        Floats scaled;
    lanes:
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
            const std::uint32_t code = byte_of(codes, beat % kBeatsOfCodes * kLanes + lane);
            const bool known = scale >= 1 && scale <= kLargestScale && code != kNoCode;
            scaled[lane] = float_of(known ? scaled_code(code, scale) : 0u);
            if (!known && covers(run, beat * kLanes + lane)) errors = kBadCode;
        }
        dense.write(scaled);
    }
    return errors;
}

inline void decode_gradient(hls::stream<Words>& values, hls::stream<Words>& indices, hls::stream<Floats>& dense,
                            hls::stream<Entry>& entries, hls::stream<Run>& runs_in, hls::stream<Run>& runs_out) {
#pragma HLS INLINE off
    const Run run = pass_on(runs_in, runs_out);
    std::uint32_t errors = 0;
    if (run.active && run.sparse) pair_entries(values, indices, entries, run);
    if (run.active && run.block_scaled) errors = scale_codes(values, indices, dense, run);
    if (run.active && !is_compressed(run)) widen_dense(values, dense, run);
    report_errors(runs_in, runs_out, errors);
}

}  // namespace card
