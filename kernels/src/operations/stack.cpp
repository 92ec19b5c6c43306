#include "operations/stack.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <utility>

#include "operations/buffers.h"

namespace native {

namespace {

Rotation rotation_of(const StackStep& step, int index) {
  return index < 0 ? Rotation{nullptr, nullptr, 0, false} : step.rotations[index];
}

}  // namespace

void Stack::add(int size, Half half) {
  if (!halves_.empty() && size != size_)
    throw std::invalid_argument("the layers of a stack have one size");
  size_ = size;
  halves_.push_back(std::move(half));
}

void Stack::use(const Use& use, int pairs) {
  if (use.step < 0) throw std::invalid_argument("a step of a stack");
  num_steps_ = std::max(num_steps_, use.step + 1);
  if (use.rotation < 0) return;
  if (static_cast<int>(max_pairs_.size()) <= use.rotation)
    max_pairs_.resize(use.rotation + 1, INT_MAX);
  max_pairs_[use.rotation] = std::min(max_pairs_[use.rotation], pairs);
}

void Stack::add_attention(std::shared_ptr<const AttentionHalf> half, std::shared_ptr<Pool> pool,
                          Use of, const Visibility& visibility) {
  use(of, pool->layout().key_dim / 2);
  const int size = half->size();
  add(size, [half = std::move(half), pool = std::move(pool), of, visibility](
                const StackStep& step, const float* x, const float*, float* y) {
    run_attention(*half, *pool, *step.steps[of.step], rotation_of(step, of.rotation), visibility,
                  nullptr, x, step.num_rows, y);
  });
}

void Stack::add_latent(std::shared_ptr<const LatentHalf> half, std::shared_ptr<Pool> pool, Use of,
                       int window) {
  use(of, half->rotated_dim() / 2);
  const int size = half->size();
  add(size, [half = std::move(half), pool = std::move(pool), of, window](
                const StackStep& step, const float* x, const float*, float* y) {
    run_latent(*half, *pool, *step.steps[of.step], rotation_of(step, of.rotation), window, nullptr,
               x, step.num_rows, y);
  });
}

void Stack::add_mixer(std::shared_ptr<const Mixer> mixer, std::shared_ptr<StatePool> pool) {
  state_pools_.push_back(pool);
  const int size = mixer->size();
  add(size, [mixer = std::move(mixer), pool = std::move(pool)](
                const StackStep& step, const float* x, const float*, float* y) {
    run_mixer(*mixer, *pool, *step.states, x, y);
  });
}

void Stack::add_mlp(std::shared_ptr<const MlpHalf> half, bool is_parallel) {
  if (is_parallel && halves_.empty()) throw std::invalid_argument("a half comes before an MLP");
  has_parallel_ |= is_parallel;
  const int size = half->size();
  add(size, [half = std::move(half), is_parallel](const StackStep& step, const float* x,
                                                  const float* before, float* y) {
    run_mlp(*half, is_parallel ? before : x, x, step.num_rows, y);
  });
}

void Stack::add_mixture(std::shared_ptr<const MixtureHalf> half) {
  const int size = half->size();
  add(size, [half = std::move(half)](const StackStep& step, const float* x, const float*, float* y) {
    run_mixture(*half, x, step.num_rows, y);
  });
}

void Stack::run(const StackStep& step, const float* x, float* y) const {
  const size_t rows_size = static_cast<size_t>(step.num_rows) * size_;
  thread_local std::vector<float> memory;
  float* buffers[] = {y, nullptr, nullptr};
  const size_t num_buffers = has_parallel_ ? 3 : 2;
  assign(memory, {{&buffers[1], rows_size}, {&buffers[2], has_parallel_ ? rows_size : 0}});
  const float* before = nullptr;
  for (size_t left = halves_.size(); left-- > 0;) {
    // The last half writes y.
    float* next = buffers[left % num_buffers];
    halves_[halves_.size() - 1 - left](step, x, before, next);
    before = std::exchange(x, next);
  }
}

}  // namespace native
