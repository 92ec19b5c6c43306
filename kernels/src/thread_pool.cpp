#include "thread_pool.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <memory>

namespace native {

namespace {

// About 50 microseconds; work that comes later belongs to the next step of the model.
constexpr int NUM_SPINS = 2000;
constexpr int PARTS_BITS = 16;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint64_t number_of(uint64_t numbered) { return numbered >> PARTS_BITS; }
int parts_of(uint64_t numbered) { return static_cast<uint16_t>(numbered); }
uint64_t numbered(uint64_t number, int parts) { return number << PARTS_BITS | parts; }

/// Keep the calling thread on some processors; where the system does not allow it, it runs anywhere.
void stay_on(const std::vector<int>& processors) {
#ifdef __linux__
  const int size = *std::max_element(processors.begin(), processors.end()) + 1;
  cpu_set_t* set = CPU_ALLOC(size);
  if (!set) return;
  CPU_ZERO_S(CPU_ALLOC_SIZE(size), set);
  for (int processor : processors) CPU_SET_S(processor, CPU_ALLOC_SIZE(size), set);
  sched_setaffinity(0, CPU_ALLOC_SIZE(size), set);
  CPU_FREE(set);
#else
  static_cast<void>(processors);
#endif
}

std::unique_ptr<ThreadPool> process_threads = std::make_unique<ThreadPool>(1);

}  // namespace

ThreadPool::ThreadPool(int num_threads, const Nodes& nodes)
    : unclaimed_(num_threads), done_(num_threads), nodes_(nodes), node_of_(num_threads) {
  for (int node = 0; node < num_nodes(); node++)
    std::fill(node_of_.begin() + first_thread(node), node_of_.begin() + first_thread(node + 1), node);
  threads_.reserve(num_threads - 1);
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(sleep_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

int ThreadPool::first_thread(int node) const {
  size_t before = 0, total = 0;
  for (const auto& processors : nodes_) {
    if (node-- > 0) before += processors.size();
    total += processors.size();
  }
  if (total == 0) return node > 0 ? num_threads() : 0;
  return static_cast<int>(num_threads() * before / total);
}

int ThreadPool::first_part(int num_parts, int thread) const {
  // Rounded up: of fewer parts than threads, the first is the calling thread's.
  const int64_t rounding = num_threads() - 1;
  return static_cast<int>((int64_t{num_parts} * thread + rounding) / num_threads());
}

void ThreadPool::call(int num_parts, const void* run, Call call) {
  std::unique_lock caller(caller_, std::try_to_lock);
  if (!caller || threads_.empty() || num_parts == 1) {
    for (int part = 0; part < num_parts; part++) call(run, part);
    return;
  }
  run_.store(run, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  const uint64_t number = number_of(operation_.load(std::memory_order_relaxed)) + 1;
  const Numbered operation = numbered(number, num_parts);
  operation_.store(operation);
  if (num_asleep_.load() > 0) {
    std::lock_guard lock(sleep_);
    wake_.notify_all();
  }
  const int num_own = run_parts(operation, 0);
  while (!are_done(operation, num_own)) pause();
}

/// Run the parts of a thread's range, then what others have left, those of its node first; return
/// how many it has run.
int ThreadPool::run_parts(Numbered operation, int thread) {
  int num_done = 0;
  const auto run_all_of = [&](int owner) {
    const int before = num_done;
    for (int part; (part = claim(operation, owner)) >= 0; num_done++)
      // They are this operation's: it does not end before its claimed parts are done.
      call_.load(std::memory_order_relaxed)(run_.load(std::memory_order_relaxed), part);
    if (num_done == before) return;
    done_[thread].value.store(numbered(number_of(operation), num_done), std::memory_order_release);
  };
  run_all_of(thread);
  // Of few parts those threads that have one are enough to look for others'; the first always has.
  const int num_parts = parts_of(operation);
  if (first_part(num_parts, thread) == first_part(num_parts, thread + 1)) return num_done;
  for (int i = 0; i < num_nodes(); i++) {
    const int node = (node_of_[thread] + i) % num_nodes();
    const int first = first_thread(node), count = first_thread(node + 1) - first;
    for (int j = 0; j < count; j++) run_all_of(first + (thread + 1 + j) % count);
  }
  return num_done;
}

/// Return an unclaimed part of a thread's range, or -1.
int ThreadPool::claim(Numbered operation, int owner) {
  const int num_parts = parts_of(operation), end = first_part(num_parts, owner + 1);
  const int size = end - first_part(num_parts, owner);
  std::atomic<Numbered>& unclaimed = unclaimed_[owner].value;
  Numbered seen = unclaimed.load(std::memory_order_relaxed);
  for (;;) {
    if (number_of(seen) > number_of(operation)) return -1;
    const int left = number_of(seen) < number_of(operation) ? size : parts_of(seen);
    if (left == 0) return -1;
    const Numbered after = numbered(number_of(operation), left - 1);
    // What has been written before the operation is visible since its number was read.
    if (unclaimed.compare_exchange_weak(seen, after, std::memory_order_relaxed)) return end - left;
  }
}

bool ThreadPool::are_done(Numbered operation, int num_own) const {
  int num_done = num_own;
  for (size_t i = 1; i < done_.size(); i++) {
    const Numbered done = done_[i].value.load(std::memory_order_acquire);
    if (number_of(done) == number_of(operation)) num_done += parts_of(done);
  }
  return num_done == parts_of(operation);
}

void ThreadPool::work(int thread) {
  if (!nodes_.empty()) stay_on(nodes_[node_of_[thread]]);
  Numbered seen = 0;
  do {
    seen = operation_.load(std::memory_order_acquire);
    run_parts(seen, thread);
  } while (wait_for_work(seen));
}

/// Return true when another operation has begun; false when the pool is destroyed.
bool ThreadPool::wait_for_work(Numbered seen) {
  for (int i = 0; i < NUM_SPINS; i++) {
    if (operation_.load(std::memory_order_relaxed) != seen) return true;
    pause();
  }
  std::unique_lock lock(sleep_);
  num_asleep_++;
  wake_.wait(lock, [&] { return stopping_ || operation_.load() != seen; });
  num_asleep_--;
  return !stopping_;
}

ThreadPool& threads() { return *process_threads; }

void set_num_threads(int num_threads, const Nodes& nodes) {
  if (num_threads != threads().num_threads() || nodes != threads().nodes())
    process_threads = std::make_unique<ThreadPool>(num_threads, nodes);
}

}  // namespace native
