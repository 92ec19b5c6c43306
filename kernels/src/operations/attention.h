// Attention of the rows of one step over the paged pool.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace native {

/// Successive tokens of one request.
struct Slice {
  int first_row;
  int num_rows;
  int first_position;
  int first_block;  // index into the tables
  int until = 0;    // its rows attend to what follows them before this position, too
};

/// The rows of one step, shared by all layers.
struct Step {
  std::vector<Slice> slices;
  std::vector<int32_t> tables;  // the block tables of the slices' requests
  std::vector<int32_t> slots;   // where each row's key and value are written

  int num_rows() const { return static_cast<int>(slots.size()); }
};

/// Write keys and values `[num_rows, heads, dim]` into the pool, then attend.  Rows beyond those of
/// the step are padding; their outputs are zero.
void write_and_attend(Pool& pool, const Step& step, const AttentionArgs& args, const float* keys,
                      const float* values, int num_rows);

/// Write rows [first, next) into the pool, without padding, in the calling thread.
void write_rows(Pool& pool, const Step& step, int first, int next, const float* keys,
                const float* values);

/// Attend to what has been written, by all threads.
void attend(const Step& step, const AttentionArgs& args, int num_rows);

}  // namespace native
