// Recurrent states of one layer, and what a step does with them.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "memory.h"

namespace native {

/// Cells of one size, each a state after some position of a request.
///
/// The pool may grow while operations compute with cells that it had before: a step is queued while
/// the one before it runs.  So neither cells nor where they are found ever move.
class StatePool {
 public:
  explicit StatePool(size_t cell_floats);
  StatePool(const StatePool&) = delete;
  StatePool& operator=(const StatePool&) = delete;

  size_t cell_floats() const { return cell_floats_; }
  /// Have at least so many cells; in one thread at a time.  Throws std::bad_alloc.
  void grow(int num_cells);
  int num_cells() const;
  float* cell(int index) const;

 private:
  size_t cell_floats_;
  /// Of a billion cells.
  static constexpr int MAX_CHUNKS = 28;
  /// Each as large as all before it together; memory is backed by pages when it is touched.
  std::array<std::unique_ptr<Memory>, MAX_CHUNKS> chunks_;
  int num_chunks_ = 0;
};

/// Successive rows of one request, from the state in one cell to that in another, or the same one.
struct StatePiece {
  int first_row;
  int num_rows;
  int source;  // -1 is all zero
  int target;
};

/// Successive pieces of one request, each but the first beginning with the state that the one before
/// ends with.
struct StateRun {
  int first_piece;
  int num_pieces;
  int first_row;
  int num_rows;
};

/// The rows of a step, in order.
struct StateStep {
  std::vector<StatePiece> pieces;
  std::vector<StateRun> runs;
  int num_cells = 0;  // that the pieces are in
  int num_rows = 0;

  /// Throws std::invalid_argument if the rows of the pieces do not follow each other.
  explicit StateStep(std::vector<StatePiece> pieces);
};

}  // namespace native
