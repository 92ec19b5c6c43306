// Norm and rotation of a token's queries and keys; its keys and values go into its slot.
//
// 32 threads have a head: the query heads and then the KV heads.  A group is THREADS / 32 heads (group.y)
// of a token (group.x).  A slot beyond the pool's is padding.
if (group.x == 0 && group.y == 0 && thread_id < 8) next_token[thread_id] = token[thread_id];

const int lane = thread_id % 32;
const int head = group.y * (THREADS / 32) + thread_id / 32;
if (head >= NUM_HEADS + NUM_KV_HEADS) return;

const bool is_query = head < NUM_HEADS;
const int kv_head = head - NUM_HEADS;
const int num_slots = key_pool_shape[0] / NUM_KV_HEADS;
const Offset slot = slots[group.x];
const Offset row = kv_head * Offset(num_slots) + slot;
DEVICE Pool* key_row = (DEVICE Pool*)key_pool + row * KEY_DIM;
DEVICE Model* query_row = queries_out + (Offset(group.x) * NUM_HEADS + head) * KEY_DIM;
const DEVICE Model* from = is_query ? queries + (Offset(group.x) * NUM_HEADS + head) * KEY_DIM
                                    : keys + (Offset(group.x) * NUM_KV_HEADS + kv_head) * KEY_DIM;
if (!is_query && slot >= num_slots) return;

#if HAS_NORM
const DEVICE Model* weights = is_query ? q_weight : k_weight;
float square = 0.0f;
for (int dim = lane; dim < KEY_DIM; dim += 32) {
  const float x = static_cast<float>(from[dim]);
  square += x * x;
}
team_sum<1, 32>(&square);
const float inverse = RSQRT(square / KEY_DIM + NORM_EPS);
#define NORMED(dim) (static_cast<float>(from[dim]) * inverse * static_cast<float>(weights[dim]))
#else
#define NORMED(dim) static_cast<float>(from[dim])
#endif

// Pairs that are rotated, and then what is not.
for (int i = lane; i < ROTARY_DIM / 2; i += 32) {
  const int first = TRADITIONAL ? 2 * i : i;
  const int second = TRADITIONAL ? 2 * i + 1 : i + ROTARY_DIM / 2;
  const float angle = static_cast<float>(positions[group.x]) * inv_freq[i];
  const float cosine = COS(angle) * ROTARY_SCALE;
  const float sine = SIN(angle) * ROTARY_SCALE;
  const float x = NORMED(first);
  const float y = NORMED(second);
  if (is_query) {
    query_row[first] = static_cast<Model>(x * cosine - y * sine);
    query_row[second] = static_cast<Model>(x * sine + y * cosine);
  } else {
    key_row[first] = static_cast<Pool>(x * cosine - y * sine);
    key_row[second] = static_cast<Pool>(x * sine + y * cosine);
  }
}
for (int dim = ROTARY_DIM + lane; dim < KEY_DIM; dim += 32) {
  if (is_query) {
    query_row[dim] = static_cast<Model>(NORMED(dim));
  } else {
    key_row[dim] = static_cast<Pool>(NORMED(dim));
  }
}
#undef NORMED

if (!is_query) {
  DEVICE Pool* value_row = (DEVICE Pool*)value_pool + row * VALUE_DIM;
  for (int dim = lane; dim < VALUE_DIM; dim += 32) {
    const Offset value = (Offset(group.x) * NUM_KV_HEADS + kv_head) * VALUE_DIM + dim;
    value_row[dim] = static_cast<Pool>(static_cast<float>(values[value]));
  }
}
