// One token for each row of logits.
#include "operations/sampling.h"

#include "primitives/cpu_primitive.h"
#include "primitives/primitives.h"
#include "thread_pool.h"

namespace native::graph {

namespace {

class Sample : public CpuPrimitive {
 public:
  Sample(std::vector<RowSampling> rows, std::vector<LogitEdits> edits)
      : rows_(std::move(rows)), edits_(std::move(edits)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    allocate(outputs[0]);
    const uint32_t* before = inputs.size() > 1 ? contiguous<uint32_t>(inputs[1]) : nullptr;
    dispatch([logits = contiguous(inputs[0]), rows = rows_, edits = edits_, before,
              size = inputs[0].shape(1), tokens = outputs[0].data<uint32_t>()] {
      native::sample(logits, rows.data(), edits.data(), static_cast<int>(rows.size()), size, before,
                     tokens);
    });
  }

  DEFINE_NAME(NativeSample)

 private:
  std::vector<RowSampling> rows_;
  std::vector<LogitEdits> edits_;
};

}  // namespace

mx::array sample(const mx::array& logits, std::vector<RowSampling> rows,
                 std::vector<LogitEdits> edits, const std::optional<mx::array>& before) {
  require(logits.ndim() == 2 && logits.shape(0) == static_cast<int>(rows.size()) &&
              logits.shape(1) > 0 && edits.size() == rows.size(),
          "logits are [rows, size]");
  const int num_before = before ? static_cast<int>(before->size()) : 0;
  for (const auto& [tokens, factors, terms, expected] : edits) {
    require(factors.size() == tokens.size() && terms.size() == tokens.size(),
            "a factor and a term for each token");
    require(expected.index < num_before, "an expected token is one of the step before");
    require(expected.index < 0 || (expected.factors.size() == tokens.size() &&
                                   expected.terms.size() == tokens.size()),
            "a factor and a term for each token that may be the expected one");
    for (const int32_t token : tokens)
      if (token < 0 || token >= logits.shape(1))
        throw std::out_of_range("a token id is not in the vocabulary");
  }
  std::vector<mx::array> inputs = {as_floats(logits)};
  if (before) inputs.push_back(mx::astype(*before, mx::uint32, stream()));
  return mx::array({logits.shape(0)}, mx::uint32,
                   std::make_shared<Sample>(std::move(rows), std::move(edits)), std::move(inputs));
}

}  // namespace native::graph
