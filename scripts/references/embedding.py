"""Vectors of small models with random weights by sentence-transformers, in float32.

It needs an environment of its own, with torch:

    pip install numpy torch sentence-transformers
    python -m scripts.references.embedding tests/data/golden_embeddings.json
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Normalize,
    Pooling,
    Transformer,
)
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.support.embedding_models import (
    DENSE_SIZE,
    EMBEDDERS,
    INSTRUCTION,
    QUERY,
    RERANKER,
    TEXTS,
    WORDS,
    Embedder,
    config_of,
    rerank_prompt,
)
from tests.support.reference_weights import weight


def tokenizer() -> Any:
    """Return a tokenizer of words that ends a text with a token of its own."""
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = ("<end>", WORDS["<end>"])
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", end[0]], pair=["$A", "$B", end[0]], special_tokens=[end]
    )
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")


def filled(model: Any) -> dict[str, tuple[int, ...]]:
    """Give a module its weights; return their shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict({n: torch.from_numpy(weight(n, s)) for n, s in shapes.items()})
    return shapes


def made(factory: Any, model_type: str) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **config_of(model_type))
    config._attn_implementation = "eager"
    return factory.from_config(config, dtype=torch.float32).eval()


def embedded(embedder: Embedder) -> dict[str, Any]:
    """Return the files of a model, the shapes of its weights, and the vectors of the texts."""
    trunk = made(transformers.AutoModel, embedder.model_type)
    shapes = filled(trunk)
    with TemporaryDirectory() as folder:
        trunk.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        first: Any = Transformer(folder, model_kwargs={"attn_implementation": "eager"})
        modules: list[Any] = [first, Pooling(trunk.config.hidden_size, embedder.pooling)]
        if embedder.is_dense:
            modules.append(Dense(trunk.config.hidden_size, DENSE_SIZE))
            modules.append(Dense(DENSE_SIZE, DENSE_SIZE, bias=False, activation_function=None))
        dense = {str(i): filled(m) for i, m in enumerate(modules) if isinstance(m, Dense)}
        if embedder.is_normalized:
            modules.append(Normalize())
        model = sentence_transformers.SentenceTransformer(
            modules=modules, prompts={"query": "q : "}, device="cpu"
        )
        vectors = model.encode(list(TEXTS), batch_size=1)
        asked = model.encode(list(TEXTS), batch_size=1, prompt_name="query")
        cut = model.encode(list(TEXTS), batch_size=1, truncate_dim=6)
        model.save(folder, create_model_card=False)
        files = {
            str(path.relative_to(folder)): path.read_text(encoding="utf-8")
            for path in sorted(Path(folder).rglob("*.json"))
        }
    return {
        "files": files,
        "shapes": shapes,
        "dense": dense,
        "vectors": rounded(vectors),
        "queries": rounded(asked),
        "cut": rounded(cut),
    }


def reranked() -> dict[str, Any]:
    """Return how likely the reranker says yes rather than no of each text."""
    model = made(transformers.AutoModelForCausalLM, RERANKER)
    shapes = filled(model)
    encode = tokenizer().encode
    scores = []
    for text in TEXTS:
        ids = encode(rerank_prompt(INSTRUCTION, QUERY, text), add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        both = torch.stack([logits[WORDS["no"]], logits[WORDS["yes"]]])
        scores.append(round(torch.softmax(both, 0)[1].item(), 7))
    return {"shapes": shapes, "scores": scores}


def rounded(vectors: Any) -> list[list[float]]:
    return [[round(float(x), 7) for x in vector] for vector in vectors]


def main(path: Path) -> None:
    golden: dict[str, Any] = {name: embedded(each) for name, each in EMBEDDERS.items()}
    golden["reranker"] = reranked()
    golden["sentence_transformers"] = sentence_transformers.__version__
    golden["transformers"] = transformers.__version__
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
