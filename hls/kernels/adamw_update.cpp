// Updates as torch.optim.Adam and AdamW do.
//
//   gradient --> read_gradient --> decode_gradient --> expand_gradient --+
//   master      --> load_array ------------------------------------------+--> compute --> store_array --> master
//   exp_avg     --> load_array ------------------------------------------+            --> store_array --> exp_avg
//   exp_avg_sq  --> load_array ------------------------------------------+            --> store_array --> exp_avg_sq
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

struct Adam {
    float gradient_scale;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float decay;
    float l2;
    float step_size;
    float inverse_sqrt_bias_correction2;
    float eps;
};

// Returns torch.lerp(exp_avg, gradient, 1 - beta1), whose formula has two branches.
float average(const Adam& step, float keep, float exp_avg, float gradient) {
#pragma HLS INLINE
    const float gap = gradient - exp_avg;
    return step.one_minus_beta1 < 0.5f ? exp_avg + step.one_minus_beta1 * gap : gradient - gap * keep;
}

void compute(hls::stream<Floats>& gradients, hls::stream<Floats>& masters, hls::stream<Floats>& exp_avgs,
             hls::stream<Floats>& exp_avg_sqs, hls::stream<Floats>& new_masters, hls::stream<Floats>& new_exp_avgs,
             hls::stream<Floats>& new_exp_avg_sqs, hls::stream<Floats>& parameters, hls::stream<Run>& runs_in,
             hls::stream<Run>& runs_out, std::uint32_t gradient_scale, std::uint32_t one_minus_beta1,
             std::uint32_t beta2, std::uint32_t one_minus_beta2, std::uint32_t decay, std::uint32_t l2,
             std::uint32_t step_size, std::uint32_t inverse_sqrt_bias_correction2, std::uint32_t eps) {
#pragma HLS INLINE off
    const Adam step = {float_of(gradient_scale),
                       float_of(one_minus_beta1),
                       float_of(beta2),
                       float_of(one_minus_beta2),
                       float_of(decay),
                       float_of(l2),
                       float_of(step_size),
                       float_of(inverse_sqrt_bias_correction2),
                       float_of(eps)};
    const float keep = 1.0f - step.one_minus_beta1;  // one subtractor, not one for every lane
    const Run run = pass_on(runs_in, runs_out);
beats:
    for (std::uint32_t beat = run.begin; beat < run.stored_end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
        const bool given = beat < run.end;
        const Floats gradient = next_beat(gradients, given && run.active);
        Floats master = next_beat(masters, given);
        Floats exp_avg = next_beat(exp_avgs, given);
        Floats exp_avg_sq = next_beat(exp_avg_sqs, given);
    lanes:
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
            float p = master[lane];
            float g = gradient[lane] * step.gradient_scale;
            g = step.l2 != 0.0f ? g + step.l2 * p : g;
            const float m = average(step, keep, exp_avg[lane], g);
            const float v = exp_avg_sq[lane] * step.beta2 + (step.one_minus_beta2 * g) * g;
            p = p * step.decay;
            p = p - step.step_size * (m / (hls::sqrt(v) * step.inverse_sqrt_bias_correction2 + step.eps));

            const std::uint32_t element = beat * kLanes + lane;
            master[lane] = stored_value(run, element, master[lane], p);
            exp_avg[lane] = stored_value(run, element, exp_avg[lane], m);
            exp_avg_sq[lane] = stored_value(run, element, exp_avg_sq[lane], v);
        }
        new_masters.write(master);
        new_exp_avgs.write(exp_avg);
        new_exp_avg_sqs.write(exp_avg_sq);
        if (given) parameters.write(master);
    }
    report(runs_in, runs_out);
}

}  // namespace

extern "C" void adamw_update(const Words* gradient, const Floats* master_in, const Floats* exp_avg_in,
                             const Floats* exp_avg_sq_in, Floats* master_out, Floats* exp_avg_out,
                             Floats* exp_avg_sq_out, Words* parameter, Words* status, std::uint32_t numel,
                             std::uint32_t first, std::uint32_t last, std::uint32_t gradient_form,
                             std::uint32_t parameter_form, std::uint32_t active, std::uint32_t gradient_scale,
                             std::uint32_t one_minus_beta1, std::uint32_t beta2, std::uint32_t one_minus_beta2,
                             std::uint32_t decay, std::uint32_t l2, std::uint32_t step_size,
                             std::uint32_t inverse_sqrt_bias_correction2, std::uint32_t eps) {
    // clang-format off
#pragma HLS INTERFACE m_axi port=gradient bundle=gmem0 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=master_in bundle=gmem1 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=exp_avg_in bundle=gmem2 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=exp_avg_sq_in bundle=gmem3 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=master_out bundle=gmem1 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=exp_avg_out bundle=gmem2 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=exp_avg_sq_out bundle=gmem3 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=parameter bundle=gmem4 max_write_burst_length=64 num_write_outstanding=4
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
    hls::stream<Floats, 32> exp_avgs("exp_avgs");
#pragma HLS STREAM variable = exp_avgs depth = 32
    hls::stream<Floats, 32> exp_avg_sqs("exp_avg_sqs");
#pragma HLS STREAM variable = exp_avg_sqs depth = 32
    hls::stream<Floats, 32> new_masters("new_masters");
#pragma HLS STREAM variable = new_masters depth = 32
    hls::stream<Floats, 32> new_exp_avgs("new_exp_avgs");
#pragma HLS STREAM variable = new_exp_avgs depth = 32
    hls::stream<Floats, 32> new_exp_avg_sqs("new_exp_avg_sqs");
#pragma HLS STREAM variable = new_exp_avg_sqs depth = 32
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
    hls::stream<Run, 2> runs_10("runs_10");
#pragma HLS STREAM variable = runs_10 depth = 2
    hls::stream<Run, 2> runs_11("runs_11");
#pragma HLS STREAM variable = runs_11 depth = 2

    PROCESS(read_gradient, gradient, values, indices, counts, runs_1, k_adamw_update, numel, first, last, gradient_form,
            parameter_form, active);
    PROCESS(decode_gradient, values, indices, dense, entries, runs_1, runs_2);
    PROCESS(expand_gradient, dense, counts, entries, gradients, findings, runs_2, runs_3);
    PROCESS(load_array, master_in, masters, runs_3, runs_4, 0);
    PROCESS(load_array, exp_avg_in, exp_avgs, runs_4, runs_5, 1);
    PROCESS(load_array, exp_avg_sq_in, exp_avg_sqs, runs_5, runs_6, 2);
    PROCESS(compute, gradients, masters, exp_avgs, exp_avg_sqs, new_masters, new_exp_avgs, new_exp_avg_sqs, parameters,
            runs_6, runs_7, gradient_scale, one_minus_beta1, beta2, one_minus_beta2, decay, l2, step_size,
            inverse_sqrt_bias_correction2, eps);
    PROCESS(store_array, master_out, new_masters, runs_7, runs_8, 0);
    PROCESS(store_array, exp_avg_out, new_exp_avgs, runs_8, runs_9, 1);
    PROCESS(store_array, exp_avg_sq_out, new_exp_avg_sqs, runs_9, runs_10, 2);
    PROCESS(store_parameter, parameter, parameters, runs_10, runs_11);
    PROCESS(write_status, status, findings, runs_11);
}
