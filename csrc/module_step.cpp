// The Python face of what happens between the products. As in module.cpp, callers have checked the buffers against
// the shapes; what a shape implies is checked again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "engine.h"
#include "step.h"

namespace nb = nanobind;
using namespace lean;

namespace {

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

// A few rows are sooner done than shared out, or than the interpreter's lock is let go and taken again.
constexpr int64_t FEW = 1 << 15;  // numbers

template <class F> void each_row(int64_t rows, int64_t width, F&& body) {
    if (rows * width <= FEW) {
        for (int64_t i = 0; i < rows; ++i) body(i);
        return;
    }
    nb::gil_scoped_release released;
    Engine::get().for_each(rows, body);
}

void rms_norm(uintptr_t x, uintptr_t weight, uintptr_t out, int64_t rows, int64_t width, float eps) {
    require(rows >= 0 && width > 0, "these are not the sizes of a norm");
    const NormCall call = {pointer<const float>(x), pointer<const float>(weight), pointer<float>(out), rows, width, eps};
    each_row(rows, width, [&](int64_t row) { norm_row(call, row); });
}

void turn_heads(uintptr_t x, uintptr_t cos, uintptr_t sin, uintptr_t norm, uintptr_t out, int64_t tokens,
                int64_t heads, int64_t dim, int64_t half, bool apart, float eps) {
    require(tokens >= 0 && heads > 0 && dim > 0 && half >= 0 && 2 * half <= dim, "these are not the sizes of heads");
    const TurnCall call = {pointer<const float>(x), pointer<const float>(cos), pointer<const float>(sin),
                           pointer<const float>(norm), pointer<float>(out), tokens, heads, dim, half, apart, eps};
    each_row(tokens, heads * dim, [&](int64_t token) {
        for (int64_t head = 0; head < heads; ++head) turn_head(call, token, head);
    });
}

void route(uintptr_t logits, uintptr_t bias, uintptr_t ids, uintptr_t weights, uintptr_t chances, int64_t tokens,
           int64_t experts, int64_t top_k, int64_t groups, int64_t groups_used, int gating, bool renormalise,
           bool best_two, float scale) {
    require(tokens >= 0 && experts > 0 && experts <= MOST_EXPERTS && top_k > 0 && top_k <= experts,
            "top_k must be 1 to the number of experts, and those at most 4096");
    require(groups > 0 && experts % groups == 0 && groups_used > 0 && groups_used <= groups &&
                top_k <= experts / groups * groups_used && (!best_two || groups == 1 || experts / groups > 1),
            "these are not groups of experts");
    require(gating >= SOFTMAX && gating <= SQRT_SOFTPLUS, "unknown gating");
    const RouteCall call = {pointer<const float>(logits), pointer<const float>(bias), pointer<int64_t>(ids),
                            pointer<float>(weights), pointer<float>(chances), tokens, experts, top_k, groups,
                            groups_used, static_cast<Gating>(gating), renormalise, best_two, scale};
    each_row(tokens, experts * top_k, [&](int64_t token) { route_token(call, token); });
}

void weighted_sum(uintptr_t rows, uintptr_t weights, uintptr_t out, int64_t tokens, int64_t count, int64_t width) {
    require(tokens >= 0 && count > 0 && width > 0, "these are not the sizes of a weighted sum");
    const SumCall call = {pointer<const float>(rows), pointer<const float>(weights), pointer<float>(out), tokens, count,
                          width};
    each_row(tokens, count * width, [&](int64_t token) { sum_token(call, token); });
}

int64_t largest(uintptr_t x, int64_t n, int64_t count, uintptr_t values, uintptr_t places) {
    require(count > 0 && count <= n, "these are not numbers to choose from");
    return largest_numbers(pointer<const float>(x), n, count, pointer<float>(values), pointer<int64_t>(places));
}

void attend(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t keys, uintptr_t values, uintptr_t sinks, uintptr_t out,
            int64_t heads, int64_t kv_heads, int64_t dim, int64_t capacity, int64_t first, int64_t end, float scale,
            bool halves) {
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "the key heads do not divide the heads");
    require(dim > 0 && dim <= ATTEND_MOST_DIM && dim % ATTEND_DIM == 0, "heads of this size cannot be attended to");
    require(first >= 0 && first < end && end <= capacity, "these keys are not in the cache");
    const AttendCall call = {pointer<const float>(q), pointer<const float>(k), pointer<const float>(v),
                             pointer<uint8_t>(keys), pointer<uint8_t>(values), pointer<const float>(sinks),
                             pointer<float>(out), heads, kv_heads, dim, capacity, first, end, scale, halves};
    nb::gil_scoped_release released;
    Engine::get().attend(call);
}

}  // namespace

void bind_step(nb::module_& m) {
    m.def("rms_norm", &rms_norm);
    m.def("turn_heads", &turn_heads);
    m.def("route", &route);
    m.def("weighted_sum", &weighted_sum);
    m.def("largest", &largest);
    m.def("attend", &attend);
    m.attr("ATTEND_DIM") = ATTEND_DIM;
    m.attr("ATTEND_MOST_DIM") = ATTEND_MOST_DIM;
    m.attr("MOST_EXPERTS") = MOST_EXPERTS;
}
