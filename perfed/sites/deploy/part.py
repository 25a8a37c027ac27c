"""A run as a site has agreed to it: its study, what holds at all sites, and what the site makes of its data for it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from perfed.codec import encode
from perfed.data.client import Client
from perfed.data.domain_input import apply_options
from perfed.data.facts import SPLITS, Counts, SplitFacts
from perfed.data.federation import Federation, federation_of
from perfed.data.federation_schema import FederationSchema, SiteMetadata
from perfed.data.reading import check_seal, checked, read_json, seal
from perfed.datasets.tables import TableSettings
from perfed.engine.initial import Initialiser
from perfed.errors import PerfedError, shorten_list
from perfed.experiment.config import Experiment, read
from perfed.plugins import SKLEARN
from perfed.privacy.apply import PrivateMethod
from perfed.sites.deploy.spending import RUNS, SiteBudget, secret_in
from perfed.sites.deploy.trial import method_of, private_in, protocol_of
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.dry_run import derive_allow_list
from perfed.sites.flower.masking import Signer
from perfed.sites.flower.refusal import RefusalReason, Refused
from perfed.sites.flower.store import SiteStore, StoredExchanges
from perfed.system import installed_version, write_atomic
from perfed.tables.agreement import agree_on_schema
from perfed.tables.marks import FEWEST
from perfed.tables.options import TableOptions
from perfed.tables.site_data import SiteData, read_site_data
from perfed.training.plan import Plan, PlanSettings, open_device

_RUN = "run.json"  # the run that the site is in: its id and place, its study, what was agreed, and since when
_OWN = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w-]*")  # module:NAME


def table_options(experiment: Experiment) -> TableOptions:
    """What the columns of the sites' tables are for."""
    return TableSettings.model_construct(**experiment.data.options).table_options(experiment.seed)


def told_by(own: SiteData) -> dict[str, Any]:
    """What a site tells the server before its facts, as it leaves."""
    return own.create_metadata(FEWEST).plain()


def make_schema_of_one_site(site: str, metadata: Mapping[str, Any], options: TableOptions) -> FederationSchema:
    """Return what would hold if there were no other site; columns that the study names may be at other sites.

    Args:
        site: its name.
        metadata: what it tells before it trains (:func:`told_by`).
        options: what the columns of the sites' tables are for.

    Raises:
        PerfedError: as :func:`perfed.tables.agreement.agree_on_schema`.
    """
    named = sorted({name for names in options.named.values() for name in names})
    return agree_on_schema(
        {site: SiteMetadata.of_plain({**metadata, "named": named or None}, f"site '{site}'")}, options
    )


def installed_versions() -> str:
    """Return the versions of perfed and torch: with others, replies may differ from those of the same messages."""
    return f"perfed {installed_version()}, torch {torch.__version__}"


def facts_by(client: Client, agreement: FederationSchema, secret: bytes | None = None) -> dict[str, Any]:
    """What a site tells the server once all have agreed, as it leaves: counts, shapes, a hash of its inputs' names.

    With a ``secret``, of a private study, in the place of how many rows are of each class or domain, or have an event,
    stands an even share, and the checksum of the rows is one of both.
    """
    facts = client.facts(agreement.task == "survival").nameless
    if secret is not None:
        classes, domains = len(agreement.classes or ()), agreement.domains
        number = len(domains) if isinstance(domains, tuple) else domains or 0
        splits = {name: _even(split, classes, number) for name, split in facts.splits.items()}
        mark = int.from_bytes(hashlib.sha256(secret + b"%d" % facts.mark).digest()[:6])
        facts = replace(facts, splits=splits, mark=mark)
    return facts.plain()


def _even(split: SplitFacts, classes: int, domains: int) -> SplitFacts:
    """Facts that say of the rows how many they are, and of which shape."""

    def share(known: Counts | None, parts: int) -> Counts | None:
        return None if known is None else tuple(len(range(part, split.samples, parts)) for part in range(parts))

    return replace(
        split,
        classes=share(split.classes, classes),
        domains=share(split.domains, domains),
        events=None if split.events is None else split.samples,
    )


def same_study(one: str, other: str) -> bool:
    """Whether two studies ask the same of a site; others may have joined one of them."""
    return asked(one) == asked(other)


def count_sites(study: Experiment) -> int:
    """Return how many sites a study has."""
    return len(study.data.options["files"])


def asked(study: str) -> dict[str, Any]:
    """Return what a study asks of a site, as plain values: all of it but for the names of sites.

    How many sites there are counts where they protect each other: shares of noise and the size of sums depend on it.
    """
    plain = read(study, "the study").model_dump(mode="json")
    files = plain["data"].pop("files", [])
    return {**plain, "sites": len(files)} if plain.get("privacy") or plain.get("secure_aggregation") else plain


def hash_study(study: str) -> str:
    """Return the SHA-256 of a study, a TOML text, as a site's administrator has agreed to it.

    A server may give the sites other names without asking the site's administrator. Where the study has their keys,
    the names of these count, and those in its table of data do not. The keys themselves do not count: after one was
    rotated, sites still know which sums they have opened.
    """
    experiment = read(study, "the study")
    secure, content = experiment.secure_aggregation, asked(study)
    if secure is None or secure.keys is None:
        content = experiment.model_dump(mode="json")
    else:
        content["secure_aggregation"]["keys"] = sorted(secure.keys)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def own_modules(study: Experiment) -> list[str]:
    """Return the modules of the user's that the study names (``module:NAME``); they must be where its programs run."""
    texts = _texts(study.model_dump(mode="json", exclude={"name", "description"}))
    names = (name for text in texts if not text.startswith(SKLEARN) for name in text.split("+"))
    return sorted({match[1] for name in names if (match := _OWN.fullmatch(name))})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value  # a method's own table
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


class _Held(BaseModel):
    """What ``run.json`` of a site holds."""

    run: str
    study: str
    place: str
    since: str
    agreement: dict[str, Any]
    rows_hash: str = ""
    versions: str = ""


@dataclass(frozen=True)
class Part:
    """A run as a site has agreed to it.

    Attributes:
        site: its name.
        data: its file or folder.
        run: id of the run.
        study: the experiment, as TOML.
        agreement: what holds at all sites.
        place: the directory of its results on the server.
        since: when the site first agreed to it.
        own: the data, where they have been read already.
        rows_hash: hash of the rows with which the site joined; empty where these may change.
        versions: of perfed and torch with which the site joined (:func:`installed_versions`); empty where older
            versions wrote the run's file.
    """

    site: str
    data: Path
    run: str
    study: str
    agreement: FederationSchema
    place: str
    since: str
    own: SiteData | None = field(default=None, compare=False, repr=False)
    rows_hash: str = field(default="", compare=False)
    versions: str = field(default="", compare=False)

    @classmethod
    def of(cls, folder: Path, site: str, data: Path) -> Part | None:
        """The run that the site in ``folder`` is in; ``None`` where it is in none.

        Raises:
            PerfedError: the file that says so is damaged.
        """
        return cls._in(folder / _RUN, site, data) if (folder / _RUN).exists() else None

    @classmethod
    def earlier(cls, folder: Path, site: str, data: Path, run: str) -> Part:
        """The run with the id ``run``, in which the site in ``folder`` is or was.

        Raises:
            PerfedError: it was in no such run, or the file that says so is damaged.
        """
        file = StoredExchanges(folder / RUNS, run).path / _RUN
        if not file.exists():
            held = sorted(found.parent.name for found in (folder / RUNS).glob(f"*/{_RUN}"))
            raise PerfedError(f"{folder}: nothing is kept of run '{run}'; allowed: {shorten_list(held) or 'none'}")
        return cls._in(file, site, data)

    @classmethod
    def find_joined(cls, folder: Path, site: str, data: Path, run: str) -> Part | None:
        """Return the run with the id ``run`` if the site in ``folder`` has ever joined it, and ``None`` otherwise.

        Raises:
            PerfedError: ``run`` cannot be an id, or the run's file is damaged.
        """
        file = StoredExchanges(folder / RUNS, run).path / _RUN
        return cls._in(file, site, data) if file.exists() else None

    @classmethod
    def all_kept(cls, folder: Path, site: str, data: Path) -> Iterator[Part]:
        """All runs in which the site in ``folder`` is or was.

        Raises:
            PerfedError: a file that says so is damaged.
        """
        for file in sorted((folder / RUNS).glob(f"*/{_RUN}")):
            yield cls._in(file, site, data)

    @classmethod
    def _in(cls, file: Path, site: str, data: Path) -> Part:
        held = checked(_Held, check_seal(read_json(file), file), file)
        agreement = FederationSchema.of_plain(held.agreement, str(file))
        run = (held.run, held.study, agreement, held.place, held.since)
        return cls(site, data, *run, rows_hash=held.rows_hash, versions=held.versions)

    def write(self, folder: Path) -> None:
        """Let :meth:`of` and, once the site is in another run, :meth:`earlier` find it."""
        content = {name: getattr(self, name) for name in ("run", "place", "since", "study", "versions")}
        content["rows_hash"] = self.rows_hash or ("" if self.private is None else self.current_rows_hash)
        content["agreement"] = self.agreement.plain()
        kept = self.stored(folder).path
        kept.mkdir(parents=True, exist_ok=True)
        for place in (kept, folder):
            write_atomic(place / _RUN, json.dumps(seal(content), indent=1) + "\n")

    @property
    def held(self) -> dict[str, str]:
        """What the site tells a server of another run: it finds out whether anybody is at work on this one."""
        refuses = (
            f"busy since {self.since} with run {self.run}, whose results are in {self.place} on the server; "
            "wait for its end, or end it ('perfed submit DIR --stop')"
        )
        return {"busy": self.run, "place": self.place, "refuses": refuses}

    @cached_property
    def experiment(self) -> Experiment:
        """The study, parsed and checked."""
        return read(self.study, "the study")

    @cached_property
    def federation(self) -> Federation:
        """:attr:`rows` as the study's method has them, in type and place."""
        return self.rows.to(dtype=self.experiment.torch_dtype, device=self.device)

    @cached_property
    def rows(self) -> Federation:
        """The site's client alone, by the agreement.

        Raises:
            PerfedError: its data do not fit.
        """
        experiment = self.experiment
        own = self.own or read_site_data(self.site, self.data, table_options(experiment))
        alone = federation_of([own.client(self.agreement)], self.agreement, experiment.data.name)
        return apply_options(alone, experiment.data.options, experiment.seed)

    @cached_property
    def device(self) -> torch.device:
        """Where the site computes."""
        return open_device(self.experiment.device, f"device = '{self.experiment.device}'")

    @cached_property
    def initialiser(self) -> Initialiser:
        """Method, model and seed of the study."""
        experiment, model = self.experiment, self.experiment.model_for(self.federation)
        secure = experiment.secure_aggregation
        return Initialiser(
            method_of(experiment), model, experiment.seed, experiment.torch_dtype, self.device, secure=secure
        )

    @cached_property
    def private(self) -> PrivateMethod | None:
        """The study's method under ``[privacy]``, and the plan of what it tells; ``None`` without that table."""
        return private_in(self.experiment)

    @cached_property
    def current_rows_hash(self) -> str:
        """The SHA-256 of inputs, targets and domains of all the site's rows, as training and evaluation use them."""
        (client,) = self.rows
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in SPLITS:
            if (split := client.split(name)) is not None:
                domain = {} if split.domain is None else {"domain": split.domain}
                tensors[name] = {"x": split.x, "y": split.y, **domain}
        return hashlib.sha256(encode(tensors)).hexdigest()

    @property
    def binding(self) -> bytes:
        """The SHA-256 of what all replies depend on: the site, the study, the agreement, the rows, and the versions."""
        content = [self.site, self.run, self.study, self.agreement.plain(), self.current_rows_hash]
        content += [self.versions] if self.versions else []  # older versions left them out
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()

    @property
    def has_other_versions(self) -> bool:
        """Whether the site joined a private run with other versions than those that are installed now."""
        return bool(self.rows_hash) and self.versions != installed_versions()

    def check_unchanged(self) -> None:
        """Do nothing where rows and versions are those with which the site joined a private run.

        Raises:
            Refused: they have changed. The noise would be the same, so that replies before and after the change would
                differ by the changed rows, or by what the versions compute otherwise.
        """
        again = "or submit the study again with another --out, which counts as a further run"
        if self.has_other_versions:
            raise Refused(
                RefusalReason.VERSION,
                f"this site joined run {self.run}, which has [privacy], with {self.versions or 'an older perfed'}, and "
                f"now has {installed_versions()}; install the former again, {again}",
            )
        if self.rows_hash and self.rows_hash != self.current_rows_hash:
            raise Refused(
                RefusalReason.ROWS,
                f"{self.data}: the rows have changed since this site joined run {self.run}, which has [privacy]; "
                f"restore the file, {again}",
            )

    def budget(self, folder: Path, most: float | None = None, delta: float | None = None) -> SiteBudget | None:
        """Return what the site in ``folder`` may tell in the run; ``None`` without a table ``[privacy]``.

        ``most``, ``delta``: as of :class:`~perfed.sites.deploy.spending.SiteBudget`.
        """
        if self.private is None:
            return None
        run, name = self.stored(folder).path, self.experiment.name
        return SiteBudget(folder, run, name, self.private, self.binding, most, delta)

    def signing_key(self, folder: Path) -> Signer | None:
        """Return the signing key of the site in ``folder``; ``None`` where the study has no keys of the sites."""
        secure = self.experiment.secure_aggregation
        if secure is None or secure.keys is None:
            return None
        from perfed.sites.flower.signing import SigningKey  # which needs perfed[flower]

        return SigningKey.in_folder(folder)

    def facts(self, folder: Path) -> dict[str, Any]:
        """What the site in ``folder`` tells once all have agreed; see :func:`facts_by`."""
        secret = None if self.private is None else secret_in(self.stored(folder).path)
        (client,) = self.federation
        return facts_by(client, self.agreement, secret)

    @property
    def plan(self) -> Plan:
        """One client at a time, on the study's threads."""
        return Plan("sequential", threads=self.experiment.plan.threads)

    def plan_in(self, folder: Path) -> Plan:
        """Return :attr:`plan` with the numbers of threads that trials have chosen for the site in ``folder``."""
        plan, file = self.plan, self._plan_file(folder)
        if file.exists():
            plan.paths.update(checked(PlanSettings, read_json(file), file).paths)
        return plan

    def record_plan(self, plan: Plan, folder: Path) -> None:
        """Record the choices of ``plan``, so that the site has the same bits after a restart."""
        write_atomic(self._plan_file(folder), json.dumps(plan.to_dict(), indent=1))

    def _plan_file(self, folder: Path) -> Path:
        return self.stored(folder).path / "plan.json"

    @cached_property
    def allowed(self) -> AllowList:
        """What the site answers in the run.

        Raises:
            PerfedError: the study's method refuses such sites; see :func:`derive_allow_list`.
                Whether private numbers fit into a sum would depend on the site's rows.
        """
        self._check_room()
        initialiser, federation, domains = self.initialiser, self.federation, self.agreement.domains
        protocol = protocol_of(self.experiment, len(domains) if isinstance(domains, tuple) else domains or 0)
        try:
            return derive_allow_list(federation.clients[0], initialiser.info(federation), initialiser, protocol)
        except PerfedError as error:
            raise PerfedError(f"the study was tried on made-up rows: {error}") from None

    def _check_room(self) -> None:
        """Check that what a private study sums under masks fits, whatever the site's rows are."""
        secure, private, federation = self.experiment.secure_aggregation, self.private, self.federation
        if secure is None or private is None:
            return
        metrics = private.metrics
        bounds = (
            {}
            if metrics is None
            else metrics.compute_bounds(federation.task, federation.num_classes, federation.target_scale)
        )
        private.check_room(secure.numbers(count_sites(self.experiment)).largest_value, bounds)

    def states(self, folder: Path) -> SiteStore:
        """Where the site in ``folder`` keeps its states of the run; this process is the site until it is closed."""
        return SiteStore(folder / RUNS, self.run)

    def stored(self, folder: Path) -> StoredExchanges:
        """The same to read, while another process is the site."""
        return StoredExchanges(folder / RUNS, self.run)
