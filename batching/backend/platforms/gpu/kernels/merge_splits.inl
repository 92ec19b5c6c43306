// Joins what paged_decode found in the splits of a row.
//
// A group is a query head (group.x) of a row (group.y); a thread is a dim of its values.
const int num_splits = stats_shape[2];
const Offset result = Offset(group.y) * NUM_HEADS + group.x;

#if HAS_SINKS
const float sink = sinks[group.x];
#else
const float sink = NEGATIVE_INFINITY;
#endif
float maximum = sink;
for (int split = 0; split < num_splits; split++) {
  maximum = MAX(maximum, stats[2 * (result * num_splits + split)]);
}
float total = HAS_SINKS ? EXP(sink - maximum) : 0.0f;
float value = 0.0f;
for (int split = 0; split < num_splits; split++) {
  const Offset from = result * num_splits + split;
  const float sum = stats[2 * from + 1];
  // A split without keys has no partials.
  if (sum != 0.0f) {
    const float weight = EXP(stats[2 * from] - maximum);
    total += weight * sum;
    if (thread_id < VALUE_DIM) value += weight * partials[from * VALUE_DIM + thread_id];
  }
}
// A row without keys, which is padding, is 0.
if (thread_id < VALUE_DIM) {
  out[result * VALUE_DIM + thread_id] = static_cast<Model>(total != 0.0f ? value / total : 0.0f);
}
if (group.x == 0 && group.y == 0 && thread_id < 8) next_token[thread_id] = token[thread_id];
