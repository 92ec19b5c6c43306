"""aider, which speaks chat completions and reads edits out of the text."""

from pathlib import Path

from scripts.server_process import Server
from tests.agents.programs import IDLE_TIMEOUT, INSTALLED, MODEL, SECRET, Workplace, workplace

AIDER = INSTALLED / "python" / "bin" / "aider"
QUIET = ["--yes-always", "--no-check-update", "--no-analytics", "--no-show-model-warnings"]
EDIT = f"""notes.txt
```
<<<<<<< SEARCH
the secret word is {SECRET}
=======
the secret word is honey
>>>>>>> REPLACE
```"""


def prepared(home: Path, server: Server) -> Workplace:
    place = workplace(home, AIDER_OPENAI_API_BASE=f"{server.url}/v1", AIDER_OPENAI_API_KEY="none")
    (place.home / "message").write_text(f"[[say {EDIT}]]")
    return place


def command(*arguments: str) -> list[str | Path]:
    model = ["--model", f"openai/{MODEL}", "--edit-format", "diff", "--map-tokens", "0"]
    return [AIDER, *QUIET, *model, "--timeout", str(IDLE_TIMEOUT), *arguments, "notes.txt"]
