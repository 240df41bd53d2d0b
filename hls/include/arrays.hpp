// Moves arrays between card memory and the update, and writes parameters and the status.
#pragma once

#include "crc32c.hpp"

namespace card {

inline void load_array(const Floats* array, hls::stream<Floats>& beats, hls::stream<Run>& runs_in,
                       hls::stream<Run>& runs_out, std::uint32_t number) {
#pragma HLS INLINE off
    const Run run = pass_on(runs_in, runs_out);
    RangeChecksum checksum(run, sizeof(float));
load:
    for (std::uint32_t beat = run.begin; beat < run.end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
        const Floats values = array[beat];
        checksum.add(bits_of(values), beat);
        beats.write(values);
    }
    report(runs_in, runs_out, kWordArrayRead + number, checksum.value());
}

inline void store_array(Floats* array, hls::stream<Floats>& beats, hls::stream<Run>& runs_in,
                        hls::stream<Run>& runs_out, std::uint32_t number) {
#pragma HLS INLINE off
    const Run run = pass_on(runs_in, runs_out);
    RangeChecksum checksum(run, sizeof(float));
store:
    for (std::uint32_t beat = run.begin; beat < run.stored_end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
        const Floats values = beats.read();
        if (beat < run.end) checksum.add(bits_of(values), beat);
        array[beat] = values;
    }
    report(runs_in, runs_out, kWordArrayWritten + number, checksum.value());
}

// Stores the model's parameter, which is the master in the parameter's type.
inline void store_parameter(Words* parameter, hls::stream<Floats>& masters, hls::stream<Run>& runs_in,
                            hls::stream<Run>& runs_out) {
#pragma HLS INLINE off
    const Run run = pass_on(runs_in, runs_out);
    RangeChecksum checksum(run, bytes_of(run.parameter_dtype));
    if (run.parameter_dtype == kFloat32) {
    same:
        for (std::uint32_t beat = run.begin; beat < run.end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
            const Words words = bits_of(masters.read());
            checksum.add(words, beat);
            parameter[beat] = words;
        }
    } else {
    groups:
        for (std::uint32_t group = run.begin / 2; group < run.end / 2; ++group) {
#pragma HLS PIPELINE II = 16
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 131072
            const Floats lower = masters.read();
            const Floats upper = masters.read();
            const Words words = narrow_group(lower, upper, run.parameter_dtype);
            checksum.add(words, group);
            parameter[group] = words;
        }
    }
    report(runs_in, runs_out, kWordParameterWritten, checksum.value());
}

// Ends the chain: writes the run's status.
inline void write_status(Words* status, hls::stream<std::uint32_t>& findings, hls::stream<Run>& runs) {
#pragma HLS INLINE off
    const Run order = runs.read();
    const std::uint32_t num_findings = order.active && order.sparse ? order.num_blocks : 0;
    std::uint32_t errors = 0;
gather:
    for (std::uint32_t block = 0; block < num_findings; ++block) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 8192
        errors |= findings.read();
    }
    Run run = runs.read();
    run.status[kWordErrors] |= errors;
    Words beat;
words:
    for (std::uint32_t word = 0; word < kLanes; ++word) {
#pragma HLS UNROLL
        beat[word] = run.status[word];
    }
    status[0] = beat;
}

}  // namespace card
