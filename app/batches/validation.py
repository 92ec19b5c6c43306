"""Validates the input of a batch before its first line is served."""

from pathlib import Path
from typing import Final

from app.batches.lines import BadLine, LineRules, NotJsonLines, parse_line, read_lines
from app.batches.records import Record, bad_line_record
from app.batches.work import WorkFile

# Lines whose ids are looked up at once.
_CHUNK: Final = 512


def validate(path: Path, batch_id: str, rules: LineRules, work: WorkFile) -> int:
    """Return the number of lines, and record a result in `work` for each invalid one; clears `work` first.

    It blocks, for large files for seconds.

    Raises:
        NotJsonLines: the file as a whole is invalid.
        OSError: a file cannot be read or written.
    """
    work.clear()
    num_lines = 0
    custom_ids: list[tuple[str, int]] = []
    bad: list[Record] = []
    for line in read_lines(path, rules.max_line_bytes):
        num_lines += 1
        if num_lines > rules.max_lines:
            raise NotJsonLines("too_many_lines", f"there are more than {rules.max_lines} lines")
        try:
            custom_ids.append((parse_line(line, rules).custom_id, line.number))
        except BadLine as error:
            bad.append(bad_line_record(batch_id, line.number, error))
        if len(custom_ids) + len(bad) == _CHUNK:
            _record(batch_id, custom_ids, bad, work)
    _record(batch_id, custom_ids, bad, work)
    if not num_lines:
        raise NotJsonLines("empty_file", "there are no lines")
    return num_lines


def _record(
    batch_id: str, custom_ids: list[tuple[str, int]], bad: list[Record], work: WorkFile
) -> None:
    """Put the results of bad lines, among them those that repeat an id, and empty both lists."""
    by_line = {number: custom_id for custom_id, number in custom_ids}
    for number, first in work.repeated(custom_ids).items():
        message = f"custom_id is that of line {first}"
        error = BadLine("duplicate_custom_id", message, by_line[number])
        bad.append(bad_line_record(batch_id, number, error))
    work.put(bad)
    custom_ids.clear()
    bad.clear()
