// Attention of a row's query heads that share a KV head, over one split of the keys that it sees.
//
// A group is HEADS query heads of a KV head (group.x), a row (group.y) and a split (group.z).  A team of
// neighbouring threads reads a key, eight elements each, for all the heads at once.
SHARED(unsigned, slots, SPLIT_KEYS);
SHARED(float, scores, HEADS * SPLIT_KEYS);
SHARED(float, sums, VALUE_TEAMS * VALUE_DIM);

#if VALUES_IN_KEYS
const DEVICE Pool* value_rows = key_pool;
#else
const DEVICE Pool* value_rows = value_pool;
#endif
const int num_slots = key_pool_shape[0] / NUM_KV_HEADS;
const int row = group.y;
const int kv_head = group.x / HEAD_TILES;
const int first_head = group.x * HEADS;
const int first_key = group.z * SPLIT_KEYS;
const int num_keys = MIN(ranges[2 * row + 1] - first_key, SPLIT_KEYS);
// Of partials and statistics; those of the next head are groups.z further.
const Offset first_result = (Offset(row) * NUM_HEADS + first_head) * groups.z + group.z;

if (num_keys <= 0) {
  if (thread_id < HEADS) {
    stats[2 * (first_result + thread_id * groups.z)] = NEGATIVE_INFINITY;
    stats[2 * (first_result + thread_id * groups.z) + 1] = 0.0f;
  }
  return;
}

for (int key = thread_id; key < num_keys; key += THREADS) {
  const int position = ranges[2 * row] + first_key + key;
  const unsigned block = block_tables[Offset(row) * block_tables_shape[1] + position / BLOCK_SIZE];
  slots[key] = block * BLOCK_SIZE + position % BLOCK_SIZE;
}
BARRIER();

// Scores.  A team has KEYS_AT_ONCE keys in flight; beyond the last it reads that one again.
{
  const int lane = thread_id % KEY_LANES;
  const int team = thread_id / KEY_LANES;
  float query[HEADS * KEY_STEPS * 8];
  UNROLL for (int h = 0; h < HEADS; h++) {
    UNROLL for (int step = 0; step < KEY_STEPS; step++) {
      const int dim = (step * KEY_LANES + lane) * 8;
      if (dim < KEY_DIM) {
        load8(queries + (Offset(row) * NUM_HEADS + first_head + h) * KEY_DIM + dim,
              query + (h * KEY_STEPS + step) * 8);
      }
    }
  }
  for (int base = 0; base < num_keys; base += KEY_TEAMS * KEYS_AT_ONCE) {
    // The number of one is k * HEADS + h; those after the last are 0.
    float dots[DOTS];
    UNROLL for (int i = 0; i < DOTS; i++) dots[i] = 0.0f;
    UNROLL for (int k = 0; k < KEYS_AT_ONCE; k++) {
      const int key = MIN(base + k * KEY_TEAMS + team, num_keys - 1);
      const DEVICE Pool* from = key_pool + (kv_head * Offset(num_slots) + slots[key]) * KEY_DIM;
      UNROLL for (int step = 0; step < KEY_STEPS; step++) {
        const int dim = (step * KEY_LANES + lane) * 8;
        if (dim < KEY_DIM) {
          float part[8];
          load8(from + dim, part);
          UNROLL for (int h = 0; h < HEADS; h++) {
            UNROLL for (int i = 0; i < 8; i++) {
              dots[k * HEADS + h] += query[(h * KEY_STEPS + step) * 8 + i] * part[i];
            }
          }
        }
      }
    }
    team_sum_each<DOTS, KEY_LANES>(dots, lane);
    UNROLL for (int i = 0; i < DOTS_EACH; i++) {
      const int dot = lane * DOTS / KEY_LANES + i;
      const int key = base + dot / HEADS * KEY_TEAMS + team;
      if (dot < KEYS_AT_ONCE * HEADS && key < num_keys && lane % LANES_A_DOT == 0) {
#if QUANTIZED
        const float scale = SCALE * key_scales[kv_head * Offset(num_slots) + slots[key]];
#else
        const float scale = SCALE;
#endif
        const float score = dots[i] * scale;
        scores[dot % HEADS * SPLIT_KEYS + key] =
            SOFT_CAP > 0.0f ? SOFT_CAP * TANH(score / SOFT_CAP) : score;
      }
    }
  }
}
BARRIER();

// Weights: 32 threads have a head.
for (int h = thread_id / 32; h < HEADS; h += THREADS / 32) {
  const int lane = thread_id % 32;
  float maximum = NEGATIVE_INFINITY;
  for (int key = lane; key < num_keys; key += 32) {
    maximum = MAX(maximum, scores[h * SPLIT_KEYS + key]);
  }
  team_max<1, 32>(&maximum);
  float sum = 0.0f;
  for (int key = lane; key < num_keys; key += 32) {
    const float weight = EXP(scores[h * SPLIT_KEYS + key] - maximum);
    sum += weight;
#if QUANTIZED
    scores[h * SPLIT_KEYS + key] = weight * value_scales[kv_head * Offset(num_slots) + slots[key]];
#else
    scores[h * SPLIT_KEYS + key] = weight;
#endif
  }
  team_sum<1, 32>(&sum);
  if (lane == 0) {
    stats[2 * (first_result + h * groups.z)] = maximum;
    stats[2 * (first_result + h * groups.z) + 1] = sum;
  }
}
BARRIER();

// Values: each team adds up those of its keys, and then the teams' sums are added.
{
  const int lane = thread_id % VALUE_LANES;
  const int team = thread_id / VALUE_LANES;
  float value[HEADS * VALUE_STEPS * 8];
  UNROLL for (int i = 0; i < HEADS * VALUE_STEPS * 8; i++) value[i] = 0.0f;
  for (int base = 0; base < num_keys; base += VALUE_TEAMS * KEYS_AT_ONCE) {
    UNROLL for (int k = 0; k < KEYS_AT_ONCE; k++) {
      const bool beyond = base + k * VALUE_TEAMS + team >= num_keys;
      const int key = beyond ? num_keys - 1 : base + k * VALUE_TEAMS + team;
      const DEVICE Pool* from = value_rows + (kv_head * Offset(num_slots) + slots[key]) * VALUE_STRIDE;
      UNROLL for (int step = 0; step < VALUE_STEPS; step++) {
        const int dim = (step * VALUE_LANES + lane) * 8;
        if (dim < VALUE_DIM) {
          float part[8];
          load8(from + dim, part);
          UNROLL for (int h = 0; h < HEADS; h++) {
            const float weight = beyond ? 0.0f : scores[h * SPLIT_KEYS + key];
            UNROLL for (int i = 0; i < 8; i++) value[(h * VALUE_STEPS + step) * 8 + i] += weight * part[i];
          }
        }
      }
    }
  }
  UNROLL for (int h = 0; h < HEADS; h++) {
    UNROLL for (int step = 0; step < VALUE_STEPS; step++) {
      const int dim = (step * VALUE_LANES + lane) * 8;
      if (dim < VALUE_DIM) {
        UNROLL for (int i = 0; i < 8; i++) {
          sums[team * VALUE_DIM + dim + i] = value[(h * VALUE_STEPS + step) * 8 + i];
        }
      }
    }
    BARRIER();
    for (int dim = thread_id; dim < VALUE_DIM; dim += THREADS) {
      float sum = 0.0f;
      for (int other = 0; other < VALUE_TEAMS; other++) sum += sums[other * VALUE_DIM + dim];
      partials[(first_result + h * groups.z) * VALUE_DIM + dim] = sum;
    }
    BARRIER();
  }
}
