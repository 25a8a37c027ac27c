"""A run that a site has joined: its study, the schema that all sites agreed on, and everything derived from them."""

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
from perfed.sites.deploy.spending import RUNS, SiteBudget, load_or_create_secret
from perfed.sites.deploy.trial import build_exchange_settings, build_method, build_private_method
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

_RUN_FILE = "run.json"  # describes the run that the site is in; see _RunFile
_USER_NAME = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w-]*")  # a name of the form module:NAME


def read_table_options(experiment: Experiment) -> TableOptions:
    """Return the study's settings of what the columns of the sites' tables are used for."""
    return TableSettings.model_construct(**experiment.data.options).table_options(experiment.seed)


def create_site_metadata(data: SiteData) -> dict[str, Any]:
    """Return the metadata of a site's data that it sends to the server before training, as plain values for JSON."""
    return data.create_metadata(FEWEST).plain()


def make_schema_of_one_site(site: str, metadata: Mapping[str, Any], options: TableOptions) -> FederationSchema:
    """Return the federation schema as it would be if this were the only site.

    Columns that the study names need not be in the site's table, because they may be at other sites.

    Args:
        site: name of the site.
        metadata: metadata of the site (:func:`create_site_metadata`).
        options: what the columns of the sites' tables are used for.

    Raises:
        PerfedError: under the same conditions as :func:`perfed.tables.agreement.agree_on_schema`.
    """
    named = sorted({name for names in options.named.values() for name in names})
    return agree_on_schema(
        {site: SiteMetadata.of_plain({**metadata, "named": named or None}, f"site '{site}'")}, options
    )


def installed_versions() -> str:
    """Return the installed versions of perfed and torch as a text.

    With other versions, a site may send other replies to the same messages.
    """
    return f"perfed {installed_version()}, torch {torch.__version__}"


def create_site_facts(client: Client, agreement: FederationSchema, secret: bytes | None = None) -> dict[str, Any]:
    """Return the facts that a site sends to the server once all sites have agreed, as plain values for JSON.

    The facts are counts, shapes, and a hash of the names of the site's inputs.

    Args:
        client: the site's client.
        agreement: the schema that all sites agreed on.
        secret: secret of the site in a private study. With it, the numbers of rows per class and domain, and of rows
            with an event, are replaced by even shares, and the checksum of the rows is hashed together with the secret.
    """
    facts = client.facts(agreement.task == "survival").nameless
    if secret is not None:
        classes, domains = len(agreement.classes or ()), agreement.domains
        number = len(domains) if isinstance(domains, tuple) else domains or 0
        splits = {name: _spread_counts(split, classes, number) for name, split in facts.splits.items()}
        mark = int.from_bytes(hashlib.sha256(secret + b"%d" % facts.mark).digest()[:6])
        facts = replace(facts, splits=splits, mark=mark)
    return facts.plain()


def _spread_counts(split: SplitFacts, classes: int, domains: int) -> SplitFacts:
    """Return the facts of a split with its rows spread evenly over classes and domains.

    All rows count as having an event, so that only the number and the shape of the rows remain.
    """

    def even_counts(counts: Counts | None, groups: int) -> Counts | None:
        return None if counts is None else tuple(len(range(group, split.samples, groups)) for group in range(groups))

    return replace(
        split,
        classes=even_counts(split.classes, classes),
        domains=even_counts(split.domains, domains),
        events=None if split.events is None else split.samples,
    )


def is_same_study(first: str, second: str) -> bool:
    """Return whether two studies, TOML texts, are the same apart from the names of their sites."""
    return read_study_content(first) == read_study_content(second)


def count_sites(study: Experiment) -> int:
    """Return the number of sites of a study."""
    return len(study.data.options["files"])


def read_study_content(study: str) -> dict[str, Any]:
    """Return the settings of a study, a TOML text, as plain values without the names of the sites.

    The number of sites is included if the sites protect each other, because the shares of noise and the sums depend on
    it.
    """
    plain = read(study, "the study").model_dump(mode="json")
    files = plain["data"].pop("files", [])
    return {**plain, "sites": len(files)} if plain.get("privacy") or plain.get("secure_aggregation") else plain


def hash_study(study: str) -> str:
    """Return the SHA-256 of a study, a TOML text, for comparison with the study that the site's administrator accepted.

    The server may rename sites without asking the administrator of each site, so the names of the sites count only if
    the study contains the sites' public keys. The keys themselves do not count, so that the sites remember the sums
    that they have opened after a key was rotated.
    """
    experiment = read(study, "the study")
    secure, content = experiment.secure_aggregation, read_study_content(study)
    if secure is None or secure.keys is None:
        content = experiment.model_dump(mode="json")
    else:
        content["secure_aggregation"]["keys"] = sorted(secure.keys)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def list_user_modules(study: Experiment) -> list[str]:
    """Return the names of the user's modules that the study refers to as ``module:NAME``, sorted.

    These modules must be importable wherever the study runs.
    """
    texts = _iterate_strings(study.model_dump(mode="json", exclude={"name", "description"}))
    names = (name for text in texts if not text.startswith(SKLEARN) for name in text.split("+"))
    return sorted({match[1] for name in names if (match := _USER_NAME.fullmatch(name))})


def _iterate_strings(value: Any) -> Iterator[str]:
    """Yield all strings in nested dictionaries and lists, keys of dictionaries included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value  # the name of a method's table
        for item in value.values():
            yield from _iterate_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_strings(item)


class _RunFile(BaseModel):
    """The content of a site's file ``run.json``."""

    run: str
    study: str
    place: str
    since: str
    agreement: dict[str, Any]
    rows_hash: str = ""
    versions: str = ""


@dataclass(frozen=True)
class SiteRun:
    """A run that a site has joined, or would join.

    Attributes:
        site: name of the site.
        data: file or folder with the site's table.
        run: id of the run.
        study: the experiment as TOML.
        agreement: the schema that all sites agreed on.
        place: directory of the run's results on the server.
        since: time at which the site first agreed to the run.
        site_data: the site's data if they have already been read.
        rows_hash: hash of the rows with which the site joined; empty if the rows may change.
        versions: versions of perfed and torch with which the site joined (:func:`installed_versions`); empty if the
            run's file was written by a version of perfed that did not record them.
    """

    site: str
    data: Path
    run: str
    study: str
    agreement: FederationSchema
    place: str
    since: str
    site_data: SiteData | None = field(default=None, compare=False, repr=False)
    rows_hash: str = field(default="", compare=False)
    versions: str = field(default="", compare=False)

    @classmethod
    def read_current(cls, folder: Path, site: str, data: Path) -> SiteRun | None:
        """Return the run that the site in ``folder`` is in, or ``None`` if it is in none.

        Raises:
            PerfedError: the run's file is damaged.
        """
        return cls._read_file(folder / _RUN_FILE, site, data) if (folder / _RUN_FILE).exists() else None

    @classmethod
    def read_joined(cls, folder: Path, site: str, data: Path, run: str) -> SiteRun:
        """Return the run with the id ``run``, which the site in ``folder`` must have joined at some time.

        Raises:
            PerfedError: the site has not joined this run, or the run's file is damaged.
        """
        file = StoredExchanges(folder / RUNS, run).path / _RUN_FILE
        if not file.exists():
            run_ids = sorted(path.parent.name for path in (folder / RUNS).glob(f"*/{_RUN_FILE}"))
            raise PerfedError(
                f"{folder}: no data of run '{run}' are stored; allowed: {shorten_list(run_ids) or 'none'}"
            )
        return cls._read_file(file, site, data)

    @classmethod
    def find_joined(cls, folder: Path, site: str, data: Path, run: str) -> SiteRun | None:
        """Return the run with the id ``run`` if the site in ``folder`` has ever joined it, and ``None`` otherwise.

        Raises:
            PerfedError: ``run`` is not a valid id, or the run's file is damaged.
        """
        file = StoredExchanges(folder / RUNS, run).path / _RUN_FILE
        return cls._read_file(file, site, data) if file.exists() else None

    @classmethod
    def read_all(cls, folder: Path, site: str, data: Path) -> Iterator[SiteRun]:
        """Yield all runs that the site in ``folder`` has joined.

        Raises:
            PerfedError: the file of a run is damaged.
        """
        for file in sorted((folder / RUNS).glob(f"*/{_RUN_FILE}")):
            yield cls._read_file(file, site, data)

    @classmethod
    def _read_file(cls, file: Path, site: str, data: Path) -> SiteRun:
        content = checked(_RunFile, check_seal(read_json(file), file), file)
        agreement = FederationSchema.of_plain(content.agreement, str(file))
        run = (content.run, content.study, agreement, content.place, content.since)
        return cls(site, data, *run, rows_hash=content.rows_hash, versions=content.versions)

    def write(self, folder: Path) -> None:
        """Write the run to the folder of the site as its current run, and to the run's own folder.

        :meth:`read_current` reads the former, :meth:`read_joined` the latter, also after the site has joined another
        run.
        """
        content = {name: getattr(self, name) for name in ("run", "place", "since", "study", "versions")}
        content["rows_hash"] = self.rows_hash or ("" if self.private_method is None else self.current_rows_hash)
        content["agreement"] = self.agreement.plain()
        run_folder = self.get_stored_exchanges(folder).path
        run_folder.mkdir(parents=True, exist_ok=True)
        for directory in (run_folder, folder):
            write_atomic(directory / _RUN_FILE, json.dumps(seal(content), indent=1) + "\n")

    @property
    def busy_fields(self) -> dict[str, str]:
        """The fields by which a site tells the server of another run that it is busy with this one.

        They hold the run's id and directory, by which the server finds out whether the run is still going on, and a
        message.
        """
        message = (
            f"busy since {self.since} with run {self.run}, whose results are in {self.place} on the server; "
            "wait until it ends, or end it ('perfed submit DIR --stop')"
        )
        return {"busy": self.run, "place": self.place, "refuses": message}

    @cached_property
    def experiment(self) -> Experiment:
        """The study, parsed and validated."""
        return read(self.study, "the study")

    @cached_property
    def federation(self) -> Federation:
        """A federation of this site only (:attr:`site_federation`), in the study's data type and on its device."""
        return self.site_federation.to(dtype=self.experiment.torch_dtype, device=self.device)

    @cached_property
    def site_federation(self) -> Federation:
        """A federation of this site only, built from its data according to the agreement.

        Raises:
            PerfedError: the site's data do not match the agreement.
        """
        experiment = self.experiment
        data = self.site_data or read_site_data(self.site, self.data, read_table_options(experiment))
        federation = federation_of([data.client(self.agreement)], self.agreement, experiment.data.name)
        return apply_options(federation, experiment.data.options, experiment.seed)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the site computes."""
        return open_device(self.experiment.device, f"device = '{self.experiment.device}'")

    @cached_property
    def initialiser(self) -> Initialiser:
        """The initialiser with the study's method, model and seed."""
        experiment, model = self.experiment, self.experiment.model_for(self.federation)
        secure = experiment.secure_aggregation
        return Initialiser(
            build_method(experiment), model, experiment.seed, experiment.torch_dtype, self.device, secure=secure
        )

    @cached_property
    def private_method(self) -> PrivateMethod | None:
        """The study's method with the privacy plan of its ``[privacy]`` table; ``None`` without that table."""
        return build_private_method(self.experiment)

    @cached_property
    def current_rows_hash(self) -> str:
        """The SHA-256 of the inputs, targets and domains of all rows of the site, as used in the study."""
        (client,) = self.site_federation
        tensors: dict[str, dict[str, torch.Tensor]] = {}
        for name in SPLITS:
            if (split := client.split(name)) is not None:
                domain = {} if split.domain is None else {"domain": split.domain}
                tensors[name] = {"x": split.x, "y": split.y, **domain}
        return hashlib.sha256(encode(tensors)).hexdigest()

    @property
    def binding_hash(self) -> bytes:
        """The SHA-256 of everything that all replies depend on.

        These are the name of the site, the run's id, the study, the agreement, the site's rows, and the versions of
        perfed and torch.
        """
        content = [self.site, self.run, self.study, self.agreement.plain(), self.current_rows_hash]
        content += [self.versions] if self.versions else []  # run files of older versions of perfed lack them
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()

    @property
    def has_other_versions(self) -> bool:
        """Whether the site joined a private run with versions other than the installed ones."""
        return bool(self.rows_hash) and self.versions != installed_versions()

    def check_unchanged(self) -> None:
        """Check that rows and versions are those with which the site joined a private run.

        The noise of a private run would stay the same after a change, so that the difference of replies from before and
        after the change would reveal the changed rows.

        Raises:
            Refused: the rows or the installed versions have changed.
        """
        advice = "or submit the study again with another --out, which counts as a further run"
        if self.has_other_versions:
            raise Refused(
                RefusalReason.VERSION,
                f"this site joined run {self.run}, which has [privacy], with {self.versions or 'an older perfed'}, and "
                f"now has {installed_versions()}; install the earlier versions again, {advice}",
            )
        if self.rows_hash and self.rows_hash != self.current_rows_hash:
            raise Refused(
                RefusalReason.ROWS,
                f"{self.data}: the rows have changed since this site joined run {self.run}, which has [privacy]; "
                f"restore the file, {advice}",
            )

    def make_budget(self, folder: Path, most: float | None = None, delta: float | None = None) -> SiteBudget | None:
        """Return the privacy budget of the site in ``folder`` for this run, or ``None`` without a table ``[privacy]``.

        Args:
            folder: folder of the site.
            most, delta: epsilon that all runs of the site may spend, and its delta
                (:class:`~perfed.sites.deploy.spending.SiteBudget`).
        """
        if self.private_method is None:
            return None
        run, name = self.get_stored_exchanges(folder).path, self.experiment.name
        return SiteBudget(folder, run, name, self.private_method, self.binding_hash, most, delta)

    def load_signing_key(self, folder: Path) -> Signer | None:
        """Return the signing key of the site in ``folder``, or ``None`` if the study has no keys of the sites."""
        secure = self.experiment.secure_aggregation
        if secure is None or secure.keys is None:
            return None
        from perfed.sites.flower.signing import SigningKey  # requires perfed[flower]

        return SigningKey.in_folder(folder)

    def create_facts(self, folder: Path) -> dict[str, Any]:
        """Return the facts that the site in ``folder`` sends to the server (:func:`create_site_facts`)."""
        secret = None if self.private_method is None else load_or_create_secret(self.get_stored_exchanges(folder).path)
        (client,) = self.federation
        return create_site_facts(client, self.agreement, secret)

    @property
    def plan(self) -> Plan:
        """The training plan: one client at a time, with the study's number of threads."""
        return Plan("sequential", threads=self.experiment.plan.threads)

    def load_plan(self, folder: Path) -> Plan:
        """Return :attr:`plan` with the thread counts chosen by earlier timing trials of the site in ``folder``."""
        plan, file = self.plan, self._plan_file(folder)
        if file.exists():
            plan.paths.update(checked(PlanSettings, read_json(file), file).paths)
        return plan

    def record_plan(self, plan: Plan, folder: Path) -> None:
        """Write the choices of ``plan`` to a file, so that results stay bit-identical after a restart of the site."""
        write_atomic(self._plan_file(folder), json.dumps(plan.to_dict(), indent=1))

    def _plan_file(self, folder: Path) -> Path:
        return self.get_stored_exchanges(folder).path / "plan.json"

    @cached_property
    def allow_list(self) -> AllowList:
        """The list of exchanges that the site answers in this run.

        Raises:
            PerfedError: the study's method rejects such sites (see
                :func:`~perfed.sites.flower.dry_run.derive_allow_list`), or private numbers might not fit into a masked
                sum.
        """
        self._check_sums_fit()
        initialiser, federation, domains = self.initialiser, self.federation, self.agreement.domains
        protocol = build_exchange_settings(
            self.experiment, len(domains) if isinstance(domains, tuple) else domains or 0
        )
        try:
            return derive_allow_list(federation.clients[0], initialiser.info(federation), initialiser, protocol)
        except PerfedError as error:
            raise PerfedError(f"a rehearsal of the study on synthetic rows failed: {error}") from None

    def _check_sums_fit(self) -> None:
        """Check that the masked sums of a private study cannot overflow, whatever the site's rows are."""
        secure, private, federation = self.experiment.secure_aggregation, self.private_method, self.federation
        if secure is None or private is None:
            return
        metrics = private.metrics
        bounds = (
            {}
            if metrics is None
            else metrics.compute_bounds(federation.task, federation.num_classes, federation.target_scale)
        )
        private.check_room(secure.numbers(count_sites(self.experiment)).largest_value, bounds)

    def open_store(self, folder: Path) -> SiteStore:
        """Open the store of the run's states in the site's ``folder`` for writing.

        Until the store is closed, no other process can act as this site.
        """
        return SiteStore(folder / RUNS, self.run)

    def get_stored_exchanges(self, folder: Path) -> StoredExchanges:
        """Return read-only access to the run's stored states, which works while another process acts as this site."""
        return StoredExchanges(folder / RUNS, self.run)
