// The threads that compute an operation together.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace native {

/// Runs the parts of one operation at a time, in the calling thread and its workers.
///
/// Threads claim parts one by one, so a thread that the system preempts delays one part and not a
/// fixed share of the operation.  An idle worker spins, since the next operation of a model begins
/// some microseconds later, and then sleeps.
class ThreadPool {
 public:
  /// With 1 thread everything runs in the calling thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  /// Call `run(part)` for each part in [0, num_parts); return when all have returned.
  ///
  /// Parts must not throw, nor call this.  While the operation of another caller runs, the calling
  /// thread runs all parts itself.
  template <typename Run>
  void for_each(int num_parts, const Run& run) {
    call(num_parts, &run, [](const void* f, int part) {
      (*static_cast<const Run*>(f))(part);
    });
  }

 private:
  using Call = void (*)(const void* run, int part);

  void call(int num_parts, const void* run, Call call);
  void work();
  bool run_one(uint64_t& seen);
  bool wait_for_work(uint64_t seen);

  // The operation: written while none of its parts can be claimed, with `caller_` locked.
  std::atomic<const void*> run_{nullptr};
  std::atomic<Call> call_{nullptr};
  std::atomic<int> num_parts_{0};

  // The operation's number in the upper half, its unclaimed parts in the lower half: a claim for an
  // earlier operation cannot succeed.
  alignas(64) std::atomic<uint64_t> claims_{0};
  alignas(64) std::atomic<int> num_done_{0};

  std::mutex caller_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

/// The threads of this process.
ThreadPool& threads();
/// Replace the threads if the number differs; no operation may run meanwhile.
void set_num_threads(int num_threads);

}  // namespace native
