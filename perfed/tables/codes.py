"""Detection of categories and classes that sites write in different ways, from the texts that sites send."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal
from unicodedata import combining, normalize

from perfed.data.names import toml_value
from perfed.errors import shorten_list

_SHORT = 3  # largest number of letters of an abbreviation
_MOST = 50  # largest number of texts of a column whose pairs are compared
_LISTED = 6  # largest number of texts that a message lists
_WORDS = (
    "f female w weiblich woman women frau femme féminin femenino mujer girl",
    "m male männlich maennlich man men mann homme masculin masculino hombre boy",
    "yes y true t 1 ja j oui si sí positive positiv pos + present",
    "no n false f 0 nein non negative negativ neg - absent",
    "unknown unk u unbekannt inconnu",
)

Match = Literal["spelling", "synonym", "abbreviation"]


def describe_codes(name: str, texts: Mapping[str, Sequence[str]], sources: Mapping[str, str]) -> Iterator[str]:
    """Yield messages about texts of a column that seem to mean the same but differ between sites.

    Args:
        name: the name of the column.
        texts: the texts of each site.
        sources: the name of each site in messages.
    """
    holders: dict[str, set[str]] = {}
    for site, site_texts in texts.items():
        for text in site_texts:
            holders.setdefault(text, set()).add(site)
    replacements = _find_replacements(holders) if len(holders) <= _MOST else {}
    by_sites: dict[tuple[str, ...], list[str]] = {}
    for text in replacements:
        by_sites.setdefault(tuple(sorted(holders[text])), []).append(text)
    for sites, synonyms in by_sites.items():
        targets = [replacements[text] for text in synonyms]
        other_sites = sorted(set().union(*(holders[text] for text in targets)) - set(sites)) or list(sites)
        site_list, other_list = (shorten_list([sources[site] for site in group], 3) for group in (sites, other_sites))
        here, elsewhere = f"{_quote_texts(synonyms)} at {site_list}", f"{_quote_texts(targets)} at {other_list}"
        setting = _format_setting(name, dict(zip(synonyms, targets, strict=True)))
        yield (
            f"column '{name}': {here} and {elsewhere} seem to mean the same; write them in one way, or put {setting} "
            "into the study"
        )
    yield from _describe_foreign(name, texts, holders, set(replacements), sources)


def _describe_foreign(
    name: str,
    texts: Mapping[str, Sequence[str]],
    holders: Mapping[str, set[str]],
    explained: set[str],
    sources: Mapping[str, str],
) -> Iterator[str]:
    """Yield a line for each site whose texts occur at no other site although the other sites have texts in common."""
    site_texts = {site: set(members) for site, members in texts.items() if members}
    for site, members in site_texts.items():
        other_sites = [other_site for other_site in site_texts if other_site != site]
        other_texts = set().union(*(site_texts[other_site] for other_site in other_sites))
        common = [text for text in other_texts if len(holders[text]) == len(other_sites)]
        is_foreign = not members & other_texts and not (members | other_texts) & explained
        if len(other_sites) > 1 and common and is_foreign and len(members) <= _MOST and len(members) > 1:
            example = _format_setting(name, {min(members): "…"})
            yield (
                f"column '{name}' at {sources[site]} holds {_quote_texts(sorted(members))}, none of which the other "
                f"{len(other_sites)} sites have ({_quote_texts(sorted(common))}); if they mean the same, say which in "
                f"values, such as {example}, or recode the column at {sources[site]}"
            )


def _find_replacements(holders: Mapping[str, set[str]]) -> dict[str, str]:
    """Return the replacement of each text that seems to mean the same as one at more sites."""
    order = sorted(holders, key=lambda text: (-len(holders[text]), text))
    pairs: dict[str, dict[str, Match]] = {text: {} for text in order}
    for position, text in enumerate(order):
        for candidate in order[:position]:
            match = match_texts(text, candidate)
            if match == "spelling" or (match is not None and not holders[text] & holders[candidate]):
                pairs[text][candidate] = match
    replacements: dict[str, str] = {}
    for text in order:
        for reason in ("spelling", "synonym", "abbreviation"):
            candidates = [candidate for candidate, match in pairs[text].items() if match == reason]
            targets = [candidate for candidate in candidates if candidate not in replacements]
            if len(targets) == 1:
                rivals = [rival for rival, target in replacements.items() if target == targets[0]]
                rivals = [rival for rival in rivals if holders[rival] & holders[text]]
                if not rivals or reason == "spelling":
                    replacements[text] = targets[0]
                break
    return replacements


def match_texts(first: str, second: str) -> Match | None:
    """Return the reason why two different texts probably mean the same, or ``None`` if there is no sign of it.

    Example:
        >>> match_texts("Yes", "yes "), match_texts("female", "w"), match_texts("sev", "Severe"), match_texts("A", "B")
        ('spelling', 'synonym', 'abbreviation', None)
    """
    first, second = _simplify_text(first), _simplify_text(second)
    if first == second:
        return "spelling"
    if any({first, second} <= words for words in _SYNONYMS):
        return "synonym"
    short, long = sorted((first, second), key=len)
    is_abbreviation = short.isalpha() and len(short) <= _SHORT and long.isalpha() and long.startswith(short)
    return "abbreviation" if is_abbreviation else None


def _simplify_text(text: str) -> str:
    """Return a text in lower case without accents, with one space for separators between words."""
    if text.strip().isdecimal():
        return str(int(text))
    letters = "".join(letter for letter in normalize("NFKD", text.casefold()) if not combining(letter))
    return re.sub(r"(?<=\w)[\s_.-]+(?=\w|$)", " ", letters.strip()).strip()


_SYNONYMS = tuple(frozenset(map(_simplify_text, words.split())) for words in _WORDS)


def _quote_texts(texts: Sequence[str]) -> str:
    return shorten_list([f"'{text}'" for text in texts], _LISTED)


def _format_setting(name: str, replacements: Mapping[str, str]) -> str:
    """Return the TOML setting that replaces texts of a column."""
    return f"values = {toml_value({name: replacements})}"
