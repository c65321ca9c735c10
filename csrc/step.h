// What happens to a token between the products: norms, rotary embedding, the choice of experts, the sum of their
// outputs. Each row by itself, so the bits do not depend on how many there are or on the threads.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace lean {

// out = x / sqrt(mean(x^2) + eps) * weight
struct NormCall {
    const float* x;       // [rows][width]
    const float* weight;  // [width]
    float* out;           // [rows][width]
    int64_t rows, width;
    float eps;
};
void norm_row(const NormCall& call, int64_t row);

// The first 2 * half dimensions of every head turned by its token's angles, after a norm of the head if it has one.
struct TurnCall {
    const float* x;            // [tokens][heads][dim]
    const float *cos, *sin;    // [tokens][half]
    const float* norm;         // [dim] or null
    float* out;                // [tokens][heads][dim]
    int64_t tokens, heads, dim, half;
    bool apart;  // pairs are i and i + half; else 2 i and 2 i + 1
    float eps;   // of the norm
};
void turn_head(const TurnCall& call, int64_t token, int64_t head);

enum Gating : int32_t { SOFTMAX, SIGMOID, CHOSEN_SOFTMAX, SQRT_SOFTPLUS };
constexpr int64_t MOST_EXPERTS = 4096;

// The best `top_k` of a token's experts, their weights, and a number from 0 to 1 for every expert that ranks it.
struct RouteCall {
    const float* logits;  // [tokens][experts]
    const float* bias;    // [experts], takes part in the choice alone; or null
    int64_t* ids;         // [tokens][top_k], best first
    float* weights;       // [tokens][top_k]
    float* chances;       // [tokens][experts]
    int64_t tokens, experts, top_k, groups, groups_used;
    Gating gating;
    bool renormalise, best_two;  // best_two: a group counts as the sum of its best two, else as its best
    float scale;
};
void route_token(const RouteCall& call, int64_t token);

// The `count` largest of n numbers and their places, largest first; the earlier of equals comes first. NaNs are left
// out: returns how many numbers there were.
int64_t largest_numbers(const float* x, int64_t n, int64_t count, float* values, int64_t* places);

// out = onto + sum of weights[j] * rows[j], in the order of ids[j]
struct SumCall {
    const float* rows;     // [tokens][count][width]
    const float* weights;  // [tokens][count]
    const int64_t* ids;    // [tokens][count]
    const float* onto;     // [tokens][width], or null for zeros
    float* out;            // [tokens][width]
    int64_t tokens, count, width;
};
void sum_token(const SumCall& call, AddFn add, int64_t token);

// out = x + scale * y
struct AddCall {
    const float* x;  // [rows][width]
    const float* y;  // [rows][width], or [width] for every row
    float* out;      // [rows][width]
    int64_t width;
    float scale;
    bool every;
};
void add_row(const AddCall& call, int64_t row);

// out = x * sigmoid(gate)
struct GateCall {
    const float* x;     // [rows][width]
    const float* gate;  // [rows][width], or [rows] for a whole row
    float* out;         // [rows][width]
    int64_t width;
    bool whole;
};
void gate_row(const GateCall& call, int64_t row);

// What a gated delta net makes of each head's two numbers: the share that is written anew, sigmoid(beta), and the
// logarithm of what stays, rate * softplus(alpha + step).
struct DecayCall {
    const float *beta, *alpha;  // [tokens][heads]
    const float *step, *rate;   // [heads]
    float *share, *decay;       // [tokens][heads]
    int64_t heads;
};
void decay_row(const DecayCall& call, int64_t token);

// out = x * scale / sqrt(sum(x^2) + eps)
struct UnitCall {
    const float* x;  // [rows][width]
    float* out;
    int64_t width;
    float eps, scale;
};
void unit_row(const UnitCall& call, int64_t row);

// cos and sin of position * frequency, times the magnitude, for every pair of dimensions.
struct AngleCall {
    const double* frequencies;  // [half]
    const int64_t* positions;   // [tokens]
    float *cos, *sin;           // [tokens][half]
    int64_t half;
    double magnitude;
};
void angle_row(const AngleCall& call, int64_t token);

// Rows of a tensor of three dimensions, to those of another.
struct CopyCall {
    const float* from;
    float* to;
    int64_t inner, width;
    int64_t outer_stride, inner_stride;        // of `from`, in numbers
    int64_t to_outer_stride, to_inner_stride;  // of `to`
};
void copy_row(const CopyCall& call, int64_t row);

}  // namespace lean
