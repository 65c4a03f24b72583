// Which experts compute a row, and their weights (models/spec.py, Experts, has the equations).
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "recipe.h"

// The n_used experts of one row in the order in which they are added up, and weight_scale times their weights.
// products: (n_experts,), padded to 16, with the router's bias; they are overwritten. selection_bias: (n_experts,) or
// null. scores: scratch of n_experts. weights: (n_used,), padded to 16.
//
// All floats are computed in one order, which the instruction set does not change.
void route(const ExpertsConfig& config, const Kernels& kernels, float* products, const float* selection_bias,
           float* scores, int32_t* chosen, float* weights);

// The dot product of two vectors: 16 lanes, and then one fixed tree.
float dot_product(const float* a, const float* b, int n);
