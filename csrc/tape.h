// Kernels kept as they run, to be run again: the next token's step is the same calls on the same memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace lean {

// What a call works on must live as long as the tape. The calls come in parts: after each but the last, something else
// has to be done before the next may be run, unless a number says that there is nothing to do.
class Tape {
public:
    using Job = std::function<void()>;
    void add(Job job) { parts_.back().jobs.push_back(std::move(job)); }
    // Ends a part. What comes after it is not wanted in a run in which *done is not 0; always if `done` is null.
    void cut(const int64_t* done) {
        parts_.back().done = done;
        parts_.emplace_back();
    }
    // Runs this part and those after it, up to the end of one after which something is wanted: returns which.
    // Throws what a call throws; the calls after it are not made.
    size_t run(size_t part) const {
        for (;; ++part) {
            const Part& each = parts_.at(part);
            for (const Job& job : each.jobs) job();
            if (part + 1 == parts_.size() || each.done == nullptr || *each.done == 0) return part;
        }
    }

    // The tape that keeps what this thread calls, or null.
    static Tape*& recording() {
        static thread_local Tape* tape = nullptr;
        return tape;
    }

private:
    struct Part {
        std::vector<Job> jobs;
        const int64_t* done = nullptr;
    };
    std::vector<Part> parts_{1};
};

}  // namespace lean
