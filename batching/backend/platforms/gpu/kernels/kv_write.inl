// Writes a token's keys and values into its slot.
//
// A group is a token: group.x.  A slot beyond the pool's is padding.  In a pool of 8 bits what is written is as
// that has it: integers, and a scale for each row.
const int num_slots = key_pool_shape[0] / NUM_KV_HEADS;
const Offset slot = slots[group.x];
DEVICE Pool* key_rows = (DEVICE Pool*)key_pool;
if (slot < num_slots) {
  for (int i = thread_id; i < NUM_KV_HEADS * KEY_DIM; i += THREADS) {
    const Offset row = i / KEY_DIM * Offset(num_slots) + slot;
    const Offset from = Offset(group.x) * (NUM_KV_HEADS * KEY_DIM) + i;
    key_rows[row * KEY_DIM + i % KEY_DIM] = static_cast<Pool>(static_cast<float>(keys[from]));
  }
#if !VALUES_IN_KEYS
  DEVICE Pool* value_rows = (DEVICE Pool*)value_pool;
  for (int i = thread_id; i < NUM_KV_HEADS * VALUE_DIM; i += THREADS) {
    const Offset row = i / VALUE_DIM * Offset(num_slots) + slot;
    const Offset from = Offset(group.x) * (NUM_KV_HEADS * VALUE_DIM) + i;
    value_rows[row * VALUE_DIM + i % VALUE_DIM] = static_cast<Pool>(static_cast<float>(values[from]));
  }
#endif
#if QUANTIZED
  for (int head = thread_id; head < NUM_KV_HEADS; head += THREADS) {
    const Offset row = head * Offset(num_slots) + slot;
    const Offset from = Offset(group.x) * NUM_KV_HEADS + head;
    ((DEVICE float*)key_scales)[row] = new_key_scales[from];
    ((DEVICE float*)value_scales)[row] = new_value_scales[from];
  }
#endif
}
if (group.x == 0 && thread_id < 8) next_token[thread_id] = token[thread_id];
