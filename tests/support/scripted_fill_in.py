"""`python -m tests.support.scripted_fill_in`: the scripted server, whose model has the markers of Qwen Coder.

Between two texts it writes what the directive in the first one says, and how many characters the second one has in
place of `{suffix}`.
"""

import sys
from typing import Any

from batching.inputs.sequence_spec import SequenceSpec
from tests.support.fill_in import QWEN
from tests.support.scripted_server import ScriptedRunner, answer, main


class FillInRunner(ScriptedRunner):
    @staticmethod
    def tokenizer() -> Any:
        tokenizer = ScriptedRunner.tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN)})
        return tokenizer

    def _answer(self, spec: SequenceSpec) -> str:
        prefix, suffix, middle = QWEN[:3]
        read = self._tokenizer.decode(spec.prompt).removesuffix(middle)
        before, _, after = read.removeprefix(prefix).partition(suffix)
        return answer(before).replace("{suffix}", str(len(after)))


if __name__ == "__main__":
    sys.exit(main(FillInRunner))
