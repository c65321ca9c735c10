// The Python face of what happens between the products. As in module.cpp, callers have checked the buffers against
// the shapes; what a shape implies is checked again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>

#include "engine.h"
#include "perform.h"
#include "step.h"

namespace nb = nanobind;
using namespace lean;

namespace {

void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

// Rows so few that they are sooner done than shared out.
constexpr int64_t FEW = 1 << 15;  // numbers

template <class F> void each_row(int64_t rows, int64_t width, F body) {
    const bool few = rows * width <= FEW;
    perform(
        [=] {
            if (few)
                for (int64_t i = 0; i < rows; ++i) body(i);
            else
                Engine::get().for_each(rows, body);
        },
        few);
}

void rms_norm(uintptr_t x, uintptr_t weight, uintptr_t out, int64_t rows, int64_t width, float eps) {
    require(rows >= 0 && width > 0, "these are not the sizes of a norm");
    const NormCall call = {pointer<const float>(x), pointer<const float>(weight), pointer<float>(out), rows, width, eps};
    each_row(rows, width, [=](int64_t row) { norm_row(call, row); });
}

void turn_heads(uintptr_t x, uintptr_t cos, uintptr_t sin, uintptr_t norm, uintptr_t out, int64_t tokens,
                int64_t heads, int64_t dim, int64_t half, bool apart, float eps) {
    require(tokens >= 0 && heads > 0 && dim > 0 && half >= 0 && 2 * half <= dim, "these are not the sizes of heads");
    const TurnCall call = {pointer<const float>(x), pointer<const float>(cos), pointer<const float>(sin),
                           pointer<const float>(norm), pointer<float>(out), tokens, heads, dim, half, apart, eps};
    each_row(tokens, heads * dim, [=](int64_t token) {
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
    each_row(tokens, experts * top_k, [=](int64_t token) { route_token(call, token); });
}

void weighted_sum(uintptr_t rows, uintptr_t weights, uintptr_t ids, uintptr_t onto, uintptr_t out, int64_t tokens,
                  int64_t count, int64_t width) {
    require(tokens >= 0 && count > 0 && width > 0, "these are not the sizes of a weighted sum");
    const SumCall call = {pointer<const float>(rows), pointer<const float>(weights), pointer<const int64_t>(ids),
                          pointer<const float>(onto), pointer<float>(out), tokens, count, width};
    each_row(tokens, count * width, [=](int64_t token) { sum_token(call, Engine::get().table().add, token); });
}

int64_t largest(uintptr_t x, int64_t n, int64_t count, uintptr_t values, uintptr_t places) {
    require(count > 0 && count <= n, "these are not numbers to choose from");
    return largest_numbers(pointer<const float>(x), n, count, pointer<float>(values), pointer<int64_t>(places));
}

void add(uintptr_t x, uintptr_t y, uintptr_t out, int64_t rows, int64_t width, float scale, bool every) {
    require(rows >= 0 && width > 0, "these are not the sizes of a sum");
    const AddCall call = {pointer<const float>(x), pointer<const float>(y), pointer<float>(out), width, scale, every};
    each_row(rows, width, [=](int64_t row) { add_row(call, row); });
}

void scale(uintptr_t x, uintptr_t out, int64_t rows, int64_t width, float factor) {
    require(rows >= 0 && width > 0, "these are not the sizes of a product");
    const auto* from = pointer<const float>(x);
    float* to = pointer<float>(out);
    each_row(rows, width, [=](int64_t row) {
        for (int64_t i = row * width; i < (row + 1) * width; ++i) to[i] = from[i] * factor;
    });
}

void sigmoid_gate(uintptr_t x, uintptr_t gate, uintptr_t out, int64_t rows, int64_t width, bool whole) {
    require(rows >= 0 && width > 0, "these are not the sizes of a gate");
    const GateCall call = {pointer<const float>(x), pointer<const float>(gate), pointer<float>(out), width, whole};
    each_row(rows, width, [=](int64_t row) { gate_row(call, row); });
}

void glu(int kind, float limit, float alpha, uintptr_t gate, uintptr_t up, uintptr_t out, int64_t rows, int64_t width) {
    require(rows >= 0 && width > 0, "these are not the sizes of a gated activation");
    const Activation act = make_activation(kind, limit, alpha);
    const auto *from = pointer<const float>(gate), *with = pointer<const float>(up);
    float* to = pointer<float>(out);
    each_row(rows, width, [=](int64_t row) {
        if (to != from) std::copy_n(from + row * width, width, to + row * width);
        Engine::get().table().glu(act, to + row * width, with + row * width, width);
    });
}

void angles(uintptr_t frequencies, uintptr_t positions, uintptr_t cos, uintptr_t sin, int64_t tokens, int64_t half,
            double magnitude) {
    require(tokens >= 0 && half >= 0, "these are not the sizes of angles");
    const AngleCall call = {pointer<const double>(frequencies), pointer<const int64_t>(positions), pointer<float>(cos),
                            pointer<float>(sin), half, magnitude};
    each_row(tokens, 8 * half, [=](int64_t token) { angle_row(call, token); });
}

void copy(uintptr_t from, uintptr_t to, int64_t outer, int64_t inner, int64_t width, int64_t outer_stride,
          int64_t inner_stride, int64_t to_outer_stride, int64_t to_inner_stride) {
    require(outer >= 0 && inner > 0 && width > 0, "these are not the sizes of a copy");
    const CopyCall call = {pointer<const float>(from), pointer<float>(to), inner, width, outer_stride, inner_stride,
                           to_outer_stride, to_inner_stride};
    each_row(outer * inner, width, [=](int64_t row) { copy_row(call, row); });
}

void decays(uintptr_t beta, uintptr_t alpha, uintptr_t step, uintptr_t rate, uintptr_t share, uintptr_t decay,
            int64_t tokens, int64_t heads) {
    require(tokens >= 0 && heads > 0, "these are not the sizes of a delta net");
    const DecayCall call = {pointer<const float>(beta), pointer<const float>(alpha), pointer<const float>(step),
                            pointer<const float>(rate), pointer<float>(share), pointer<float>(decay), heads};
    each_row(tokens, 8 * heads, [=](int64_t token) { decay_row(call, token); });
}

void unit(uintptr_t x, uintptr_t out, int64_t rows, int64_t width, float eps, float scale) {
    require(rows >= 0 && width > 0, "these are not the sizes of vectors");
    const UnitCall call = {pointer<const float>(x), pointer<float>(out), width, eps, scale};
    each_row(rows, width, [=](int64_t row) { unit_row(call, row); });
}

void require_heads(int64_t heads, int64_t kv_heads, int64_t dim) {
    require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "the key heads do not divide the heads");
    require(dim > 0 && dim <= ATTEND_MOST_DIM && dim % ATTEND_DIM == 0, "heads of this size cannot be attended to");
}

// The cache lies at an address, and the token at a position, that are looked up when the call is made: a tape is run
// for one token after the other, of one sequence after the other.
void attend(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t cache_at, uintptr_t position_at, uintptr_t sinks,
            uintptr_t out, int64_t heads, int64_t kv_heads, int64_t dim, int64_t capacity, int64_t window, float scale,
            bool halves) {
    require_heads(heads, kv_heads, dim);
    require(window > 0, "a window holds at least one key");
    AttendCall call = {pointer<const float>(q), pointer<const float>(k), pointer<const float>(v), nullptr, nullptr,
                       pointer<const float>(sinks), pointer<float>(out), heads, kv_heads, dim, capacity, 0, 0, scale,
                       halves};
    const auto *address = pointer<const int64_t>(cache_at), *position = pointer<const int64_t>(position_at);
    const int64_t cache_bytes = kv_heads * capacity * dim * (halves ? 2 : 4);
    perform([=]() mutable {
        call.end = *position + 1;
        call.first = std::max<int64_t>(0, call.end - window);
        require(call.first < call.end && call.end <= capacity, "these keys are not in the cache");
        call.keys = pointer<uint8_t>(static_cast<uintptr_t>(*address));
        call.values = call.keys + cache_bytes;
        Engine::get().attend(call);
    });
}

void attend_chunk(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t keys, uintptr_t values, uintptr_t sinks,
                  uintptr_t out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t capacity,
                  int64_t start, int64_t window, float scale, bool halves) {
    require(Tape::recording() == nullptr, "a tape takes one token at a time");
    require(tokens > 0, "a chunk without tokens cannot be attended");
    require_heads(heads, kv_heads, dim);
    require(start >= 0 && tokens <= capacity && start <= capacity - tokens && window > 0,
            "these keys are not in the cache");
    const ChunkCall call = {pointer<const float>(q), pointer<const float>(k), pointer<const float>(v),
                            pointer<uint8_t>(keys), pointer<uint8_t>(values), pointer<const float>(sinks),
                            pointer<float>(out), tokens, heads, kv_heads, dim, capacity, start, window, scale, halves};
    nb::gil_scoped_release released;
    Engine::get().attend_chunk(call);
}

}  // namespace

void bind_step(nb::module_& m) {
    m.def("rms_norm", &rms_norm);
    m.def("turn_heads", &turn_heads);
    m.def("route", &route);
    m.def("weighted_sum", &weighted_sum);
    m.def("largest", &largest);
    m.def("attend", &attend);
    m.def("attend_chunk", &attend_chunk);
    m.def("add", &add);
    m.def("scale", &scale);
    m.def("sigmoid_gate", &sigmoid_gate);
    m.def("glu", &glu);
    m.def("angles", &angles);
    m.def("copy", &copy);
    m.def("decays", &decays);
    m.def("unit", &unit);
    nb::class_<Tape>(m, "Tape")
        .def(nb::init<>())
        .def("record", [](Tape& tape) {
            require(Tape::recording() == nullptr, "this thread records a tape already");
            Tape::recording() = &tape;
        })
        .def("stop", [](Tape& tape) {
            if (Tape::recording() == &tape) Tape::recording() = nullptr;
        })
        .def("cut", [](Tape& tape, uintptr_t done) { tape.cut(pointer<const int64_t>(done)); })
        .def("run", &Tape::run, nb::call_guard<nb::gil_scoped_release>());
    m.attr("ATTEND_DIM") = ATTEND_DIM;
    m.attr("ATTEND_MOST_DIM") = ATTEND_MOST_DIM;
    m.attr("MOST_EXPERTS") = MOST_EXPERTS;
}
