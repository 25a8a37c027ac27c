"""Functions that load the models of clients from folders, including those of sites that have joined a run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from perfed.client_model.estimator import ESTIMATOR, load_estimator
from perfed.client_model.facts import read_facts, read_file_checksums
from perfed.client_model.mixture import PARTS, Mixture
from perfed.client_model.network import load_network
from perfed.client_model.site_model import FACTS, TABLE, Predictor, SiteModel
from perfed.data.checksums import find_damage, refuse_damage
from perfed.data.names import find_name
from perfed.errors import PerfedError, shorten_list
from perfed.tables.site import TablePreprocessor


def load_site(path: Path | str, trust: bool = False) -> SiteModel:
    """Return the model that :meth:`SiteModel.save` wrote into ``path``.

    Code in the files is executed only if they are trusted. Networks with other operations than those of torch, and
    pickled preprocessing, can contain code.

    Args:
        path: the folder.
        trust: whether to load files that can execute code.

    Raises:
        PerfedError: the folder has no model, or its files are damaged, or can execute code and are not trusted.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from perfed import start, validate
        >>> table = {"method": "fedavg", "rounds": 1, "data": {"name": "digits"}, "model": {"head": "linear"}}
        >>> run = start(validate(table))
        >>> _ = run.execute()
        >>> site = run.site(run.federation.clients[0].id)
        >>> with TemporaryDirectory() as folder:
        ...     again = load_site(site.save(f"{folder}/site"))
        >>> x = run.federation.clients[0].test.x
        >>> bool((again.predict_proba(x) == site.predict_proba(x)).all())
        True
    """
    folder = Path(path)
    if not (folder / FACTS).exists():
        raise PerfedError(f"{folder}: no site's model here ({FACTS} is missing)")
    facts = read_facts(folder / FACTS)
    table = None if facts["columns"] is None else TablePreprocessor.load(folder / TABLE, trust)
    model = SiteModel(facts, _load_predictor(folder, facts, trust), table)
    if not trust:  # files that are trusted may have been replaced on purpose
        checksums = read_file_checksums(folder / FACTS)
        refuse_damage(folder, find_damage(folder, checksums), "save the model of the site again")
    return model


def _load_predictor(folder: Path, facts: Mapping[str, Any], trust: bool) -> Predictor:
    if (folder / PARTS).is_dir():
        return _load_mixture(folder, facts, trust)
    if (folder / ESTIMATOR).exists():
        return load_estimator(folder, facts)
    return load_network(folder, facts, trust)


def _load_mixture(folder: Path, facts: Mapping[str, Any], trust: bool) -> Mixture:
    weights = (facts.get("weights") or {}).values()
    if not weights:
        raise PerfedError(f"{folder / FACTS}: has no weights for the models in '{PARTS}'")
    parts = [load_site(folder / PARTS / str(number), trust) for number in range(len(weights))]
    return Mixture(tuple(parts), tuple(weights))


def joined_sites(path: Path) -> dict[str, Path]:
    """Return the folders with the models of the sites that have joined the run in ``path``, by name."""
    folders = {}
    for file in sorted(path.glob(f"joined/*/{FACTS}")):
        try:
            folders[str(json.loads(file.read_text(encoding="utf-8"))["site"])] = file.parent
        except (OSError, ValueError, KeyError, TypeError):  # loading the model reports what is wrong
            folders[file.parent.name] = file.parent
    return folders


def load_joined_site(path: Path | None, client: str, ids: Collection[str], trust: bool = False) -> SiteModel | None:
    """Return the model of a site that has joined the run in ``path``.

    The result is ``None`` if ``client`` is one of the run's ``ids``, or if no site has joined.

    Raises:
        PerfedError: sites have joined, and ``client`` is neither one of these nor one of ``ids``.
    """
    if path is None or find_name(client, ids) is not None or not (joined := joined_sites(path)):
        return None
    name = find_name(client, joined)
    if name is None:
        raise PerfedError(
            f"unknown client '{client}'; ids are: {shorten_list([*ids])}; joined: {shorten_list([*joined])}"
        )
    return load_site(joined[name], trust)
