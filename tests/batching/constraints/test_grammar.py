"""Grammars: what is let through, what is rejected, and that no grammar takes the server down."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from batching.constraints import grammar
from batching.constraints.grammar import MAX_GRAMMAR_LENGTH, Grammar, GrammarCompiler
from batching.constraints.grammar_text import (
    GrammarText,
    InvalidGrammar,
    choice_grammar,
    json_object_grammar,
    json_rule,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from batching.constraints.matcher import GrammarMatcher
from batching.errors import InvalidRequest, RequestFailed
from batching.sandbox.sandbox import SandboxProcess
from tests.support.fakes import ByteTokenizer
from tests.support.schemas import SCHEMAS
from tests.support.weekly import weekly

WORDS: Final = (b'{"', b'":', b'": ', b'",', b", ", b"}]", b"true", b"null", b"  ", b"\n  ", b"ab")
SPECIAL: Final = ("<|end|>", "<|im_end|>", "<think>")
NUM_KNOWN: Final = 256 + len(WORDS) + len(SPECIAL)
END, IM_END, THINK = range(NUM_KNOWN - len(SPECIAL), NUM_KNOWN)
# The model has ids that the tokenizer does not know, and its last word of bits is not full.
VOCAB_SIZE: Final = NUM_KNOWN + 70
# What brings a JSON text to its end.
CLOSING: Final = (b"}", b"]", b'"', b"}]", b":", b'":')


def printable(byte: int) -> str:
    """Return how byte-level BPE writes a byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return chr(byte) if byte in shown else chr(0x100 + hidden.index(byte))


def byte_level() -> Tokenizer:
    pieces = [bytes([byte]) for byte in range(256)] + list(WORDS)
    names = ["".join(map(printable, piece)) for piece in pieces]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's way: a letter is itself, a space is a line below, other bytes are named."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    names += [word.decode().replace(" ", "▁") for word in WORDS]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


class FastTokenizer(ByteTokenizer):
    """A Hugging Face tokenizer shows its backend, and that is all that grammars need."""

    def __init__(self, backend: Tokenizer) -> None:
        backend.add_tokens([AddedToken(text, special=True) for text in SPECIAL])
        # Lengths for other uses do not matter to grammars.
        backend.enable_truncation(4)
        backend.enable_padding(direction="left", length=8, pad_id=ord("?"), pad_token="?")
        self.backend_tokenizer = backend


def as_bytes(token_ids: Sequence[int]) -> bytes:
    return b"".join(bytes([i]) if i < 256 else WORDS[i - 256] for i in token_ids)


ENDS: Final = frozenset({END, IM_END})
COMPILER: Final = GrammarCompiler(FastTokenizer(byte_level()), VOCAB_SIZE, ENDS)


def compiled(grammar: GrammarText, compiler: GrammarCompiler = COMPILER) -> Grammar:
    return compiler.compile(grammar, param="response_format")


def rejection(grammar: GrammarText, compiler: GrammarCompiler = COMPILER) -> str:
    """Return why a grammar is rejected."""
    with pytest.raises(InvalidGrammar) as caught:
        compiled(grammar, compiler)
    assert caught.value.param == "response_format"
    return str(caught.value)


def allowed(matcher: GrammarMatcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    """Return the tokens that may follow, over what stood in the row before."""
    row: NDArray[np.int32] = np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)
    matcher.fill_mask(row)
    words = row.view(np.uint32).tolist()
    return {32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def accepts(grammar: GrammarText, text: str, compiler: GrammarCompiler = COMPILER) -> bool:
    """True if a text may be written byte by byte, and then ended."""
    matcher = compiled(grammar, compiler).matcher()
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        matcher.accept(byte)
    return allowed(matcher) >= ENDS


def follow(matcher: GrammarMatcher, text: bytes) -> None:
    for byte in text:
        assert byte in allowed(matcher)
        matcher.accept(byte)


# The texts of grammars


@pytest.mark.parametrize("text", ["{}", '{"a":1}', '{"a": [1, null], "b": {"c": "é\\n"}}', "{ }"])
def test_any_json_object(text: str) -> None:
    assert accepts(json_object_grammar(), text)


@pytest.mark.parametrize("text", ["[]", "1", '{"a"}', "{}}", " {}", "{a: 1}", '{"a": 1,}'])
def test_what_is_no_json_object(text: str) -> None:
    assert not accepts(json_object_grammar(), text)


@pytest.mark.parametrize("blank", ["", " ", "\n", "\n" + 32 * " "])
@pytest.mark.parametrize("place", ['{{{}"a": 1}}', '{{"a":{}1}}', '{{"a": 1,{}"b": 2}}'])
def test_json_is_written_naturally(place: str, blank: str) -> None:
    assert accepts(json_object_grammar(), place.format(blank))


@pytest.mark.parametrize("blank", ["  ", "\n\n", "\n" + 33 * " ", "\t"])
def test_json_cannot_be_blanks_for_ever(blank: str) -> None:
    assert not accepts(json_object_grammar(), f'{{"a":{blank}1}}')


def test_json_of_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    grammar = json_schema_grammar(schema | {"additionalProperties": False})
    assert accepts(grammar, '{"a": 12}')
    assert not accepts(grammar, '{"a": "x"}')
    assert not accepts(grammar, "{}")
    assert not accepts(grammar, '{"a": 1, "b": 2}')


def test_a_schema_can_be_a_boolean() -> None:
    assert accepts(json_schema_grammar(True), '[1, "a"]')
    assert "false" in rejection(json_schema_grammar(False))


@pytest.mark.parametrize(
    "pattern", [r'^[^"\\]+$', r'^(?:[^"\\]|\n)+$', r'^[^]"\\]+$', r'^[^-"\\]+$', r"^\[[^<\"\\]+$"]
)
def test_a_pattern_can_leave_out_what_json_escapes(pattern: str) -> None:
    grammar = json_schema_grammar({"properties": {"pattern": {"pattern": pattern}}})
    validator = Draft202012Validator({"pattern": pattern})
    for text in ("[é\n+a", '[a"', "[a\\", "a]", "a-", "a<"):
        answer = json.dumps({"pattern": text}, ensure_ascii=False)
        assert accepts(grammar, answer) is validator.is_valid(text), text


def test_the_pattern_of_a_name_can_leave_out_what_json_escapes() -> None:
    names = {"patternProperties": {'^[^"]+$': {}}, "additionalProperties": False}
    assert accepts(json_schema_grammar(names), '{"a": 1}')
    assert not accepts(json_schema_grammar(names), '{"a\\"": 1}')


def test_values_are_no_patterns() -> None:
    value = {"pattern": '[^"]', "enum": ["[^a]"]}
    for schema in ({"const": value}, {"properties": {"const": {"enum": [value]}}}):
        answer = value if "const" in schema else {"const": value}
        assert accepts(json_schema_grammar(schema), json.dumps(answer))


def test_json_inside_a_lark_grammar() -> None:
    call = GrammarText(f'start: "<call>" json "</call>"\njson: {json_rule({"type": "integer"})}')
    assert accepts(call, "<call>12</call>")
    assert not accepts(call, "<call>a</call>")


def test_a_regex_matches_the_whole_text() -> None:
    assert accepts(regex_grammar(r"[a-c]{2}/\d"), "ab/7")
    assert not accepts(regex_grammar(r"[a-c]{2}/\d"), "ab/78")
    assert not accepts(regex_grammar(r"[a-c]{2}/\d"), "ab")


def test_a_digit_of_a_regex_is_of_ascii() -> None:
    grammar = regex_grammar(r"\d[\d-]\\d[^\d]\D")
    assert accepts(grammar, r"1-\dab")
    assert accepts(grammar, r"12\d  ")
    for other in ("\u0661-\\dab", "1\u0661\\dab", "1-\\d\u0661b", "1-\\d1b"):
        assert not accepts(grammar, other)


@given(st.lists(st.text(max_size=8), min_size=1, max_size=5, unique=True), st.data())
@settings(max_examples=12)
def test_one_of_the_choices(choices: list[str], data: st.DataObject) -> None:
    grammar = choice_grammar(choices)
    assert accepts(grammar, data.draw(st.sampled_from(choices)))
    other = data.draw(st.text(max_size=8))
    assert accepts(grammar, other) is (other in choices)


def test_a_lark_grammar() -> None:
    grammar = lark_grammar('start: "a" NUMBER+\nNUMBER: /[0-9]/\n')
    assert accepts(grammar, "a12")
    assert not accepts(grammar, "a")


@given(SCHEMAS, st.integers(0, 2**32))
@settings(max_examples=25)
def test_whatever_is_chosen_of_what_is_allowed_follows_the_schema(schema: Any, seed: int) -> None:
    matcher = compiled(json_schema_grammar(schema)).matcher()
    token_ids = random_walk(matcher, np.random.default_rng(seed), max_tokens=300)
    assert matcher.error is None
    if token_ids and token_ids[-1] in ENDS:
        answer = json.loads(as_bytes(token_ids[:-1]).decode())
        Draft202012Validator(schema).validate(answer)


def random_walk(
    matcher: GrammarMatcher, choose: np.random.Generator, *, max_tokens: int
) -> list[int]:
    """Write tokens that are allowed until one ends the text; half of the time such as close it."""
    token_ids: list[int] = []
    while len(token_ids) < max_tokens and not ENDS & set(token_ids[-1:]):
        candidates = allowed(matcher)
        assert candidates, "something may always follow"
        assert max(candidates) < THINK, "neither special tokens nor unknown ids are text"
        closing = {i for i in candidates - ENDS if as_bytes([i]) in CLOSING} | candidates & ENDS
        token_ids.append(
            int(choose.choice(sorted(closing if closing and choose.random() < 0.5 else candidates)))
        )
        matcher.accept(token_ids[-1])
    return token_ids


# Masks and matchers


def test_any_end_token_ends_the_completion() -> None:
    for end in ENDS:
        matcher = compiled(choice_grammar(["a"])).matcher()
        assert not ENDS & allowed(matcher)
        matcher.accept(ord("a"))
        assert matcher.is_complete
        assert allowed(matcher) == ENDS
        matcher.accept(end)
        assert matcher.is_complete
        assert matcher.error is None


def test_a_text_that_could_go_on_may_also_end() -> None:
    matcher = compiled(regex_grammar("a+")).matcher()
    matcher.accept(ord("a"))
    assert not matcher.is_complete
    assert allowed(matcher) == ENDS | {ord("a")}


def test_a_word_that_is_an_end_token_is_never_text() -> None:
    word = 256 + WORDS.index(b"ab")
    compiler = GrammarCompiler(FastTokenizer(byte_level()), VOCAB_SIZE, frozenset({word}))
    matcher = compiled(regex_grammar(r"(.|\n)*x"), compiler).matcher()
    assert word not in allowed(matcher)
    matcher.accept(ord("x"))
    assert word in allowed(matcher)


def test_a_lark_grammar_can_name_special_tokens() -> None:
    matcher = compiled(lark_grammar('start: <think> "a"')).matcher()
    assert allowed(matcher) == {THINK}
    assert "unknown special token" in rejection(lark_grammar("start: <nothing>"))


@pytest.mark.parametrize("text", ["<think>", "a<|im_end|>b", "<|end|><|end|>"])
def test_the_text_of_a_special_token_is_written_without_that_token(text: str) -> None:
    assert accepts(choice_grammar([text]), text)
    assert accepts(json_schema_grammar({"enum": [text, 1]}), json.dumps(text))


def test_a_lark_grammar_can_name_end_tokens() -> None:
    matcher = compiled(lark_grammar('start: "a" <|im_end|>')).matcher()
    matcher.accept(ord("a"))
    assert allowed(matcher) == {IM_END}


def test_byte_fallback_means_the_same_bytes() -> None:
    compiler = GrammarCompiler(FastTokenizer(byte_fallback()), VOCAB_SIZE, ENDS)
    assert accepts(json_object_grammar(), '{"é": " \\n"}', compiler)
    matcher = compiled(json_object_grammar(), compiler).matcher()
    assert {ord("{"), 256 + WORDS.index(b'{"')} <= allowed(matcher)
    matcher.accept(256 + WORDS.index(b'{"'))
    matcher.accept(256 + WORDS.index(b'": '))
    assert 256 + WORDS.index(b"true") in allowed(matcher)


@pytest.mark.parametrize(
    ("vocab_size", "last"),
    [(256, 0xF4), (260, 259), (266, 265), (NUM_KNOWN, IM_END), (1024, IM_END)],
)
def test_a_vocabulary_of_another_size_than_the_tokenizers(vocab_size: int, last: int) -> None:
    ends = frozenset({ord("~"), IM_END})
    compiler = GrammarCompiler(FastTokenizer(byte_level()), vocab_size, ends)
    matcher = compiled(regex_grammar(r"(.|\n)*"), compiler).matcher()
    assert max(allowed(matcher, vocab_size)) == last


def test_text_is_written_as_it_stands() -> None:
    decomposed = "e\u0301"
    matcher = compiled(choice_grammar([decomposed])).matcher()
    follow(matcher, decomposed.encode())
    assert matcher.is_complete


def test_a_fork_goes_on_by_itself() -> None:
    matcher = compiled(choice_grammar(["ab", "ac"])).matcher()
    matcher.accept(ord("a"))
    fork = matcher.fork()
    fork.accept(ord("b"))
    assert fork.is_complete
    assert allowed(matcher) - {256 + WORDS.index(b"ab")} == {ord("b"), ord("c")}


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    matcher = compiled(choice_grammar(["ab"])).matcher()
    matcher.accept(ord("x"))
    assert matcher.error is not None
    assert not matcher.is_complete
    assert allowed(matcher) == ENDS


class Panic(BaseException):
    """What pyo3 makes of a panic of Rust: no Exception."""


class Broken:
    """An LLMatcher that does not survive one of its calls, and works otherwise."""

    def __init__(self, call: str, error: BaseException) -> None:
        self._matcher = LLMatcher(COMPILER._vocabulary().tokenizer, regex_grammar("a+"))
        self._call = call
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._call else getattr(self._matcher, name)

    def _fail(self, *_: Any) -> None:
        raise self._error


def broken(call: str, error: BaseException) -> GrammarMatcher:
    matcher: Any = Broken(call, error)
    return GrammarMatcher(matcher, COMPILER._vocabulary())


@pytest.mark.parametrize("error", [Panic("index 7"), RuntimeError("Already borrowed")])
@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("unsafe_compute_mask_ptr", allowed),
        ("consume_token", lambda matcher: matcher.accept(ord("a"))),
        ("is_stopped", lambda matcher: matcher.is_complete),
        ("is_error", lambda matcher: matcher.error),
        ("deep_copy", lambda matcher: matcher.fork()),
    ],
)
def test_what_llguidance_does_not_survive_fails_one_request(
    call: str, use: Callable[[GrammarMatcher], Any], error: BaseException
) -> None:
    matcher = broken(call, error)
    use(matcher)
    for each in (matcher, matcher.fork()):
        assert each.error == "the grammar cannot be followed any further"
        assert allowed(each) == ENDS
        assert not each.is_complete
        each.accept(END)
    assert allowed(compiled(regex_grammar("a+")).matcher()) == {ord("a")}


def test_an_interruption_is_no_error_of_a_request() -> None:
    with pytest.raises(KeyboardInterrupt):
        broken("consume_token", KeyboardInterrupt()).accept(ord("a"))


def test_a_token_that_is_none_is_an_error() -> None:
    matcher = compiled(regex_grammar("a+")).matcher()
    matcher.accept(-1)
    assert matcher.error is not None


def test_a_failed_mask_lets_the_request_end_and_fail(caplog: pytest.LogCaptureFixture) -> None:
    matcher = broken("unsafe_compute_mask_ptr", Panic("text of the prompt"))
    assert allowed(matcher) == ENDS
    assert "Panic" in caplog.text
    assert "text of the prompt" not in caplog.text


@pytest.mark.parametrize("error", [Panic("index 7"), RuntimeError("fault"), MemoryError()])
def test_a_grammar_that_llguidance_does_not_survive_is_rejected(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    grammar_text = regex_grammar("does not survive")
    monkeypatch.setattr(grammar, "LLMatcher", fail)
    assert rejection(grammar_text) == "the grammar cannot be compiled"


def test_a_tokenizer_that_llguidance_does_not_survive_follows_no_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Panic("index 7")

    compiler = GrammarCompiler(FastTokenizer(byte_level()), VOCAB_SIZE, ENDS)
    monkeypatch.setattr(grammar, "LLTokenizer", fail)
    assert "its tokenizer cannot be read" in rejection(regex_grammar("a"), compiler)
    assert compiler.token_bytes(1)


def test_a_completion_can_exceed_its_limits() -> None:
    matcher = compiled(regex_grammar("(a{1,1000}){1,1000}")).matcher()
    for _ in range(1000):
        assert allowed(matcher)
        matcher.accept(ord("a"))
    assert matcher.error is not None
    assert "\n" not in matcher.error
    assert allowed(matcher) == ENDS


class Counted(FastTokenizer):
    """Counts how often it was read."""

    num_reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "backend_tokenizer":
            Counted.num_reads += 1
        return super().__getattribute__(name)


def test_a_completion_can_exceed_the_memory_for_its_states() -> None:
    matcher = compiled(json_schema_grammar({"type": "string", "maxLength": 10**9})).matcher()
    matcher.accept(ord('"'))
    row = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
    num_tokens = 0
    while matcher.error is None:
        matcher.fill_mask(row)
        matcher.accept(ord("a"))
        num_tokens += 1
    assert 1_000 < num_tokens < 20_000


def test_threads_compile_at_once_with_one_vocabulary() -> None:
    compiler = GrammarCompiler(Counted(byte_level()), VOCAB_SIZE, ENDS)
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda: found.append(accepts(regex_grammar("a"), "a", compiler)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    assert Counted.num_reads == 1


def test_what_a_grammar_costs_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def count(line: bytes) -> bytes:
        tried.append(json.loads(line)[-1])
        return b""

    monkeypatch.setattr(grammar._SANDBOX, "ask", count)
    compiler = GrammarCompiler(FastTokenizer(byte_level()), VOCAB_SIZE, ENDS)
    costs, more = regex_grammar("costs"), regex_grammar("more costs")
    for text in (costs, costs, more, costs):
        compiler.compile(text, param="regex")
    assert tried == [costs, more]


def test_a_process_that_is_ended_from_outside_says_nothing_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: SandboxProcess) -> NoReturn:
        raise OSError("no room for processes")

    compiler = GrammarCompiler(FastTokenizer(byte_level()), VOCAB_SIZE, ENDS)
    with monkeypatch.context() as patched:
        patched.setattr(SandboxProcess, "start", fail)
        with pytest.raises(RequestFailed, match="please try again"):
            compiler.compile(json_object_grammar(), param="response_format")
    compiler.compile(json_object_grammar(), param="response_format")


def test_what_a_token_stands_for() -> None:
    assert COMPILER.token_bytes(0xC3) == b"\xc3"
    assert COMPILER.token_bytes(256) == WORDS[0]
    unknown = GrammarCompiler(ByteTokenizer(), VOCAB_SIZE, ENDS)
    assert unknown.token_bytes(1) == ByteTokenizer().decode([1]).encode()


# What is rejected


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {}}, "not"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}}, "if"),
        ({"properties": {"a": {"contains": {}}}}, "contains"),
        ({"type": "string", "format": "binary"}, "format: binary"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"oneOf": [{"type": "object"}, {"type": "object"}]}, "oneOf"),
        ({"$ref": "https://example.com/schema"}, "not present"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "#"}, "no text follows the grammar"),
        ({"type": "text"}, "Invalid type: text"),
        ({"maximum": float("nan")}, "expected value"),
        ({"title": "\ud800"}, "hex escape"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_rejected_by_name(schema: Any, reason: str) -> None:
    assert reason in rejection(json_schema_grammar(schema))


@pytest.mark.parametrize("place", [{}, {"properties": {"a": {"x-guidance": {"lenient": True}}}}])
def test_clients_cannot_switch_checks_off(place: dict[str, Any]) -> None:
    schema = {"x-guidance": {"lenient": True}, "not": {}} | place
    assert "not" in rejection(json_schema_grammar(schema))
    assert "not" in rejection(lark_grammar(f"start: %json {json.dumps(schema)}"))


def test_clients_cannot_change_how_json_is_written() -> None:
    grammar = json_schema_grammar({"x-guidance": {"whitespace_pattern": " *"}, "type": "object"})
    assert accepts(grammar, "{ }")
    assert not accepts(grammar, "{  }")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex_grammar("a("), "unclosed group"),
        (regex_grammar(9999 * "(" + "a"), "unclosed group"),
        (regex_grammar(r"(?=a)"), "look-around"),
        (lark_grammar("start: foo"), 'unknown name: "foo"'),
        (lark_grammar("start: " + 9999 * "("), "too deeply nested"),
        (lark_grammar('{"grammars": []}'), "expecting rule"),
        (GrammarText("x" * (MAX_GRAMMAR_LENGTH + 1)), "exceeds"),
    ],
)
def test_a_malformed_grammar_is_rejected_in_one_short_line(
    grammar: GrammarText, reason: str
) -> None:
    message = rejection(grammar)
    assert reason in message
    assert len(message) < 400
    assert "\n" not in message
    assert "start:" not in message


def test_a_rejection_is_an_invalid_request() -> None:
    assert issubclass(InvalidGrammar, InvalidRequest)


def test_a_schema_can_be_nested_to_a_depth() -> None:
    assert accepts(json_schema_grammar(nested(98)), "[" * 98 + "]" * 98)
    with pytest.raises(InvalidGrammar, match="deeper than 100") as caught:
        json_schema_grammar(nested(100_000))
    assert caught.value.param == "schema"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def rule_chain(length: int) -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return f'start: r0\n{rules}r{length}: "a"\n'


def many_patterns(count: int) -> dict[str, Any]:
    return {"patternProperties": {f"^p{i}x[a-z]*$": {"type": "string"} for i in range(count)}}


@pytest.mark.parametrize(
    "grammar",
    [
        lark_grammar(rule_chain(500)),
        lark_grammar(rule_chain(4000)),
        # Each takes the seconds that it may.
        *weekly(
            [
                json_schema_grammar(many_patterns(900)),
                json_schema_grammar(
                    {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967)]}
                ),
            ],
            1,
        ),
    ],
)
def test_a_grammar_that_would_take_the_server_down_is_rejected(grammar: GrammarText) -> None:
    assert "too much time or memory" in rejection(grammar)


def test_what_special_tokens_stand_before_is_compiled_as_well() -> None:
    chain = rule_chain(4000).replace("start: r0", "start: <think> <[3]> r0")
    assert "too much time or memory" in rejection(lark_grammar(chain))


@pytest.mark.parametrize(
    "grammar",
    [
        lark_grammar(
            "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "a"'
        ),
        lark_grammar("start: A\nA: " + " & ".join(f"/.*a.{{{i}}}.*/" for i in range(2, 20))),
        json_schema_grammar(
            {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(40)]}
        ),
        json_schema_grammar({"type": "object", "properties": {f"p{i}": {} for i in range(300)}}),
    ],
)
def test_a_grammar_that_is_too_wide_is_rejected(grammar: GrammarText) -> None:
    assert rejection(grammar)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {i}" for i in range(2000)]},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "minItems": 10**9, "items": {}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"next": {"$ref": "#/$defs/a"}}}}},
        {"properties": {f"p{i}": {"type": "string"} for i in range(200)}},
    ],
)
def test_large_is_not_yet_too_much(schema: dict[str, Any]) -> None:
    assert not compiled(json_schema_grammar(schema)).matcher().is_complete


def test_a_model_whose_tokens_are_unknown_follows_no_grammar() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB_SIZE, ENDS)
    assert "does not expose the bytes" in rejection(json_object_grammar(), compiler)


@pytest.mark.parametrize("ends", [frozenset[int](), frozenset({VOCAB_SIZE})])
def test_a_model_that_cannot_end_follows_no_grammar(ends: frozenset[int]) -> None:
    compiler = GrammarCompiler(FastTokenizer(byte_level()), VOCAB_SIZE, ends)
    assert "it has no end token" in rejection(json_object_grammar(), compiler)


def test_a_vocabulary_that_is_not_made_of_bytes_is_rejected() -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    compiler = GrammarCompiler(FastTokenizer(backend), VOCAB_SIZE, ENDS)
    assert "this model cannot follow a grammar" in rejection(json_object_grammar(), compiler)
