"""lm-evaluation-harness on plain mlx-lm, without the server: the model `plain-mlx-lm`.

`python -m scripts.eval.plain run --model plain-mlx-lm --model_args model=REFERENCE ...` has the harness's
command line.  Weights are dequantized to float32 by the server's loader, which also reads GGUF files;
everything else is mlx-lm's own evaluation.
"""

# Before anything that imports mlx, since its BLAS has to come first.
from batching.backend.loader import load_model

# isort: split
import mlx.core as mx
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from mlx_lm.evaluate import MLXLM
from mlx_lm.sample_utils import make_sampler


@register_model("plain-mlx-lm")
class PlainMLXLM(MLXLM):
    """mlx-lm's evaluation of a model that the server's loader reads."""

    def __init__(self, model: str, **_: object) -> None:
        """`_` is what the harness tells every model: a batch size and a device."""
        # Not MLXLM's, which loads the model itself and so has to have it in a directory.
        super(MLXLM, self).__init__()
        loaded = load_model(model, dtype=mx.float32)
        self._model, self.tokenizer = loaded.model, loaded.tokenizer
        self._max_tokens = None
        self._batch_size = 8
        self._sampler = make_sampler(temp=0.0)
        self.use_chat_template = False

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Score texts behind the token that the harness puts before them; MLXLM leaves their first out."""
        prefix = self.tokenizer.bos_token or self.tokenizer.eos_token
        pairs = [
            Instance("loglikelihood", {}, (prefix, *request.args), index)
            for index, request in enumerate(requests)
        ]
        return [score for score, _ in self.loglikelihood(pairs)]


if __name__ == "__main__":
    mx.set_default_device(mx.Device(mx.cpu))
    cli_evaluate()
