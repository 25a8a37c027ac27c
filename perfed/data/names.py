"""Checks and quoting of the names that users choose, such as those of columns, classes, sites and studies."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from perfed.errors import PerfedError, shorten_list

LONGEST_NAME = 1000
"""Largest number of characters in the name of a column, class, category or domain."""

_LINE_BREAKS_AND_TABS = "\t\n\r"
_INVALID_IN_XML = "\ufffe\uffff"
_REORDERING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # they change the order of displayed text
_MARKDOWN = re.compile(r"[\\`*\[\]~$]|(?<![^\W_])_|_(?![^\W_])")  # an underscore between letters is not markup
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;"}


def compose_text(text: str) -> str:
    """Return a text with composed accents (Unicode's form NFC), the form in which names and values are compared.

    Example:
        >>> compose_text("Ko\\u0308ln") == "K\\u00f6ln"
        True
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def find_name(name: str, names: Collection[str]) -> str | None:
    """Return the one of ``names`` that equals ``name`` up to the composition of accents, or ``None``.

    Example:
        >>> find_name("K\\u00f6ln", ["Bonn", "Ko\\u0308ln"]) == "Ko\\u0308ln"
        True
    """
    if name in names:
        return name
    composed = compose_text(name)
    return next((candidate for candidate in names if compose_text(candidate) == composed), None)


def find_client(name: str, ids: Collection[str]) -> str:
    """Return the id of the client with this name, whatever the composition of its accents.

    Raises:
        PerfedError: an unknown client.
    """
    client = find_name(name, ids)
    if client is None:
        raise PerfedError(f"unknown client '{name}'; ids are: {shorten_list([*ids])}")
    return client


def find_originals(texts: Iterable[str]) -> dict[str, str]:
    """Return the original spelling of each text that is not in composed form, by its composed form."""
    pairs = ((compose_text(text), text) for text in texts)
    return {composed: text for composed, text in pairs if composed != text}


def find_control_character(name: str) -> str | None:
    r"""Return the code point of the first forbidden control character, or ``None``.

    All control characters are forbidden except line breaks and tabs, which headers of spreadsheets contain. Characters
    that reorder bidirectional text and code points that XML cannot represent are forbidden, too.

    Example:
        >>> find_control_character("age\x00"), find_control_character("Age\n(years)")
        ('U+0000', None)
    """
    if name.isprintable():
        return None
    for character in name:
        is_control = unicodedata.category(character) in ("Cc", "Cs") or character in _REORDERING + _INVALID_IN_XML
        if is_control and character not in _LINE_BREAKS_AND_TABS:
            return f"U+{ord(character):04X}"
    return None


def describe_control_character(role: str, name: str) -> str | None:
    r"""Return an error message if a name holds a forbidden control character, otherwise ``None``.

    Args:
        role: the kind of thing that has the name, for the message.
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
"""The rule for control characters, as messages state it."""


def refuse_control_characters(role: str, names: Iterable[str]) -> None:
    """Raise an error if a name holds a forbidden control character.

    Args:
        role: the kind of thing that has the names, for the message.
        names: the names.

    Raises:
        PerfedError: a name holds one; the message contains the name and the character.
    """
    for name in names:
        if (problem := describe_control_character(role, name)) is not None:
            raise PerfedError(problem)


def check_name(name: str) -> str:
    """Return ``name`` unchanged, as validators of message fields must.

    Raises:
        PerfedError: the name holds a forbidden control character.
    """
    refuse_control_characters("the name", [name])
    return name


def quote_name(text: str) -> str:
    r"""Return a text in double quotes on one line, with escapes that TOML and Python share for unprintable characters.

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
    short_escape = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}.get(character)
    code = ord(character)
    return short_escape or (f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")


def quote_unless_plain(name: str) -> str:
    r"""Return a name unchanged if it is unambiguous in a list on one line, otherwise in quotes.

    Example:
        >>> print(quote_unless_plain("age"), quote_unless_plain("Age\n(years)"), quote_unless_plain("a, b"))
        age "Age\n(years)" "a, b"
    """
    is_plain = name.isprintable() and name == name.strip() and not set(name) & set(',;:"\\')
    return name if is_plain and name else quote_name(name)


def toml_value(value: Any) -> str:
    r"""Return a text, a number, a list or a table of these as a TOML value on one line.

    Example:
        >>> print(toml_value({"sex": {"female": "F", "not known": 'a "U"'}}))
        { sex = { female = "F", "not known" = "a \"U\"" } }
    """
    if isinstance(value, str):
        return quote_name(value)
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_toml_key(name)} = {toml_value(inner)}' for name, inner in value.items())} }}"
    return f"[{', '.join(map(toml_value, value))}]" if isinstance(value, list) else str(value)


def _toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else quote_name(name)


def markdown_text(text: str) -> str:
    r"""Return Markdown that shows a text literally and on one line, also inside a cell of a table.

    Example:
        >>> print(markdown_text("a*b\n<img src=x>"))
        a\*b &lt;img src=x&gt;
    """
    line = _MARKDOWN.sub(r"\\\g<0>", _join_lines(text))
    return re.sub("[&<>|]", lambda match: _ENTITIES[match[0]], line)


def markdown_code(text: str) -> str:
    r"""Return a text as a code span of Markdown, enclosed in as many backticks as it needs.

    Example:
        >>> print(markdown_code("lr"), markdown_code("a`b"))
        `lr` ``a`b``
    """
    line = _join_lines(text)
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", line)), default=0))
    space = " " if line.startswith("`") or line.endswith("`") or not line.strip() else ""
    return f"{fence}{space}{line}{space}{fence}"


def _join_lines(text: str) -> str:
    """Return ``text`` with spaces in place of line breaks and with escapes for other unprintable characters."""
    return "".join(map(_escape_unprintable, " ".join(text.split())))


def _escape_unprintable(character: str) -> str:
    return character if character.isprintable() else _escape_character(character)
