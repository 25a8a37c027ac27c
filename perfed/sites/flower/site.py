"""A site in a run: it answers the server's messages, one after the other, and keeps its own state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch

from perfed.codec import encode
from perfed.data.client import Client
from perfed.data.target_scale import TargetScale
from perfed.engine.evaluate import Outputs
from perfed.engine.executor import Background, ChunkResult, ChunkTask, LocalExecutor
from perfed.engine.initial import Initialiser
from perfed.errors import PerfedError
from perfed.method.declared import FederationInfo
from perfed.rng import Noise
from perfed.sites.flower.allowed import AllowList
from perfed.sites.flower.masking import KINDS, Masking, Signer, drop_reply, pack_masked_reply
from perfed.sites.flower.message import frame, unframe, unpack
from perfed.sites.flower.refusal import RefusalReason, Refused, refuse_as
from perfed.sites.flower.store import MAX_PAYLOADS, SiteStore
from perfed.sites.flower.wire import MEASURED, exchange_from_header, make_reply_tree, pack_result, unpack_task
from perfed.system import write_atomic
from perfed.training.plan import Plan
from perfed.training.private import ReleaseCounter

METRICS = "metrics.jsonl"
"""File beside the states: what was measured here and stays here, a line each."""
MODEL = "model.message"
"""File beside the states: the last message by which the site has made its own model."""
_OLDER = 6  # states before the newest base that stay, for a server that comes back from an older checkpoint


SITE_MODEL = "the site's model"
"""Name under which a ledger counts the fine-tuning of the model that the site keeps."""


def metrics_of_round(round_: int) -> str:
    """Return the name of an evaluation whose metrics leave with noise, as a ledger has it."""
    return f"metrics of round {round_}"


class Budget(Protocol):
    """What a site may tell under ``[privacy]``, and the noise on it."""

    def make_noise(self, message: bytes) -> Noise:
        """Return the source of the noise in the answer to ``message``, a hash of 32 bytes (:func:`hash_request`)."""

    def accept_message(self, exchange: str, message: bytes) -> None:
        """Write down that the site answers ``message`` in an exchange, before it looks at its rows.

        Raises:
            Refused: it has accepted another message in this exchange.
        """

    def add_releases(self, exchange: str, counter: ReleaseCounter) -> None:
        """Write down what an exchange has released, before anything of it leaves; asked again, it counts once.

        Raises:
            Refused: it would be more than the site may release.
        """

    def release_metrics(
        self, round_: int, message: bytes, outputs: Outputs, info: FederationInfo, scale: TargetScale | None
    ) -> dict[str, float]:
        """Return the metrics that leave after a round, with noise, and note them before.

        Args:
            round_: number of the round.
            message: hash of what is answered, as for :meth:`make_noise`.
            outputs: what the site's model says of its test rows, in the unit of the data.
            info: of the federation.
            scale: what targets were standardised by.

        Raises:
            Refused: it would tell more than it may.
        """


class Site:
    """One client where its data are.

    Args:
        client: with inputs in the run's dtype.
        initialiser: method, model, seed.
        plan: how work is cut up.
        info: what the server knows of the federation, but for what every message says anew.
        scale: what targets were standardised by.
        store: on the site's disk, of the run.
        allowed: what is answered, and nothing else.
        budget: of what is told, where ``allowed`` is discreet.
        study: hash of the study, which is the same in all its runs; replies under masks need it.
        signer: the site's signing key; needed where the study has the public keys of the sites.

    Raises:
        PerfedError: a budget is needed and there is none.
    """

    def __init__(
        self,
        client: Client,
        initialiser: Initialiser,
        plan: Plan,
        *,
        info: FederationInfo,
        scale: TargetScale | None,
        store: SiteStore,
        allowed: AllowList,
        budget: Budget | None = None,
        study: str = "",
        signer: Signer | None = None,
    ) -> None:
        if allowed.discreet and budget is None:
            raise PerfedError(f"site '{client.id}': a private study needs a secret and a budget of the site")
        self.client, self.initialiser, self.plan, self._budget = client, initialiser, plan, budget
        self._info, self._scale, self._store = info, scale, store
        self._allowed = allowed
        self._host: LocalExecutor | None = None
        self._last: tuple[str, bytes] | None = None  # what was asked last, and the reply
        secure = initialiser.secure
        self._masking = None if secure is None else Masking(secure, client.id, store.run, allowed, store, study, signer)

    def answer(self, data: bytes) -> bytes:
        """The reply to a message of the server; to one that is sent once more that of the first time.

        Raises:
            PerfedError: a message that is none or that the study does not ask for, a state that is not here, or
                training that diverged.
        """
        with refuse_as(RefusalReason.MESSAGE):
            header, tree = unpack(data)
            if self._masking is not None and header.get("kind") in KINDS:
                return self._masking.answer(header, data)
            secure = header.pop("secure", None)
            if problem := self._allowed.find_request_problem(header, tree, self._store.run):
                raise PerfedError(problem)
        asked, sequence = hashlib.sha256(data).hexdigest(), header["sequence"]
        stored = self._store.load_reply(sequence)
        if stored is not None and unpack(stored)[0].get("asked") == asked:
            return stored
        if self._last is not None and self._last[0] == asked:  # an evaluation, which leaves no state
            return self._last[1]
        content, lasting = describe_request(header, data), header["index"] >= 0
        with refuse_as(RefusalReason.STATE):
            state = self._store.load_state(header["base"])
        if self._budget is not None and (lasting or self._tells_metrics(header)):
            self._budget.accept_message(self._ledger_name(header), hash_request(content, state))
        if not (self._budget is not None and lasting) and not self._store.admit_request(sequence, content):
            why = "a server that goes on asks the same again"
            said = f"the server's message: exchange {sequence} was asked with {MAX_PAYLOADS} payloads already; {why}"
            raise Refused(RefusalReason.MESSAGE, said)
        done, reply = self._done(header, tree, secure, asked, content, state)
        if done.states:
            masked = bool(self._allowed.terms(exchange_from_header(header)))
            history = None if self._masking is None else self._masking.continue_history(header, tree, masked=masked)
            self._store.save_exchange(sequence, done.states[self.client.id], reply, history)
            self._store.remove_exchanges({*header["keep"], *self._needed(header["base"], sequence)})
        else:
            write_atomic(self._store.path / MODEL, data)
            self._last = asked, reply
        return reply

    def _done(
        self,
        header: Mapping[str, Any],
        tree: Mapping[str, Any],
        secure: Any,
        asked: str,
        content: str,
        state: dict[str, Any] | None,
    ) -> tuple[ChunkResult, bytes]:
        """Return what was done, and the reply that leaves; under masks these are added last."""
        work = unpack_task(header, tree, self.client.id, state, self._scale)
        terms = self._allowed.terms(work.exchange) if self._masking is not None else ()
        going = None
        if self._masking is not None and terms:
            going = self._masking.join(header, tree, secure)
            work = replace(work, exchange=self._masking.repeat_exchange(header, tree, state))
            if work.exchange.round != header["round"]:  # another reply than in that round must have other noise
                content = f"{content} as in round {work.exchange.round}"
        noisy = self._tells_metrics(header)
        exact = self._run(header, replace(work, keep_outputs=noisy), hash_request(content, state))
        done = self._told(header, exact)
        if problem := self._allowed.find_reply_problem(header, make_reply_tree(done)):
            raise Refused(RefusalReason.MESSAGE, problem)
        if noisy and exact.outputs:
            done = self._measured(header["round"], hash_request(content, state), done, exact.outputs[0])
        fields = {**header, "asked": asked}
        if self._masking is None:
            return done, pack_result(done, fields)
        if going is None:
            return done, pack_result(drop_reply(done), fields)
        vector = self._masking.masked(going, secure, done, terms)
        return done, pack_masked_reply(vector, done, fields, going.attempt)

    def _run(self, header: Mapping[str, Any], work: ChunkTask, message: bytes) -> ChunkResult:
        """Return what was done, with what it has released in the ledger, also where it failed."""
        host = self._at(header)
        if self._budget is None:
            return host.run(work)
        counter = ReleaseCounter()
        host.noise, host.counter = self._budget.make_noise(message), counter
        try:
            return host.run(work)
        finally:
            self._budget.add_releases(self._ledger_name(header), counter)

    def _tells_metrics(self, header: Mapping[str, Any]) -> bool:
        """Return whether metrics with noise leave after the exchange of a message."""
        return self._allowed.discreet and self._allowed.tells(exchange_from_header(header))

    def _ledger_name(self, header: Mapping[str, Any]) -> str:
        """Return under which name the ledger counts what the exchange of a message releases of training rows.

        Models of evaluations replace each other at the site, so that those whose metrics stay there count as one.
        """
        if header["index"] >= 0:
            return str(header["sequence"])
        return metrics_of_round(header["round"]) if self._tells_metrics(header) else SITE_MODEL

    def _told(self, header: Mapping[str, Any], done: ChunkResult) -> ChunkResult:
        """What of it is told: of a private study no loss and no metric, which are kept here."""
        if not self._allowed.discreet:
            return done
        if found := done.metrics.get(self.client.id):
            place = {name: header[name] for name in ("round", "index", "measure")}
            loss = float(done.losses[0])
            line = {**place, "train_loss": loss if isfinite(loss) else None, "metrics": found}
            with (self._store.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return replace(done, losses=torch.full_like(done.losses, torch.nan), metrics={})

    def _measured(self, round_: int, message: bytes, done: ChunkResult, outputs: Outputs) -> ChunkResult:
        """With metrics that have noise; they are of the reply where this goes into a sum."""
        assert self._budget is not None
        found = self._budget.release_metrics(round_, message, outputs, self._info, self._scale)
        if self._masking is None:
            return replace(done, metrics={self.client.id: found})
        stacked = {name: torch.tensor([value], dtype=torch.float64) for name, value in found.items()}
        return replace(done, content={**done.content, MEASURED: stacked}, shapes=({},))

    def _needed(self, base: int, sequence: int) -> set[int]:
        """States that the server may still name: replies between ``base`` and ``sequence`` were not accepted."""
        stored = self._store.list_sequences()
        return {base, *[n for n in stored if n >= sequence], *[n for n in stored if n < base][-_OLDER:]}

    def _at(self, header: Mapping[str, Any]) -> LocalExecutor:
        """The host, which knows of the federation what the message says."""
        background = make_background(self.client, header, self._info)
        if self._host is None or self._host.background != background:
            self._host = LocalExecutor([self.client], background, self.initialiser, self.plan)
            if self._allowed.discreet:
                self._host.on_metric_error = self._note_metric_error
        return self._host

    def _note_metric_error(self, error: Exception) -> None:
        """Say at the site that exact metrics, which stay there, failed; a failed reply could tell of its test rows."""
        kind = type(error.__cause__ or error).__name__  # its words may say something of the rows
        self._store.notes.append(f"exact metrics cannot be computed here and are left out ({kind})")


def hash_request(content: str, state: Mapping[str, Any] | None) -> bytes:
    """Return the SHA-256 of a request, which covers the content of the message and the state that the site starts from.

    Args:
        content: what is asked (:func:`describe_request`).
        state: the state that the site starts from; ``None`` for the initial one.
    """
    digest = hashlib.sha256(content.encode())
    digest.update(b"" if state is None else hashlib.sha256(encode(state)).digest())
    return digest.digest()


def describe_request(header: Mapping[str, Any], data: bytes) -> str:
    """Names what is asked, whatever states the server wants kept."""
    asked = {name: value for name, value in header.items() if name not in ("keep", "secure")}
    body = unframe(data)[1]
    return f"{header['program']} {header['measure']} {hashlib.sha256(frame(asked, body)).hexdigest()}"


def make_background(client: Client, header: Mapping[str, Any], info: FederationInfo) -> Background:
    """What a site's client knows of the federation: ``info``, and what the server's message says anew."""
    ids = (client.id, *["another"] * (header["clients"] - 1))  # how many there are, and not who
    info = replace(info, ids=ids, num_domains=header["domains"])
    return Background(info, (client.input_shape,), tuple(header["trained"]), None)


def load_model_message(path: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Header and tree of the last message by which the site in ``path`` has made its own model, and what names it.

    Raises:
        PerfedError: there is none yet.
    """
    try:
        data = (path / MODEL).read_bytes()
        header, tree = unpack(data)
        if header.get("run") != path.name:
            raise PerfedError(f"it is of run '{header.get('run')}'")
        return header, tree, describe_request(header, data)
    except PerfedError as error:
        raise PerfedError(f"{path / MODEL} is damaged ({error})") from None
    except FileNotFoundError:
        others = [made.parent.name for made in sorted(path.parent.glob(f"*/{MODEL}"))]
        earlier = f"; an earlier run's: --run {' or '.join(others)}" if others else ""
        raise PerfedError(f"{path}: no model has been made yet; it is when the run is evaluated{earlier}") from None
