#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace lean {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Long enough to bridge the gap between the products of one layer, short enough to leave the core to others.
constexpr auto SPIN = std::chrono::microseconds(30);

}  // namespace

ThreadPool::ThreadPool(int threads) {
    workers_.reserve(static_cast<size_t>(threads - 1));
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
    stop_ = true;
    ++generation_;
    generation_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::take_tasks() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(context_, i);
}

void ThreadPool::run(int64_t count, void (*task)(void*, int64_t), void* context) {
    if (workers_.empty() || count <= 1) {
        for (int64_t i = 0; i < count; ++i) task(context, i);
        return;
    }
    task_ = task;
    context_ = context;
    count_ = count;
    next_ = 0;
    open_ = true;
    ++generation_;
    generation_.notify_all();
    take_tasks();
    // A worker announces itself before it looks at `open_`: either it sees the call closed, or it is seen here.
    open_ = false;
    for (int spins = 0; inside_ != 0; ++spins) {
        if (spins < 4000)
            relax();
        else
            std::this_thread::yield();
    }
}

void ThreadPool::work() {
    uint32_t seen = 0;
    while (!stop_) {
        const auto start = std::chrono::steady_clock::now();
        for (int spins = 1; generation_ == seen; ++spins) {
            relax();
            if (spins % 64 == 0 && std::chrono::steady_clock::now() - start > SPIN) {
                generation_.wait(seen);
                break;
            }
        }
        seen = generation_;
        ++inside_;
        if (open_) take_tasks();
        --inside_;
    }
}

}  // namespace lean
