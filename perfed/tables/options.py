"""The options with which the tables of sites become a federation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from perfed.data.column import Kind
from perfed.data.groups import GroupSplit
from perfed.data.labels import Task
from perfed.data.names import compose_text
from perfed.errors import PerfedError
from perfed.tables.conversions import Conversions, read_values
from perfed.tables.missing import split_code
from perfed.tables.problems import quote_names
from perfed.tables.public import read_public

Mode = Literal["own", "common", "union", "named"]
Scales = Literal["auto", "site", "all"]


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
            such as NA, None and ? (:data:`perfed.tables.missing.MISSING_TEXTS`). With an empty list, or with "" in
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
        names_of_roles = (self.target, self.event, self.domain, self.group, *self.drop)
        roles = [name for name in names_of_roles if name is not None]
        twice = [name for name in dict.fromkeys(roles) if roles.count(name) > 1]
        if twice:
            raise PerfedError(f"column {quote_names(twice)} has two roles among target, event, domain, group and drop")
        names = [name for option in _KINDS for name in self._columns_of(option)]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise PerfedError(
                f"column {quote_names(twice)} is in two of numbers, dates and categories; it has one kind"
            )
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
        for name, values in self.public.items():
            levels = values.span is None
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
        """The kinds that the options set, by name of the column."""
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
        """The names of columns, by option, that a site may lack but that at least one site must have."""
        coded = [name for name, _ in map(split_code, self.codes) if name is not None]
        names = {**{name: self._columns_of(name) for name in _LISTS}, "missing": coded, "values": tuple(self.values)}
        return names | ({"public": tuple(self.public)} if self.public else {})
