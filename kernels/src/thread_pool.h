// The threads that compute an operation together.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace native {

/// Processors of each NUMA node; none if threads may run anywhere.
using Nodes = std::vector<std::vector<int>>;

/// Runs the parts of one operation at a time, in the calling thread and its workers.
///
/// Each thread has its own range of the parts, the same in each operation of as many parts, so that
/// it reads the same weights in each step; it claims them one by one in a cache line of its own.
/// When it has none left, it takes those of others: a thread that the system preempts delays one
/// part and not its range.  An idle worker spins, since the next operation of a model begins some
/// microseconds later, and then sleeps.
///
/// With several nodes, successive threads belong to one, and workers stay on its processors.
class ThreadPool {
 public:
  /// With 1 thread everything runs in the calling thread, which is the first.
  explicit ThreadPool(int num_threads, const Nodes& nodes = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(unclaimed_.size()); }
  int num_nodes() const { return std::max<int>(1, static_cast<int>(nodes_.size())); }
  const Nodes& nodes() const { return nodes_; }
  /// Of those of a node; nodes have as many threads as they have of the processors.
  int first_thread(int node) const;
  /// Of a thread's own range; that of the thread after the last is `num_parts`.
  int first_part(int num_parts, int thread) const;

  /// Call `run(part)` for each part in [0, num_parts); return when all have returned.
  ///
  /// Parts must not throw, nor call this.  While the operation of another caller runs, the calling
  /// thread runs all parts itself.
  template <typename Run>
  void for_each(int num_parts, const Run& run) {
    for (int first = 0; first < num_parts; first += MAX_PARTS) {
      const auto part_of_all = [&run, first](int part) { run(first + part); };
      call(std::min(num_parts - first, MAX_PARTS), &part_of_all, [](const void* f, int part) {
        (*static_cast<decltype(&part_of_all)>(f))(part);
      });
    }
  }

 private:
  using Call = void (*)(const void* run, int part);
  // An operation's number in the upper bits, a number of parts in the lower ones: numbers do not
  // recur within years.
  using Numbered = uint64_t;
  static constexpr int MAX_PARTS = (1 << 16) - 1;

  // Two cache lines: processors may fetch them in pairs.
  struct alignas(128) Counter {
    std::atomic<Numbered> value{0};
  };

  void call(int num_parts, const void* run, Call call);
  int run_parts(Numbered operation, int thread);
  int claim(Numbered operation, int owner);
  bool are_done(Numbered operation, int num_own) const;
  void work(int thread);
  bool wait_for_work(Numbered seen);

  // The operation with its number of parts; `run_` and `call_` are written before, while no part
  // of the one before can be claimed, with `caller_` locked.
  alignas(128) std::atomic<Numbered> operation_{0};
  std::atomic<const void*> run_{nullptr};
  std::atomic<Call> call_{nullptr};

  // By thread.  Unclaimed parts of its range: all, while the number is that of an earlier
  // operation, so that nothing has to be written to begin one, and a claim for an earlier one fails.
  std::vector<Counter> unclaimed_;
  // By thread, which alone writes it: parts that it has run, of its own range and of others'.
  std::vector<Counter> done_;

  alignas(128) std::mutex caller_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> stopping_{false};
  Nodes nodes_;
  std::vector<int> node_of_;  // by thread
  std::vector<std::thread> threads_;
};

/// The threads of this process.
ThreadPool& threads();
/// Replace the threads if they differ; no operation may run meanwhile.
void set_num_threads(int num_threads, const Nodes& nodes = {});

}  // namespace native
