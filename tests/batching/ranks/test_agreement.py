"""What the ranks must have in common, and how the first difference is named."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batching.errors import RankLost, RankRefused
from batching.ranks.agreement import agree_with_leader, agree_with_members
from batching.ranks.model_digest import model_digest
from tests.support.rank_links import HOSTS, linked

FACTS = {"version": "1.2", "MLX": "0.32.4", "dtype": None, "chat_template": "x" * 1000}


def outcomes(*all_facts: Mapping[str, object]) -> set[str]:
    """Return what ranks with these facts raise; nothing if they agree."""
    with linked(len(all_facts)) as links, ThreadPoolExecutor(len(all_facts)) as threads:
        ours, *theirs = all_facts
        calls = [threads.submit(agree_with_members, links.leader, ours, HOSTS)]
        for member, facts in zip(links.members, theirs, strict=True):
            calls.append(threads.submit(agree_with_leader, member, facts))
        errors = [call.exception(30) for call in calls]
    assert all(error is None or isinstance(error, RankRefused) for error in errors)
    return {str(error) for error in errors if error is not None}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (FACTS, None),
        ({**FACTS, "MLX": "0.32.3"}, "has MLX 0.32.3, rank 0 has 0.32.4"),
        ({**FACTS, "MLX": "0.32.3", "version": "1"}, "has version 1, rank 0 has 1.2"),
        ({**FACTS, "dtype": "float32"}, "has dtype float32, rank 0 has none"),
        ({**FACTS, "more": 1}, "has more 1, rank 0 has none"),
        ({**FACTS, "chat_template": None}, "has chat_template none, rank 0 has text 44"),
        ({}, "has version none, rank 0 has 1.2"),
    ],
)
def test_the_first_difference_is_named_to_all(facts: dict[str, object], line: str | None) -> None:
    found = outcomes(FACTS, FACTS, facts)
    if line is None:
        assert not found
    else:
        [only] = found
        assert only.startswith(f"rank 2 (mac2) {line}")


@pytest.mark.parametrize("message", [b"", b"[1]", b"[" * 100_000, b"\xff", b'{"version": [1]}'])
def test_facts_that_cannot_be_read_differ(message: bytes) -> None:
    with linked(2) as links:
        links.members[0].send(message)
        with pytest.raises(RankRefused, match="has version"):
            agree_with_members(links.leader, FACTS, HOSTS)


def test_a_rank_that_is_lost_meanwhile_is_no_difference() -> None:
    with linked(2) as links:
        links.members[0].end(RankLost(1, "has left"))
        with pytest.raises(RankLost) as error:
            agree_with_members(links.leader, FACTS, HOSTS)
        assert error.value.status == 1


def _model(folder: Path, *, config: str = "{}", weights: bytes = b"w" * 5_000_000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "README.md").write_text(folder.name)
    return folder


def test_the_digest_is_that_of_the_contents(tmp_path: Path) -> None:
    one = model_digest(_model(tmp_path / "one"))
    other_weights = bytearray(b"w" * 5_000_000)
    other_weights[-1] = 0
    shorter = model_digest(_model(tmp_path / "shorter", weights=b"w" * 4_999_999))
    digests = {
        one,
        model_digest(_model(tmp_path / "config", config="[]")),
        model_digest(_model(tmp_path / "weights", weights=bytes(other_weights))),
        shorter,
    }
    assert len(digests) == 4
    assert model_digest(_model(tmp_path / "same")) == one


def test_the_name_of_a_file_does_not_count(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert model_digest(tmp_path / "a.gguf") == model_digest(tmp_path / "b.gguf")
