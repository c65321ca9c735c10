// Kernels kept as they run, to be run again: the next token's step is the same calls on the same memory.
#pragma once
#include <cstddef>
#include <functional>
#include <vector>

namespace lean {

// What a call works on must live as long as the tape. Parts are run by themselves, each in the order of its calls.
class Tape {
public:
    using Job = std::function<void()>;
    void add(Job job) { parts_.back().push_back(std::move(job)); }
    void cut() { parts_.emplace_back(); }
    // Throws what a call throws; the calls after it are not made.
    void run(size_t part) const {
        for (const Job& job : parts_.at(part)) job();
    }
    size_t parts() const { return parts_.size(); }
    size_t calls(size_t part) const { return parts_.at(part).size(); }

    // The tape that keeps what this thread calls, or null.
    static Tape*& recording() {
        static thread_local Tape* tape = nullptr;
        return tape;
    }

private:
    std::vector<std::vector<Job>> parts_{1};
};

}  // namespace lean
