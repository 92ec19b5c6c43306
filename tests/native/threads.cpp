// The threads: each part of an operation runs once, and its effects are visible at the end.
#include <algorithm>
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

void test_many_small_operations(int num_threads) {
  ThreadPool pool(num_threads);
  Random random(num_threads);
  Operation operation;
  for (int i = 0; i < 20000; i++) operation.run(pool, random.between(0, 9));
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
    }
}

}  // namespace

void test_threads() {
  for (int num_threads : {1, 2, 4}) {
    test_many_small_operations(num_threads);
    test_threads_that_sleep(num_threads);
  }
  test_callers_at_once();
  test_coming_and_going();
  test_set_num_threads();
}

}  // namespace tests
