"""The ``[aggregation]`` table, which selects the kind of mean with which the server averages clients' replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

import perfed.aggregation.kinds  # noqa: F401 - registers the kinds
from perfed.aggregation.aggregator import AGGREGATORS, Aggregator, aggregator_entry, aggregator_id, check_settings
from perfed.errors import PerfedError
from perfed.plugins import bare_name
from perfed.settings import STRICT


class Aggregation(BaseModel):
    """The ``[aggregation]`` table: a kind of aggregation and its settings.

    The settings of the kind are attributes of this object.

    Attributes:
        kind: ``mean``, ``median``, ``trimmed-mean``, ``norm-bound``, or ``module:NAME`` in a file of the user's.

    Example:
        >>> Aggregation(kind="trimmed-mean").trim
        0.1
    """

    model_config = ConfigDict(**{**STRICT, "extra": "allow"})

    kind: str = Field(
        "mean", description="what takes the place of the mean over clients; module:NAME is one in a file of the user's"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_settings(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise PerfedError(f"aggregation must be a table (given: {value!r}); write aggregation.kind = {value!r}")
        if not isinstance(value, Mapping) or not isinstance(kind := value.get("kind", "mean"), str):
            return value
        kind = aggregator_id(kind)
        model = AGGREGATORS[bare_name(kind)].settings
        settings = {key: item for key, item in value.items() if key != "kind"}
        check_settings(kind, model, settings)
        return {"kind": kind, **dict(TypeAdapter(model).validate_python(settings))}

    @property
    def aggregator(self) -> Aggregator[Any]:
        """The aggregator of this kind, with its settings."""
        entry = aggregator_entry(self.kind)
        return entry.aggregator(entry.settings.model_validate(self.__pydantic_extra__ or {}))
