// Runs a kernel on the CPU: the threads of a group are fibers, which run in turn up to the next collective.
//
// The turns are in an order of choice, so that what a barrier must order shows in the results.  Under TSan each
// thread of the GPU is one of TSan's, and only barriers order them.  The groups then share nothing but the
// buffers; with more than 255 threads together TSan may miss a race.

// For ucontext.h on a Mac.
#define _XOPEN_SOURCE 700
// Its longjmp takes another stack for a mistake.
#undef _FORTIFY_SOURCE
#include <sanitizer/asan_interface.h>
#include <ucontext.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/kernels/fibers.h"

#ifdef THREADS_WATCHED
constexpr bool kThreadsWatched = true;
#define TSAN(call) call
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void* __tsan_get_current_fiber();
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
constexpr bool kThreadsWatched = false;
#define TSAN(call)
#endif

namespace {

constexpr int kLanes = 32;
constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kMaxShared = 32 * 1024;
// Between two shared arrays, so that ASan sees what is beyond one.
constexpr std::size_t kGap = 64;
constexpr std::size_t kArenaBytes = 2 * kMaxShared;
constexpr int kMaxPosted = 64;

enum class State { kRuns, kAtBarrier, kAtExchange, kEnded };

// Where a fiber or their scheduler goes on.  A switch by ucontext also saves the signals, by two system calls: more
// than all else that a kernel does here.  The sanitizers know no other switch, so that it is only the first one without.
#if defined(THREADS_WATCHED) || defined(__SANITIZE_ADDRESS__)
struct Context {
  ucontext_t context;

  void go_on(Context& other) { swapcontext(&context, &other.context); }
};
#else
struct Context {
  ucontext_t context;
  jmp_buf place;
  bool has_begun = false;

  void go_on(Context& other) {
    if (_setjmp(place)) return;
    has_begun = true;
    if (other.has_begun) _longjmp(other.place, 1);
    other.has_begun = true;
    setcontext(&other.context);
  }
};
#endif

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  void* tsan = nullptr;
  State state = State::kRuns;
  int line = 0;
  int num_barriers = 0;
  int num_exchanges = 0;
  // Of this and of the last exchange: a thread may be one ahead of its neighbours.
  float posted[2][kMaxPosted];
};

struct Group {
  Group(const Kernel& kernel, int3 count, int threads) : kernel(kernel), count(count), fibers(threads) {}

  const Kernel& kernel;
  int3 index{}, count;
  std::vector<Fiber> fibers;
  // Shared memory, and its arrays by their lines.
  std::unique_ptr<char[]> arena{new char[kArenaBytes]};
  std::map<int, void*> shared;
  std::size_t shared_bytes = 0;
  // Two, since a thread may be at the next barrier when another leaves this one.
  char barrier_tags[2];
  Context scheduler;
  int current = 0;
  std::string error;
};

// The end of each thread comes before the end of the kernel.
[[maybe_unused]] char end_tag;
[[maybe_unused]] void* tsan_scheduler;
// Of this thread of the CPU, which may not be the only one that runs kernels.
thread_local Group* group;

Fiber& current() { return group->fibers[group->current]; }

void leave(State state, int line) {
  Fiber& fiber = current();
  fiber.state = state;
  fiber.line = line;
  // 1: the switch itself orders nothing.
  TSAN(__tsan_switch_to_fiber(tsan_scheduler, 1));
  fiber.context.go_on(group->scheduler);
}

void enter(int thread) {
  group->current = thread;
  TSAN(__tsan_switch_to_fiber(group->fibers[thread].tsan, 1));
  group->scheduler.go_on(group->fibers[thread].context);
}

void run_thread() {
  try {
    group->kernel.body(group->kernel.buffers, group->kernel.shapes);
  } catch (const std::runtime_error& reason) {
    group->error = reason.what();
  }
  TSAN(__tsan_release(&end_tag));
  leave(State::kEnded, 0);
}

void start(Fiber& fiber) {
  fiber.context = {};
  ucontext_t& context = fiber.context.context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, run_thread, 0);
  TSAN(fiber.tsan = __tsan_create_fiber(0));
  fiber.state = State::kRuns;
  fiber.num_barriers = fiber.num_exchanges = 0;
}

// Lets those go on who all wait for each other at one line; returns whether there are any.
bool release(int first, int count, State state) {
  Fiber* fibers = &group->fibers[first];
  const auto waits = [&](const Fiber& fiber) {
    return fiber.state == state && fiber.line == fibers[0].line;
  };
  if (!std::all_of(fibers, fibers + count, waits)) return false;
  for (int i = 0; i < count; i++) fibers[i].state = State::kRuns;
  return true;
}

bool release_any() {
  const int num_threads = static_cast<int>(group->fibers.size());
  bool any = release(0, num_threads, State::kAtBarrier);
  for (int first = 0; first < num_threads; first += kLanes) {
    any |= release(first, kLanes, State::kAtExchange);
  }
  return any;
}

std::string describe(int thread) {
  const Fiber& fiber = group->fibers[thread];
  const char* names[] = {"runs", "waits at a barrier", "waits at an exchange", "has ended"};
  return "thread " + std::to_string(thread) + " " + names[static_cast<int>(fiber.state)] +
         (fiber.line ? ", line " + std::to_string(fiber.line) : "");
}

void fail_divergent() {
  int other = 0;
  const int num_threads = static_cast<int>(group->fibers.size());
  while (other < num_threads - 1 && group->fibers[other].state == group->fibers[0].state &&
         group->fibers[other].line == group->fibers[0].line) {
    other++;
  }
  throw std::runtime_error("divergent collective: " + describe(0) + ", and " + describe(other));
}

// Of count things: forward, backward, or shuffled by the number itself.
class Order {
 public:
  Order(int number, int count) : number_(number), random_(number), turns_(count) {
    std::iota(turns_.begin(), turns_.end(), 0);
    if (number == 1) std::reverse(turns_.begin(), turns_.end());
  }

  const std::vector<int>& next() {
    if (number_ > 1) std::shuffle(turns_.begin(), turns_.end(), random_);
    return turns_;
  }

 private:
  int number_;
  std::mt19937 random_;
  std::vector<int> turns_;
};

bool has_ended(const Fiber& fiber) { return fiber.state == State::kEnded; }

void run_group(Order& order) {
  group->shared.clear();
  group->shared_bytes = 0;
  ASAN_UNPOISON_MEMORY_REGION(group->arena.get(), kArenaBytes);
  // A NaN in each float: what is read before it is written shows.  TSan would not come to see an index of 0xff.
  std::memset(group->arena.get(), kThreadsWatched ? 0 : 0xff, kArenaBytes);
  ASAN_POISON_MEMORY_REGION(group->arena.get(), kArenaBytes);
  for (Fiber& fiber : group->fibers) start(fiber);
  for (;;) {
    for (int thread : order.next()) {
      if (group->fibers[thread].state == State::kRuns) enter(thread);
      if (!group->error.empty()) throw std::runtime_error(group->error);
    }
    if (std::all_of(group->fibers.begin(), group->fibers.end(), has_ended)) break;
    if (!release_any()) fail_divergent();
  }
}

void run_groups(const Kernel& kernel, const int* grid, int threads, int order) {
  if (threads % kLanes || grid[0] % threads) {
    throw std::runtime_error(std::to_string(threads) + " threads of " + std::to_string(grid[0]));
  }
  TSAN(tsan_scheduler = __tsan_get_current_fiber());
  const int3 count = {grid[0] / threads, grid[1], grid[2]};
  const int num_groups = count.x * count.y * count.z;
  Order order_of_groups(order, num_groups), turns(order, threads);
  std::vector<std::unique_ptr<Group>> groups;
  for (int i : order_of_groups.next()) {
    if (groups.empty() || kThreadsWatched) {
      groups.push_back(std::make_unique<Group>(kernel, count, threads));
      group = groups.back().get();
    }
    group->index = {i % count.x, i / count.x % count.y, i / count.x / count.y};
    run_group(turns);
  }
  TSAN(__tsan_acquire(&end_tag));
  TSAN(for (const auto& each : groups) for (Fiber& fiber : each->fibers) __tsan_destroy_fiber(fiber.tsan));
}

// Shows n values to the 31 neighbours; returns which of `posted` has theirs.  It orders no memory, as a GPU's
// exchanges do not.
int exchange(const float* values, int n, int line) {
  const int turn = current().num_exchanges++ % 2;
  if (n > kMaxPosted) throw std::runtime_error(std::to_string(n) + " values in an exchange");
  for (int i = 0; i < n; i++) current().posted[turn][i] = values[i];
  leave(State::kAtExchange, line);
  return turn;
}

}  // namespace

namespace dialect {

int thread_index() { return group->current; }
int3 group_index() { return group->index; }
int3 num_groups() { return group->count; }

void* shared_memory(std::size_t bytes, int line) {
  void*& array = group->shared[line];
  if (!array) {
    array = &group->arena[group->shared_bytes + group->shared.size() * kGap];
    group->shared_bytes += (bytes + kGap - 1) / kGap * kGap;
    if (group->shared_bytes > kMaxShared) {
      throw std::runtime_error(std::to_string(group->shared_bytes) + " bytes of shared memory");
    }
    ASAN_UNPOISON_MEMORY_REGION(array, bytes);
  }
  return array;
}

void barrier(int line) {
  [[maybe_unused]] char* tag = &group->barrier_tags[current().num_barriers++ % 2];
  TSAN(__tsan_release(tag));
  leave(State::kAtBarrier, line);
  TSAN(__tsan_acquire(tag));
}

float shuffle_xor(float value, int mask, int line) {
  const int turn = exchange(&value, 1, line);
  return group->fibers[group->current ^ mask].posted[turn][0];
}

void reduce(float* values, int n, int lanes, bool maximum, int line) {
  const int turn = exchange(values, n, line);
  const Fiber* team = &group->fibers[group->current / lanes * lanes];
  for (int i = 0; i < n; i++) {
    // Halves are added in the order of the GPUs' exchanges.
    float parts[kLanes];
    for (int lane = 0; lane < lanes; lane++) parts[lane] = team[lane].posted[turn][i];
    for (int step = lanes / 2; step > 0; step /= 2) {
      for (int lane = 0; lane < step; lane++) {
        const float other = parts[lane + step];
        parts[lane] = maximum ? std::fmax(parts[lane], other) : parts[lane] + other;
      }
    }
    values[i] = parts[0];
  }
}

}  // namespace dialect

extern "C" int run_kernel(const Kernel* kernel, const int* grid, int threads, int order, char* error,
                          std::size_t error_size) {
  try {
    run_groups(*kernel, grid, threads, order);
    return 0;
  } catch (const std::runtime_error& reason) {
    std::snprintf(error, error_size, "%s", reason.what());
    return 1;
  }
}
