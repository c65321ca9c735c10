// The Python face of reading experts: file to slot, in the slot's order, in one call without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "engine.h"
#include "files.h"

namespace nb = nanobind;
using namespace lean;

namespace {

// Memory that a Python object lends for writing, for as long as this lives.
class Lent {
public:
    explicit Lent(nb::handle owner) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_WRITABLE) != 0) throw nb::python_error();
    }
    ~Lent() { PyBuffer_Release(&view_); }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;
    uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
    int64_t bytes() const { return view_.len; }

private:
    Py_buffer view_;
};

// Which matrices of an expert are kept in another order than its file has them in.
class Arrangement {
public:
    // For each matrix (offset, qtype, layout, rows, cols), within `bytes`.
    Arrangement(const std::vector<std::vector<int64_t>>& matrices, int64_t bytes) : bytes_(bytes) {
        for (const std::vector<int64_t>& m : matrices) {
            if (m.size() != 5) throw std::invalid_argument("a matrix is described by 5 numbers");
            Part part{m[0], make_matrix(static_cast<int32_t>(m[1]), static_cast<Layout>(m[2]), m[3], m[4])};
            check_section(part.offset, part.matrix.bytes(), bytes, "a matrix");
            parts_.push_back(part);
        }
    }

    void check(const Lent& slot) const {
        if (slot.bytes() != bytes_)
            throw std::invalid_argument("an expert of " + std::to_string(bytes_) + " bytes in memory of " +
                                        std::to_string(slot.bytes()));
    }

    // On this thread alone. The caller does not hold the interpreter's lock.
    void apply(uint8_t* slot) const {
        for (const Part& part : parts_) Engine::get().arrange(slot + part.offset, part.matrix, true);
    }

    void run(nb::handle slot) const {
        const Lent memory(slot);
        check(memory);
        nb::gil_scoped_release released;
        apply(memory.data());
    }

private:
    struct Part {
        int64_t offset;
        Matrix matrix;
    };
    std::vector<Part> parts_;
    int64_t bytes_;
};

using Stamp = std::tuple<int64_t, int64_t, int64_t>;

// (outcome, error, bytes, stamp, whether `arrangement` has been applied: if it is given, and the file has the stamp
// `only` or that is not given)
std::tuple<int32_t, int32_t, int64_t, Stamp, bool> read_expert(FileReader& reader, nb::bytes path, nb::handle buffer,
                                                               bool direct, const Arrangement* arrangement,
                                                               std::optional<Stamp> only) {
    const Lent memory(buffer);
    if (arrangement != nullptr) arrangement->check(memory);
    const char* name = path.c_str();
    nb::gil_scoped_release released;
    const FileRead found = reader.read(name, memory.data(), memory.bytes(), direct);
    const Stamp stamp{found.stamp.device, found.stamp.inode, found.stamp.changed_ns};
    const bool arranged = found.outcome == FileRead::WHOLE && arrangement != nullptr && (!only || *only == stamp);
    if (arranged) arrangement->apply(memory.data());
    return {found.outcome, found.error, found.bytes, stamp, arranged};
}

}  // namespace

void bind_files(nb::module_& m) {
    nb::class_<Arrangement>(m, "Arrangement")
        .def(nb::init<const std::vector<std::vector<int64_t>>&, int64_t>())
        .def("run", &Arrangement::run);
    nb::class_<FileReader>(m, "FileReader")
        .def(nb::init<>())
        .def("read", &read_expert, nb::arg("path"), nb::arg("buffer"), nb::arg("direct"), nb::arg("arrangement").none(),
             nb::arg("only").none())
        .def("seconds", &FileReader::seconds);
    m.attr("READ_WHOLE") = static_cast<int>(FileRead::WHOLE);
    m.attr("READ_FAILED") = static_cast<int>(FileRead::FAILED);
    m.attr("READ_NOT_REGULAR") = static_cast<int>(FileRead::NOT_REGULAR);
    m.attr("READ_OTHER_SIZE") = static_cast<int>(FileRead::OTHER_SIZE);
    m.attr("READ_ENDED") = static_cast<int>(FileRead::ENDED);
}
