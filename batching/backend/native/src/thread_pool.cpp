#include "thread_pool.h"

#include <memory>

namespace native {

namespace {

// About 50 microseconds; work that comes later belongs to the next step of the model.
constexpr int NUM_SPINS = 2000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint32_t num_unclaimed(uint64_t claims) { return static_cast<uint32_t>(claims); }

std::unique_ptr<ThreadPool> process_threads = std::make_unique<ThreadPool>(1);

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; i++) threads_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(sleep_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::call(int num_parts, const void* run, Call call) {
  if (num_parts <= 0) return;
  std::unique_lock caller(caller_, std::try_to_lock);
  if (!caller || threads_.empty() || num_parts == 1) {
    for (int part = 0; part < num_parts; part++) call(run, part);
    return;
  }
  run_.store(run, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  num_parts_.store(num_parts, std::memory_order_relaxed);
  num_done_.store(0, std::memory_order_relaxed);
  uint64_t number = (claims_.load(std::memory_order_relaxed) >> 32) + 1;
  claims_.store(number << 32 | static_cast<uint32_t>(num_parts));
  if (num_asleep_.load() > 0) {
    std::lock_guard lock(sleep_);
    wake_.notify_all();
  }
  uint64_t seen = 0;
  while (run_one(seen)) {
  }
  while (num_done_.load(std::memory_order_acquire) < num_parts) pause();
}

/// Run a part if one is unclaimed; `seen` becomes the last value of `claims_`.
bool ThreadPool::run_one(uint64_t& seen) {
  seen = claims_.load(std::memory_order_acquire);
  while (num_unclaimed(seen) > 0) {
    const void* run = run_.load(std::memory_order_relaxed);
    Call call = call_.load(std::memory_order_relaxed);
    int num_parts = num_parts_.load(std::memory_order_relaxed);
    // Fails if another operation has begun: its number differs.
    if (claims_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      call(run, num_parts - static_cast<int>(num_unclaimed(seen)));
      num_done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
  return false;
}

void ThreadPool::work() {
  uint64_t seen = 0;
  do {
    while (run_one(seen)) {
    }
  } while (wait_for_work(seen));
}

/// Return true when there are new parts to claim, false when the pool is destroyed.
bool ThreadPool::wait_for_work(uint64_t seen) {
  for (int i = 0; i < NUM_SPINS; i++) {
    if (claims_.load(std::memory_order_relaxed) != seen) return true;
    pause();
  }
  std::unique_lock lock(sleep_);
  num_asleep_++;
  wake_.wait(lock, [&] { return stopping_ || claims_.load() != seen; });
  num_asleep_--;
  return !stopping_;
}

ThreadPool& threads() { return *process_threads; }

void set_num_threads(int num_threads) {
  if (num_threads != threads().num_threads())
    process_threads = std::make_unique<ThreadPool>(num_threads);
}

}  // namespace native
