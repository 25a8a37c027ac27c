"""The allow-list of a site: the exchanges of its study and the trees in each; the site answers no other request."""

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
    """The kind of an exchange, which is the same in all rounds.

    Attributes:
        preparation: Whether the exchange is before the first round.
        index: The number of the exchange within the round; -1 for an exchange on a copy of the model.
        program: The program of the method, of an extension or of the engine.
        measure: The split on which the site's model is scored afterwards, or ``None``.
        extensions: The extensions that take part; see :class:`perfed.engine.executor.Exchange`.
    """

    preparation: bool
    index: int
    program: str
    measure: str | None
    extensions: str

    @classmethod
    def from_exchange(cls, exchange: Exchange) -> Self:
        """Return the kind of an exchange of some round."""
        return cls(exchange.round == 0, exchange.index, exchange.program, exchange.measure, exchange.extensions)


class TreeForm(NamedTuple):
    """The form of the trees that an exchange sends or receives.

    Attributes:
        spec: The entries; an axis whose size differs between trees has no size.
        bytes: The total size of the tensors in bytes, in the largest tree.
    """

    spec: TreeSpec
    bytes: int

    @classmethod
    def from_tree(cls, tree: Tree, *, finite: bool) -> Self:
        """Return the form of one tree; ``finite`` says whether all values must be finite."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in flatten(tree).values())
        return cls({name: entry._replace(finite=finite) for name, entry in make_spec(tree).items()}, size)

    def find_problem(self, tree: Tree) -> str | None:
        """Return in one line why a tree does not have this form; ``None`` if it has."""
        return find_tree_problem(tree, self.spec, self.bytes)

    def merge(self, new: TreeForm) -> TreeForm | None:
        """Return a form that covers both; ``None`` if they differ in more than the lengths of axes."""
        if self.spec.keys() != new.spec.keys():
            return None
        spec: dict[str, TensorSpec] = {}
        for name, entry in self.spec.items():
            new_entry = new.spec[name]
            if len(new_entry.shape) != len(entry.shape) or new_entry.dtype != entry.dtype:
                return None
            shape = tuple(a if a == b else None for a, b in zip(entry.shape, new_entry.shape, strict=True))
            spec[name] = entry._replace(shape=shape)
        return TreeForm(spec, max(self.bytes, new.bytes))


def add_form(forms: tuple[TreeForm, ...], new: TreeForm) -> tuple[TreeForm, ...]:
    """Return ``forms`` with a new form, which is merged into an existing form if possible."""
    for position, form in enumerate(forms):
        if (merged := form.merge(new)) is not None:
            return (*forms[:position], merged, *forms[position + 1 :])
    return (*forms, new)


@dataclass(frozen=True)
class ExchangeForms:
    """The forms of the trees that a site may receive and send in an exchange.

    Attributes:
        payloads, replies: The possible forms of payloads and replies; a tree must have one of them.
        terms: The products of entries whose sums over sites the server receives under secure aggregation.
    """

    payloads: tuple[TreeForm, ...]
    replies: tuple[TreeForm, ...]
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class AllowList:
    """The list of all requests that a site answers in a run.

    The function :func:`perfed.sites.flower.dry_run.derive_allow_list` derives it from a study.

    Attributes:
        rounds: The number of rounds of the study.
        clients: The number of sites of the study.
        domains: The number of domains.
        metrics: The names of the metrics in addition to those of the task.
        scores_held_classes: Whether predictions may be scored among the classes that a site has.
        reported_metrics: The names of all metrics that a site may send.
        exchanges: The forms of the trees in each kind of exchange.
        min_sites: The smallest number of sites that are asked in a round.
        discreet: Whether losses and metrics stay at the site, and an exchange accepts a single payload.
        noisy: The program and the split whose metrics leave with noise although the study is discreet; may be empty.
    """

    rounds: int
    clients: int
    domains: int
    metrics: tuple[str, ...]
    scores_held_classes: bool
    reported_metrics: tuple[str, ...]
    exchanges: Mapping[ExchangeKind, ExchangeForms]
    min_sites: int = 1
    discreet: bool = False
    noisy: tuple[str, str] | tuple[()] = ()

    def releases_metrics(self, exchange: Exchange) -> bool:
        """Return whether metrics with noise leave the site after an exchange."""
        return not exchange.changes_states and (exchange.program, exchange.measure) == self.noisy

    def get_sum_terms(self, exchange: Exchange) -> tuple[Term, ...]:
        """Return the products of entries whose sums over sites the server receives in an exchange under masks.

        The tuple is empty if nothing is summed, or if replies are not masked.
        """
        forms = self.exchanges.get(ExchangeKind.from_exchange(exchange))
        return () if forms is None else forms.terms

    @property
    def sum_names(self) -> list[str]:
        """The names of the products of entries whose sums the server receives."""
        terms = (term for forms in self.exchanges.values() for term in forms.terms)
        return list(dict.fromkeys(" x ".join(term) for term in terms))

    @property
    def programs(self) -> list[str]:
        """The names of the programs that the server may run."""
        return list(dict.fromkeys(kind.program for kind in self.exchanges))

    @property
    def reply_entries(self) -> list[tuple[str, TensorSpec]]:
        """The names and properties of the tensors in replies, as in the site's log, without empty tensors."""
        entries = [entry for forms in self.exchanges.values() for entry in self._list_reply_entries(forms)]
        return list(dict.fromkeys((name, entry) for name, entry in entries if 0 not in entry.shape))

    def _list_reply_entries(self, forms: ExchangeForms) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the names and properties of the tensors that leave in replies of an exchange."""
        for form in forms.replies:
            if not self.uses_masks:
                yield from ((name, entry) for name, entry in form.spec.items() if not (self.discreet and name == LOSS))
            elif forms.terms:
                yield MASKED, TensorSpec((None,), torch.int64)
            elif not self.discreet:
                yield LOSS, form.spec[LOSS]

    @property
    def uses_masks(self) -> bool:
        """Whether replies are masked for secure sums."""
        return any(forms.terms for forms in self.exchanges.values())

    @property
    def entry_names(self) -> list[str]:
        """The names of the entries in replies, or of the entries that are summed, without the training loss."""
        if self.uses_masks:
            terms = (term for forms in self.exchanges.values() for term in forms.terms if term not in ALWAYS)
            paths = dict.fromkeys(path for term in terms for path in term)
            return [path for path in paths if path not in {f"{MEASURED}/{name}" for name in self.reported_metrics}]
        return list(dict.fromkeys(name.removeprefix(REPLY) for name, _ in self.reply_entries if name.startswith(REPLY)))

    @property
    def max_reply_bytes(self) -> int:
        """The total size of the tensors of the largest reply in bytes."""
        return max((form.bytes for forms in self.exchanges.values() for form in forms.replies), default=0)

    def find_request_problem(self, header: Mapping[str, Any], tree: Tree, run: str) -> str | None:
        """Return in one line why a task message of the server is refused; ``None`` if it is answered.

        Args:
            header, tree: The header and the tree of the message.
            run: The id of the run that the site takes part in.
        """
        problem = find_header_problem(header, {"kind": "work", "run": run}) or self._find_field_problem(header)
        problem = problem or _find_form_problem(tree, self.exchanges[_kind_from_header(header)].payloads)
        return problem and f"the server's message: {problem}"

    def find_reply_problem(self, header: Mapping[str, Any], tree: Tree) -> str | None:
        """Return in one line why a reply must not leave; ``None`` if it may.

        Args:
            header: The header of the message that is answered.
            tree: The tensors of the reply.
        """
        problem = _find_form_problem(tree, self.exchanges[_kind_from_header(header)].replies)
        return problem and f"the reply: {problem}"

    def _find_field_problem(self, header: Mapping[str, Any]) -> str | None:
        for name, (fits, needed) in _FIELDS.items():
            if name not in header:
                return f"{name} is missing from the header"
            if not fits(header[name]):
                return f"{name} is {shorten_repr(header[name])}; {needed} is needed"
        if strange := sorted(header.keys() - _FIELDS.keys()):
            return f"has {shorten_list([shorten_repr(name) for name in strange], 3)}, which is not expected"
        exchange = exchange_from_header(header)
        if exchange.round > self.rounds:
            return f"round is {shorten_repr(exchange.round)}; the study has {self.rounds}"
        if not exchange.changes_states and exchange.round == 0:
            return "round is 0; models are measured from round 1 on"
        if ExchangeKind.from_exchange(exchange) not in self.exchanges:
            return f"{self._describe_unknown_exchange(exchange)}, which the study does not ask for"
        return self._find_value_problem(header, exchange)

    def _find_value_problem(self, header: Mapping[str, Any], exchange: Exchange) -> str | None:
        metrics, held_classes = header["scoring"]["metrics"], header["scoring"]["held"]
        for name, fits, needed in (
            ("sequence", header["sequence"] == get_sequence_number(exchange), get_sequence_number(exchange)),
            ("base", header["base"] < header["sequence"], f"a number below {header['sequence']}"),
            ("clients", header["clients"] == self.clients, self.clients),
            ("domains", header["domains"] == self.domains, self.domains),
            ("trained", _is_ascending(header["trained"], self.domains), f"domains below {self.domains}, each once"),
            (
                "scoring",
                tuple(metrics) == self.metrics and (self.scores_held_classes or not held_classes),
                list(self.metrics),
            ),
        ):
            if not fits:
                return f"{name} is {shorten_repr(header[name])}; {needed} is needed"
        return None

    def _describe_unknown_exchange(self, exchange: Exchange) -> str:
        """Return the part of an exchange that does not belong to the study."""
        programs = {kind.program for kind in self.exchanges}
        if exchange.program not in programs:
            return f"program is {shorten_repr(exchange.program)}"
        splits = {kind.measure for kind in self.exchanges}
        if exchange.measure not in splits:
            return f"measure is {shorten_repr(exchange.measure)}"
        return f"program is {shorten_repr(exchange.program)} as exchange {exchange.index} of round {exchange.round}"


def _kind_from_header(header: Mapping[str, Any]) -> ExchangeKind:
    """Return the kind of the exchange of a task message."""
    index, program, measure, extensions = (header[name] for name in ("index", "program", "measure", "extensions"))
    return ExchangeKind(header["round"] == 0, index, program, measure, extensions)


def _find_form_problem(tree: Tree, forms: tuple[TreeForm, ...]) -> str | None:
    """Return why a tree has none of the forms; ``None`` if it has one."""
    problems = [form.find_problem(tree) for form in forms]
    return None if None in problems else problems[-1]


def _is_ascending(numbers: list[int], below: int) -> bool:
    return all(0 <= number < below for number in numbers) and sorted(set(numbers)) == numbers


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_scoring(value: Any) -> bool:
    """Return whether ``value`` has the form ``{"metrics": [names], "held": bool}`` of a message's scoring field."""
    if not isinstance(value, dict) or value.keys() != {"metrics", "held"} or not isinstance(value["metrics"], list):
        return False
    return type(value["held"]) is bool and all(isinstance(name, str) for name in value["metrics"])


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("sequence", "base", "round", "clients", "domains"), (_is_count, "a whole number, not negative,")),
    "index": (lambda value: type(value) is int and value >= -1, "a whole number from -1 on"),
    **dict.fromkeys(("keep", "trained"), (_are_counts, "a list of whole numbers")),
    **dict.fromkeys(("kind", "run", "program", "extensions"), (lambda value: isinstance(value, str), "a text")),
    "measure": (lambda value: value is None or isinstance(value, str), "a text or null"),
    "scoring": (_is_scoring, "a list of metrics, and whether they are among the classes of the site,"),
}
"""The fields in the header of a task message (:func:`perfed.sites.flower.wire.pack_task`), each with a check of its
value and a description of the allowed values."""
