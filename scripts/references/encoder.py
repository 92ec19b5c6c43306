"""Vectors and scores of small encoders with random weights by sentence-transformers, in float32.

It needs an environment of its own, with torch:

    pip install numpy torch sentence-transformers
    python -m scripts.references.encoder tests/data/golden_encoders.json
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from scripts.references.embedding import filled, rounded
from tests.support.embedding_models import WORDS
from tests.support.encoder_models import CONFIGS, POOLING, QUERY, TEXTS

_CLS, _END = "<|im_start|>", "<end>"


def tokenizer() -> Any:
    """Return a tokenizer of words that writes texts and pairs as BERT's does."""
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=[_CLS, "$A", _END],
        pair=[_CLS, "$A", _END, "$B:1", f"{_END}:1"],
        special_tokens=[(name, WORDS[name]) for name in (_CLS, _END)],
    )
    make: Any = transformers.PreTrainedTokenizerFast
    return make(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        cls_token=_CLS,
        sep_token=_END,
        model_input_names=["input_ids", "attention_mask", "token_type_ids"],
    )


def made(factory: Any, model_type: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type], **changes)
    config._attn_implementation = "eager"
    return factory.from_config(config, dtype=torch.float32).eval()


def texts_of(folder: str) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in sorted(Path(folder).rglob("*.json"))
    }


def embedded(model_type: str) -> dict[str, Any]:
    """Return the files of a model, the shapes of its weights, and the vectors of the texts."""
    trunk = made(transformers.AutoModel, model_type)
    shapes = filled(trunk)
    with TemporaryDirectory() as folder:
        trunk.save_pretrained(folder)
        saved = tokenizer()
        if CONFIGS[model_type].get("type_vocab_size") != 2:
            saved.model_input_names = ["input_ids", "attention_mask"]
        saved.save_pretrained(folder)
        first: Any = Transformer(folder, model_kwargs={"attn_implementation": "eager"})
        modules = [first, Pooling(trunk.config.hidden_size, POOLING[model_type]), Normalize()]
        model = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
        vectors = model.encode(list(TEXTS), batch_size=1)
        model.save(folder, create_model_card=False)
        files = texts_of(folder)
    return {"files": files, "shapes": shapes, "vectors": rounded(vectors)}


def scored(model_type: str) -> dict[str, Any]:
    """Return the config of a cross-encoder, the shapes of its weights, and the scores of the texts."""
    model = made(transformers.AutoModelForSequenceClassification, model_type, num_labels=1)
    shapes = filled(model)
    encode, has_types = tokenizer(), model_type == "bert"
    scores = []
    for text in TEXTS:
        inputs = encode(QUERY, text, return_tensors="pt")
        if not has_types:
            del inputs["token_type_ids"]
        with torch.no_grad():
            scores.append(round(torch.sigmoid(model(**inputs).logits[0, 0]).item(), 7))
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = (Path(folder) / "config.json").read_text(encoding="utf-8")
    return {"config": config, "shapes": shapes, "scores": scores}


def main(path: Path) -> None:
    golden: dict[str, Any] = {
        name: {"embedder": embedded(name), "cross_encoder": scored(name)} for name in CONFIGS
    }
    golden["sentence_transformers"] = sentence_transformers.__version__
    golden["transformers"] = transformers.__version__
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
