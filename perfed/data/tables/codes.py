"""Categories and classes that sites write in different ways, from the texts that sites send."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal
from unicodedata import combining, normalize

from perfed.errors import shorten_list

_SHORT = 3  # letters that an abbreviation has at most
_MOST = 50  # texts of a column of which pairs are looked at
_LISTED = 6  # texts that a message lists
_WORDS = (
    "f female w weiblich woman women frau femme féminin femenino mujer girl",
    "m male männlich maennlich man men mann homme masculin masculino hombre boy",
    "yes y true t 1 ja j oui si sí positive positiv pos + present",
    "no n false f 0 nein non negative negativ neg - absent",
    "unknown unk u unbekannt inconnu",
)
_SYNONYMS = tuple(frozenset(words.split()) for words in _WORDS)

Match = Literal["spelling", "synonym", "abbreviation"]


def describe_codes(name: str, texts: Mapping[str, Sequence[str]], sources: Mapping[str, str]) -> Iterator[str]:
    """Yield what to say of texts of a column that seem to mean the same and differ between sites.

    Args:
        name: of the column.
        texts: that each site has in it.
        sources: what messages call the sites.
    """
    holders: dict[str, set[str]] = {}
    for site, of_site in texts.items():
        for text in of_site:
            holders.setdefault(text, set()).add(site)
    replacements = _find_replacements(holders) if len(holders) <= _MOST else {}
    by_sites: dict[tuple[str, ...], list[str]] = {}
    for text in replacements:
        by_sites.setdefault(tuple(sorted(holders[text])), []).append(text)
    for where, replaced in by_sites.items():
        meant = [replacements[text] for text in replaced]
        others = sorted(set().union(*(holders[text] for text in meant)) - set(where)) or list(where)
        there, elsewhere = (_list_sites(group, sources) for group in (where, others))
        same = f"{_quote_texts(replaced)} at {there} and {_quote_texts(meant)} at {elsewhere} seem to mean the same"
        setting = _format_setting(name, dict(zip(replaced, meant, strict=True)))
        yield f"column '{name}': {same}; write them in one way, or put {setting} into the study"
    yield from _describe_foreign(name, texts, holders, set(replacements), sources)


def _describe_foreign(
    name: str,
    texts: Mapping[str, Sequence[str]],
    holders: Mapping[str, set[str]],
    explained: set[str],
    sources: Mapping[str, str],
) -> Iterator[str]:
    """Yield a line for each site that shares no text with others, which have theirs in common."""
    site_texts = {site: set(of_site) for site, of_site in texts.items() if of_site}
    for site, of_site in site_texts.items():
        others = [other for other in site_texts if other != site]
        other_texts = set().union(*(site_texts[other] for other in others))
        common = [text for text in other_texts if len(holders[text]) == len(others)]
        alone = not of_site & other_texts and not (of_site | other_texts) & explained
        if len(others) > 1 and common and alone and len(of_site) <= _MOST and len(of_site) > 1:
            example = _format_setting(name, {min(of_site): "…"})
            yield (
                f"column '{name}' at {sources[site]} holds {_quote_texts(sorted(of_site))}, none of which the other "
                f"{len(others)} sites have ({_quote_texts(sorted(common))}); if they mean the same, say which in "
                f"values, such as {example}, or recode the column at {sources[site]}"
            )


def _find_replacements(holders: Mapping[str, set[str]]) -> dict[str, str]:
    """Return texts and those that mean the same at more sites."""
    order = sorted(holders, key=lambda text: (-len(holders[text]), text))
    pairs: dict[str, dict[str, Match]] = {text: {} for text in order}
    for at, text in enumerate(order):
        for other in order[:at]:
            match = match_texts(text, other)
            if match == "spelling" or (match is not None and not holders[text] & holders[other]):
                pairs[text][other] = match
    replacements: dict[str, str] = {}
    for text in order:
        for kind in ("spelling", "synonym", "abbreviation"):
            meant = [other for other, match in pairs[text].items() if match == kind and other not in replacements]
            if len(meant) == 1:
                rivals = [t for t, old in replacements.items() if old == meant[0] and holders[t] & holders[text]]
                if not rivals or kind == "spelling":
                    replacements[text] = meant[0]
                break
    return replacements


def match_texts(one: str, other: str) -> Match | None:
    """Return why two different texts probably mean the same; ``None`` where nothing says so.

    Example:
        >>> match_texts("Yes", "yes "), match_texts("female", "w"), match_texts("sev", "Severe"), match_texts("A", "B")
        ('spelling', 'synonym', 'abbreviation', None)
    """
    one, other = _simplify_text(one), _simplify_text(other)
    if one == other:
        return "spelling"
    if any({one, other} <= words for words in _SIMPLE_SYNONYMS):
        return "synonym"
    short, long = sorted((one, other), key=len)
    abbreviates = short.isalpha() and len(short) <= _SHORT and long.isalpha() and long.startswith(short)
    return "abbreviation" if abbreviates else None


def _simplify_text(text: str) -> str:
    """Return a text in small letters, without accents and without spaces, hyphens and points between words."""
    if text.strip().isdecimal():
        return str(int(text))
    letters = "".join(letter for letter in normalize("NFKD", text.casefold()) if not combining(letter))
    return re.sub(r"(?<=\w)[\s_.-]+(?=\w|$)", " ", letters.strip()).strip()


_SIMPLE_SYNONYMS = tuple(frozenset(map(_simplify_text, words)) for words in _SYNONYMS)


def _quote_texts(texts: Sequence[str]) -> str:
    return shorten_list([f"'{text}'" for text in texts], _LISTED)


def _list_sites(sites: Sequence[str], sources: Mapping[str, str]) -> str:
    return shorten_list([sources[site] for site in sites], 3)


def _format_setting(name: str, replacements: Mapping[str, str]) -> str:
    """Return the setting that replaces texts of a column, as TOML."""
    pairs = ", ".join(f"{_format_toml(old)} = {_format_toml(new, value=True)}" for old, new in replacements.items())
    return f"values = {{ {_format_toml(name)} = {{ {pairs} }} }}"


def _format_toml(text: str, *, value: bool = False) -> str:
    """Return a key of TOML, or a text as its ``value``."""
    if not value and re.fullmatch(r"[A-Za-z0-9_-]+", text):
        return text
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in text)
    return f'"{escaped}"'
