// The threads that share one operation's work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace native {

/// Runs the parts of one operation at a time, in the calling thread and its own.
///
/// Parts are claimed one by one, so a thread that the system takes off its core holds up one part
/// and not a share of the whole.  A thread that finds no work looks for it a while, since the next
/// operation of a model begins some microseconds later, and then sleeps.
class ThreadPool {
 public:
  /// With `num_threads` of 1 everything runs in the calling thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  /// Call `run(part)` for each part in [0, num_parts); return when all have returned.
  ///
  /// They must not throw, nor call this themselves.  While another thread's operation runs, the
  /// caller does all parts itself.
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

  // The operation: written while no part of it can be claimed, by whoever holds `caller_`.
  std::atomic<const void*> run_{nullptr};
  std::atomic<Call> call_{nullptr};
  std::atomic<int> num_parts_{0};

  // The number of the operation in the upper half, and how many of its parts nobody has claimed
  // in the lower one: a claim of an earlier operation's part cannot succeed.
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
/// Make them anew if it is another number; then nothing may run meanwhile.
void set_num_threads(int num_threads);

}  // namespace native
