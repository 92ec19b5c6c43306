// Attention of the rows of one step over the paged pool.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace native {

/// `num_rows` successive tokens of one request, from a position on.
struct Slice {
  int first_row;
  int num_rows;
  int first_position;
  int first_block;  // in the tables
};

/// The rows of one step; made once and used by every layer.
struct Step {
  std::vector<Slice> slices;
  std::vector<int32_t> tables;  // the blocks of all slices' requests
  std::vector<int32_t> slots;   // where each row's key and value go

  int num_rows() const { return static_cast<int>(slots.size()); }
};

/// Write keys and values `[num_rows, heads, dim]` into the pool, then attend; outputs of rows
/// beyond those of the step, `num_rows` in all, are zero.
void write_and_attend(Pool& pool, const Step& step, const AttentionArgs& args, const float* keys,
                      const float* values, int num_rows);

// The two parts of it.

/// Write rows [first, next) into the pool, of those that the step has, in the calling thread.
void write_rows(Pool& pool, const Step& step, int first, int next, const float* keys,
                const float* values);

/// Attend what has been written; rows beyond those of the step become zero.
void attend(const Step& step, const AttentionArgs& args, int num_rows);

}  // namespace native
