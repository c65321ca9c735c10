// A fixed set of threads that share the tasks of one call. The caller is one of them.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace lean {

class ThreadPool {
public:
    explicit ThreadPool(int threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls task(context, i) once for each i in [0, count), from any of the threads, and returns when all have
    // returned. A thread that is late in waking is not waited for. One call at a time.
    void run(int64_t count, void (*task)(void* context, int64_t index), void* context);

    template <class F> void parallel_for(int64_t count, F&& body) {
        run(count, [](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body);
    }

private:
    void work();
    void take_tasks();

    std::vector<std::thread> workers_;
    void (*task_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    int64_t count_ = 0;
    alignas(64) std::atomic<uint32_t> generation_{0};  // workers sleep on it
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int32_t> inside_{0};  // workers that may touch the current call
    std::atomic<bool> open_{false};
    std::atomic<bool> stop_{false};
};

}  // namespace lean
