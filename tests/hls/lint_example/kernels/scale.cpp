#include "steps.hpp"

namespace {

float scaled(float value) { return value * 2.0f; }

void compute(hls::stream<Beat>& in, hls::stream<Beat>& out, std::uint32_t beats) {
#pragma HLS INLINE off
    for (std::uint32_t i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 1 max = 65536
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
#pragma HLS INTERFACE ap_ctrl_hs port = return
#pragma HLS DATAFLOW
    hls::stream<Beat> loaded("loaded");
#pragma HLS STREAM variable = loaded depth = kDepth
#pragma HLS BIND_STORAGE variable = loaded type = fifo impl = srl
    hls::stream<Beat> computed("computed");
#pragma HLS STREAM variable = computed depth = 64
#pragma HLS BIND_STORAGE variable = computed type = fifo impl = srl
    load(values_in, loaded, beats);
    compute(loaded, computed, beats);
    store(values_out, computed, beats);
}
