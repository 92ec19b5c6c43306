#include "operations/attention.h"

#include <algorithm>
#include <bit>

#include "memory.h"
#include "operations/parallel.h"

namespace native {

namespace {

/// Keys of a span: enough that merging costs little, few enough to split a long context.
constexpr int SPAN_KEYS = 256;
/// With that many tiles per thread, tiles have their full size, and spans are not split among
/// threads.
constexpr int ENOUGH_TILES_PER_THREAD = 4;

/// All parts, and the tiles whose spans are parts of their own.
struct Plan {
  std::vector<AttentionPart> parts;
  struct Split {
    AttentionPart part;
    int num_spans;
  };
  std::vector<Split> splits;
  std::vector<float> partials;
};

size_t partial_floats(int size, const PoolLayout& pool) {
  const size_t padded = (size + 15) / 16 * 16;
  return padded * (2 + pool.value_stride());
}

/// Tiles of so many rows in the whole step.
int count_tiles(const AttentionArgs& args, const Step& step, int tile_rows) {
  int count = 0;
  for (const Slice& s : step.slices) count += (s.num_rows + tile_rows - 1) / tile_rows;
  return count * args.pool.num_heads;
}

Plan make_plan(const AttentionArgs& args, const Step& step, int num_threads) {
  const PoolLayout& pool = args.pool;
  const int group = args.num_query_heads / pool.num_heads;
  const int enough = ENOUGH_TILES_PER_THREAD * num_threads;
  int tile_rows = std::max(1, TILE / group);
  if (count_tiles(args, step, tile_rows) < enough) tile_rows = std::max(1, TILE / 2 / group);
  const bool splits_spans = count_tiles(args, step, tile_rows) < enough;
  const int span_keys = args.span_blocks * pool.block_size;
  Plan plan;
  size_t num_floats = 0;
  for (const Slice& s : step.slices) {
    for (int head = 0; head < pool.num_heads; head++) {
      for (int row = 0; row < s.num_rows; row += tile_rows) {
        const int num_rows = std::min(tile_rows, s.num_rows - row);
        const int position = s.first_position + row;
        AttentionPart part{step.tables.data() + s.first_block, head,     s.first_row + row,
                           num_rows,                           position, s.until,
                           -1,                                 nullptr};
        const int first_span = args.first_visible(position) / span_keys;
        const int num_spans = part.last_position() / span_keys + 1 - first_span;
        if (!splits_spans || num_spans == 1) {
          plan.parts.push_back(part);
          continue;
        }
        plan.splits.push_back({part, num_spans});
        for (int i = 0; i < num_spans; i++) {
          part.span = first_span + i;
          plan.parts.push_back(part);
          num_floats += partial_floats(num_rows * group, pool);
        }
      }
    }
  }
  plan.partials.resize(num_floats);
  return plan;
}

/// Assign memory to the result of each split span; a split points to that of its first span.
void assign_partials(Plan& plan, int group, const PoolLayout& pool) {
  float* next = plan.partials.data();
  size_t split = 0;
  int left = 0;
  for (AttentionPart& part : plan.parts) {
    if (part.span < 0) continue;
    if (left == 0) {
      plan.splits[split].part.partial = next;
      left = plan.splits[split++].num_spans;
    }
    left--;
    part.partial = next;
    next += partial_floats(part.num_rows * group, pool);
  }
}

/// Deal the parts to the threads, longest first: otherwise all threads may wait for a long part that
/// was started last.  Parts of about the same length stay in the order of their heads, so that
/// threads read the same keys.
void deal(std::vector<AttentionPart>& parts, int span_keys) {
  const auto cost = [&](const AttentionPart& part) {
    const int keys = part.span < 0 ? part.last_position() + 1 : span_keys;
    const uint64_t exact = static_cast<uint64_t>(keys) * part.num_rows;
    const int ignored = std::max(0, static_cast<int>(std::bit_width(exact)) - 3);
    return exact >> ignored << ignored;
  };
  std::vector<AttentionPart> sorted = parts;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
  const int count = static_cast<int>(parts.size());
  auto next = sorted.begin();
  for (int round = 0; next != sorted.end(); round++)
    for (int thread = 0; thread < threads().num_threads(); thread++) {
      const int part = threads().first_part(count, thread) + round;
      if (part < threads().first_part(count, thread + 1)) parts[part] = *next++;
    }
}

/// Set what each part prefetches: probably the part after it is claimed by the same thread.
void link_prefetches(std::vector<AttentionPart>& parts, const AttentionArgs& args) {
  for (size_t i = 0; i + 1 < parts.size(); i++) {
    const AttentionPart& after = parts[i + 1];
    const int first_block = args.first_visible(after.first_position) / args.pool.block_size;
    const int span = after.span < 0 ? first_block / args.span_blocks : after.span;
    const int last = after.last_position() / args.pool.block_size;
    parts[i].next_blocks = after.blocks + span * args.span_blocks;
    parts[i].num_next = std::min(args.span_blocks, last + 1 - span * args.span_blocks);
    parts[i].next_head = after.head;
  }
}

size_t scratch_floats(const AttentionArgs& args) {
  const PoolLayout& pool = args.pool;
  constexpr size_t size = MAX_TILE;
  return size * (pool.query_stride() + pool.group_columns() + 3) +
         std::max(pool.key_size(), pool.value_size()) +
         2 * partial_floats(static_cast<int>(size), pool) + 128;
}

}  // namespace

void write_rows(Pool& pool, const Step& step, int first, int next, const float* keys,
                const float* values) {
  const PoolLayout& layout = pool.layout();
  const size_t at = static_cast<size_t>(first) * layout.num_heads;
  pool.write(step.slots.data() + first, std::min(next, step.num_rows()) - first,
             keys + at * layout.key_dim, values ? values + at * layout.value_dim : nullptr);
}

void attend(const Step& step, const AttentionArgs& given, int num_rows) {
  const Kernels& k = *kernels();
  AttentionArgs args = given;
  args.span_blocks = std::max(1, SPAN_KEYS / args.pool.block_size);
  Plan plan = make_plan(args, step, threads().num_threads());
  assign_partials(plan, args.num_query_heads / args.pool.num_heads, args.pool);
  deal(plan.parts, args.span_blocks * args.pool.block_size);
  link_prefetches(plan.parts, args);
  const size_t size = scratch_floats(args);
  const auto scratch = [size] {
    thread_local std::vector<float> memory;
    return grow(memory, size);
  };
  threads().for_each(static_cast<int>(plan.parts.size()),
                   [&](int i) { k.attend(args, plan.parts[i], scratch()); });
  threads().for_each(static_cast<int>(plan.splits.size()), [&](int i) {
    k.merge_spans(args, plan.splits[i].part, plan.splits[i].num_spans, scratch());
  });
  const size_t row = static_cast<size_t>(args.num_query_heads) * args.pool.value_dim;
  std::fill(args.y + step.num_rows() * row, args.y + num_rows * row, 0.0f);
}

void write_and_attend(Pool& pool, const Step& step, const AttentionArgs& args, const float* keys,
                      const float* values, int num_rows) {
  for_rows(step.num_rows(), rows_per_part(step.num_rows()),
           [&](int first, int next) { write_rows(pool, step, first, next, keys, values); });
  attend(step, args, num_rows);
}

}  // namespace native
