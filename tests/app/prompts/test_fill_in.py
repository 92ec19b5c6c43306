"""Prompts to fill in, and the endpoints that make them."""

from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from app.api.models.cards import capabilities
from app.prompts.fill_in import ExtraFile, fill_in_prompt, fill_in_tokens
from app.prompts.render import PromptTooLong
from batching import InvalidRequest, ModelInfo
from tests.support.fill_in import QWEN, Marked, model_of
from tests.support.speaker import MODEL_ID, ByteTokenizer, Served, served

pytestmark = pytest.mark.anyio

STARCODER: Final = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
SANTACODER: Final = ("<fim-prefix>", "<fim-suffix>", "<fim-middle>")
CODELLAMA: Final = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
DEEPSEEK: Final = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001
SEED: Final = ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>")


@pytest.mark.parametrize(
    ("markers", "shown"),
    [
        (QWEN, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (STARCODER, "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        (SANTACODER, "<fim-prefix>a<fim-suffix>b<fim-middle>"),
        (CODELLAMA, "▁<PRE>a▁<SUF>b▁<MID>"),
        (DEEPSEEK, "".join([DEEPSEEK[0], "a", DEEPSEEK[1], "b", DEEPSEEK[2]])),
        (SEED, "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a"),
    ],
)
def test_each_family_has_its_order(markers: tuple[str, ...], shown: str) -> None:
    tokenizer = Marked(*markers)
    made = fill_in_prompt(model_of(tokenizer), "suffix", "a", "b")
    assert tokenizer.shown(made.token_ids) == shown
    # Whatever a model writes of them, the text is filled in.
    assert {*made.ends} == {*tokenizer.markers.values()}


def test_mellum_has_the_markers_of_starcoder_and_its_suffix_first() -> None:
    tokenizer = Marked(*STARCODER)
    made = fill_in_prompt(model_of(tokenizer, "JetBrains/Mellum-4b-base"), "suffix", "a", "b")
    assert tokenizer.shown(made.token_ids) == "<fim_suffix>b<fim_prefix>a<fim_middle>"


def sentence_pieces() -> Any:
    """Return a tokenizer that puts a space before each text, as CodeLlama's."""
    vocab = {text: index for index, text in enumerate(("<unk>", "</s>", "▁", "a", "b", "☺"))}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in CODELLAMA])
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_no_space_is_put_before_the_suffix_of_codellama() -> None:
    tokenizer = sentence_pieces()
    model = ModelInfo("m", tokenizer, frozenset(), len(tokenizer), 128)
    made = fill_in_prompt(model, "suffix", "a", "b")
    pieces = ["▁<PRE>", "▁", "a", "▁<SUF>", "b", "▁<MID>"]
    assert tokenizer.convert_ids_to_tokens(made.token_ids) == pieces


def test_models_tell_that_they_can() -> None:
    assert "insert" in capabilities(model_of(Marked(*QWEN)))
    assert "insert" not in capabilities(model_of(ByteTokenizer()))


def test_files_stand_before_the_prefix() -> None:
    tokenizer = Marked(*QWEN)
    made = fill_in_prompt(model_of(tokenizer), "suffix", "a", "b", [ExtraFile("f.py", "x")])
    assert tokenizer.shown(made.token_ids) == (
        "<|repo_name|>project\n<|file_sep|>f.py\nx\n<|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    )
    plain = Marked(*CODELLAMA)
    made = fill_in_prompt(model_of(plain), "suffix", "a", "b", [ExtraFile("f.py", "x")])
    assert plain.shown(made.token_ids) == "f.py\nx\n▁<PRE>a▁<SUF>b▁<MID>"


@pytest.mark.parametrize(
    ("num_tokens", "shown"),
    [
        (48, "#project\n|f\nx\n|g\ny\n|filename\n<abcdefgh>ijklmnop="),
        (43, "#project\n|g\ny\n|filename\n<abcdefgh>ijklmnop="),
        (42, "<abcdefgh>ijklmnop="),
        (19, "<abcdefgh>ijklmnop="),
        (17, "<abcdefgh>ijklmn="),
        (13, "<abcdefgh>ij="),
        (11, "<cdefgh>ij="),
    ],
)
def test_what_is_far_from_the_middle_is_cut_first(num_tokens: int, shown: str) -> None:
    tokenizer = Marked(*QWEN)
    made = fill_in_prompt(
        model_of(tokenizer, max_model_len=num_tokens + 4),
        "suffix",
        "abcdefgh",
        "ijklmnop",
        [ExtraFile("f", "x"), ExtraFile("g", "y")],
        4,
    )
    text = tokenizer.shown(made.token_ids)
    for marker, short in zip(QWEN, "<>=#|", strict=True):
        text = text.replace(marker, short)
    assert text == shown
    assert made.is_cut == (num_tokens < 48)
    assert len(made.token_ids) <= num_tokens


def test_a_text_that_is_far_too_long_is_not_tokenized() -> None:
    class WithVocabulary(Marked):
        def get_vocab(self) -> dict[str, int]:
            return self.markers

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert len(text) < 1_000_000
            return super().encode(text)

    model, long = model_of(WithVocabulary(*QWEN)), "a" * 1_000_000
    with pytest.raises(PromptTooLong):
        fill_in_prompt(model, "suffix", long, "b")
    for num_reserved, num_tokens in ((1, 2047), (1000, 1048), (2047, 1024), (4096, 1024)):
        made = fill_in_prompt(model, "suffix", long, long, [ExtraFile("f", long)], num_reserved)
        assert made.is_cut and len(made.token_ids) == num_tokens


def test_a_model_without_markers_fills_nothing_in() -> None:
    assert fill_in_tokens(model_of(ByteTokenizer())) is None
    with pytest.raises(InvalidRequest) as refused:
        fill_in_prompt(model_of(ByteTokenizer()), "suffix", "a", "b")
    assert refused.value.param == "suffix"


ASKED: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": "ab", "suffix": "cd"},
    "/api/generate": {"model": MODEL_ID, "prompt": "ab", "suffix": "cd", "stream": False},
    "/infill": {"input_prefix": "a", "prompt": "b", "input_suffix": "cd"},
}


async def fill(server: Served, path: str, **fields: Any) -> Any:
    return await server.post(path, ASKED[path] | fields)


@pytest.mark.parametrize("path", ASKED)
async def test_what_is_between_is_filled_in(path: str) -> None:
    tokenizer = Marked(*QWEN)
    end = tokenizer.markers["<|file_sep|>"]
    async with served([*b"xy", end, *b"never"], tokenizer=tokenizer) as server:
        answer = (await fill(server, path)).json()
    text = answer.get("content") or answer.get("response") or answer["choices"][0]["text"]
    assert text == "xy"
    used = answer.get("tokens_evaluated") or answer.get("prompt_eval_count")
    assert (used or answer["usage"]["prompt_tokens"]) == len("abcd") + 3


@pytest.mark.parametrize("path", ASKED)
async def test_a_model_that_cannot_says_so(path: str) -> None:
    async with served() as server:
        response = await fill(server, path)
    assert response.status_code == 400
    assert "suffix" in response.text and MODEL_ID in response.text


@pytest.mark.parametrize(
    "fields", [{"echo": True}, {"truncate_prompt_tokens": 3}, {"prompt": [1, 2]}]
)
async def test_a_suffix_needs_a_whole_text(fields: dict[str, Any]) -> None:
    async with served() as server:
        response = await fill(server, "/v1/completions", **fields)
    assert response.json()["error"]["param"] == "suffix"
