// Writes a token's keys and values into its slot, as integers with a scale for each row.
//
// A group is a token: group.x; 32 threads have a row: the keys of each head, and then its values.  A slot beyond
// the pool's is padding.  A row with a NaN or an infinity has a scale that is a NaN.
const int num_slots = key_pool_shape[0] / NUM_KV_HEADS;
const Offset slot = slots[group.x];
const int lane = thread_id % 32;
if (slot < num_slots) {
  for (int i = thread_id / 32; i < 2 * NUM_KV_HEADS; i += THREADS / 32) {
    const bool is_key = i < NUM_KV_HEADS;
    const int head = i % NUM_KV_HEADS;
    const int dims = is_key ? KEY_DIM : VALUE_DIM;
    const Offset row = head * Offset(num_slots) + slot;
    const Offset new_row = Offset(group.x) * NUM_KV_HEADS + head;
    const DEVICE Model* from = is_key ? keys + new_row * KEY_DIM : values + new_row * VALUE_DIM;
    DEVICE Pool* to = is_key ? (DEVICE Pool*)key_pool + row * KEY_DIM
                             : (DEVICE Pool*)value_pool + row * VALUE_DIM;
    DEVICE float* scale = is_key ? (DEVICE float*)key_scales + row : (DEVICE float*)value_scales + row;

    float largest = 0.0f;
    for (int dim = lane; dim < dims; dim += 32) {
      const float x = static_cast<float>(from[dim]);
      const float magnitude = MAX(x, -x);
      largest = MAX(largest, IS_FINITE(x) ? magnitude : -NEGATIVE_INFINITY);
    }
    team_max<1, 32>(&largest);
    const bool is_finite = IS_FINITE(largest);
    // Avoids a division by 0; numbers that small are negligible.
    const float factor = is_finite && largest > 1e-30f ? 127.0f / largest : 0.0f;
    for (int dim = lane; dim < dims; dim += 32) {
      const float x = static_cast<float>(from[dim]);
      to[dim] = static_cast<Pool>(is_finite ? ROUND(x * factor) : 0.0f);
    }
    // Infinity less itself is a NaN.
    if (lane == 0) *scale = is_finite ? largest / 127.0f : largest - largest;
  }
}
if (group.x == 0 && thread_id < 8) next_token[thread_id] = token[thread_id];
