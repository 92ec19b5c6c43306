"""llama.cpp's grammars let the same texts through."""

import re
from typing import Final

import pytest
from hypothesis import given, strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from batching.constraints.gbnf import gbnf_grammar
from batching.constraints.grammar_text import InvalidGrammar

END: Final = 256
THINK: Final = 257

ARITHMETIC: Final = r"""
# an equation a line
root  ::= (expr "=" ws num "\n")+
expr  ::= term ([-+*/] term)*   # a sum or a product
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON: Final = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


class Bytes:
    """A vocabulary of bytes, of an end and of a token with a name."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END, THINK)
    tokens = tuple([bytes([i]) for i in range(256)] + [b"<end>", b"<think>"])

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER: Final = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(grammar: str, text: str | bytes | list[int]) -> bool:
    matcher = LLMatcher(TOKENIZER, gbnf_grammar(grammar), log_level=0)
    assert not matcher.get_error()
    tokens = text.encode() if isinstance(text, str) else text
    return all(matcher.consume_token(token) for token in tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (ARITHMETIC, ["a+1=2\n", "(x*2)=10 \nb=1\n"], ["a+=2\n", "a=2", "A=1\n"]),
        (
            JSON,
            ["{}", '{"a": [1, -2.5, "\\u00e4\\n"]}', '{"ä": {"b": null}}', "{\n\t}"],
            ["[]", "{'a': 1}", '{"a": 01}', '{"a": "\\u12"}', '{"a"  : 1}', ""],
        ),
        ('root ::= item+\nitem ::= "- " [^\\r\\n]+ "\\n"', ["- a\n- b\n"], ["-a\n", "- \n"]),
        ('root ::= "a" | "ab"', ["a", "ab"], ["abb", ""]),
        # Taking the longest terminal would be wrong.
        ('root ::= ("a" | "ab") "b"', ["ab", "abb"], ["a"]),
        ('root ::= [a-z]* "end"', ["end", "xend", "endend"], ["en"]),
        ("root ::= [ぁ-ゟ]{2} .", ["あい!", "あい\n", "ああ😀"], ["あ!!", "あい"]),
        ('root ::= "a"{2} [b]{1,} "c"{ 0, 2 } [d]{3,3}', ["aabbddd", "aabccddd"], ["aaddd"]),
        ('root ::= "\\x41\\u00e4\\U0001F600\\"\\\\"', ['Aä😀"\\'], ["A"]),
        ("root ::= [\\]\\[\\-^a-] [^^]", ["]b", "[b", "-b", "^b", "ab"], ["a^", "bb"]),
        ("root ::= [-+] [+-]", ["-+", "+-"], ["a-"]),
        ('root ::= () ( | "x") "" [y]?', ["", "x", "xy"], ["yx"]),
        ('root ::= a-B | "!"\na-B ::= "(" root ")"', ["!", "((!))"], ["(!"]),
        ('root ::= root "a" | "a"', ["aaa"], [""]),
        ("root ::= foo\nfoo::=[a]\n| [b]\n", ["a", "b"], ["ab"]),
    ],
)
def test_texts_that_a_grammar_derives(grammar: str, texts: list[str], others: list[str]) -> None:
    assert [text for text in texts if not accepts(grammar, text)] == []
    assert [text for text in others if accepts(grammar, text)] == []


def test_a_token_stands_for_itself() -> None:
    assert accepts('root ::= <think> "a"', [THINK, ord("a")])
    assert accepts(f'root ::= <[{THINK}]> "a"', [THINK, ord("a")])
    assert not accepts('root ::= <think> "a"', "<think>a")


# The same expression in GBNF and as a regular expression.
letters = st.sampled_from([('"a"', "a"), ('"ab"', "(?:ab)"), ("[b-c]", "[b-c]"), ('""', "(?:)")])
expressions = st.recursive(
    letters,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: (f"{p[0][0]} {p[1][0]}", p[0][1] + p[1][1])),
        st.tuples(inner, inner).map(
            lambda p: (f"({p[0][0]} | {p[1][0]})", f"(?:{p[0][1]}|{p[1][1]})")
        ),
        st.tuples(inner, st.sampled_from(["*", "?", "+", "{2}", "{0,2}"])).map(
            lambda p: (f"({p[0][0]}){p[1]}", f"(?:{p[0][1]}){p[1]}")
        ),
    ),
    max_leaves=6,
)


@given(expressions, st.text("abc", max_size=6))
def test_a_regular_grammar_is_its_regular_expression(pair: tuple[str, str], text: str) -> None:
    grammar, pattern = pair
    assert accepts(f"root ::= {grammar}", text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "there is no rule named root"),
        ('main ::= "a"', "there is no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "a rule is defined twice"),
        ("root ::= other", "there is no rule named 'other'"),
        ('"a" root ::= "b"', "a rule must begin with a name and ::=, not '\"a\"'"),
        ('root ::= ("a"', "a ( has no )"),
        ('root ::= ("a"\nfoo ::= "b" )', "a ( has no )"),
        ('root ::= "a")', "a ) has no ("),
        ("root ::= *", "* repeats nothing"),
        ('root ::= "a"+?', "? repeats nothing"),
        ('root ::= "a" | {2}', "{2} repeats nothing"),
        ('root ::= "a', "line 1: '\"a' is not GBNF"),
        ("root ::= [a]\n\n  $", "line 3: '$' is not GBNF"),
        ("root ::= []", "a character class is empty"),
        ("root ::= [^]", "a character class is empty"),
        ("root ::= [z-a]", "the range in [z-a] is empty"),
        (r'root ::= "\q"', r"there is no escape '\\q'"),
        (r'root ::= "\ud800"', r"\ud800 is no character"),
        (r"root ::= [\U00110000]", r"\U00110000 is no character"),
        (r'root ::= "\x4"', r"there is no escape '\\x'"),
        ("root ::= !<[7]>", "line 1: '!<[7]>' is not GBNF"),
    ],
)
def test_what_is_no_grammar_is_refused_with_a_reason(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidGrammar) as raised:
        gbnf_grammar(grammar)
    assert str(raised.value) == reason
    assert raised.value.param == "grammar"
