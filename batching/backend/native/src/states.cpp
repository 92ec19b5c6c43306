#include "states.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace native {

namespace {

constexpr int CELLS_OF_CHUNK = 8;

}  // namespace

StatePool::StatePool(size_t cell_floats) : cell_floats_(cell_floats) {
  if (cell_floats == 0) throw std::invalid_argument("a state has numbers");
}

int StatePool::num_cells() const { return static_cast<int>(chunks_.size()) * CELLS_OF_CHUNK; }

void StatePool::grow(int num_cells) {
  while (this->num_cells() < num_cells)
    chunks_.push_back(
        std::make_unique<Memory>(CELLS_OF_CHUNK * cell_floats_ * sizeof(float)));
}

float* StatePool::cell(int index) const {
  return static_cast<float*>(chunks_[index / CELLS_OF_CHUNK]->data()) +
         index % CELLS_OF_CHUNK * cell_floats_;
}

StateStep::StateStep(std::vector<StatePiece> given) : pieces(std::move(given)) {
  for (size_t i = 0; i < pieces.size(); i++) {
    const StatePiece& piece = pieces[i];
    if (piece.first_row != num_rows || piece.num_rows < 1 || piece.source < -1 || piece.target < 0)
      throw std::invalid_argument("pieces follow each other and have rows and a cell");
    num_rows += piece.num_rows;
    num_cells = std::max({num_cells, piece.source + 1, piece.target + 1});
    if (i > 0 && piece.source == pieces[i - 1].target) {
      runs.back().num_pieces++;
      runs.back().num_rows += piece.num_rows;
    } else {
      runs.push_back({static_cast<int>(i), 1, piece.first_row, piece.num_rows});
    }
  }
}

}  // namespace native
