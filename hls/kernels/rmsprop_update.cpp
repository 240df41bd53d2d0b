// Updates as torch.optim.RMSprop does.
//
//   gradient --> read_gradient --> decode_gradient --> expand_gradient -+
//   master          --> load_array -------------------------------------+-> compute --> store_array --> master
//   square_avg      --> load_array -------------------------------------+           --> store_array --> square_avg
//   momentum_buffer --> load_array -------------------------------------+           --> store_array --> momentum_buffer
//   grad_avg        --> load_array -------------------------------------+           --> store_array --> grad_avg
//                                                                                   --> store_parameter --> parameter
//
//   The run passes through all of them: read_gradient --> ... --> write_status --> status
//
// Without momentum, or not centered, an array that torch does not have passes through unchanged.
#include <hls_math.h>

#include <arrays.hpp>
#include <card_kernels.hpp>
#include <gradient.hpp>
#include <process.hpp>

using namespace card;

namespace {

struct Rmsprop {
    float gradient_scale;
    float weight_decay;
    float alpha;
    float one_minus_alpha;
    float eps;
    float momentum;
    float centered;
    float lr;
};

// Returns torch.lerp(grad_avg, gradient, 1 - alpha), whose formula has two branches.
float average(const Rmsprop& step, float keep, float grad_avg, float gradient) {
#pragma HLS INLINE
    const float gap = gradient - grad_avg;
    return step.one_minus_alpha < 0.5f ? grad_avg + step.one_minus_alpha * gap : gradient - gap * keep;
}

void compute(hls::stream<Floats>& gradients, hls::stream<Floats>& masters, hls::stream<Floats>& square_avgs,
             hls::stream<Floats>& momentum_buffers, hls::stream<Floats>& grad_avgs, hls::stream<Floats>& new_masters,
             hls::stream<Floats>& new_square_avgs, hls::stream<Floats>& new_momentum_buffers,
             hls::stream<Floats>& new_grad_avgs, hls::stream<Floats>& parameters, hls::stream<Run>& runs_in,
             hls::stream<Run>& runs_out, std::uint32_t gradient_scale, std::uint32_t weight_decay, std::uint32_t alpha,
             std::uint32_t one_minus_alpha, std::uint32_t eps, std::uint32_t momentum, std::uint32_t centered,
             std::uint32_t lr) {
#pragma HLS INLINE off
    const Rmsprop step = {
        float_of(gradient_scale), float_of(weight_decay), float_of(alpha), float_of(one_minus_alpha), float_of(eps),
        float_of(momentum),       float_of(centered),     float_of(lr)};
    const float keep = 1.0f - step.one_minus_alpha;  // one subtractor, not one for every lane
    const Run run = pass_on(runs_in, runs_out);
beats:
    for (std::uint32_t beat = run.begin; beat < run.stored_end; ++beat) {
#pragma HLS PIPELINE II = 8
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 262144
        const bool given = beat < run.end;
        const Floats gradient = next_beat(gradients, given && run.active);
        Floats master = next_beat(masters, given);
        Floats square_avg = next_beat(square_avgs, given);
        Floats momentum_buffer = next_beat(momentum_buffers, given);
        Floats grad_avg = next_beat(grad_avgs, given);
    lanes:
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
            float p = master[lane];
            float g = gradient[lane] * step.gradient_scale;
            g = step.weight_decay != 0.0f ? g + step.weight_decay * p : g;
            const float v = square_avg[lane] * step.alpha + (step.one_minus_alpha * g) * g;
            const float a = step.centered != 0.0f ? average(step, keep, grad_avg[lane], g) : grad_avg[lane];
            const float variance = step.centered != 0.0f ? v - a * a : v;
            const float change = g / (hls::sqrt(variance) + step.eps);
            const float moved = step.momentum != 0.0f ? step.momentum * momentum_buffer[lane] + change : change;
            const float b = step.momentum != 0.0f ? moved : momentum_buffer[lane];
            p = p - step.lr * moved;

            const std::uint32_t element = beat * kLanes + lane;
            master[lane] = stored_value(run, element, master[lane], p);
            square_avg[lane] = stored_value(run, element, square_avg[lane], v);
            momentum_buffer[lane] = stored_value(run, element, momentum_buffer[lane], b);
            grad_avg[lane] = stored_value(run, element, grad_avg[lane], a);
        }
        new_masters.write(master);
        new_square_avgs.write(square_avg);
        new_momentum_buffers.write(momentum_buffer);
        new_grad_avgs.write(grad_avg);
        if (given) parameters.write(master);
    }
    report(runs_in, runs_out);
}

}  // namespace

extern "C" void rmsprop_update(const Words* gradient, const Floats* master_in, const Floats* square_avg_in,
                               const Floats* momentum_buffer_in, const Floats* grad_avg_in, Floats* master_out,
                               Floats* square_avg_out, Floats* momentum_buffer_out, Floats* grad_avg_out,
                               Words* parameter, Words* status, std::uint32_t numel, std::uint32_t first,
                               std::uint32_t last, std::uint32_t gradient_form, std::uint32_t parameter_form,
                               std::uint32_t active, std::uint32_t gradient_scale, std::uint32_t weight_decay,
                               std::uint32_t alpha, std::uint32_t one_minus_alpha, std::uint32_t eps,
                               std::uint32_t momentum, std::uint32_t centered, std::uint32_t lr) {
    // clang-format off
#pragma HLS INTERFACE m_axi port=gradient bundle=gmem0 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=master_in bundle=gmem1 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=square_avg_in bundle=gmem2 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=momentum_buffer_in bundle=gmem3 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=grad_avg_in bundle=gmem4 max_read_burst_length=64 num_read_outstanding=4
#pragma HLS INTERFACE m_axi port=master_out bundle=gmem1 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=square_avg_out bundle=gmem2 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=momentum_buffer_out bundle=gmem3 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=grad_avg_out bundle=gmem4 max_write_burst_length=64 num_write_outstanding=4
#pragma HLS INTERFACE m_axi port=parameter bundle=gmem5 max_write_burst_length=64 num_write_outstanding=4
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
    hls::stream<Floats, 32> square_avgs("square_avgs");
#pragma HLS STREAM variable = square_avgs depth = 32
    hls::stream<Floats, 32> momentum_buffers("momentum_buffers");
#pragma HLS STREAM variable = momentum_buffers depth = 32
    hls::stream<Floats, 32> grad_avgs("grad_avgs");
#pragma HLS STREAM variable = grad_avgs depth = 32
    hls::stream<Floats, 32> new_masters("new_masters");
#pragma HLS STREAM variable = new_masters depth = 32
    hls::stream<Floats, 32> new_square_avgs("new_square_avgs");
#pragma HLS STREAM variable = new_square_avgs depth = 32
    hls::stream<Floats, 32> new_momentum_buffers("new_momentum_buffers");
#pragma HLS STREAM variable = new_momentum_buffers depth = 32
    hls::stream<Floats, 32> new_grad_avgs("new_grad_avgs");
#pragma HLS STREAM variable = new_grad_avgs depth = 32
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
    hls::stream<Run, 2> runs_12("runs_12");
#pragma HLS STREAM variable = runs_12 depth = 2
    hls::stream<Run, 2> runs_13("runs_13");
#pragma HLS STREAM variable = runs_13 depth = 2

    PROCESS(read_gradient, gradient, values, indices, counts, runs_1, k_rmsprop_update, numel, first, last,
            gradient_form, parameter_form, active);
    PROCESS(decode_gradient, values, indices, dense, entries, runs_1, runs_2);
    PROCESS(expand_gradient, dense, counts, entries, gradients, findings, runs_2, runs_3);
    PROCESS(load_array, master_in, masters, runs_3, runs_4, 0);
    PROCESS(load_array, square_avg_in, square_avgs, runs_4, runs_5, 1);
    PROCESS(load_array, momentum_buffer_in, momentum_buffers, runs_5, runs_6, 2);
    PROCESS(load_array, grad_avg_in, grad_avgs, runs_6, runs_7, 3);
    PROCESS(compute, gradients, masters, square_avgs, momentum_buffers, grad_avgs, new_masters, new_square_avgs,
            new_momentum_buffers, new_grad_avgs, parameters, runs_7, runs_8, gradient_scale, weight_decay, alpha,
            one_minus_alpha, eps, momentum, centered, lr);
    PROCESS(store_array, master_out, new_masters, runs_8, runs_9, 0);
    PROCESS(store_array, square_avg_out, new_square_avgs, runs_9, runs_10, 1);
    PROCESS(store_array, momentum_buffer_out, new_momentum_buffers, runs_10, runs_11, 2);
    PROCESS(store_array, grad_avg_out, new_grad_avgs, runs_11, runs_12, 3);
    PROCESS(store_parameter, parameter, parameters, runs_12, runs_13);
    PROCESS(write_status, status, findings, runs_13);
}
