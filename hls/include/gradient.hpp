// Turns the gradient in card memory into beats of fp32 for the update, in three processes.
//
//   read_gradient --values----> decode_gradient --dense----> expand_gradient --gradients-->
//                 --indices--->                 --entries-->    (a tile)
//                 --counts---------------------------------->
//
// A dense gradient passes through `values` and `dense` only. So does a block-scaled gradient, whose codes pass through
// `values` and whose exponents pass through `indices`. A sparse gradient is scattered over a tile on the chip, block
// after block. Card memory never holds a compressed gradient in dense form.
#pragma once

#include "crc32c.hpp"
#include "decode_gradient.hpp"
#include "payload.hpp"

namespace card {

// ---- read

inline void read_dense(const Words* gradient, hls::stream<Words>& values, Run& run) {
#pragma HLS INLINE
    const std::uint32_t item_bytes = bytes_of(run.gradient_dtype);
    const std::uint32_t per_beat = run.gradient_dtype == kFloat32 ? 1 : 2;  // fp32 beats for each gradient beat
    RangeChecksum checksum(run, item_bytes);
dense:
    for (std::uint32_t beat = run.begin / per_beat; beat < run.end / per_beat; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
        const Words words = gradient[beat];
        checksum.add(words, beat);
        values.write(words);
    }
    run.status[kWordGradientRead] = checksum.value();
}

// Reads a sparse gradient's counts. Returns whether they sum to the number of kept elements.
inline bool read_counts(const Words* gradient, const Payload& payload, hls::stream<std::uint32_t>& counts,
                        Checksum& checksum) {
#pragma HLS INLINE
    std::uint64_t total = 0;
    Words words;
counts:
    for (std::uint32_t block = 0; block < payload.num_blocks; ++block) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 1 max = 8192
        if (block % kLanes == 0) {
            words = gradient[1 + block / kLanes];
            checksum.add(words);
        }
        total += words[block % kLanes];
        counts.write(words[block % kLanes]);
    }
    return total == payload.numel;
}

// Reads header and counts before anything else moves, so that a run with a bad payload writes nothing.
inline Payload read_payload_front(const Words* gradient, hls::stream<std::uint32_t>& counts, Run& run) {
#pragma HLS INLINE
    Checksum checksum;
    const Words header = gradient[0];
    checksum.add(header);
    const Payload payload = plan_payload(run, header);
    if (!describes(header, run, payload)) {
        refuse(run, kBadHeader);
    } else if (run.sparse) {
        run.num_blocks = payload.num_blocks;
        run.count = payload.numel;
        if (!read_counts(gradient, payload, counts, checksum)) refuse(run, kWrongCounts);
    }
    run.status[kWordHeaderRead] = checksum.value();
    return payload;
}

inline std::uint32_t smaller(std::uint32_t left, std::uint32_t right) {
#pragma HLS INLINE
    return left < right ? left : right;
}

// Reads a burst of a part, from the part's beat `begin` on.
inline void read_burst(const Words* gradient, const Part& part, std::uint32_t begin, hls::stream<Words>& beats,
                       Checksum& checksum) {
#pragma HLS INLINE
    const std::uint32_t end = smaller(begin + part.burst, part.beats);
burst:
    for (std::uint32_t beat = begin; beat < end; ++beat) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 1 max = 256
        const Words words = gradient[part.offset + beat];
        checksum.add(words);
        if (beat >= part.begin && beat < part.end) beats.write(words);
    }
}

inline void read_parts(const Words* gradient, const Payload& payload, hls::stream<Words>& values,
                       hls::stream<Words>& indices, Run& run) {
#pragma HLS INLINE
    Checksum index_checksum;
    Checksum value_checksum;
    std::uint32_t value = 0;
bursts:
    for (std::uint32_t index = 0; index < payload.indices.beats; index += payload.indices.burst) {
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 4096
        read_burst(gradient, payload.indices, index, indices, index_checksum);
        read_burst(gradient, payload.values, value, values, value_checksum);
        value += payload.values.burst;
    }
    run.status[kWordIndicesRead] = index_checksum.value();
    run.status[kWordGradientRead] = value_checksum.value();
}

// Makes the run and starts the chain that passes it on.
inline void read_gradient(const Words* gradient, hls::stream<Words>& values, hls::stream<Words>& indices,
                          hls::stream<std::uint32_t>& counts, hls::stream<Run>& runs, std::uint32_t kernel,
                          std::uint32_t numel, std::uint32_t first, std::uint32_t last, std::uint32_t gradient_form,
                          std::uint32_t parameter_form, std::uint32_t active) {
#pragma HLS INLINE off
    Run run = plan_run(kernel, numel, first, last, gradient_form, parameter_form, active);
    Payload payload = {};
    if (run.active && is_compressed(run)) payload = read_payload_front(gradient, counts, run);
    runs.write(run);
    if (run.active && is_compressed(run)) read_parts(gradient, payload, values, indices, run);
    if (run.active && !is_compressed(run)) read_dense(gradient, values, run);
    runs.write(run);
}

// ---- expand

constexpr std::uint32_t kRows = kBlock / kLanes;

inline void scatter(hls::stream<std::uint32_t>& counts, hls::stream<Entry>& entries, float tile[kRows][kLanes],
                    hls::stream<std::uint32_t>& findings, std::uint32_t block, std::uint32_t numel) {
#pragma HLS INLINE off
clear:
    for (std::uint32_t row = 0; row < kRows; ++row) {
#pragma HLS PIPELINE II = 1
    lanes:
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
            tile[row][lane] = 0.0f;
        }
    }
    const std::uint32_t limit = smaller(kBlock, numel - block * kBlock);
    const std::uint32_t count = counts.read();
    std::uint32_t least = 0;  // smallest valid next index
    std::uint32_t errors = 0;
place:
    for (std::uint32_t number = 0; number < count; ++number) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 65536
        const Entry entry = entries.read();
        if (entry.index >= least && entry.index < limit) {
            tile[entry.index / kLanes][entry.index % kLanes] = entry.value;
            least = entry.index + 1u;
        } else {
            errors = kBadIndex;
        }
    }
    findings.write(errors);
}

// Emits the elements of the block that belong to the beats [begin, end).
inline void emit(const float tile[kRows][kLanes], hls::stream<Floats>& gradients, std::uint32_t block,
                 std::uint32_t begin, std::uint32_t end) {
#pragma HLS INLINE off
    const std::uint32_t base = block * kRows;
    const std::uint32_t first = begin < base ? 0 : smaller(begin - base, kRows);
    const std::uint32_t last = end < base ? 0 : smaller(end - base, kRows);
rows:
    for (std::uint32_t row = first; row < last; ++row) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 4096
        Floats beat;
    lanes:
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
            beat[lane] = tile[row][lane];
        }
        gradients.write(beat);
    }
}

// The tile is a ping-pong buffer: while a block is emitted, in 32,768 cycles, the next block is cleared (4,096) and
// scattered (one element a cycle).
inline void expand_blocks(hls::stream<std::uint32_t>& counts, hls::stream<Entry>& entries,
                          hls::stream<Floats>& gradients, hls::stream<std::uint32_t>& findings,
                          std::uint32_t num_blocks, std::uint32_t numel, std::uint32_t begin, std::uint32_t end) {
#pragma HLS INLINE off
blocks:
    for (std::uint32_t block = 0; block < num_blocks; ++block) {
#pragma HLS LOOP_TRIPCOUNT min = 1 max = 64
#pragma HLS DATAFLOW
        float tile[kRows][kLanes];
#pragma HLS ARRAY_PARTITION variable = tile dim = 2 complete
#pragma HLS BIND_STORAGE variable = tile type = ram_2p impl = uram
        scatter(counts, entries, tile, findings, block, numel);
        emit(tile, gradients, block, begin, end);
    }
}

inline void expand_gradient(hls::stream<Floats>& dense, hls::stream<std::uint32_t>& counts, hls::stream<Entry>& entries,
                            hls::stream<Floats>& gradients, hls::stream<std::uint32_t>& findings,
                            hls::stream<Run>& runs_in, hls::stream<Run>& runs_out) {
#pragma HLS INLINE off
    const Run run = pass_on(runs_in, runs_out);
    if (run.active && run.sparse) {
        expand_blocks(counts, entries, gradients, findings, run.num_blocks, run.numel, run.begin, run.end);
    } else {
    drop:
        for (std::uint32_t block = 0; block < run.num_blocks; ++block) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 8192
            counts.read();  // discards the counts of a refused payload
        }
    }
    if (run.active && !run.sparse) {
    forward:
        for (std::uint32_t beat = run.begin; beat < run.end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
            gradients.write(dense.read());
        }
    }
    report(runs_in, runs_out);
}

}  // namespace card
