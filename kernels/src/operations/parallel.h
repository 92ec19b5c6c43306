// Distributes the rows of an operation among the threads.
#pragma once

#include <algorithm>

#include "thread_pool.h"

namespace native {

constexpr int ROWS_PER_PART = 8;

/// Some for each thread, but no more than are worth a part.
inline int rows_per_part(int num_rows) {
  const int num_threads = threads().num_threads();
  return std::clamp((num_rows + num_threads - 1) / num_threads, 1, ROWS_PER_PART);
}

/// Call `run(first, next)` for all rows, `rows_per_part` at a time.
template <typename Run>
void for_rows(int num_rows, int rows_per_part, const Run& run) {
  threads().for_each((num_rows + rows_per_part - 1) / rows_per_part, [&](int part) {
    const int first = part * rows_per_part;
    run(first, std::min(first + rows_per_part, num_rows));
  });
}

}  // namespace native
