#include "operations/recurrent.h"

#include "operations/parallel.h"

namespace native {

namespace {

// A multiple of what a kernel computes together, so that it does not depend on the parts.  They fit
// into the L1 cache, where they stay for all tokens.
constexpr int ROWS_OF_STATE = 32;
// A multiple of all vectors.  Fewer do not repay claiming a part.
constexpr int CHANNELS_AT_ONCE = 1024;

}  // namespace

void delta_rule(const DeltaArgs& args, int num_requests) {
  const int parts = (args.value_dim + ROWS_OF_STATE - 1) / ROWS_OF_STATE;
  threads().for_each(num_requests * args.num_heads * parts, [&](int part) {
    const int first = part % parts * ROWS_OF_STATE;
    kernels()->delta_rule(args, part / parts, first,
                          std::min(first + ROWS_OF_STATE, args.value_dim));
  });
}

void convolve(const ConvolutionArgs& args, int num_requests) {
  const int parts = (args.num_channels + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE;
  threads().for_each(num_requests * args.num_tokens * parts, [&](int part) {
    const int first = part % parts * CHANNELS_AT_ONCE;
    kernels()->convolve(args, part / parts, first, std::min(first + CHANNELS_AT_ONCE, args.num_channels));
  });
}

}  // namespace native
