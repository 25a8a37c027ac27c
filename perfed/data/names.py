r"""Names that others choose, of columns, classes, sites or studies: what they may hold, and how files quote them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from perfed.errors import PerfedError

_LINE_BREAKS_AND_TABS = "\t\n\r"
_NOT_IN_XML = "\ufffe\uffff"
_REORDERING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they show text in another order than it has
_MARKDOWN = re.compile(r"[\\`*\[\]~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore between letters is no markup
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}


def find_control_character(name: str) -> str | None:
    r"""Return the code point of the first control character that no name may hold, or ``None``.

    Line breaks and tabs are allowed, since spreadsheets have them in headers. Besides the other control characters,
    those that reorder bidirectional text, and code points that files or drawings cannot hold, are not allowed.

    Example:
        >>> find_control_character("age\x00"), find_control_character("Age\n(years)")
        ('U+0000', None)
    """
    if name.isprintable():
        return None
    for character in name:
        control = unicodedata.category(character) in ("Cc", "Cs") or character in _REORDERING + _NOT_IN_XML
        if control and character not in _LINE_BREAKS_AND_TABS:
            return f"U+{ord(character):04X}"
    return None


def describe_control_character(role: str, name: str) -> str | None:
    r"""Return what is wrong with a name that holds a control character, or ``None``.

    Args:
        role: what it names, for the message.
        name: the name.

    Example:
        >>> print(describe_control_character("column", "age\x00"))
        column "age\u0000" holds the control character U+0000; of these, names may hold line breaks and tabs only
    """
    character = find_control_character(name)
    if character is None:
        return None
    return f"{role} {quote_name(name)} holds the control character {character}; {ALLOWED}"


ALLOWED = "of these, names may hold line breaks and tabs only"
"""What a message says of control characters."""


def refuse_control_characters(role: str, names: Iterable[str]) -> None:
    """Refuse names that hold control characters.

    Args:
        role: what they name, for the message.
        names: the names.

    Raises:
        PerfedError: one does; names it and the character.
    """
    for name in names:
        if (problem := describe_control_character(role, name)) is not None:
            raise PerfedError(problem)


def check_name(name: str) -> str:
    """Return a name as it is, for fields of messages.

    Raises:
        PerfedError: it holds a control character.
    """
    refuse_control_characters("the name", [name])
    return name


def quote_name(text: str) -> str:
    r"""Return a text in double quotes on one line, as TOML and Python write it: only printable characters are left.

    Example:
        >>> print(quote_name('Age\n(years), "all"'))
        "Age\n(years), \"all\""
    """
    return '"' + "".join(map(_escape_character, text)) + '"'


def _escape_character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    short = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}.get(character)
    code = ord(character)
    return short or (f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")


def quote_unless_plain(name: str) -> str:
    r"""Return a name as it is where it can stand in a list on one line, otherwise in quotes.

    Example:
        >>> print(quote_unless_plain("age"), quote_unless_plain("Age\n(years)"), quote_unless_plain("a, b"))
        age "Age\n(years)" "a, b"
    """
    plain = name.isprintable() and name == name.strip() and not set(name) & set(',;:"\\')
    return name if plain and name else quote_name(name)


def markdown_text(text: str) -> str:
    r"""Return a text as Markdown that shows it on one line: nothing in it is markup, HTML or the end of a table's cell.

    Example:
        >>> print(markdown_text("a*b\n<img src=x>"))
        a\*b &lt;img src=x&gt;
    """
    line = _MARKDOWN.sub(r"\\\g<0>", _on_one_line(text))
    return re.sub("[&<>|]", lambda match: _ENTITIES[match[0]], line)


def markdown_code(text: str) -> str:
    r"""Return a text as a code span of Markdown, in as many backticks as it needs.

    Example:
        >>> print(markdown_code("lr"), markdown_code("a`b"))
        `lr` ``a`b``
    """
    line = _on_one_line(text)
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", line)), default=0))
    space = " " if line.startswith("`") or line.endswith("`") or not line.strip() else ""
    return f"{fence}{space}{line}{space}{fence}"


def _on_one_line(text: str) -> str:
    """``text`` with spaces for line breaks, and other characters that cannot be printed written out."""
    return "".join(map(_escape_unprintable, " ".join(text.split())))


def _escape_unprintable(character: str) -> str:
    return character if character.isprintable() else _escape_character(character)
