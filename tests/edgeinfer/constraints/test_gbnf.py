"""Grammars of llama.cpp: what they let through, byte by byte."""

import pytest
from byte_masks import byte_vocabulary, lets_through

from edgeinfer.common.errors import InvalidConstraint
from edgeinfer.constraints.library import grammar_of, open_matcher
from edgeinfer.constraints.options import wanted_of

pytestmark = pytest.mark.usefixtures("grammar")

JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

ws ::= | " " | "\n" [ \t]{0,20}
"""
CHESS = r"""root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move   ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
LIST = r"""root ::= item+

# without line ends of any kind
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""


@pytest.mark.parametrize(
    "source, texts, others",
    [
        (JSON, ['{"a": [1, true, null, "x\\n\\u00e9"], "b": {}}', "{}"], ["[1]", '{"a" 1}', '{"a": 01}']),
        (CHESS, ["1. e4 e5\n2. Nf3 O-O\n"], ["e4\n", "1. e4 e5\n"]),
        (LIST, ["- one\n- two\n", "- é漢\n"], ["one\n", "- a\u2028b\n"]),
        ("root ::= jp+\njp ::= [ぁ-ゟ] | [一-鿿]", ["日本", "ひ日"], ["a", "ア"]),
        (r'root ::= "\u0041" [\u0042-\u0044] "\x45\U0001F600" "/" [/.] "\t"', ["ADE😀//\t"], ["AEE😀//\t"]),
        (r'root ::= "a\"b\\u" [\]\[a]', ['a"b\\u]', 'a"b\\u['], ["a"]),
        ('root ::= fooBar-baz | "x"\nfooBar-baz ::= "a" "b" | fooBar-baz "c"', ["ab", "abcc", "x"], ["a", "xc"]),
        ('root ::= . "b"{2} "c"{0,2}', ["xbb", "ébbcc"], ["xb", "xbbccc"]),
        ('root ::= "a" ("b" | ) "c"', ["abc", "ac"], ["abb"]),
    ],
    ids=["json", "chess", "list", "ranges", "codes", "escapes", "names", "repetition", "empty"],
)
def test_a_converted_grammar_lets_the_same_through(source, texts, others):
    wanted = wanted_of({"grammar": source})
    assert wanted.form == "gbnf"
    matcher = open_matcher(byte_vocabulary(), grammar_of(wanted.form, wanted.source))
    assert matcher.get_error() == ""
    assert [text for text in texts if not lets_through(matcher.deep_copy(), text)] == []
    assert [text for text in others if lets_through(matcher.deep_copy(), text)] == []


@pytest.mark.parametrize(
    "source", ["root ::= (", "root ::= [a", 'x ::= "a"', 'root ::= "\\q"', 'root ::= "\\Uffffffff"']
)
def test_what_is_no_gbnf_is_refused(source):
    with pytest.raises(InvalidConstraint):
        grammar_of("gbnf", source)


def test_lark_is_not_taken_for_gbnf():
    assert wanted_of({"grammar": 'start: "a ::= b"'}).form == "lark"
    assert wanted_of({"grammar": '%llguidance {}\nstart: "x"'}).form == "lark"
