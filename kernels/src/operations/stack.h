// All layers of a model as one operation.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "operations/latent.h"
#include "operations/mixer.h"
#include "operations/mixture.h"

namespace native {

/// What layers are given in a step.
struct StackStep {
  int num_rows;
  std::vector<std::shared_ptr<const Step>> steps;  // of layers whose blocks are the same
  std::vector<Rotation> rotations;
  std::shared_ptr<const StateStep> states;
};

/// Halves of blocks, one after the other, on the pools of their layers.
class Stack {
 public:
  /// Where a half finds its step and its angles; no rotation is -1.
  struct Use {
    int step;
    int rotation;
  };

  void add_attention(std::shared_ptr<const AttentionHalf> half, std::shared_ptr<Pool> pool, Use use,
                     const Visibility& visibility);
  void add_latent(std::shared_ptr<const LatentHalf> half, std::shared_ptr<Pool> pool, Use use,
                  int window);
  void add_mixer(std::shared_ptr<const Mixer> mixer, std::shared_ptr<StatePool> pool);
  /// is_parallel: it has the input of the half before it.
  void add_mlp(std::shared_ptr<const MlpHalf> half, bool is_parallel);
  void add_mixture(std::shared_ptr<const MixtureHalf> half);

  int size() const { return size_; }
  int num_steps() const { return num_steps_; }
  /// Of each rotation, how many pairs the heads have that it rotates.
  const std::vector<int>& max_pairs() const { return max_pairs_; }
  const std::vector<std::shared_ptr<StatePool>>& state_pools() const { return state_pools_; }

  /// Rows `[num_rows, size]` in and out.
  void run(const StackStep& step, const float* x, float* y) const;

 private:
  /// Of x, and of what the half before has had as x.
  using Half =
      std::function<void(const StackStep&, const float* x, const float* before, float* y)>;

  void add(int size, Half half);
  void use(const Use& use, int pairs);

  std::vector<Half> halves_;
  int size_ = 0;
  int num_steps_ = 0;
  bool has_parallel_ = false;
  std::vector<int> max_pairs_;
  std::vector<std::shared_ptr<StatePool>> state_pools_;
};

}  // namespace native
