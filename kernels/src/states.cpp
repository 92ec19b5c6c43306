#include "states.h"

#include <algorithm>
#include <bit>
#include <new>
#include <stdexcept>
#include <utility>

namespace native {

namespace {

constexpr int CELLS_OF_FIRST_CHUNK = 8;

int chunk_of(int cell) {
  return std::bit_width(static_cast<unsigned>(cell / CELLS_OF_FIRST_CHUNK));
}
int first_cell(int chunk) { return chunk == 0 ? 0 : CELLS_OF_FIRST_CHUNK << (chunk - 1); }

}  // namespace

StatePool::StatePool(size_t cell_floats) : cell_floats_(cell_floats) {
  if (cell_floats == 0) throw std::invalid_argument("a state has numbers");
}

int StatePool::num_cells() const { return first_cell(num_chunks_); }

void StatePool::grow(int num_cells) {
  while (this->num_cells() < num_cells) {
    if (num_chunks_ == MAX_CHUNKS) throw std::bad_alloc();
    const size_t size = first_cell(num_chunks_ + 1) - this->num_cells();
    chunks_[num_chunks_] = std::make_unique<Memory>(size * cell_floats_ * sizeof(float));
    num_chunks_++;
  }
}

float* StatePool::cell(int index) const {
  const int chunk = chunk_of(index);
  return static_cast<float*>(chunks_[chunk]->data()) +
         (index - first_cell(chunk)) * cell_floats_;
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
