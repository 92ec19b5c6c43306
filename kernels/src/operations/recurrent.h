// Recurrences, by all threads.
#pragma once

#include "kernels.h"

namespace native {

void delta_rule(const DeltaArgs& args, int num_requests);

void convolve(const ConvolutionArgs& args, int num_requests);

}  // namespace native
