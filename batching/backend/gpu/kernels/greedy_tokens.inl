// The token with the largest logit, the first of equal ones, and whether all of a row's logits are finite.
//
// A group is a row (group.x).  A NaN is never the largest.
SHARED(float, largest, THREADS);
SHARED(int, where, THREADS);
SHARED(int, others, THREADS);

const int vocabulary = logits_shape[1];
float best = NEGATIVE_INFINITY;
int best_token = vocabulary;
int bad = 0;
for (int i = thread_id; i < vocabulary; i += THREADS) {
  const float logit = static_cast<float>(logits[Offset(group.x) * vocabulary + i]);
  if (!IS_FINITE(logit)) bad = 1;
  if (logit > best) {
    best = logit;
    best_token = i;
  }
}
largest[thread_id] = best;
where[thread_id] = best_token;
others[thread_id] = bad;
BARRIER();
for (int half_way = THREADS / 2; half_way > 0; half_way /= 2) {
  if (thread_id < half_way) {
    const int other = thread_id + half_way;
    const bool larger = largest[other] > largest[thread_id];
    if (larger || (largest[other] == largest[thread_id] && where[other] < where[thread_id])) {
      largest[thread_id] = largest[other];
      where[thread_id] = where[other];
    }
    others[thread_id] += others[other];
  }
  BARRIER();
}
if (thread_id == 0) {
  // No logit is above minus infinity: the first token.
  tokens[group.x] = where[0] < vocabulary ? where[0] : 0;
  finite[group.x] = others[0] == 0 ? 1 : 0;
}
