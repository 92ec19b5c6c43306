from array import array
from itertools import takewhile

from hypothesis import given, strategies as st

from batching.blocks.shared_beginnings import SharedBeginnings

TOKENS = st.lists(st.integers(0, 2) | st.just(1 << 40), max_size=5)


def num_common(tokens: list[int], other: list[int]) -> int:
    pairs = zip(tokens, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(st.lists(TOKENS, min_size=1, max_size=12), TOKENS, st.data())
def test_none_has_more_in_common(
    blocks: list[list[int]], tokens: list[int], data: st.DataObject
) -> None:
    beginnings = SharedBeginnings()
    for block_id, each in enumerate(blocks):
        beginnings.add(array("q", each), block_id)
    gone = data.draw(st.sets(st.sampled_from(range(len(blocks))), max_size=len(blocks) - 1))
    for block_id in gone:
        beginnings.remove(array("q", blocks[block_id]), block_id)
    left = set(range(len(blocks))) - gone
    assert len(beginnings) == len(left)
    most, block_id = beginnings.longest(array("q", tokens))
    assert block_id in left
    assert most == num_common(tokens, blocks[block_id])
    assert most == max(num_common(tokens, blocks[i]) for i in left)
