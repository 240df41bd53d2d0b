// The kernels, as they are called: pointers to card memory, then 32-bit words. What each argument means is written in
// docs/smartssd_kernels.md.
#pragma once

#include "beats.hpp"

extern "C" {

// torch.optim.Adam and AdamW.
void adamw_update(const card::Words* gradient, const card::Floats* master_in, const card::Floats* exp_avg_in,
                  const card::Floats* exp_avg_sq_in, card::Floats* master_out, card::Floats* exp_avg_out,
                  card::Floats* exp_avg_sq_out, card::Words* parameter, card::Words* status, std::uint32_t numel,
                  std::uint32_t first, std::uint32_t last, std::uint32_t gradient_form, std::uint32_t parameter_form,
                  std::uint32_t active, std::uint32_t gradient_scale, std::uint32_t one_minus_beta1,
                  std::uint32_t beta2, std::uint32_t one_minus_beta2, std::uint32_t decay, std::uint32_t l2,
                  std::uint32_t step_size, std::uint32_t inverse_sqrt_bias_correction2, std::uint32_t eps);

// torch.optim.Adagrad.
void adagrad_update(const card::Words* gradient, const card::Floats* master_in, const card::Floats* sum_in,
                    card::Floats* master_out, card::Floats* sum_out, card::Words* parameter, card::Words* status,
                    std::uint32_t numel, std::uint32_t first, std::uint32_t last, std::uint32_t gradient_form,
                    std::uint32_t parameter_form, std::uint32_t active, std::uint32_t gradient_scale,
                    std::uint32_t weight_decay, std::uint32_t step_size, std::uint32_t eps);

// torch.optim.SGD.
void sgd_update(const card::Words* gradient, const card::Floats* master_in, const card::Floats* momentum_buffer_in,
                card::Floats* master_out, card::Floats* momentum_buffer_out, card::Words* parameter,
                card::Words* status, std::uint32_t numel, std::uint32_t first, std::uint32_t last,
                std::uint32_t gradient_form, std::uint32_t parameter_form, std::uint32_t active,
                std::uint32_t gradient_scale, std::uint32_t weight_decay, std::uint32_t buffer_coefficient,
                std::uint32_t gradient_coefficient, std::uint32_t nesterov_momentum, std::uint32_t lr);
}
