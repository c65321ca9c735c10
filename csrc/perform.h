// How the Python faces do a call: without the interpreter's lock where it takes long, and onto the tape if one records.
#pragma once
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <utility>

#include "tape.h"

namespace lean {

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

// A short job is sooner done than the lock let go and taken again.
template <class Job> void perform(Job job, bool is_short = false) {
    if (is_short) {
        job();
    } else {
        nanobind::gil_scoped_release released;
        job();
    }
    if (Tape* tape = Tape::recording()) tape->add(std::move(job));
}

// For calls whose arguments do not outlive them.
inline void refuse_tape(const char* what) {
    if (Tape::recording() != nullptr) throw std::logic_error(std::string(what) + " cannot be recorded on a tape");
}

}  // namespace lean
