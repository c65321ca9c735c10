// Products of whole matrices and whole experts, on the thread pool.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "arrange.h"
#include "dequant.h"
#include "kernels.h"
#include "pool.h"

namespace lean {

struct Matrix {
    const Format* format = nullptr;
    Layout layout = CANONICAL;
    int64_t rows = 0;
    int64_t cols = 0;
    int64_t bytes() const { return rows * format->row_bytes(cols); }
};

// Throws std::invalid_argument unless a product of this type and shape exists.
Matrix make_matrix(int32_t qtype, Layout layout, int64_t rows, int64_t cols);

// Throws std::invalid_argument, naming `what`, unless `bytes` from `offset` on lie within an expert.
void check_section(int64_t offset, int64_t bytes, int64_t expert_bytes, const char* what);

// Throws std::invalid_argument for a kind that does not exist.
Activation make_activation(int kind, float limit, float alpha);

// One matrix of an expert: where it lies in the expert's bytes, its bias and its scale (offset -1: none).
struct ExpertMatrix {
    Matrix matrix;
    int64_t offset = 0;
    int64_t bias = -1;
    int64_t scale = -1;
};

struct GroupMatrix {
    Matrix matrix;
    const uint8_t* data = nullptr;
};

struct FfnPlan {
    ExpertMatrix gate, up, down;
    int64_t slot_bytes = 0;
};

struct FfnCall {
    std::vector<const uint8_t*> slots;
    std::vector<int64_t> counts;
    const int32_t* token = nullptr;
    const int32_t* dest = nullptr;
    int64_t pairs = 0;  // sum of counts
    const float* x = nullptr;          // [tokens][model], or
    const uint8_t* rounded = nullptr;  // what `round` made of it
    int64_t tokens = 0;
    const float* weights = nullptr;  // [places], or null
    int64_t places = 0;              // that `dest` counts: of the weights, or else rows of `out`
    float* out = nullptr;            // [places], set at `dest`; with weights [tokens], added to in the order of the pairs
    Activation activation = {Activation::SILU, 0, 0};
};

// Grows and is kept, so that steady calls allocate nothing.
class Scratch {
public:
    uint8_t* get(size_t bytes);
    size_t bytes() const { return size_; }
    void release();

private:
    struct Free {
        void operator()(uint8_t* p) const;
    };
    std::unique_ptr<uint8_t, Free> data_;
    size_t size_ = 0;
};

class Engine {
public:
    // The process's engine. A forked child gets a fresh one, since threads do not survive a fork.
    static Engine& get();

    // Matrix i of `count`, which lie one after the other, times part i of each token of x [tokens][count][cols]:
    // out is [tokens][count][rows].
    void linear(const uint8_t* w, const Matrix& matrix, int64_t count, const float* x, int64_t tokens, float* out);
    // Several matrices of equally many columns times the same tokens: x is rounded once for each kind of partner, and
    // the threads are woken once. out[i] is [tokens][rows of matrix i], with the bits of `linear`.
    void linear_group(const std::vector<GroupMatrix>& group, const float* x, int64_t tokens,
                      const std::vector<float*>& out);
    void moe_ffn(const FfnPlan& plan, const FfnCall& call);
    // Tokens x [tokens][model] as the plan's experts multiply them: `rounded_bytes` for each.
    void round(const FfnPlan& plan, const float* x, int64_t tokens, uint8_t* rounded);
    size_t rounded_bytes(const FfnPlan& plan) const;
    void dequantize(const uint8_t* w, const Format& format, int64_t rows, int64_t cols, float* out);
    void embed(const uint8_t* w, const Matrix& matrix, const int64_t* ids, int64_t count, float* out);

    // Whether the instruction set in use multiplies matrices of this type in this layout.
    bool multiplies(int32_t qtype, Layout layout) const;
    // Rearranges `matrix` in place from the canonical order into its own layout, on the threads or (alone) on the
    // caller's. Throws std::invalid_argument for a layout that the type does not have.
    void arrange(uint8_t* w, const Matrix& matrix, bool alone);

    // Quantises rows of floats; false, with `out` unfinished, if one of them holds a NaN, an infinity or a number
    // whose scale no half can hold. Throws std::invalid_argument for a type without a quantiser.
    bool encode(const float* x, const Format& format, int64_t rows, int64_t cols, uint8_t* out);
    void convolve(const ConvolutionCall& call);
    void delta_rule(const DeltaCall& call);
    void attend(const AttendCall& call);
    void attend_chunk(const ChunkCall& call);

    // body(i) for each i in [0, count), on all threads.
    template <class F> void for_each(int64_t count, F&& body) {
        std::lock_guard lock(mutex_);
        pool_->parallel_for(count, [&](int64_t i) { body(i); });
    }

    int threads();
    void set_threads(int threads);
    const KernelTable& table() const { return *table_; }
    void set_table(const KernelTable& table) { table_ = &table; }
    size_t scratch_bytes();
    void release_scratch();

private:
    Engine();

    std::mutex mutex_;  // one call at a time: the threads are already shared by it
    std::unique_ptr<ThreadPool> pool_;
    std::atomic<const KernelTable*> table_;
    Scratch act_, hidden_, hidden_act_, index_, attended_;
};

}  // namespace lean
