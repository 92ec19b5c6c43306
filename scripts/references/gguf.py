"""Greedy tokens and log probabilities of a Gemma 3 GGUF file, by independent implementations.

Weights are dequantized by `gguf` and computed by `transformers` in float32; text becomes tokens by
SentencePiece.  It needs an environment of its own, with torch:

    pip install gguf protobuf sentencepiece torch transformers
    python -m scripts.references.gguf gemma-3-270m-q4_k_m.gguf tests/data/golden_gemma3.json
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import gguf
import sentencepiece
import torch
import transformers

_MAX_TOKENS: Final = 32
_USER_DEFINED: Final = 4
_PROMPTS: Final = {
    "capital": "The capital of France is",
    "story": "Once upon a time there was a small fox who",
    "code": "def fibonacci(n):\n    ",
    "umlauts": "Die Hauptstadt von Österreich heißt",
    # Longer than the sliding window.
    "numbers": ", ".join(map(str, range(1, 161))) + ",",
}
_CORPUS: Final = (
    "Hello, world!",
    " leading and  double   spaces ",
    "line\nbreaks\n\nand\n\n\n\ttabs\r\n",
    "naïve café — “quotes” … 'don't' I'LL",
    "日本語とひらがな 中文 한국어 العربية हिन्दी ไทย",
    "🙂🚀 family 👨‍👩‍👧 flags 🇦🇹",
    "1234567890 3.14159 1e-05 0xFF ½ ²",
    "def f(x: int) -> int:\n    return x ** 2  # square\n",
    "https://example.org/a?b=c&d=%20#e",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\u00a0\u200b\u3000 odd spaces",
    "ЁЖИК Ελλάδα ÅÄÖ ßẞ",
    "",
    " ",
)


def _contents(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def tokenizer_of(reader: gguf.GGUFReader) -> sentencepiece.SentencePieceProcessor:
    """Build SentencePiece's own model of the file's pieces, of which a converter made its list."""
    model = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    columns = [_contents(reader, f"tokenizer.ggml.{n}") for n in ("tokens", "scores", "token_type")]
    for text, score, kind in zip(*columns, strict=True):
        piece = model.pieces.add()
        piece.piece = text.replace(" ", "▁") if kind == _USER_DEFINED else text
        piece.score, piece.type = score, kind
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = _contents(reader, "tokenizer.ggml.unknown_token_id")
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def model_of(reader: gguf.GGUFReader) -> Any:
    def value(key: str) -> Any:
        return _contents(reader, f"gemma3.{key}")

    config = transformers.Gemma3TextConfig(
        vocab_size=len(_contents(reader, "tokenizer.ggml.tokens")),
        hidden_size=value("embedding_length"),
        num_hidden_layers=value("block_count"),
        intermediate_size=value("feed_forward_length"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        query_pre_attn_scalar=value("attention.key_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        sliding_window=value("attention.sliding_window"),
        max_position_embeddings=value("context_length"),
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tie_word_embeddings=True,
    )
    model: Any = transformers.Gemma3ForCausalLM(config)
    model.float().eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight",)) or name)
            weights = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            parameter.copy_(weights - 1 if name.endswith("norm.weight") else weights)
    assert not tensors, tensors.keys()
    return model


def greedy(model: Any, prompt: list[int]) -> dict[str, list[Any]]:
    """Return the tokens, their log probabilities, and by how much each was ahead of the next."""
    found: dict[str, list[Any]] = {"completion_token_ids": [], "margins": [], "logprobs": []}
    cache, inputs = None, prompt
    with torch.no_grad():
        for _ in range(_MAX_TOKENS):
            step = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True)
            cache, logits = step.past_key_values, step.logits[0, -1].double()
            best = logits.topk(2)
            token = int(best.indices[0])
            found["completion_token_ids"].append(token)
            found["margins"].append(round(float(best.values[0] - best.values[1]), 5))
            found["logprobs"].append(round(float(logits.log_softmax(-1)[token]), 5))
            inputs = [token]
    return found


def main(source: str, target: str) -> None:
    reader = gguf.GGUFReader(source)
    tokenizer, model = tokenizer_of(reader), model_of(reader)
    bos = _contents(reader, "tokenizer.ggml.bos_token_id")
    cases = []
    for name, prompt in _PROMPTS.items():
        token_ids = [bos, *tokenizer.encode(prompt)]
        case = {"name": name, "prompt": prompt, "prompt_token_ids": token_ids}
        cases.append(case | greedy(model, token_ids))
    golden = {
        "model": Path(source).name,
        "reference": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cases": cases,
        "corpus": [{"text": text, "token_ids": tokenizer.encode(text)} for text in _CORPUS],
    }
    content = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    Path(target).write_text(f"{content}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
