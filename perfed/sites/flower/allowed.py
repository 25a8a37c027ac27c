"""A site's allow-list: the exchanges of its study, and what goes in and out in each; nothing else is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from perfed.codec import flatten
from perfed.engine.executor import Exchange
from perfed.engine.secure_aggregation import ALWAYS
from perfed.errors import shorten_list
from perfed.maths.sums import Term
from perfed.sites.flower.checks import (
    TensorSpec,
    TreeSpec,
    find_header_problem,
    find_tree_problem,
    make_spec,
    shorten_repr,
)
from perfed.sites.flower.wire import LOSS, MASKED, MEASURED, REPLY, exchange_from_header, get_sequence_number
from perfed.tree import Tree


@dataclass(frozen=True)
class ExchangeKind:
    """What an exchange asks of a site, whatever the round.

    Attributes:
        preparation: whether it is before the first round.
        index: number of the exchange within the round; -1: on a copy of the model.
        program: of the method, of an extension or of the engine.
        measure: split on which the site's model is scored afterwards, or ``None``.
        extensions: see :class:`perfed.engine.executor.Exchange`.
    """

    preparation: bool
    index: int
    program: str
    measure: str | None
    extensions: str

    @classmethod
    def of(cls, exchange: Exchange) -> Self:
        """That of an exchange of some round."""
        return cls(exchange.round == 0, exchange.index, exchange.program, exchange.measure, exchange.extensions)


class TreeForm(NamedTuple):
    """What a tree is like.

    Attributes:
        spec: its entries; an axis that was not always the same has no size.
        bytes: of its largest.
    """

    spec: TreeSpec
    bytes: int

    @classmethod
    def of(cls, tree: Tree, *, finite: bool) -> Self:
        """The form of one tree."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in flatten(tree).values())
        return cls({name: entry._replace(finite=finite) for name, entry in make_spec(tree).items()}, size)

    def wrong(self, tree: Tree) -> str | None:
        """What is wrong with a tree, in one line."""
        return find_tree_problem(tree, self.spec, self.bytes)

    def joined(self, other: TreeForm) -> TreeForm | None:
        """The form of both, where they differ in the length of axes alone."""
        if self.spec.keys() != other.spec.keys():
            return None
        spec: dict[str, TensorSpec] = {}
        for name, entry in self.spec.items():
            shape, found = other.spec[name].shape, other.spec[name]
            if len(shape) != len(entry.shape) or found.dtype != entry.dtype:
                return None
            both = tuple(a if a == b else None for a, b in zip(entry.shape, shape, strict=True))
            spec[name] = entry._replace(shape=both)
        return TreeForm(spec, max(self.bytes, other.bytes))


def add_form(forms: tuple[TreeForm, ...], new: TreeForm) -> tuple[TreeForm, ...]:
    """``forms`` and a further one, which may widen one of them."""
    for place, form in enumerate(forms):
        if (both := form.joined(new)) is not None:
            return (*forms[:place], both, *forms[place + 1 :])
    return (*forms, new)


@dataclass(frozen=True)
class ExchangeForms:
    """What goes in and out in an exchange.

    Attributes:
        payloads, replies: forms of which a tree must have one.
        terms: whose sums over sites the server needs of the replies, where it sees sums alone.
    """

    payloads: tuple[TreeForm, ...]
    replies: tuple[TreeForm, ...]
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class AllowList:
    """All that a site answers of a run; made by :func:`perfed.sites.flower.dry_run.derive_allow_list`.

    Attributes:
        rounds: of the study.
        clients: how many sites the study has.
        domains: how many there are.
        metrics: names of what is measured beside what the task always has.
        held: whether the study measures predictions among the classes that a site holds.
        measured: names of all metrics that a site may tell.
        exchanges: by what they ask.
        asked: the fewest sites that a round asks.
        discreet: whether losses and metrics stay at the site, and an exchange is done with one payload alone.
        noisy: program and split whose metrics leave all the same, with noise; empty: none do.
    """

    rounds: int
    clients: int
    domains: int
    metrics: tuple[str, ...]
    held: bool
    measured: tuple[str, ...]
    exchanges: Mapping[ExchangeKind, ExchangeForms]
    asked: int = 1
    discreet: bool = False
    noisy: tuple[str, str] | tuple[()] = ()

    def tells(self, exchange: Exchange) -> bool:
        """Whether metrics leave with noise after an exchange."""
        return not exchange.lasting and (exchange.program, exchange.measure) == self.noisy

    def terms(self, exchange: Exchange) -> tuple[Term, ...]:
        """Whose sums over sites the server needs of the replies of an exchange, where it sees sums alone."""
        found = self.exchanges.get(ExchangeKind.of(exchange))
        return () if found is None else found.terms

    @property
    def summed(self) -> list[str]:
        """The products of entries whose sums the server gets, as it names them."""
        terms = (term for answered in self.exchanges.values() for term in answered.terms)
        return list(dict.fromkeys(" x ".join(term) for term in terms))

    @property
    def programs(self) -> list[str]:
        """Names of what the server may let run."""
        return list(dict.fromkeys(asked.program for asked in self.exchanges))

    @property
    def sent(self) -> list[tuple[str, TensorSpec]]:
        """What the replies hold, by the names that the site's log has; what is empty is left out."""
        found = [(name, entry) for answered in self.exchanges.values() for name, entry in self._sent(answered)]
        return list(dict.fromkeys((name, entry) for name, entry in found if 0 not in entry.shape))

    def _sent(self, answered: ExchangeForms) -> Iterator[tuple[str, TensorSpec]]:
        for form in answered.replies:
            if not self.masked:
                yield from ((name, entry) for name, entry in form.spec.items() if not (self.discreet and name == LOSS))
            elif answered.terms:
                yield MASKED, TensorSpec((None,), torch.int64)
            elif not self.discreet:
                yield LOSS, form.spec[LOSS]

    @property
    def masked(self) -> bool:
        """Whether replies leave under masks."""
        return any(answered.terms for answered in self.exchanges.values())

    @property
    def entries(self) -> list[str]:
        """Names of what the programs reply, or of what goes into sums of replies, but for the loss of training."""
        if self.masked:
            terms = (term for answered in self.exchanges.values() for term in answered.terms if term not in ALWAYS)
            paths = dict.fromkeys(path for term in terms for path in term)
            return [path for path in paths if path not in {f"{MEASURED}/{name}" for name in self.measured}]
        return list(dict.fromkeys(name.removeprefix(REPLY) for name, _ in self.sent if name.startswith(REPLY)))

    @property
    def bytes(self) -> int:
        """Of all tensors of the largest reply."""
        return max((form.bytes for answered in self.exchanges.values() for form in answered.replies), default=0)

    def find_request_problem(self, header: Mapping[str, Any], tree: Tree, run: str) -> str | None:
        """Why a message of the server is not answered, in one line.

        Args:
            header, tree: of the message.
            run: id of the run that the site is in.
        """
        problem = find_header_problem(header, {"kind": "work", "run": run}) or self._wrong_header(header)
        problem = problem or _wrong_form(tree, self.exchanges[_asked(header)].payloads)
        return problem and f"the server's message: {problem}"

    def find_reply_problem(self, header: Mapping[str, Any], tree: Tree) -> str | None:
        """Why a reply to the message with ``header`` does not leave, in one line."""
        problem = _wrong_form(tree, self.exchanges[_asked(header)].replies)
        return problem and f"the reply: {problem}"

    def _wrong_header(self, header: Mapping[str, Any]) -> str | None:
        for name, (fits, needed) in _FIELDS.items():
            if name not in header:
                return f"{name} is missing from the header"
            if not fits(header[name]):
                return f"{name} is {shorten_repr(header[name])}; {needed} is needed"
        if strange := sorted(header.keys() - _FIELDS.keys()):
            return f"has {shorten_list([shorten_repr(name) for name in strange], 3)}, which nobody needs"
        exchange = exchange_from_header(header)
        if exchange.round > self.rounds:
            return f"round is {shorten_repr(exchange.round)}; the study has {self.rounds}"
        if not exchange.lasting and exchange.round == 0:
            return "round is 0; models are measured from round 1 on"
        if ExchangeKind.of(exchange) not in self.exchanges:
            return f"{self._strange(exchange)}, which the study does not ask for"
        return self._wrong_numbers(header, exchange)

    def _wrong_numbers(self, header: Mapping[str, Any], exchange: Exchange) -> str | None:
        metrics, held = header["scoring"]["metrics"], header["scoring"]["held"]
        for name, fits, needed in (
            ("sequence", header["sequence"] == get_sequence_number(exchange), get_sequence_number(exchange)),
            ("base", header["base"] < header["sequence"], f"a number below {header['sequence']}"),
            ("clients", header["clients"] == self.clients, self.clients),
            ("domains", header["domains"] == self.domains, self.domains),
            ("trained", _ascending(header["trained"], self.domains), f"domains below {self.domains}, each once"),
            ("scoring", tuple(metrics) == self.metrics and (self.held or not held), list(self.metrics)),
        ):
            if not fits:
                return f"{name} is {shorten_repr(header[name])}; {needed} is needed"
        return None

    def _strange(self, exchange: Exchange) -> str:
        """What of an exchange is not of the study."""
        programs = {asked.program for asked in self.exchanges}
        if exchange.program not in programs:
            return f"program is {shorten_repr(exchange.program)}"
        splits = {asked.measure for asked in self.exchanges}
        if exchange.measure not in splits:
            return f"measure is {shorten_repr(exchange.measure)}"
        return f"program is {shorten_repr(exchange.program)} as exchange {exchange.index} of round {exchange.round}"


def _asked(header: Mapping[str, Any]) -> ExchangeKind:
    index, program, measure, extensions = (header[name] for name in ("index", "program", "measure", "extensions"))
    return ExchangeKind(header["round"] == 0, index, program, measure, extensions)


def _wrong_form(tree: Tree, forms: tuple[TreeForm, ...]) -> str | None:
    problems = [form.wrong(tree) for form in forms]
    return None if None in problems else problems[-1]


def _ascending(numbers: list[int], below: int) -> bool:
    return all(0 <= number < below for number in numbers) and sorted(set(numbers)) == numbers


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_scoring(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"metrics", "held"} or not isinstance(value["metrics"], list):
        return False
    return type(value["held"]) is bool and all(isinstance(name, str) for name in value["metrics"])


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("sequence", "base", "round", "clients", "domains"), (_is_count, "a whole number, not negative,")),
    "index": (lambda value: type(value) is int and value >= -1, "a whole number from -1 on"),
    **dict.fromkeys(("keep", "trained"), (_are_counts, "a list of whole numbers")),
    **dict.fromkeys(("kind", "run", "program", "extensions"), (lambda value: isinstance(value, str), "a text")),
    "measure": (lambda value: value is None or isinstance(value, str), "a text or null"),
    "scoring": (_is_scoring, "names of metrics, and whether classes are held,"),
}
"""Of a message of work (:func:`perfed.sites.flower.wire.pack_task`): what each must be, in words too."""
