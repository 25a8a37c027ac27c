"""The methods that ``--methods`` names: which are meant, and what to write where none or half of them are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfed.errors import PerfedError
from perfed.experiment.estimators import is_baseline
from perfed.experiment.planned import parse_names, suggested
from perfed.method.registry import method_id


def chosen_methods(text: str, table: Mapping[str, Any], *, baselines: bool = False) -> list[str]:
    """The methods of ``--methods``, as files have them.

    Raises:
        PerfedError: none, an unknown one or one that is there twice; without any it names some for the experiment
            ``table``.
    """
    if text.strip(" ,"):
        return parse_names(text, baselines=baselines)
    some = ",".join(suggested(table))
    raise PerfedError(f"--methods: at least one is needed, such as --methods {some}; 'perfed list methods' names all")


def check_one_word(text: str, others: Sequence[str | None]) -> None:
    """Refuse a list of methods that a shell has divided at its spaces.

    Args:
        text: what ``--methods`` has got.
        others: the words that stand for themselves: the experiment and settings.

    Raises:
        PerfedError: ``others`` has the rest of the list; says how to write it.
    """
    loose = [word for word in others if word and "=" not in word]
    if text.rstrip().endswith(",") or any(word.startswith(",") for word in loose):
        rest = [name for word in loose for name in word.split(",") if _is_method(name)]
        whole = ",".join([*(name.strip() for name in text.split(",") if name.strip()), *rest])
        if rest:
            raise PerfedError(f"--methods {text} {' '.join(rest)}: a list has no spaces; write --methods {whole}")


def _is_method(name: str) -> bool:
    try:
        return bool(name) and (is_baseline(name) or bool(method_id(name)))
    except PerfedError:
        return False
