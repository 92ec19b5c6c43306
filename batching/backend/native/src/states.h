// Recurrent states of one layer, and what a step does with them.
#pragma once

#include <memory>
#include <vector>

#include "memory.h"

namespace native {

/// Cells of one size, each a state after some position of a request.  Their addresses stay.
class StatePool {
 public:
  explicit StatePool(size_t cell_floats);
  StatePool(const StatePool&) = delete;
  StatePool& operator=(const StatePool&) = delete;

  size_t cell_floats() const { return cell_floats_; }
  /// Have at least so many cells; not while an operation looks for one.
  void grow(int num_cells);
  int num_cells() const;
  float* cell(int index) const;

 private:
  size_t cell_floats_;
  std::vector<std::unique_ptr<Memory>> chunks_;
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
