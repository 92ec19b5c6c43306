"""Log probabilities of small models with random weights by transformers, in float32.

It needs an environment of its own, with torch:

    pip install numpy torch transformers
    python -m scripts.references.transformers tests/data/golden_transformers.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.reference_weights import CONFIGS, TOKENS, weight


def reference(model_type: str) -> dict[str, Any]:
    """Return the checkpoint's shapes, and log probabilities of each token after those before it."""
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    config._attn_implementation = "eager"
    make: Any = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict({n: torch.from_numpy(weight(n, s)) for n, s in shapes.items()})
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(TOKENS)[1:, None])
    return {"shapes": shapes, "logprobs": [round(p, 6) for p in logprobs[:, 0].tolist()]}


def main(path: Path) -> None:
    golden: dict[str, Any] = {model_type: reference(model_type) for model_type in CONFIGS}
    golden["transformers"] = transformers.__version__
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
