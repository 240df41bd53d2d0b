// Updates as torch.optim.Adagrad does.
//
//   gradient --> read_gradient --> decode_gradient --> expand_gradient --+
//   master --> load_array -----------------------------------------------+--> compute --> store_array --> master
//   sum    --> load_array -----------------------------------------------+            --> store_array --> sum
//                                                                                     --> store_parameter --> parameter
//
//   The run passes through all of them: read_gradient --> ... --> write_status --> status
#include <hls_math.h>

#include <arrays.hpp>
#include <card_kernels.hpp>
#include <gradient.hpp>
#include <process.hpp>

using namespace card;

namespace {

struct Adagrad {
    float gradient_scale;
    float weight_decay;
    float step_size;
    float eps;
};

void compute(hls::stream<Floats>& gradients, hls::stream<Floats>& masters, hls::stream<Floats>& sums,
             hls::stream<Floats>& new_masters, hls::stream<Floats>& new_sums, hls::stream<Floats>& parameters,
             hls::stream<Run>& runs_in, hls::stream<Run>& runs_out, std::uint32_t gradient_scale,
             std::uint32_t weight_decay, std::uint32_t step_size, std::uint32_t eps) {
#pragma HLS INLINE off
    const Adagrad step = {float_of(gradient_scale), float_of(weight_decay), float_of(step_size), float_of(eps)};
    const Run run = pass_on(runs_in, runs_out);
beats:
    for (std::uint32_t beat = run.begin; beat < run.stored_end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
        const bool given = beat < run.end;
        const Floats gradient = next_beat(gradients, given && run.active);
        Floats master = next_beat(masters, given);
        Floats sum = next_beat(sums, given);
    lanes:
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
            float p = master[lane];
            float g = gradient[lane] * step.gradient_scale;
            g = step.weight_decay != 0.0f ? g + step.weight_decay * p : g;
            const float s = sum[lane] + g * g;
            p = p - step.step_size * (g / (hls::sqrt(s) + step.eps));

            const std::uint32_t element = beat * kLanes + lane;
            master[lane] = stored_value(run, element, master[lane], p);
            sum[lane] = stored_value(run, element, sum[lane], s);
        }
        new_masters.write(master);
        new_sums.write(sum);
        if (given) parameters.write(master);
    }
    report(runs_in, runs_out);
}

}  // namespace

extern "C" void adagrad_update(const Words* gradient, const Floats* master_in, const Floats* sum_in, Floats* master_out,
                               Floats* sum_out, Words* parameter, Words* status, std::uint32_t numel,
                               std::uint32_t first, std::uint32_t last, std::uint32_t gradient_form,
                               std::uint32_t parameter_form, std::uint32_t active, std::uint32_t gradient_scale,
                               std::uint32_t weight_decay, std::uint32_t step_size, std::uint32_t eps) {
    // clang-format off
#pragma HLS INTERFACE m_axi port=gradient bundle=gmem0 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=master_in bundle=gmem1 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=sum_in bundle=gmem2 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=master_out bundle=gmem1 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=sum_out bundle=gmem2 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=parameter bundle=gmem3 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=status bundle=gmem0 max_write_burst_length=2 num_write_outstanding=1
#pragma HLS INTERFACE s_axilite port=return
    // clang-format on
#pragma HLS DATAFLOW
    hls::stream<Words, 32> values("values");
#pragma HLS STREAM variable = values depth = 32
    hls::stream<Words, 32> indices("indices");
#pragma HLS STREAM variable = indices depth = 32
    hls::stream<std::uint32_t, 8192> counts("counts");
#pragma HLS STREAM variable = counts depth = 8192
    hls::stream<Floats, 32> dense("dense");
#pragma HLS STREAM variable = dense depth = 32
    hls::stream<Entry, 64> entries("entries");
#pragma HLS STREAM variable = entries depth = 64
    hls::stream<std::uint32_t, 16> findings("findings");
#pragma HLS STREAM variable = findings depth = 16
    hls::stream<Floats, 32> gradients("gradients");
#pragma HLS STREAM variable = gradients depth = 32
    hls::stream<Floats, 32> masters("masters");
#pragma HLS STREAM variable = masters depth = 32
    hls::stream<Floats, 32> sums("sums");
#pragma HLS STREAM variable = sums depth = 32
    hls::stream<Floats, 32> new_masters("new_masters");
#pragma HLS STREAM variable = new_masters depth = 32
    hls::stream<Floats, 32> new_sums("new_sums");
#pragma HLS STREAM variable = new_sums depth = 32
    hls::stream<Floats, 32> parameters("parameters");
#pragma HLS STREAM variable = parameters depth = 32
    // The chain that passes the run on.
    hls::stream<Run, 2> runs_1("runs_1");
#pragma HLS STREAM variable = runs_1 depth = 2
    hls::stream<Run, 2> runs_2("runs_2");
#pragma HLS STREAM variable = runs_2 depth = 2
    hls::stream<Run, 2> runs_3("runs_3");
#pragma HLS STREAM variable = runs_3 depth = 2
    hls::stream<Run, 2> runs_4("runs_4");
#pragma HLS STREAM variable = runs_4 depth = 2
    hls::stream<Run, 2> runs_5("runs_5");
#pragma HLS STREAM variable = runs_5 depth = 2
    hls::stream<Run, 2> runs_6("runs_6");
#pragma HLS STREAM variable = runs_6 depth = 2
    hls::stream<Run, 2> runs_7("runs_7");
#pragma HLS STREAM variable = runs_7 depth = 2
    hls::stream<Run, 2> runs_8("runs_8");
#pragma HLS STREAM variable = runs_8 depth = 2
    hls::stream<Run, 2> runs_9("runs_9");
#pragma HLS STREAM variable = runs_9 depth = 2

    PROCESS(read_gradient, gradient, values, indices, counts, runs_1, k_adagrad_update, numel, first, last,
            gradient_form, parameter_form, active);
    PROCESS(decode_gradient, values, indices, dense, entries, runs_1, runs_2);
    PROCESS(expand_gradient, dense, counts, entries, gradients, findings, runs_2, runs_3);
    PROCESS(load_array, master_in, masters, runs_3, runs_4, 0);
    PROCESS(load_array, sum_in, sums, runs_4, runs_5, 1);
    PROCESS(compute, gradients, masters, sums, new_masters, new_sums, parameters, runs_5, runs_6, gradient_scale,
            weight_decay, step_size, eps);
    PROCESS(store_array, master_out, new_masters, runs_6, runs_7, 0);
    PROCESS(store_array, sum_out, new_sums, runs_7, runs_8, 1);
    PROCESS(store_parameter, parameter, parameters, runs_8, runs_9);
    PROCESS(write_status, status, findings, runs_9);
}
