"""Validates the input of a batch before its first line is served."""

from pathlib import Path

from app.batches.lines import BadLine, Line, LineRules, NotJsonLines, parse_line, read_pieces
from app.batches.records import Record, bad_line_record
from app.batches.work import WorkFile
from app.storage.disk.in_thread import Pieces


def validate(path: Path, batch_id: str, rules: LineRules, work: WorkFile) -> Pieces[int]:
    """Return the number of requests, and record a result in `work` for each invalid one; clears `work` first.

    Each piece blocks for a moment.

    Raises:
        NotJsonLines: the file as a whole is invalid.
        NoRoomForFile: there is no room for the results.
        OSError: a file cannot be read or written.
    """
    work.clear()
    num_requests = 0
    for piece in read_pieces(path, rules.max_line_bytes):
        if piece.num_read > rules.max_lines:
            raise NotJsonLines("too_many_lines", f"there are more than {rules.max_lines} lines")
        num_requests += len(piece.lines)
        _check(batch_id, piece.lines, rules, work)
        yield
    if not num_requests:
        raise NotJsonLines("empty_file", "there are no lines")
    return num_requests


def _check(batch_id: str, lines: list[Line], rules: LineRules, work: WorkFile) -> None:
    """Put the results of bad lines, among them those that repeat an id."""
    custom_ids: dict[int, str] = {}
    bad: list[Record] = []
    for line in lines:
        try:
            custom_ids[line.number] = parse_line(line, rules).custom_id
        except BadLine as error:
            bad.append(bad_line_record(batch_id, line.number, error))
    for number, first in work.repeated(custom_ids).items():
        message = f"custom_id is that of line {first}"
        repeating = BadLine("duplicate_custom_id", message, custom_ids[number])
        bad.append(bad_line_record(batch_id, number, repeating))
    work.put(bad)
