// Reading a whole file into memory of the caller's, and the time that reads are under way.
#pragma once
#include <chrono>
#include <cstdint>
#include <mutex>

namespace lean {

// Another one after any write to a file, or its replacement.
struct FileStamp {
    int64_t device = 0, inode = 0, changed_ns = 0;
    bool operator==(const FileStamp&) const = default;
};

struct FileRead {
    enum Outcome : int32_t {
        WHOLE,        // `bytes` have been read
        FAILED,       // with the system's `error`
        NOT_REGULAR,  // a directory, a pipe, a device
        OTHER_SIZE,   // the file has `bytes`
        ENDED,        // after `bytes`
    };
    Outcome outcome = WHOLE;
    int32_t error = 0;
    int64_t bytes = 0;
    FileStamp stamp;
};

class FileReader {
public:
    // Fills `to` with the file, which must have just so many bytes. `direct` goes past the page cache (`to` and `bytes`
    // must then suit the file system); otherwise the file's pages are dropped from it at once. Any number of threads.
    FileRead read(const char* path, uint8_t* to, int64_t bytes, bool direct);

    // Time up to now in which at least one thread was inside `read`.
    double seconds();

private:
    using Clock = std::chrono::steady_clock;
    std::mutex mutex_;
    int64_t inside_ = 0;
    Clock::time_point since_;
    Clock::duration before_{};
};

}  // namespace lean
