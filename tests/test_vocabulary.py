"""A reader searches for the terms of the field, so documents and code keep to them."""

import re
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent

# Each with the term to use instead.
WORDS: Final = {
    "anew": "again",
    "blame": "fault",
    "likeliest": "most probable",
    "odds": "log probabilities",
    "sooner": "earlier, faster",
    "turned away": "rejected",
    "whoever": "the client, the request, the thread",
    "nobody": "no client, no request",
    "somebody": "a client, a request",
    "ToldToken": "TokenWithLogprob",
    "WireRequest": "RequestModel",
    "EndReason": "FinishReason",
    "Demands": "GenerationParams",
    "Refusal": "Rejection",
    "AnswerRecord": "SequenceStats",
    "CalledFunctionText": "FunctionCall",
    "DraftCounts": "SpecDecodeStats",
    "WholeCallReader": "BufferedCallReader",
}
ENDINGS: Final = {".py", ".md", ".h", ".cpp", ".yaml", ".yml", ".toml", ".example"}


def test_documents_and_code_use_the_fields_words() -> None:
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    texts = {
        path: (ROOT / path).read_text(encoding="utf-8")
        for path in paths
        if path.suffix in ENDINGS and path.name != Path(__file__).name and (ROOT / path).exists()
    }
    assert len(texts) > 300
    found = [
        (str(path), match[0]) for path, text in texts.items() for match in pattern.finditer(text)
    ]
    assert found == []
