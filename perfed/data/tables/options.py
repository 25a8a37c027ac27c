"""How sites' tables become a federation: the options, and which columns enter: own ones, or one schema for all."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from perfed.data.groups import GroupSplit
from perfed.data.labels import Task
from perfed.data.names import compose_text
from perfed.data.tables.conversions import Conversions, read_values
from perfed.data.tables.kinds import MISSING_CATEGORY, Column, Kind
from perfed.data.tables.missing import split_code
from perfed.data.tables.problems import listed, pandas
from perfed.data.tables.public import read_public
from perfed.errors import PerfedError, shorten_list

Mode = Literal["own", "common", "union", "named"]
Scales = Literal["auto", "site", "all"]

_RARE = 0.02  # share of a site's training rows below which a category is rare
_TWICE = 2  # and a category that occurs less often is so in any case


def learn_column(column: Column, values: NDArray[Any]) -> Column:
    """Return the column with its number of missing values, its categories and whether it is constant.

    Args:
        column: the column as :func:`perfed.data.tables.kinds.guess` returns it.
        values: its values in the training rows, as :func:`perfed.data.tables.kinds.read` returns them.
    """
    is_missing = np.asarray(pandas().isna(values), bool)
    missing = int(is_missing.sum())
    present = values[~is_missing]
    constant = missing == len(values) or (missing == 0 and bool((present == present[0]).all()))
    if column.kind != "category":
        return replace(column, missing=missing, constant=constant, masked=missing > 0)
    counts = Counter(present.tolist())
    counts[MISSING_CATEGORY] += missing
    counts = +counts  # without categories that no row holds
    least = min(max(_TWICE, _RARE * len(values)), max(counts.values(), default=0))
    levels = tuple(sorted(category for category, count in counts.items() if count >= least))
    return replace(
        column, missing=missing, constant=constant, masked=missing > 0, categories=tuple(sorted(counts)), levels=levels
    )


def agreed_kinds(
    columns: Mapping[str, Sequence[Column]], sources: Mapping[str, str]
) -> tuple[dict[str, list[Column]], list[str]]:
    """Columns of one name with one kind at all sites, where kinds do not contradict each other; and where they do.

    A column that is empty at one site has the kind of the others; yes and no are booleans where others have 0 and 1
    alone, numbers where they have more, and categories where they have these. Single letters are categories where
    they may mean something else: F here, and N and Y there.
    """
    kinds: dict[str, dict[Kind, list[str]]] = {}
    counts: set[str] = set()
    letters: dict[str, list[tuple[str, ...]]] = {}
    for site, held in columns.items():
        for column in held:
            if column.kind not in ("empty", "marked number"):  # the latter is refused where it is
                kinds.setdefault(column.name, {}).setdefault(column.kind, []).append(sources[site])
            if column.kind == "number" and not column.binary:
                counts.add(column.name)
            if column.kind == "boolean" and column.letters:
                letters.setdefault(column.name, []).append(column.letters)
    one: dict[str, Kind] = {}
    problems = []
    for name, found in kinds.items():
        others: list[Kind] = [kind for kind in found if kind != "boolean"]
        if len(others) > 1 or (len(found) > 1 and others[0] == "date"):
            rarest = sorted(found.items(), key=lambda pair: len(pair[1]))[:2]
            where = " and ".join(f"a {kind} in {shorten_list(sites, 3)}" for kind, sites in rarest)
            ways = "give it one kind (a name in numbers, categories or dates), replace its texts (values), or drop it"
            problems.append(f"column '{name}' is {where}; {ways}")
        elif found.keys() == {"boolean"} and _is_ambiguous(letters.get(name, [])):
            one[name] = "category"
        elif "boolean" in found and others in ([], ["number"]) and name not in counts:
            one[name] = "boolean"
        else:
            one[name] = others[0]
    changed = {
        site: [column.with_kind(one.get(column.name, column.kind)) for column in held] for site, held in columns.items()
    }
    return changed, problems


def _is_ambiguous(letters: Sequence[tuple[str, ...]]) -> bool:
    """Return whether sites use letters of both pairs, y and n, and t and f, and some site only one letter of a pair."""
    pairs = {frozenset("yn") if set(letters_of_site) <= set("yn") else frozenset("tf") for letters_of_site in letters}
    return len(pairs) > 1 and any(len(letters_of_site) == 1 for letters_of_site in letters)


def shared_columns(
    columns: Mapping[str, Sequence[Column]], mode: Mode, scales: Mapping[str, tuple[float, float] | None] | None = None
) -> dict[str, list[Column]]:
    """The columns that enter at each site, those that it lacks among them: but with "own" one schema.

    A column enters that varies at a site that has it, or between sites, which ``scales`` over all of them say; and a
    category if somebody tells a level; "common": if every site has it; "named": if two have. Its levels are those of
    any site, and it is masked if it is missing anywhere, or with "union" absent. With "own" each site's that are not
    constant.

    Args:
        columns: per site.
        mode: which enter.
        scales: by name, of those that are scaled by one mean and deviation.
    """
    known = scales or {}
    if mode == "own":
        return {site: [c for c in held if not c.constant] for site, held in columns.items()}
    by_name: dict[str, dict[str, Column]] = {}
    for site, held in columns.items():
        for column in held:
            by_name.setdefault(column.name, {})[site] = column
    entering: dict[str, list[Column]] = {site: [] for site in columns}
    for name, found in by_name.items():
        everywhere = len(found) == len(columns)
        few = (mode == "common" and not everywhere) or (mode == "named" and len(found) < _TWICE)
        between = known.get(name) is not None or (mode == "named" and len({c.levels for c in found.values()}) > 1)
        if few or (all(c.constant for c in found.values()) and not between):
            continue
        kind = next(iter(found.values())).kind
        masked = (mode == "union" and not everywhere) or any(c.masked for c in found.values())
        levels = {level for c in found.values() for level in c.levels} | ({MISSING_CATEGORY} if masked else set())
        if kind == "category" and not levels:  # nobody tells one: each is in too few rows
            continue
        one: dict[str, Any] = {"masked": masked, "levels": tuple(sorted(levels)) if kind == "category" else ()}
        one["scale"] = known.get(name)
        lacking = Column(name, kind, absent=True, silent=mode == "named")
        for site, held in entering.items():
            held.append(replace(found.get(site, lacking), **one))
    return entering


def words(
    task: Task,
    domains: bool,
    columns: tuple[Sequence[str], Sequence[str], Sequence[str]] | None,
    named: Sequence[str] = (),
    scaled: Sequence[str] = (),
    most: int = sys.maxsize,
) -> list[str]:
    """Return a line for each kind of metadata that sites tell each other.

    Args:
        task: of the targets.
        domains: whether samples have domains.
        columns: where sites have one schema, their booleans, and their categories that do not enter and that do.
        named: columns that the study names and that a site may lack.
        scaled: columns of which sites tell what a common scale is made of.
        most: the largest number of names in a line.
    """
    of_task: dict[Task, list[str]] = {
        "classification": ["the names of the classes"],
        "regression": ["the number of their training rows, the sum of the target and of its squares"],
        "survival": [],
    }
    lines = [*of_task[task], *(["the names of the domains"] if domains else [])]
    lines += [f"which of these columns they have: {shorten_list(named, most)}"] if named else []
    if columns is None:
        return lines
    lines.append("names and kinds of their columns, and which are constant, 0 and 1 alone or have missing values")
    sums = "how many training rows hold a value, the sum of these and of their squares"
    lines += [f"{sums}: {shorten_list(scaled, most)}"] if scaled else []
    categories = "the categories, without the rare ones, of"
    told = ("how booleans are written", f"{categories} columns that do not enter", categories)
    return lines + [f"{what}: {shorten_list(names, most)}" for what, names in zip(told, columns, strict=True) if names]


def _compose_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(compose_text(name) for name in ((names,) if isinstance(names, str) else names))


_KINDS: dict[str, Kind] = {"numbers": "number", "dates": "date", "categories": "category"}
_LISTS = ("drop", *_KINDS, "thousands", "decimals", "swapped")


@dataclass(frozen=True)
class TableOptions:
    """How sites' tables become a federation.

    Attributes:
        target: the column to predict; of survival the time, above 0.
        event: of survival the column that says whether the event was seen at that time (1, yes, true), or nothing is
            known beyond it (0, no, false); without it, the task is another.
        domain: column that says the domain of a row; it is no input (``domain_input`` of a data set makes it one).
        drop: columns that do not enter: ids, free text; here and below a text is one name.
        numbers, dates, categories: columns of this kind, whatever they look like. With "crp=mg/l" the unit or mark is
            removed from the cells of the column first; a column may have several such entries.
        thousands: columns of numbers whose thousands are separated, as in 1,250 or 1.250.
        decimals: columns of numbers with decimal commas.
        swapped: columns of dates in which a spreadsheet took the day for the month where possible. At a site whose
            recognised dates all have a day up to 12 and whose texts all have a later one, the recognised dates are
            swapped back.
        values: replacements of texts, by column, wherever the column is read, so that sites share codes:
            ``{"sex": {"female": "F"}}``.
        group: column whose rows of one value (a patient) are never on both sides of a split, not even at two sites.
        group_draw: the number of the random division of the groups; another one may be more even.
        missing: values that mean missing in all columns ("-9") or in one ("age=999"), besides empty cells and texts
            such as NA, None and ? (:data:`perfed.data.tables.missing.MISSING_TEXTS`). With an empty list, or with "" in
            it, these texts are values in all columns; with "ward=", in that column.
        task: "classification" or "regression"; by default what the targets look like.
        test_fraction: share of each site's rows that is tested on, by class.
        folds: k > 0: instead, one of k folds by class. Which, says ``seed``: seeds 0, ..., k - 1 test every row once,
            the next k do so with other folds.
        columns: "own": each site its own; "common": those that all have; "union": all, absent ones filled and masked;
            "named": each site its own, of which those that another has too, by name, come first and mean the same.
        scales: "site": each site scales numbers and dates by its own mean and deviation; "all": by those over all
            sites, of columns that several have; "auto": "all" with "named", else "site".
        preprocess: a scikit-learn transformer in place of ours, as ``module:NAME`` or itself.
        seed: of the split.
        public: by name what all may know of a column beforehand: texts of a category (classes of the target, domains),
            or the smallest and largest value of numbers and dates, which become -1 and 1. Where it is given, each
            column that enters is in it, and no site tells anything of its rows before it trains.
    """

    target: str
    event: str | None = None
    domain: str | None = None
    drop: Sequence[str] = ()
    numbers: Sequence[str] = ()
    dates: Sequence[str] = ()
    categories: Sequence[str] = ()
    missing: Sequence[str] | None = None
    thousands: Sequence[str] = ()
    decimals: Sequence[str] = ()
    swapped: Sequence[str] = ()
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    group: str | None = None
    group_draw: int = 0
    task: Task | None = None
    test_fraction: float = 0.2
    folds: int = 0
    columns: Mode = "own"
    scales: Scales = "auto"
    preprocess: Any = None
    seed: int = 0
    public: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("target", "event", "domain", "group"):
            column = getattr(self, name)
            object.__setattr__(self, name, compose_text(column) if isinstance(column, str) else column)
        for name in _LISTS:
            object.__setattr__(self, name, _compose_names(getattr(self, name)))
        if self.missing is not None:
            object.__setattr__(self, "missing", _compose_names(self.missing) or ("",))
        object.__setattr__(self, "public", read_public(self.public, self.dates))
        replacements = {compose_text(name): texts for name, texts in read_values(self.values).items()}
        object.__setattr__(self, "values", replacements)
        allowed = {
            "test_fraction": ("from 0 to below 1", 0 <= self.test_fraction < 1),
            "folds": ("0, or at least 2", self.folds == 0 or self.folds >= 2),
            "group_draw": ("whole numbers from 0 on", self.group_draw >= 0),
            "columns": (", ".join(get_args(Mode)), self.columns in get_args(Mode)),
            "scales": (", ".join(get_args(Scales)), self.scales in get_args(Scales)),
            "task": ("classification, regression", self.task in (None, "classification", "regression")),
        }
        for name, (choices, good) in allowed.items():
            if not good:
                raise PerfedError(f"{name} = {getattr(self, name)!r} is not allowed; allowed: {choices}")
        if self.preprocess is not None and (self.columns == "named" or self.one_scale):
            raise PerfedError(
                "preprocess makes inputs without names of columns; allowed with it: columns = own, common or union, "
                "and no scales"
            )
        if self.event is not None and self.task is not None:
            raise PerfedError(f"event = '{self.event}' makes it survival, but task = '{self.task}'; leave one out")
        given = (self.target, self.event, self.domain, self.group, *self.drop)
        roles = [name for name in given if name is not None]
        twice = [name for name in dict.fromkeys(roles) if roles.count(name) > 1]
        if twice:
            raise PerfedError(f"column {listed(twice)} has two roles among target, event, domain, group and drop")
        names = [name for option in _KINDS for name in self._columns_of(option)]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise PerfedError(f"column {listed(twice)} is in two of numbers, dates and categories; it has one kind")
        self._check_public()

    def _check_public(self) -> None:
        """Refuse settings that contradict what is public, and let the target say the task."""
        if not self.public:
            return
        if self.preprocess is not None or self.scales == "site":
            key = "scales = 'site'" if self.preprocess is None else "preprocess"
            raise PerfedError(f"{key} is of a site's rows, and public says what columns are scaled by; leave one out")
        roles = {"domain": self.domain, **({"target": self.target} if self.event is None else {})}
        for role, name in roles.items():
            if name is not None and name not in self.public:
                raise PerfedError(f"public says nothing of column '{name}', the {role}, which sites would then tell")
        for name, known in self.public.items():
            levels = known.span is None
            if self.kinds[name] in (("number", "date") if levels else ("category",)):
                says = "texts" if levels else "a range"
                raise PerfedError(f"public.{name} says {says}, and the column is said to be a {self.kinds[name]}")
        if self.event is None:
            task = "regression" if self.public[self.target].span else "classification"
            if self.task not in (None, task):
                raise PerfedError(f"task = '{self.task}', but public.{self.target} is of {task}; leave one out")
            object.__setattr__(self, "task", task)

    @property
    def group_split(self) -> GroupSplit:
        """The division of the groups, which is the same at all sites."""
        return GroupSplit(self.folds, self.test_fraction, self.seed, self.group_draw)

    @property
    def codes(self) -> tuple[str, ...]:
        """The values of ``missing``; () if only the usual texts mean missing, ("",) if no text does."""
        return tuple(self.missing or ())

    @property
    def one_scale(self) -> bool:
        """Whether columns that several sites have are scaled by one mean and deviation."""
        all_sites = self.scales == "all" or (self.scales == "auto" and (self.columns == "named" or bool(self.public)))
        return self.columns != "own" and all_sites

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of columns that are said, by name."""
        public: dict[str, Kind] = {name: "number" if k.span else "category" for name, k in self.public.items()}
        return public | {name: kind for option, kind in _KINDS.items() for name in self._columns_of(option)}

    @property
    def conversions(self) -> Conversions:
        """The conversions of cells before anything else reads them."""
        return Conversions.from_settings(self.values, self.numbers, self.thousands, self.decimals)

    def _columns_of(self, option: str) -> list[str]:
        """Return the columns that an option names, each once."""
        names = getattr(self, option)
        if option == "numbers":
            names = [unit if name is None else name for name, unit in map(split_code, names)]
        return list(dict.fromkeys(names))

    @property
    def named(self) -> dict[str, Sequence[str]]:
        """By option, names of columns that a site may lack, and some site must have."""
        coded = [name for name, _ in map(split_code, self.codes) if name is not None]
        found = {**{name: self._columns_of(name) for name in _LISTS}, "missing": coded, "values": tuple(self.values)}
        return found | ({"public": tuple(self.public)} if self.public else {})
