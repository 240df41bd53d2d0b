#include "steps.hpp"

namespace {

float scaled(float value) { return value * 2.0f; }

void compute(hls::stream<Beat>& in, hls::stream<Beat>& out, std::uint32_t beats) {
    for (std::uint32_t i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II = 8
        Beat beat = in.read();
#pragma HLS ARRAY_PARTITION variable = beat complete
        for (int lane = 0; lane < 16; ++lane) {
#pragma HLS UNROLL factor = 2
            beat[lane] = scaled(beat[lane]);
        }
        out.write(beat);
    }
}

}  // namespace

extern "C" void scale(const Beat* values_in, Beat* values_out, std::uint32_t beats) {
#pragma HLS INTERFACE m_axi port = values_in offset = slave bundle = gmem0 max_read_burst_length = 64
#pragma HLS INTERFACE m_axi port = values_out offset = slave bundle = gmem0 max_write_burst_length = 64
#pragma HLS INTERFACE s_axilite port = return
#pragma HLS DATAFLOW
    hls::stream<Beat> loaded("loaded");
#pragma HLS STREAM variable = loaded depth = kDepth
    hls::stream<Beat> computed("computed");
#pragma HLS STREAM variable = computed depth = 64
    load(values_in, loaded, beats);
    compute(loaded, computed, beats);
    store(values_out, computed, beats);
}
