"""The ``[participation]`` table, which decides which clients take part in a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo

import perfed.participation.policies  # noqa: F401 - registers the policies
from perfed.participation.policy import POLICIES, PolicyEntry, policy_entry, policy_id, qualified_name
from perfed.plugins import bare_name
from perfed.settings import STRICT


class Participation(BaseModel):
    """The ``[participation]`` table: ``max(1, floor(rate * N))`` clients a round, uniformly without replacement.

    Each policy has its settings in a table of its name (``[participation.srpfl]``), which is an attribute of this
    object where it is given or the policy is used.

    Attributes:
        policy: which replies are used; ``uniform``: all. ``module:NAME`` is a policy in a file of the user's.
        rate: share of the clients that is invited in each round (``overselection``: used).
        last_round: ``"all"``: every client is invited to the last round (FLIC's and FedPAC's protocol), except by the
            policies in stages and the cyclic one.
        fit_unused: a client that was never used is evaluated after fitting its personal parameters to the newest
            shared ones, and keeps those at the end (Tziotis et al. 2023, remark 4.8); not given: with ``srpfl`` only.

    Example:
        >>> Participation(rate=0.1).count(50)
        5
        >>> Participation(policy="deadline", deadline={"seconds": 2.5}).deadline.seconds
        2.5
    """

    model_config = ConfigDict(**{**STRICT, "extra": "allow"})

    policy: Annotated[str, AfterValidator(policy_id)] = "uniform"
    rate: float = Field(1.0, gt=0, le=1)
    last_round: Literal["all", "sampled"] = "all"
    fit_unused: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_tables(cls, value: Any) -> Any:
        return _with_tables(value, set(cls.model_fields)) if isinstance(value, Mapping) else value

    @property
    def entry(self) -> PolicyEntry:
        """The registry entry of the policy."""
        return policy_entry(self.policy)

    @property
    def policy_settings(self) -> BaseModel:
        """The settings of the policy in use."""
        tables = {bare_name(key): table for key, table in (self.__pydantic_extra__ or {}).items()}
        settings: BaseModel | None = tables.get(bare_name(self.policy))
        return self.entry.settings() if settings is None else settings

    @property
    def fits_unused(self) -> bool:
        """Whether clients that were never used fit their personal parameters."""
        return self.entry.policy.fits_unused if self.fit_unused is None else self.fit_unused

    def count(self, clients: int) -> int:
        """Return ``max(1, floor(rate * clients))``."""
        return max(1, int(self.rate * clients + 1e-9))

    def with_policy(self, policy: str) -> Self:
        """Return these settings with another policy."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **(self.__pydantic_extra__ or {}), "policy": policy})


def table_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a table of settings; ``[participation]`` also has one for each policy with settings."""
    fields = dict(model.model_fields)
    if issubclass(model, Participation):
        for name, entry in sorted(POLICIES.items()):
            if entry.settings.model_fields:
                fields[name] = FieldInfo(annotation=entry.settings, default_factory=entry.settings)
    return fields


def _with_tables(value: Mapping[str, Any], fixed: set[str]) -> dict[str, Any]:
    """Return the values of ``[participation]`` with each policy's table as an object of its class.

    A table under ``NAME`` and ``module:NAME`` is one. Tables with nothing but defaults are left out, except that of the
    policy in use.
    """
    result = {key: item for key, item in value.items() if key in fixed}
    policy = result.get("policy", "uniform")
    policy_name = policy_id(policy) if isinstance(policy, str) else ""
    tables: dict[str, Any] = {policy_name: {}} if policy_name else {}
    for key, table in value.items():
        if key not in fixed:
            name = _table_name(key, policy_name, table)
            before = tables.get(name, {})
            is_merged = isinstance(table, Mapping) and isinstance(before, Mapping)
            tables[name] = {**before, **table} if is_merged else table
    for name, table in tables.items():
        model = policy_entry(name).settings
        settings = TypeAdapter(dict[str, model]).validate_python({name: table})[name]  # type: ignore[valid-type]
        if model.model_fields and (name == policy_name or settings != _default_settings(model)):
            result[name] = settings
    return result


def _table_name(key: str, policy_name: str, table: Any) -> str:
    """Return the name of the policy whose table is called ``key``.

    For the policy in use it is ``policy_name``, otherwise :func:`perfed.participation.policy.qualified_name`, which any
    process can read.
    """
    name = policy_id(key) if ":" in key else key
    if bare_name(name) not in POLICIES:
        raise ValidationError.from_exception_data(
            "Participation", [{"type": "extra_forbidden", "loc": (key,), "input": table}]
        )
    return policy_name if bare_name(name) == bare_name(policy_name) else qualified_name(bare_name(name))


def _default_settings(model: type[BaseModel]) -> BaseModel | None:
    """Return the settings with all defaults; ``None`` if a setting has no default."""
    return None if any(field.is_required() for field in model.model_fields.values()) else model()
