#include "files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace lean {
namespace {

FileRead failed(FileRead read) {
    read.outcome = FileRead::FAILED;
    read.error = errno;
    return read;
}

// What the file has, up to `wanted` bytes; `read` says where it ended, or failed, before.
void fill(int fd, uint8_t* to, int64_t wanted, FileRead& read) {
    while (read.bytes < wanted) {
        const ssize_t n = ::pread(fd, to + read.bytes, static_cast<size_t>(wanted - read.bytes), read.bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            read = failed(read);
            return;
        }
        if (n == 0) {
            read.outcome = FileRead::ENDED;
            return;
        }
        read.bytes += n;
    }
}

FileRead read_file(const char* path, uint8_t* to, int64_t bytes, bool direct) {
    FileRead read;
    struct stat found;
    if (::stat(path, &found) != 0) return failed(read);  // before it is opened, which could wait for a pipe's writer
    read.stamp = {static_cast<int64_t>(found.st_dev), static_cast<int64_t>(found.st_ino),
                  int64_t{1'000'000'000} * found.st_ctim.tv_sec + found.st_ctim.tv_nsec};
    if (!S_ISREG(found.st_mode)) {
        read.outcome = FileRead::NOT_REGULAR;
        return read;
    }
    if (found.st_size != bytes) {
        read.outcome = FileRead::OTHER_SIZE;
        read.bytes = found.st_size;
        return read;
    }
    int fd;
    do {
        fd = ::open(path, O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return failed(read);
    fill(fd, to, bytes, read);
    if (!direct) ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    ::close(fd);
    return read;
}

}  // namespace

FileRead FileReader::read(const char* path, uint8_t* to, int64_t bytes, bool direct) {
    {
        std::lock_guard lock(mutex_);
        if (inside_++ == 0) since_ = Clock::now();
    }
    const FileRead read = read_file(path, to, bytes, direct);
    std::lock_guard lock(mutex_);
    if (--inside_ == 0) before_ += Clock::now() - since_;
    return read;
}

double FileReader::seconds() {
    std::lock_guard lock(mutex_);
    const Clock::duration running = inside_ != 0 ? Clock::now() - since_ : Clock::duration{};
    return std::chrono::duration<double>(before_ + running).count();
}

}  // namespace lean
