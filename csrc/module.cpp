// The Python face of the extension. Callers pass addresses of buffers whose sizes they have checked against
// the shapes given here (leanmoe/kernels/cpu.py does); everything that a shape implies is checked again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <numeric>
#include <stdexcept>

#include "engine.h"
#include "isa.h"
#include "perform.h"

namespace nb = nanobind;
using namespace lean;

void bind_step(nb::module_& m);   // module_step.cpp
void bind_files(nb::module_& m);  // module_files.cpp

namespace {

const Format& format_of(int32_t qtype) {
    const Format* format = find_format(qtype);
    if (format == nullptr) throw std::invalid_argument("no format for tensor type " + std::to_string(qtype));
    return *format;
}

// (qtype, layout, rows, cols, offset, bias offset or -1, scale offset or -1)
ExpertMatrix expert_matrix(int32_t qtype, int32_t layout, int64_t rows, int64_t cols, int64_t offset, int64_t bias,
                           int64_t scale, int64_t slot_bytes) {
    ExpertMatrix m;
    m.matrix = make_matrix(qtype, static_cast<Layout>(layout), rows, cols);
    check_section(m.offset = offset, m.matrix.bytes(), slot_bytes, "a matrix");
    if (bias >= 0) check_section(m.bias = bias, rows * 4, slot_bytes, "a bias");
    if (scale >= 0) check_section(m.scale = scale, 4, slot_bytes, "a scale");
    return m;
}

class Plan {
public:
    using Spec = std::vector<int64_t>;
    Plan(const Spec& gate, const Spec& up, const Spec& down, int64_t slot_bytes) {
        plan_.slot_bytes = slot_bytes;
        plan_.gate = read(gate);
        plan_.up = read(up);
        plan_.down = read(down);
        const Matrix &g = plan_.gate.matrix, &u = plan_.up.matrix, &d = plan_.down.matrix;
        if (g.rows != u.rows || g.cols != u.cols || d.cols != g.rows || d.rows != g.cols)
            throw std::invalid_argument("gate, up and down do not fit together");
    }

    void run(const std::vector<uintptr_t>& slots, std::vector<int64_t> counts, uintptr_t token, uintptr_t dest,
             int64_t pairs, uintptr_t x, uintptr_t rounded, int64_t tokens, uintptr_t weights, int64_t places,
             uintptr_t out, int kind, float limit, float alpha) const {
        FfnCall call;
        for (uintptr_t slot : slots) call.slots.push_back(pointer<const uint8_t>(slot));
        call.counts = std::move(counts);
        call.token = pointer<const int32_t>(token);
        call.dest = pointer<const int32_t>(dest);
        call.pairs = pairs;
        call.x = pointer<const float>(x);
        call.rounded = pointer<const uint8_t>(rounded);
        call.tokens = tokens;
        call.weights = pointer<const float>(weights);
        call.places = places;
        call.out = pointer<float>(out);
        call.activation = make_activation(kind, limit, alpha);
        refuse_tape("an expert's product");
        nb::gil_scoped_release released;
        Engine::get().moe_ffn(plan_, call);
    }

    // Some experts of one token: out[places[i]] of `rows` rows is that in slots[i].
    void run_some(const std::vector<uintptr_t>& slots, const std::vector<int32_t>& places, uintptr_t x, uintptr_t out,
                  int64_t rows, int kind, float limit, float alpha) const {
        if (slots.size() != places.size()) throw std::invalid_argument("one place is wanted for each slot");
        const std::vector<int32_t> token(slots.size(), 0);
        run(slots, std::vector<int64_t>(slots.size(), 1), reinterpret_cast<uintptr_t>(token.data()),
            reinterpret_cast<uintptr_t>(places.data()), static_cast<int64_t>(slots.size()), x, 0, 1, 0, rows, out, kind,
            limit, alpha);
    }

    // Tokens as the experts multiply them: `rounded_bytes` for each.
    void round(uintptr_t x, int64_t tokens, uintptr_t rounded) const {
        refuse_tape("rounding a prompt");
        nb::gil_scoped_release released;
        Engine::get().round(plan_, pointer<const float>(x), tokens, pointer<uint8_t>(rounded));
    }
    size_t rounded_bytes() const { return Engine::get().rounded_bytes(plan_); }

    // The experts `ids` of one token, if all of them are in memory: out[j] is that of ids[j]. `addresses` [experts] says
    // where each is, 0 for nowhere: one that has come stays. Adds to `hits` and sets `done`, or else clears it.
    void run_resident(uintptr_t addresses, int64_t experts, uintptr_t ids, int64_t top_k, uintptr_t x, uintptr_t out,
                      int kind, float limit, float alpha, uintptr_t hits, uintptr_t done) const {
        FfnCall call;
        std::vector<int32_t> token(static_cast<size_t>(top_k), 0), dest(static_cast<size_t>(top_k));
        std::iota(dest.begin(), dest.end(), 0);
        call.pairs = call.places = top_k;
        call.x = pointer<const float>(x);
        call.tokens = 1;
        call.out = pointer<float>(out);
        call.activation = make_activation(kind, limit, alpha);
        const auto *table = pointer<const int64_t>(addresses), *wanted = pointer<const int64_t>(ids);
        auto *hit = pointer<int64_t>(hits), *all = pointer<int64_t>(done);
        call.counts.assign(static_cast<size_t>(top_k), 1);
        perform([this, call, token, dest, table, experts, wanted, top_k, hit, all]() mutable {
            *all = 0;
            call.slots.clear();
            for (int64_t j = 0; j < top_k; ++j) {
                if (wanted[j] < 0 || wanted[j] >= experts) throw std::invalid_argument("there is no such expert");
                const int64_t address = __atomic_load_n(table + wanted[j], __ATOMIC_ACQUIRE);
                if (address == 0) return;
                call.slots.push_back(pointer<const uint8_t>(static_cast<uintptr_t>(address)));
            }
            call.token = token.data();
            call.dest = dest.data();
            Engine::get().moe_ffn(plan_, call);
            __atomic_fetch_add(hit, top_k, __ATOMIC_RELAXED);  // others may run this too, without the lock
            *all = 1;
        });
    }

private:
    ExpertMatrix read(const Spec& s) const {
        if (s.size() != 7) throw std::invalid_argument("a matrix is described by 7 numbers");
        return expert_matrix(static_cast<int32_t>(s[0]), static_cast<int32_t>(s[1]), s[2], s[3], s[4], s[5], s[6],
                             plan_.slot_bytes);
    }
    FfnPlan plan_;
};

// Matrices that are multiplied with the same tokens. The caller keeps their bytes alive.
class Group {
public:
    // For each matrix (address, bytes, qtype, layout, rows, cols).
    explicit Group(const std::vector<std::vector<int64_t>>& matrices) {
        if (matrices.empty()) throw std::invalid_argument("a group without a matrix");
        for (const std::vector<int64_t>& m : matrices) {
            if (m.size() != 6) throw std::invalid_argument("a matrix of a group is described by 6 numbers");
            GroupMatrix each;
            each.matrix = make_matrix(static_cast<int32_t>(m[2]), static_cast<Layout>(m[3]), m[4], m[5]);
            each.data = pointer<const uint8_t>(static_cast<uintptr_t>(m[0]));
            if (each.matrix.bytes() != m[1] || m[5] != matrices[0][5])
                throw std::invalid_argument("a matrix has other bytes than its shape wants, or other columns than "
                                            "the rest of its group");
            group_.push_back(each);
        }
    }

    void run(uintptr_t x, int64_t tokens, const std::vector<uintptr_t>& out) const {
        if (out.size() != group_.size()) throw std::invalid_argument("one result is wanted for each matrix");
        std::vector<float*> results;
        for (uintptr_t each : out) results.push_back(pointer<float>(each));
        perform([this, x, tokens, results = std::move(results)] {
            Engine::get().linear_group(group_, pointer<const float>(x), tokens, results);
        });
    }

private:
    std::vector<GroupMatrix> group_;
};

void linear_each(uintptr_t w, int64_t w_bytes, int32_t qtype, int32_t layout, int64_t rows, int64_t cols, int64_t count,
                 uintptr_t x, int64_t tokens, uintptr_t out) {
    const Matrix matrix = make_matrix(qtype, static_cast<Layout>(layout), rows, cols);
    if (count < 1 || w_bytes % count != 0 || matrix.bytes() != w_bytes / count)
        throw std::invalid_argument("a matrix takes " + std::to_string(matrix.bytes()) + " bytes; " +
                                    std::to_string(count) + " are said to lie in " + std::to_string(w_bytes));
    perform([=] {
        Engine::get().linear(pointer<const uint8_t>(w), matrix, count, pointer<const float>(x), tokens,
                             pointer<float>(out));
    });
}

void linear(uintptr_t w, int64_t w_bytes, int32_t qtype, int32_t layout, int64_t rows, int64_t cols, uintptr_t x,
            int64_t tokens, uintptr_t out) {
    linear_each(w, w_bytes, qtype, layout, rows, cols, 1, x, tokens, out);
}

void dequantize(uintptr_t w, int32_t qtype, int64_t rows, int64_t cols, uintptr_t out) {
    const Format& format = format_of(qtype);
    if (cols % format.block != 0) throw std::invalid_argument("a row is not made of whole blocks");
    refuse_tape("dequantisation");
    nb::gil_scoped_release released;
    Engine::get().dequantize(pointer<const uint8_t>(w), format, rows, cols, pointer<float>(out));
}

bool encode(uintptr_t x, int32_t qtype, int64_t rows, int64_t cols, uintptr_t out) {
    const Format& format = format_of(qtype);
    if (cols % format.block != 0) throw std::invalid_argument("a row is not made of whole blocks");
    refuse_tape("quantisation");
    nb::gil_scoped_release released;
    return Engine::get().encode(pointer<const float>(x), format, rows, cols, pointer<uint8_t>(out));
}

void embed(uintptr_t w, int32_t qtype, int32_t layout, int64_t rows, int64_t cols, uintptr_t ids, int64_t count,
           uintptr_t out) {
    const Matrix matrix = make_matrix(qtype, static_cast<Layout>(layout), rows, cols);
    const int64_t* id = pointer<const int64_t>(ids);
    perform([=] {
        for (int64_t i = 0; i < count; ++i)
            if (id[i] < 0 || id[i] >= rows)
                throw std::invalid_argument("row " + std::to_string(id[i]) + " is outside a table of " +
                                            std::to_string(rows));
        Engine::get().embed(pointer<const uint8_t>(w), matrix, id, count, pointer<float>(out));
    });
}

void arrange(uintptr_t w, int64_t w_bytes, int32_t qtype, int32_t layout, int64_t rows, int64_t cols, bool alone) {
    const Matrix matrix = make_matrix(qtype, static_cast<Layout>(layout), rows, cols);
    if (matrix.bytes() != w_bytes)
        throw std::invalid_argument("a matrix takes " + std::to_string(matrix.bytes()) + " bytes, not " +
                                    std::to_string(w_bytes));
    refuse_tape("rearranging");
    nb::gil_scoped_release released;
    Engine::get().arrange(pointer<uint8_t>(w), matrix, alone);
}

bool multiplies(int32_t qtype, int32_t layout) {
    return Engine::get().multiplies(qtype, static_cast<Layout>(layout));
}

// The inputs before the first token, and the memories below, lie at an address that is looked up when the call is made;
// see `attend`.
void convolve(uintptr_t recent_at, uintptr_t x, uintptr_t weight, uintptr_t out, int64_t tokens, int64_t channels,
              int64_t taps) {
    if (tokens < 1 || channels < 1 || taps < 2) throw std::invalid_argument("these are not the sizes of a convolution");
    ConvolutionCall call = {nullptr, pointer<const float>(x), pointer<const float>(weight), pointer<float>(out),
                            tokens,  channels,                taps};
    const auto* address = pointer<const int64_t>(recent_at);
    perform([=]() mutable {
        call.recent = pointer<float>(static_cast<uintptr_t>(*address));
        Engine::get().convolve(call);
    });
}

void delta_rule(uintptr_t memory_at, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t beta, uintptr_t decay,
                uintptr_t out, int64_t tokens, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
                bool grouped) {
    if (tokens < 1 || key_heads < 1 || heads < 1 || heads % key_heads != 0 || key_dim < 1 || value_dim < 1)
        throw std::invalid_argument("these are not the sizes of a delta net");
    DeltaCall call = {nullptr, pointer<const float>(q), pointer<const float>(k), pointer<const float>(v),
                      pointer<const float>(beta), nullptr, pointer<float>(out), tokens, key_heads, heads, key_dim,
                      value_dim, grouped};
    const auto* address = pointer<const int64_t>(memory_at);
    const auto* decays = pointer<const float>(decay);
    perform([=, keep = std::vector<float>(static_cast<size_t>(tokens * heads))]() mutable {
        for (size_t i = 0; i < keep.size(); ++i) keep[i] = std::exp(decays[i]);
        call.memory = pointer<float>(static_cast<uintptr_t>(*address));
        call.keep = keep.data();
        Engine::get().delta_rule(call);
    });
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const KernelTable* table : available_tables()) names.push_back(table->name);
    return names;
}

void set_isa(const std::string& name) {
    for (const KernelTable* table : available_tables())
        if (name == table->name) return Engine::get().set_table(*table);
    throw std::invalid_argument("this processor cannot run '" + name + "'");
}

}  // namespace

NB_MODULE(_cpu, m) {
    nb::set_leak_warnings(false);  // plans live as long as the process
    m.doc() = "Products straight from quantised blocks, on the CPU.";
    nb::class_<Plan>(m, "Plan")
        .def(nb::init<const Plan::Spec&, const Plan::Spec&, const Plan::Spec&, int64_t>())
        .def("run", &Plan::run)
        .def("run_some", &Plan::run_some)
        .def("run_resident", &Plan::run_resident)
        .def("round", &Plan::round)
        .def("rounded_bytes", &Plan::rounded_bytes);
    nb::class_<Group>(m, "Group")
        .def(nb::init<const std::vector<std::vector<int64_t>>&>())
        .def("run", &Group::run);
    m.def("linear", &linear);
    m.def("linear_each", &linear_each);
    m.def("dequantize", &dequantize);
    m.def("embed", &embed);
    m.def("arrange", &arrange);
    m.def("multiplies", &multiplies);
    m.def("encode", &encode);
    m.def("encoded_types", [] {
        std::vector<int32_t> types;
        for (int32_t i = 0; i < portable_table().encoder_count; ++i)
            types.push_back(portable_table().encoders[i].qtype);
        return types;
    });
    bind_step(m);
    bind_files(m);
    m.def("convolve", &convolve);
    m.def("delta_rule", &delta_rule);
    m.def("product_types", [] {
        std::vector<int32_t> types;
        for (int32_t i = 0; i < portable_table().kernel_count; ++i)
            types.push_back(portable_table().kernels[i].qtype);
        return types;
    });
    m.def("set_num_threads", [](int n) { Engine::get().set_threads(n); });
    m.def("get_num_threads", [] { return Engine::get().threads(); });
    m.def("isa", [] { return std::string(Engine::get().table().name); });
    m.def("set_isa", &set_isa);
    m.def("available_isas", &available_isas);
    m.def("compiled_isas", &compiled_isas);
    m.def("scratch_bytes", [] { return Engine::get().scratch_bytes(); });
    m.def("release_scratch", [] { Engine::get().release_scratch(); });
}
