"""Tokenizers from a file's metadata: the tokens of the original ones."""

import string
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import sentencepiece

from batching.backend.gguf.splitting import SPLITTINGS
from batching.backend.gguf.tokenizer import build_tokenizer
from batching.errors import ModelLoadError
from batching.model_files.gguf_header import read_header
from tests.support.gguf_models import BPE, BYTES, Metadata
from tests.support.gguf_writer import Value, write_gguf


def tokenizer(path: Path, **changes: Value) -> Any:
    entries = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return build_tokenizer(read_header(write_gguf(path / "t.gguf", BPE | entries, {})))


def test_a_template_tells_how_the_model_writes_tool_calls(tmp_path: Path) -> None:
    template = "{% for tool_call in calls %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}"
    path = write_gguf(tmp_path / "t.gguf", BPE | {"tokenizer.chat_template": template}, {})
    calling = build_tokenizer(read_header(path))
    assert (calling.tool_call_start, calling.tool_call_end) == ("<tool_call>", "</tool_call>")
    assert calling.tool_parser(' {"name": "f", "arguments": {}} ') == {"name": "f", "arguments": {}}
    assert not tokenizer(tmp_path).has_tool_calling


TEXT: Final = "I'LL pay 12345 x=[`y]; cafe\u0301 iPhone's\r\n\n  日本ひら .NET\tक्षि"


# Those of the original tokenizers; llama.cpp's are the same but for what Qwen's compose first.
WORDS: Final = {
    "default": "I|'|LL| pay| |123|45| x|=[|`|y|];| cafe|\u0301| iPhone|'|s|\r\n\n | 日本ひら| |.|NET|\t|क|\u094d|ष|\u093f",
    "gpt-2": "I|'|LL| pay| 12345| x|=[`|y|];| cafe|\u0301| iPhone|'s|\r\n\n | 日本ひら| .|NET|\t|क|\u094d|ष|\u093f",
    "smollm": "I|'|LL| pay| |1|2|3|4|5| x|=[`|y|];| cafe|\u0301| iPhone|'s|\r\n\n | 日本ひら| .|NET|\t|क|\u094d|ष|\u093f",
    "falcon": "I|'|LL| pay| |123|45| x|=[`|y|];| cafe|\u0301| iPhone|'|s|\r\n\n | 日本ひら| |.|NET|\t|क|\u094d|ष|\u093f",
    "llama3": "I|'LL| pay| |123|45| x|=[`|y|];| cafe|\u0301| iPhone|'s|\r\n\n| | 日本ひら| .|NET|\tक|\u094dष|\u093f",
    "qwen2": "I|'LL| pay| |1|2|3|4|5| x|=[`|y|];| café| iPhone|'s|\r\n\n| | 日本ひら| .|NET|\tक|\u094dष|\u093f",
    "stablelm2": "I|'LL| pay| |1|2|3|4|5| x|=[`|y|];| cafe|\u0301| iPhone|'s|\r\n\n| | 日本ひら| .|NET|\tक|\u094dष|\u093f",
    "qwen35": "I|'LL| pay| |1|2|3|4|5| x|=[`|y|];| café| iPhone|'s|\r\n\n| | 日本ひら| .|NET|\tक\u094dष\u093f",
    "tekken": "I|'LL| pay| |1|2|3|4|5| x|=[`|y|];| cafe\u0301| i|Phone|'s|\r\n\n| | 日本ひら| .|NET|\tक\u094dष\u093f",
    "gpt-4o": "I'LL| pay| |123|45| x|=[`|y|];| cafe\u0301| i|Phone's|\r\n\n| | 日本ひら| .|NET|\tक\u094dष\u093f",
    "kimi-k2": "I'LL| pay| |123|45| x|=[`|y|];| cafe\u0301| i|Phone's|\r\n\n| | |日本|ひら| .|NET|\tक\u094dष\u093f",
    "deepseek-v3": "I|'LL| pay| |123|45| x|=[`|y|];| cafe\u0301| iPhone|'s|\r\n\n|  |日本ひら| .|NET|\tक\u094dष\u093f",
    "deepseek-llm": "I|'|LL| pay| |1|2|3|4|5| x|=[`|y|];| cafe|\u0301| iPhone|'|s|\r|\n|\n|  |日本ひら| .|NET|\t|क\u094dष\u093f",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4|5| x|=|[|`|y|];| cafe|\u0301| iPhone|'|s|\r|\n|\n| | |日本ひら| .|NET|\t|क|\u094d|ष|\u093f",
}


def words(path: Path, pre: str) -> str:
    backend = tokenizer(path, pre=pre).backend_tokenizer
    text = backend.normalizer.normalize_str(TEXT) if backend.normalizer else TEXT
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return "|".join(text[start:end] for _, (start, end) in pieces)


@pytest.mark.parametrize("pre", WORDS)
def test_text_is_split_as_the_pre_tokenizer_says(tmp_path: Path, pre: str) -> None:
    assert words(tmp_path, pre) == WORDS[pre]


def test_every_splitting_is_tested() -> None:
    tested = {SPLITTINGS[pre].patterns for pre in WORDS}
    assert tested == {splitting.patterns for splitting in SPLITTINGS.values()}


def test_a_word_that_is_a_token_is_not_merged_where_the_original_does_not(tmp_path: Path) -> None:
    tokens = [*BYTES, "12", "Ġa", "<|im_start|>", "<|im_end|>", "<s>", "<tool>", "abc"]
    changes: Metadata = {"tokens": tokens, "token_type": [*[1] * 258, 3, 3, 3, 4, 1]}
    assert tokenizer(tmp_path, pre="glm4", **changes).tokenize("abc") == ["abc"]
    assert tokenizer(tmp_path, pre="qwen2", **changes).tokenize("abc") == ["a", "b", "c"]


def test_special_tokens_stand_for_themselves_and_text_survives(tmp_path: Path) -> None:
    wrapped = tokenizer(tmp_path)
    assert wrapped.encode("<|im_start|>a<tool>") == [258, BYTES.index("a"), 261]
    text = "naïve  日本語 \U0001f642\n\t'LL <tool>"
    assert wrapped.decode(wrapped.encode(text), skip_special_tokens=True) == text


def test_bos_is_added_when_the_file_or_the_family_says_so(tmp_path: Path) -> None:
    assert tokenizer(tmp_path).encode("a")[0] != 260
    assert tokenizer(tmp_path, add_bos_token=True).encode("a")[0] == 260
    assert tokenizer(tmp_path, pre="llama-bpe").encode("a")[0] == 260
    plain = tokenizer(tmp_path, pre="llama-bpe")
    assert plain.encode("a", add_special_tokens=False)[0] != 260
    assert tokenizer(tmp_path, pre="llama-bpe", add_bos_token=False).encode("a")[0] != 260


def test_eos_ends_the_texts_of_embedding_models_only(tmp_path: Path) -> None:
    def encoded(*, of_embeddings: bool, adds_eos: bool = True) -> list[int]:
        kind: Metadata = {"general.architecture": "qwen3", "tokenizer.ggml.add_bos_token": True}
        kind |= {"tokenizer.ggml.add_eos_token": adds_eos}
        kind |= {"qwen3.pooling_type": 3} if of_embeddings else {}
        path = write_gguf(tmp_path / "t.gguf", BPE | kind, {})
        token_ids: list[int] = build_tokenizer(read_header(path)).encode("1")
        return token_ids

    assert encoded(of_embeddings=True) == [260, 16, 259]
    assert encoded(of_embeddings=True, adds_eos=False) == [260, 16]
    assert encoded(of_embeddings=False) == [260, 16]


def test_all_tokens_that_end_a_turn_are_found(tmp_path: Path) -> None:
    assert tokenizer(tmp_path).eos_token_ids == {259}
    assert tokenizer(tmp_path, eos_token_id=260).eos_token_ids == {259, 260}
    assert tokenizer(tmp_path, eot_token_id=258).eos_token_ids == {258, 259}


def test_a_message_of_gpt_oss_is_not_the_end_of_a_turn(tmp_path: Path) -> None:
    def ends(*special: str) -> set[int]:
        changes: Metadata = {
            "tokens": [*BYTES, *special, "ab"],
            "token_type": [*[1] * 256, *[3] * 3, 1],
        }
        changes |= {"merges": ["a b"]}
        found: set[int] = tokenizer(
            tmp_path, **changes, bos_token_id=0, eos_token_id=-1
        ).eos_token_ids
        return found

    assert ends("<|end|>", "<|user|>", "<|assistant|>") == {256}
    assert ends("<|end|>", "<|return|>", "<|call|>") == {257, 258}


def gemma4(path: Path) -> Any:
    tokens = ["<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["a", "▁", "b", "\n", "▁a", "\n\n", "ab", "▁▁", "▁ab"]
    merges = ["\n \n", "▁ ▁", "▁ a", "▁a b"]
    return tokenizer(
        path,
        model="gemma4",
        tokens=tokens,
        token_type=[3, 3, *[6] * 256, *[1] * 9],
        merges=merges,
        bos_token_id=1,
        eos_token_id=0,
    )


def test_gemma4_merges_spaces_and_lines_and_spells_the_rest_in_bytes(tmp_path: Path) -> None:
    loaded = gemma4(tmp_path)
    pieces = loaded.tokenize(" ab  a\n\nba é")
    assert pieces == ["▁ab", "▁▁", "a", "\n\n", "b", "a", "▁", "<0xC3>", "<0xA9>"]
    assert loaded.encode("a")[0] == 1
    assert (
        loaded.decode(loaded.encode(" ab  a\n\nba é"), skip_special_tokens=True) == " ab  a\n\nba é"
    )


@pytest.mark.parametrize(
    "changes", [{"pre": "made-up"}, {"model": "bert"}, {"model": "llama", "scores": [0.0]}]
)
def test_a_tokenizer_that_is_not_known_is_rejected(tmp_path: Path, changes: Metadata) -> None:
    with pytest.raises(ModelLoadError, match=r"made-up|bert|no scores") as caught:
        tokenizer(tmp_path, **changes)
    assert "\n" not in str(caught.value)
    assert "take the model as MLX" in str(caught.value) or "scores" in str(caught.value)


def test_sentencepiece_gives_the_same_tokens(tmp_path: Path) -> None:
    words = "the quick brown fox jumps over a lazy dog while running rings around little foxes"
    sentences = [f"{a} {b}{c} {a}ing" for a in words.split() for b in words.split() for c in ".!"]
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    spm = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(spm.get_piece_size())
    kinds = [2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 1 for i in ids]
    loaded = tokenizer(
        tmp_path,
        model="llama",
        tokens=[spm.id_to_piece(i) for i in ids],
        scores=[float(spm.get_score(i)) for i in ids],
        token_type=[6 if spm.is_byte(i) else kind for i, kind in zip(ids, kinds, strict=True)],
        bos_token_id=spm.bos_id(),
        eos_token_id=spm.eos_id(),
        unknown_token_id=spm.unk_id(),
    )
    rng = np.random.default_rng(3)
    for _ in range(300):
        letters = rng.choice([*string.ascii_lowercase, " ", "é", "語", "the", "ing", " fo"], 30)
        text = "".join(letters)
        assert loaded.encode(text) == [spm.bos_id(), *spm.encode(text)]
        assert loaded.decode(loaded.encode(text), skip_special_tokens=True) == text


def test_the_special_tokens_of_phi_3_take_in_the_space_behind_them(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    tokens += ["<|endoftext|>", "<|user|>", "<|end|>"]
    changes: Metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, *[6] * 256, 1, 1, 3, 3, 3],
        "scores": [0.0] * len(tokens),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 260,
        "add_space_prefix": False,
    }

    def pieces(architecture: str) -> list[str]:
        entries = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
        entries |= {"general.architecture": architecture}
        path = write_gguf(tmp_path / "t.gguf", entries, {})
        loaded = build_tokenizer(read_header(path))
        text = "<|user|>\na <|end|>\n\n<|endoftext|>\n"
        token_ids = loaded.encode(text, add_special_tokens=False)
        found: list[str] = loaded.convert_ids_to_tokens(token_ids)
        return found

    line = "<0x0A>"
    assert pieces("phi3") == ["<|user|>", "a", "▁", "<|end|>", "<|endoftext|>", line]
    with_space = ["<|user|>", line, "a", "▁", "<|end|>", line, line, "<|endoftext|>", line]
    assert pieces("llama") == with_space
