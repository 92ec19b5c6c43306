"""Texts a second of an encoder's engine beside sentence-transformers, on as many threads of the same CPU.

    python -m scripts.bench.encoders                     # the shapes MiniLM-L6 and BERT-base, random weights
    python -m scripts.bench.encoders --torch PYTHON      # beside sentence-transformers in that environment

Both get the same directory and the same token counts; they alternate, and medians are compared.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, NamedTuple


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int


SHAPES: Final = {"minilm-l6": Shape(384, 6, 12), "bert-base": Shape(768, 12, 12)}
_NUM_WORDS: Final = 2000
# Runs in the other environment: encodes all texts for each line of its input, and says how long it took.
_OTHER: Final = """
import json, sys, time, torch
from sentence_transformers import SentenceTransformer
folder, threads, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
texts = json.loads(sys.stdin.readline())
model = SentenceTransformer(folder, device="cpu")
for line in sys.stdin:
    began = time.perf_counter()
    model.encode(texts, batch_size=batch, show_progress_bar=False)
    print(time.perf_counter() - began, flush=True)
"""


def write_model(folder: Path, shape: Shape) -> Path:
    """Write a BERT with random weights and a tokenizer of words, as sentence-transformers does."""
    import batching.backend  # noqa: F401, I001
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from batching.backend.encoders.bert import Bert

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *_words()])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [(name, words[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=special
    )
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=512
    )
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": len(words),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.hidden,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    pooling = {"word_embedding_dimension": shape.hidden, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    for name, contents in {
        "config.json": config,
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
    }.items():
        (folder / name).write_text(json.dumps(contents), encoding="utf-8")
    arrays: dict[str, mx.array] = {}
    model: Any = Bert(config)
    tree_flatten(model.parameters(), destination=arrays)
    for name in [name for name in arrays if ".qkv." in name]:
        parts = mx.split(arrays.pop(name), 3)
        for part, array in zip(("query", "key", "value"), parts, strict=True):
            arrays[name.replace("qkv", f"self.{part}")] = array
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
    return folder


def _words() -> list[str]:
    return [f"w{i}" for i in range(_NUM_WORDS)]


def make_texts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[str]:
    """Return texts of words, most of them short."""
    rng, words = random.Random(seed), _words()
    low, high = lengths
    counts = [low + int((high - low) * rng.random() ** 2) for _ in range(count)]
    return [" ".join(rng.choices(words, k=n)) for n in counts]


def ours(folder: Path, texts: Sequence[str], threads: int) -> Callable[[], float]:
    """Return what lets our engine embed all texts, from text to vectors, and returns the seconds."""
    from batching.backend.builder.engine import build_engine
    from batching.config import EngineConfig
    from batching.inputs.sequence_spec import SequenceSpec
    from batching.pooling import PoolingParams, PoolingType
    from batching.request import BatchRequest

    loaded = build_engine(
        EngineConfig(model=str(folder), model_id="bench", device="cpu", cpu_threads=threads)
    )
    pooling = PoolingParams(type=PoolingType.MEAN, normalize=False)

    def run() -> float:
        began = perf_counter()
        for index, text in enumerate(texts):
            prompt = tuple(loaded.model.tokenizer.encode(text))
            spec = SequenceSpec(prompt=prompt, max_tokens=0, pooling=pooling)
            loaded.engine.add(BatchRequest(index, spec))
        while loaded.engine.has_work:
            loaded.engine.step()
        return perf_counter() - began

    return run


def theirs(python: str, folder: Path, texts: Sequence[str], threads: int) -> Callable[[], float]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [python, "-c", _OTHER, str(folder), str(threads), "32"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    stdin.write(json.dumps(texts) + "\n")

    def run() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    return run


def measure(name: str, arguments: argparse.Namespace) -> None:
    texts = make_texts(arguments.texts, tuple(arguments.lengths))
    with TemporaryDirectory() as directory:
        folder = write_model(Path(directory), SHAPES[name])
        runs = {"engine": ours(folder, texts, arguments.threads)}
        if arguments.torch:
            runs["sentence-transformers"] = theirs(
                arguments.torch, folder, texts, arguments.threads
            )
        for run in runs.values():
            run()
        seconds: dict[str, list[float]] = {each: [] for each in runs}
        for _ in range(arguments.rounds):
            for each, run in runs.items():
                seconds[each].append(run())
    medians = {each: statistics.median(times) for each, times in seconds.items()}
    for each, median in medians.items():
        ratio = f", {median / medians['engine']:.2f} x the time" if each != "engine" else ""
        print(f"{name}: {each} {len(texts) / median:.1f} texts/s{ratio}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has the other one")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--lengths", type=int, nargs=2, default=(5, 250), metavar=("LOW", "HIGH"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    for name in arguments.shape or SHAPES:
        measure(name, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
