"""The base class of participation policies, and the registry of policies.

A policy decides which clients are invited to a round and which replies are used, for any method. It sees only what a
server would see: the replies, their content and when they arrive, but not the speeds in advance. Each policy is a file
in :mod:`perfed.participation.policies`, or a file of the user (``policy = "module:NAME"``).
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
"""Keys of ``[participation]`` that are settings of all policies, and therefore not names of policies."""


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
    """Base class of the settings of a policy, which are the table ``[participation.NAME]``; it has no settings."""

    model_config = STRICT


@dataclass(frozen=True)
class PolicyContext:
    """The facts about a run that its policy needs.

    Attributes:
        who: the clients.
        seed: the seed of the run.
        rounds: the number of rounds of the run.
        count: the number of clients that a round uses, from ``participation.rate``.
        everyone_last: whether every client is invited to the last round (``participation.last_round``).
    """

    who: Population
    seed: int
    rounds: int
    count: int
    everyone_last: bool


Settings = TypeVar("Settings", bound=BaseModel)


class Policy(Generic[Settings]):
    """Base class of all policies, which uses the reply of every invited client.

    Args:
        settings: the policy's table.
        context: the run.

    Attributes:
        count: the number of replies that a round uses, from the rate.
        state: plain data that the policy keeps between rounds; checkpoints contain it.
        strict: whether a round needs a reply from every invited client; otherwise it continues without missing ones.
        limit: the seconds after which replies are not used any more.
        everyone_in_last_round: whether ``participation.last_round = "all"`` applies to the policy.
        chooses_by_time: whether the choice depends on when replies arrive, so that clients should differ in speed.
        fits_unused: whether clients that were never used fit their personal parameters by default
            (``participation.fit_unused``).

    Raises:
        PerfedError: the settings do not fit the clients of the run.

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
            ask: invites clients by row and returns their replies; it must be called once.

        Returns:
            The rows of the clients whose replies are used, and the seconds until the server has received them.
        """
        return take_first(ask(self.draw_invited(round_)))

    def observe(self, train_loss: float, gradient: float | None, num_samples: int) -> None:
        """Receive the results of a finished round.

        Args:
            train_loss: the mean training loss of the clients used.
            gradient: the squared norm of the gradient of their mean loss at the new model; ``None`` unless
                :meth:`measures_gradient` returns true.
            num_samples: the number of training samples of the clients used.
        """

    @classmethod
    def measures_gradient(cls, settings: Settings) -> bool:
        """Return whether the policy needs the gradient at the shared model after each round, in an extra exchange."""
        return False

    @classmethod
    def check_real_time(cls, settings: Settings, fastest: float) -> None:
        """Check the settings for real sites, where an exchange takes at least ``fastest`` seconds.

        Raises:
            PerfedError: the settings are possible only in a simulation.
        """

    def check_method(self, moves_shared: bool) -> None:
        """Check that the policy can be used with the method of the run.

        Args:
            moves_shared: whether the method trains one shared model.

        Raises:
            PerfedError: the policy cannot be used.
        """
        if self.measures_gradient(self.settings) and not moves_shared:
            raise PerfedError(
                "participation.policy: it measures the gradient at the shared model, and this method moves none"
            )

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a run with the saved ``state`` can be resumed.

        Raises:
            PerfedError: data on which the policy depends have changed since the run was started.
        """

    def invites_everyone(self, round_: int) -> bool:
        """Return whether all clients are invited to the round because it is the last one."""
        return round_ == self.rounds and self.context.everyone_last and self.everyone_in_last_round

    def draw_invited(self, round_: int, count: int | None = None, *words: int) -> Rows:
        """Draw the clients that are invited, uniformly without replacement.

        Args:
            round_: the number of the round.
            count: the number of clients; by default, it follows from the rate. If the policy invites everyone to the
                last round, all clients are drawn there.
            words: words of the random key; equal words draw the same clients. By default, the number of the round.

        Returns:
            The rows of the clients in ascending order.
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

    If no reply remains, the seconds are those until the last of all replies would have arrived.
    """
    remain = ~np.isin(arrivals.rows, dropped)
    seconds = arrivals.seconds[remain] if remain.any() else arrivals.seconds
    return arrivals.rows[remain], float(seconds.max(initial=0.0))


@dataclass(frozen=True)
class PolicyEntry:
    """A registered policy.

    Attributes:
        name: the name in settings.
        policy: the class of the policy.
        settings: the class of its settings.
        summary, title: the description and the name for readers.
        example: assignments in the command that ``perfed show`` suggests.
        module: the module that registered the policy.
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
    """Return a class decorator that registers a participation policy as ``name``.

    Args:
        name: the name in ``participation.policy``, and of the policy's table ``[participation.NAME]``.
        settings: the pydantic class of this table.
        summary: one line for ``perfed list policies``; default: the first line of the class's docstring.
        title: the name as its paper prints it, for readers; default: the name.
        example: further assignments that the command suggested by ``perfed show`` needs.

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
    """Return the canonical name of a policy, as it was registered, with its module in front if ``name`` has one.

    ``module:NAME`` imports the module, which registers the policy.

    Raises:
        PerfedError: there is no such policy, or its module cannot be imported.

    Example:
        >>> policy_id("SRPFL")
        'srpfl'
    """
    return POLICIES.qualify_name(name, "participation.policy", "policy")


def qualified_name(name: str) -> str:
    """Return a policy's name, with its module in front if it is the user's and other processes can import it."""
    module = POLICIES[name].module
    return name if module == "__main__" or module.startswith("perfed.") else f"{module}:{name}"
