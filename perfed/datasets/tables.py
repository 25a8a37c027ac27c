"""Tables of the user's own, from files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from perfed.data.federation import Federation
from perfed.data.tables.files import read_sites
from perfed.data.tables.options import TableOptions
from perfed.data.tables.schema import Mode
from perfed.datasets.catalogue import NonNegative, ValidationFraction, dataset
from perfed.errors import PerfedError


class TableSettings(BaseModel):
    """The files, and what their columns are for.

    Attributes:
        files: files or folders, of one site each; with ``site_column`` of any sites. Relative to the experiment's file.
        test_files: rows to test on, in place of a split, likewise.
        site_column: names the site of every row.
        target: the column to predict; with ``event``, a time.
        event, domain, drop, dates, categories, group, folds, columns, preprocess: see
            :class:`perfed.data.tables.options.TableOptions`; "" for none.
        task: "auto": what the targets look like.
        test_fraction: of each site's rows; not with ``folds`` or ``test_files``.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    files: list[str] = []
    test_files: list[str] = []
    site_column: str = ""
    target: str = ""
    event: str = ""
    domain: str = ""
    drop: list[str] = []
    dates: list[str] = []
    categories: list[str] = []
    group: str = ""
    task: Literal["auto", "classification", "regression"] = "auto"
    test_fraction: ValidationFraction = 0.2
    folds: NonNegative = 0
    columns: Mode = "own"
    preprocess: str = ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in ("files", "target"):
            if not getattr(self, key):
                raise PerfedError(f"data.{key} is needed: 'perfed init' writes an experiment for your files")
        splits = [key for key in ("test_files", "folds", "test_fraction") if key in self.model_fields_set]
        if len([key for key in splits if getattr(self, key)]) > 1:
            raise PerfedError(f"data.{splits[0]} and data.{splits[1]} are two ways to split; leave one of them out")
        return self

    def options(self, seed: int) -> TableOptions:
        """What the columns are for, and the split of this seed."""
        return TableOptions(
            target=self.target,
            event=self.event or None,
            domain=self.domain or None,
            drop=self.drop,
            dates=self.dates,
            categories=self.categories,
            group=self.group or None,
            task=None if self.task == "auto" else self.task,
            test_fraction=0.0 if self.test_files else self.test_fraction,
            folds=self.folds,
            columns=self.columns,
            preprocess=self.preprocess or None,
            seed=seed,
        )


@dataset("tables", shared=TableSettings, paths=("files", "test_files"))
def tables(seed: int, data_dir: Path | None, **given: Any) -> Federation:
    """Tables of your own: one file per site, or a column that names the site (CSV, Parquet, Excel; perfed[tables]).

    Each site prepares its columns on its own training rows (:meth:`perfed.data.federation.Federation.from_frames`).
    ``perfed init`` writes such an experiment, ``perfed check`` says what the sites hold and what is wrong.
    """
    settings = TableSettings.model_construct(**given)
    site_column = settings.site_column or None
    read = read_sites([Path(file) for file in settings.files], site_column)
    tests = read_sites([Path(file) for file in settings.test_files], site_column) if settings.test_files else None
    federation = Federation.of_tables(
        read.frames,
        settings.options(seed),
        tests=None if tests is None else tests.frames,
        sources=read.sources,
        test_sources=None if tests is None else tests.sources,
    )
    remarks = (*read.notes, *(() if tests is None else tests.notes), *federation.notes["remarks"])
    return replace(federation, notes={**federation.notes, "remarks": remarks})
