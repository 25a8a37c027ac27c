"""What a participation policy is, and policies by name.

A policy decides who is invited to a round and whose replies are used, around any method. It sees what a server would
see: replies, when they arrive, and what they carry; never the speeds in advance. Each policy is one file in
:mod:`perfed.participation.policies`, or a file of the user's (``policy = "module:NAME"``).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel

from perfed import rng
from perfed.errors import PerfedError
from perfed.participation.clock import Population, Rows, Seconds
from perfed.plugins import Registry, bare_name
from perfed.settings import STRICT

RESERVED = ("policy", "rate", "last_round", "fit_unused")
"""Keys of ``[participation]`` that are settings of all policies, and therefore no policy's name."""


@dataclass(frozen=True)
class Arrivals:
    """Replies in the order in which they arrive.

    Attributes:
        rows: rows of the population, ``(replies,)``.
        seconds: seconds since the start of the round, ``(replies,)``, in ascending order.
        num_samples: numbers of training samples, ``(replies,)``.
    """

    rows: Rows
    seconds: Seconds
    num_samples: Rows


Ask = Callable[[Rows], Arrivals]
"""Invites clients by row and returns their replies."""


class PolicySettings(BaseModel):
    """Base of the settings of a policy, the table ``[participation.NAME]``; without any of its own."""

    model_config = STRICT


@dataclass(frozen=True)
class PolicyContext:
    """The run that a policy belongs to.

    Attributes:
        who: the clients.
        seed: seed of the run.
        rounds: number of rounds of the whole run.
        count: number of clients that a round uses, from ``participation.rate``.
        everyone_last: whether every client is invited to the last round (``participation.last_round``).
    """

    who: Population
    seed: int
    rounds: int
    count: int
    everyone_last: bool


Settings = TypeVar("Settings", bound=BaseModel)


class Policy(Generic[Settings]):
    """Base of all policies: every invited client's reply is used.

    Args:
        settings: the policy's table.
        context: the run.

    Attributes:
        count: replies that a round uses, from the rate.
        state: what the policy remembers between rounds, as plain data; checkpoints contain it.
        strict: whether a round needs a reply from every invited client; otherwise it goes on without those that fail.
        limit: seconds after which replies no longer count.
        everyone_in_last_round: whether ``participation.last_round = "all"`` applies to the policy.
        chooses_by_time: whether the choice depends on when replies arrive, so that clients should differ in speed.
        fits_unused: whether clients that were never used fit their personal parameters by default
            (``participation.fit_unused``).

    Raises:
        PerfedError: settings that do not fit the clients of the run.

    Example:
        >>> from perfed.participation import PolicySettings
        >>> class TopSettings(PolicySettings):
        ...     samples: int = 10
        >>> @register_policy("large-clients", settings=TopSettings)
        ... class LargeClients(Policy[TopSettings]):
        ...     \"\"\"Only clients with many training samples are invited.\"\"\"
        ...
        ...     def select(self, round_, ask):
        ...         (rows,) = (self.who.num_samples >= self.settings.samples).nonzero()
        ...         return take_first(ask(rows))
    """

    strict: bool = True
    limit: float = math.inf
    everyone_in_last_round: bool = True
    chooses_by_time: bool = False
    fits_unused: bool = False

    def __init__(self, settings: Settings, context: PolicyContext) -> None:
        self.settings = settings
        self.who = context.who
        self.seed = context.seed
        self.rounds = context.rounds
        self.count = context.count
        self.context = context
        self.state: dict[str, Any] = {}

    def select(self, round_: int, ask: Ask) -> tuple[Rows, float]:
        """Invite clients and choose among their replies.

        Args:
            round_: number of the round, from 1.
            ask: invites clients by row and returns their replies; to be called once.

        Returns:
            Rows of the clients whose replies are used, and the seconds until the server has them.
        """
        return take_first(ask(self.draw_invited(round_)))

    def observe(self, train_loss: float, gradient: float | None, num_samples: int) -> None:
        """Take note of a finished round.

        Args:
            train_loss: mean training loss of the clients used.
            gradient: squared norm of the gradient of their mean loss at the new model; ``None`` unless
                :meth:`measures_gradient`.
            num_samples: number of training samples of the clients used.
        """

    @classmethod
    def measures_gradient(cls, settings: Settings) -> bool:
        """Return whether the policy needs the gradient at the shared model after each round, at an extra exchange."""
        return False

    @classmethod
    def check_real_time(cls, settings: Settings, fastest: float) -> None:
        """Check settings of real sites, where an exchange takes at least ``fastest`` seconds.

        Raises:
            PerfedError: settings that only a simulation can have.
        """

    def check_method(self, moves_shared: bool) -> None:
        """Check that the policy can go around the run's method.

        Args:
            moves_shared: whether the method trains one shared model.

        Raises:
            PerfedError: it cannot.
        """
        if self.measures_gradient(self.settings) and not moves_shared:
            raise PerfedError(
                "participation.policy: it measures the gradient at the shared model, and this method moves none"
            )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a run with the remembered ``state`` can be continued.

        Raises:
            PerfedError: the policy now depends on something else than when the run began.
        """

    def invites_everyone(self, round_: int) -> bool:
        """Return whether all clients are invited to the round, as the last one."""
        return round_ == self.rounds and self.context.everyone_last and self.everyone_in_last_round

    def draw_invited(self, round_: int, count: int | None = None, *words: int) -> Rows:
        """Draw the clients that are invited, uniformly without replacement.

        Args:
            round_: number of the round.
            count: number of clients; default: by the rate. In the last round all, where the policy invites everyone.
            words: equal words draw the same clients; default: the round.

        Returns:
            Rows in ascending order.
        """
        count = self.count if count is None else count
        if self.invites_everyone(round_) or count >= len(self.who):
            return np.arange(len(self.who))
        keys = rng.key(self.seed, "participation", *(words or (round_,)), self.who.words)
        return np.sort(rng.draw_subset(keys, count).numpy())


def take_first(arrivals: Arrivals, count: int | None = None) -> tuple[Rows, float]:
    """Return the first ``count`` replies (default: all) and the seconds until the last of them arrives."""
    count = len(arrivals.rows) if count is None else min(count, len(arrivals.rows))
    return arrivals.rows[:count], float(arrivals.seconds[:count].max(initial=0.0))


def take_without(arrivals: Arrivals, dropped: Rows) -> tuple[Rows, float]:
    """Return the replies except those of the rows ``dropped``, and the seconds until the last of them arrives.

    If no reply is left, the seconds are those until the last of all replies would have arrived.
    """
    remain = ~np.isin(arrivals.rows, dropped)
    seconds = arrivals.seconds[remain] if remain.any() else arrivals.seconds
    return arrivals.rows[remain], float(seconds.max(initial=0.0))


@dataclass(frozen=True)
class PolicyEntry:
    """A registered policy: its class, that of its settings, and how readers see it.

    ``example`` are assignments of the command that ``perfed show`` suggests; ``module`` is where it was registered.
    """

    name: str
    policy: type[Policy[Any]]
    settings: type[BaseModel]
    summary: str
    title: str
    example: str
    module: str


POLICIES: Registry[PolicyEntry] = Registry("policy", lambda entry: entry.module)
"""The policies that :func:`register_policy` has registered, by name."""

_Class = TypeVar("_Class", bound=type[Policy[Any]])


def register_policy(
    name: str,
    *,
    settings: type[BaseModel] = PolicySettings,
    summary: str = "",
    title: str = "",
    example: str = "",
) -> Callable[[_Class], _Class]:
    """Class decorator: register a participation policy as ``name``.

    Args:
        name: name in ``participation.policy``, and of the policy's table ``[participation.NAME]``.
        settings: pydantic class of this table.
        summary: one line for ``perfed list policies``; default: the first line of the class's docstring.
        title: the name as its paper prints it, for readers; default: the name.
        example: assignments that the command which ``perfed show`` suggests needs besides the policy.

    Raises:
        PerfedError: the name is a setting of all policies, contains ``+``, ``:`` or ``.``, or is registered by another
            module.
    """

    def add(cls: _Class) -> _Class:
        if name in RESERVED or not name or set(name) & set("+:."):
            raise PerfedError(
                f"policy '{name}': a name has no '+', ':' or '.', and is not one of the settings {', '.join(RESERVED)}"
            )
        POLICIES.check_free(name, cls.__module__)
        text = summary or (inspect.getdoc(cls) or name).splitlines()[0]
        POLICIES[name] = PolicyEntry(name, cls, settings, text, title or name, example, cls.__module__)
        return cls

    return add


def policy_names() -> list[str]:
    """Return the names of all registered policies, sorted.

    Example:
        >>> {"uniform", "srpfl", "dropout"} <= set(policy_names())
        True
    """
    return sorted(POLICIES)


def policy_entry(name: str) -> PolicyEntry:
    """Return the registered policy ``name``, which may be ``module:NAME``; see :func:`policy_id`."""
    return POLICIES[bare_name(policy_id(name))]


def policy_id(name: str) -> str:
    """Return ``name`` as files have it: in the case in which it was registered, after its module if it has one.

    ``module:NAME`` imports the module, which registers the policy.

    Raises:
        PerfedError: there is no such policy, or its module cannot be imported.

    Example:
        >>> policy_id("SRPFL")
        'srpfl'
    """
    return POLICIES.qualify_name(name, "participation.policy", "policy")


def qualified_name(name: str) -> str:
    """Return a registered policy's name, after its module if that is not perfed's and can be imported elsewhere."""
    module = POLICIES[name].module
    return name if module == "__main__" or module.startswith("perfed.") else f"{module}:{name}"
