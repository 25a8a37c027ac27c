"""Sites' own models in folders: one is read whatever it is made of, and those that have joined a run are found."""

from __future__ import annotations

import json
from pathlib import Path

from perfed.client_model.mixture import PARTS, load_blend
from perfed.client_model.site_model import FACTS, SiteModel, load_network
from perfed.errors import PerfedError


def load_site(path: Path | str, trust: bool = False) -> SiteModel:
    """Return the model that :meth:`SiteModel.save` wrote into ``path``.

    No code in the files is run, unless they are trusted: ``network.pt2``, which is a network that is more than
    operations of torch, and a pickled preprocessing run what they hold.

    Args:
        path: the folder.
        trust: whether to read such files.

    Raises:
        PerfedError: there is none, its files are damaged, or they could run code and are not trusted.

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
    place = Path(path)
    if not (place / FACTS).exists():
        raise PerfedError(f"{place}: no site's model here ({FACTS} is missing)")
    return load_blend(place, trust) if (place / PARTS).is_dir() else load_network(place, trust)


def joined_sites(path: Path) -> dict[str, Path]:
    """Return where the models of the sites are that have joined the run in ``path`` (``perfed join``), by name."""
    found = {}
    for file in sorted(path.glob(f"joined/*/{FACTS}")):
        try:
            found[str(json.loads(file.read_text(encoding="utf-8"))["site"])] = file.parent
        except (OSError, ValueError, KeyError, TypeError):  # what is wrong is said where it is loaded
            found[file.parent.name] = file.parent
    return found
