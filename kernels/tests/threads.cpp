// The threads: each part of an operation runs once, and its effects are visible at the end.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "check.h"
#include "thread_pool.h"

namespace tests {

namespace {

using namespace native;

/// An operation whose parts write to their own memory without atomics: the thread sanitizer reports
/// missing synchronisation as a data race.
class Operation {
 public:
  void run(ThreadPool& pool, int num_parts) {
    counts_.assign(num_parts, 0);
    pool.for_each(num_parts, [this](int part) { counts_[part]++; });
    const bool once = std::all_of(counts_.begin(), counts_.end(), [](int n) { return n == 1; });
    expect(once, std::to_string(num_parts) + " parts run once each");
  }

 private:
  std::vector<int> counts_;
};

/// Long enough that spinning threads go to sleep.
void let_them_sleep() {
  for (int i = 0; i < 3000; i++) std::this_thread::yield();
}

void test_ranges() {
  for (int num_threads : {1, 3, 4, 64}) {
    ThreadPool pool(num_threads);
    for (int num_parts : {0, 1, 3, 64, 1000}) {
      const std::string what = std::to_string(num_parts) + " parts";
      expect(pool.first_part(num_parts, 0) == 0, what + " begin");
      expect(pool.first_part(num_parts, num_threads) == num_parts, what + " end");
      expect(pool.first_part(num_parts, 1) > 0 || num_parts == 0, what + ": the caller has some");
      for (int i = 0; i < num_threads; i++) {
        const int size = pool.first_part(num_parts, i + 1) - pool.first_part(num_parts, i);
        const int least = num_parts / num_threads;
        expect(size == least || (num_parts % num_threads && size == least + 1), what + " are even");
      }
    }
  }
}

void test_nodes() {
  const ThreadPool even(5, {{0}, {0}}), uneven(8, {{0, 1, 2}, {3}}), empty(2, {{0}, {}});
  expect(even.num_nodes() == 2, "nodes");
  expect(even.first_thread(0) == 0 && even.first_thread(1) == 2 && even.first_thread(2) == 5,
         "nodes of as many processors have as many threads");
  expect(uneven.first_thread(1) == 6, "a node of more processors has more threads");
  expect(empty.first_thread(1) == 2, "a node without processors has no threads");
  expect(ThreadPool(3).first_thread(1) == 3, "there is one node by default");
  // The last processor does not exist: its thread runs anywhere.
  ThreadPool pool(4, {{0}, {1 << 16}});
  Operation operation;
  for (int i = 0; i < 1000; i++) operation.run(pool, 9);
}

void test_many_small_operations(int num_threads, int num_operations, int most) {
  ThreadPool pool(num_threads);
  Random random(num_threads);
  Operation operation;
  for (int i = 0; i < num_operations; i++) operation.run(pool, random.between(0, most));
}

void test_many_parts() {
  ThreadPool pool(3);
  Operation().run(pool, 200001);
}

/// Each thread's first part waits for all others of its range, so others must take them.
void test_ranges_of_threads_that_are_held_up(int num_threads) {
  ThreadPool pool(num_threads);
  constexpr int PER_THREAD = 5;
  for (int i = 0; i < 100; i++) {
    const int held_up = i % num_threads * PER_THREAD;
    std::atomic<int> num_others{0};
    pool.for_each(num_threads * PER_THREAD, [&](int part) {
      if (part < held_up || part >= held_up + PER_THREAD) return;
      if (part != held_up) num_others++;
      while (part == held_up && num_others < PER_THREAD - 1) std::this_thread::yield();
    });
    expect(num_others == PER_THREAD - 1, "other threads take the rest of a range");
  }
}

void test_threads_that_sleep(int num_threads) {
  ThreadPool pool(num_threads);
  Operation operation;
  for (int i = 0; i < 200; i++) {
    operation.run(pool, 5);
    let_them_sleep();
  }
}

void test_callers_at_once() {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; caller++)
    callers.emplace_back([&pool] {
      Operation operation;
      for (int i = 0; i < 10000; i++) operation.run(pool, 4);
    });
  for (std::thread& caller : callers) caller.join();
}

void test_coming_and_going() {
  Operation operation;
  for (int i = 0; i < 300; i++) {
    ThreadPool pool(1 + i % 4);
    for (int j = 0; j < i % 3; j++) operation.run(pool, 4);
    if (i % 10 == 0) let_them_sleep();
  }
}

void test_set_num_threads() {
  Operation operation;
  for (int i = 0; i < 60; i++)
    for (int num_threads : {1, 2, 4}) {
      set_num_threads(num_threads);
      expect(threads().num_threads() == num_threads, "as many threads as asked for");
      operation.run(threads(), 7);
      set_num_threads(num_threads, {{0}, {0}});
      expect(threads().num_nodes() == 2, "as many nodes as asked for");
      operation.run(threads(), 7);
    }
  set_num_threads(1);
}

}  // namespace

void test_threads() {
  test_ranges();
  test_nodes();
  for (int num_threads : {1, 2, 4}) {
    test_many_small_operations(num_threads, 20000, 9);
    test_threads_that_sleep(num_threads);
  }
  // Ranges that stay empty for some operations, and threads that come late.
  test_many_small_operations(9, 2000, 20);
  test_many_parts();
  for (int num_threads : {2, 3, 5}) test_ranges_of_threads_that_are_held_up(num_threads);
  for (int num_threads : {1, 2, 3}) {
  }
  test_callers_at_once();
  test_coming_and_going();
  test_set_num_threads();
}

}  // namespace tests
