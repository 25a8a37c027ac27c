"""A site in a run, which answers the messages of the server one after the other and stores its client's state."""

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
"""The name of the file with the exact metrics that stay at the site, one line for each measurement."""
MODEL = "model.message"
"""The name of the file with the message of the last evaluation, from which the site derived its personal model."""
_MAX_OLDER_STATES = 6  # stored before the newest base, for a server that resumes from an older checkpoint


SITE_MODEL = "the site's model"
"""The name under which a ledger counts the fine-tuning of the personal model that stays at the site."""


def metrics_of_round(round_: int) -> str:
    """Return the name under which a ledger counts the noisy metrics of a round."""
    return f"metrics of round {round_}"


class Budget(Protocol):
    """The privacy budget of a site under ``[privacy]``, and the source of its noise."""

    def make_noise(self, message: bytes) -> Noise:
        """Return the source of the noise in the reply to a message.

        Args:
            message: The hash of the message, of 32 bytes (:func:`hash_request`).
        """

    def accept_message(self, exchange: str, message: bytes) -> None:
        """Record that the site answers a message of an exchange, before it uses its rows.

        Args:
            exchange: The name of the exchange in the ledger.
            message: The hash of the message.

        Raises:
            Refused: The site has accepted another message in this exchange.
        """

    def add_releases(self, exchange: str, counter: ReleaseCounter) -> None:
        """Record the releases of an exchange before its reply leaves; a repeated exchange is counted once.

        Raises:
            Refused: The releases would exceed the budget of the site.
        """

    def release_metrics(
        self, round_: int, message: bytes, outputs: Outputs, info: FederationInfo, scale: TargetScale | None
    ) -> dict[str, float]:
        """Return the metrics of a round with noise, after they were recorded in the ledger.

        Args:
            round_: The number of the round.
            message: The hash of the message that is answered, as in :meth:`make_noise`.
            outputs: The predictions of the site's model for its test rows, in the unit of the data.
            info: The facts about the federation.
            scale: The scale by which targets were standardised.

        Raises:
            Refused: The release would exceed the budget of the site.
        """


class Site:
    """One client at its site, which answers the messages of a run.

    Args:
        client: The client, with inputs in the dtype of the run.
        initialiser: The method, model and seed of the study.
        plan: The plan for the execution of tasks.
        info: The facts that the server has about the federation; each message updates some of them.
        scale: The scale by which targets were standardised.
        store: The store of the run on the site's disk.
        allowed: The list of all requests that the site answers.
        budget: The privacy budget; needed if ``allowed`` is discreet.
        study: The hash of the study, which is the same in all its runs; needed for masked replies.
        signer: The site's signing key; needed if the study has the public keys of the sites.

    Raises:
        PerfedError: A privacy budget is needed and missing.
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
        self._last_evaluation: tuple[str, bytes] | None = None  # hash of the message, and the reply
        secure = initialiser.secure
        self._masking = None if secure is None else Masking(secure, client.id, store.run, allowed, store, study, signer)

    def answer(self, data: bytes) -> bytes:
        """Return the reply to a message of the server; a message that is sent again gets the same reply.

        Raises:
            Refused: The bytes are not a message, the study does not contain the request, the state that the message
                starts from is missing, or the privacy budget is spent.
            ClientsDiverged: Training diverged.
        """
        with refuse_as(RefusalReason.MESSAGE):
            header, tree = unpack(data)
            if self._masking is not None and header.get("kind") in KINDS:
                return self._masking.answer(header, data)
            secure = header.pop("secure", None)
            if problem := self._allowed.find_request_problem(header, tree, self._store.run):
                raise PerfedError(problem)
        digest, sequence = hashlib.sha256(data).hexdigest(), header["sequence"]
        stored = self._store.load_reply(sequence)
        if stored is not None and unpack(stored)[0].get("asked") == digest:
            return stored
        if self._last_evaluation is not None and self._last_evaluation[0] == digest:
            return self._last_evaluation[1]
        content, lasting = describe_request(header, data), header["index"] >= 0
        with refuse_as(RefusalReason.STATE):
            state = self._store.load_state(header["base"])
        if self._budget is not None and (lasting or self._releases_metrics(header)):
            self._budget.accept_message(self._ledger_name(header), hash_request(content, state))
        if not (self._budget is not None and lasting) and not self._store.admit_request(sequence, content):
            raise Refused(
                RefusalReason.MESSAGE,
                f"the server's message: exchange {sequence} was already requested with {MAX_PAYLOADS} payloads; a "
                "server that resumes a run sends the same request again",
            )
        result, reply = self._work_on(header, tree, secure, digest, content, state)
        if result.states:
            masked = bool(self._allowed.get_sum_terms(exchange_from_header(header)))
            history = None if self._masking is None else self._masking.continue_history(header, tree, masked=masked)
            self._store.save_exchange(sequence, result.states[self.client.id], reply, history)
            self._store.remove_exchanges({*header["keep"], *self._list_needed_states(header["base"], sequence)})
        else:  # an evaluation, which leaves no state
            write_atomic(self._store.path / MODEL, data)
            self._last_evaluation = digest, reply
        return reply

    def _work_on(
        self,
        header: Mapping[str, Any],
        tree: Mapping[str, Any],
        secure: Any,
        digest: str,
        content: str,
        state: dict[str, Any] | None,
    ) -> tuple[ChunkResult, bytes]:
        """Do the task of a message; return its result and the reply that leaves the site.

        Args:
            header, tree: The header and the tree of the message.
            secure: The field ``secure`` of the header, for a secure sum.
            digest: The hash of the message.
            content: The description of the request (:func:`describe_request`).
            state: The state that the site starts from.
        """
        work = unpack_task(header, tree, self.client.id, state, self._scale)
        terms = self._allowed.get_sum_terms(work.exchange) if self._masking is not None else ()
        current_sum = None
        if self._masking is not None and terms:
            current_sum = self._masking.join_sum(header, tree, secure)
            work = replace(work, exchange=self._masking.repeat_exchange(header, tree, state))
            if work.exchange.round != header["round"]:  # a reply that differs from that of its round needs other noise
                content = f"{content} as in round {work.exchange.round}"
        noisy = self._releases_metrics(header)
        exact = self._run_task(header, replace(work, keep_outputs=noisy), hash_request(content, state))
        result = self._remove_private_metrics(header, exact)
        if problem := self._allowed.find_reply_problem(header, make_reply_tree(result)):
            raise Refused(RefusalReason.MESSAGE, problem)
        if noisy and exact.outputs:
            result = self._add_noisy_metrics(header["round"], hash_request(content, state), result, exact.outputs[0])
        fields = {**header, "asked": digest}
        if self._masking is None:
            return result, pack_result(result, fields)
        if current_sum is None:
            return result, pack_result(drop_reply(result), fields)
        vector = self._masking.mask_reply(current_sum, secure, result, terms)
        return result, pack_masked_reply(vector, result, fields, current_sum.attempt)

    def _run_task(self, header: Mapping[str, Any], work: ChunkTask, message: bytes) -> ChunkResult:
        """Return the result of a task; its releases are recorded in the ledger even if the task fails."""
        host = self._get_host(header)
        if self._budget is None:
            return host.run(work)
        counter = ReleaseCounter()
        host.noise, host.counter = self._budget.make_noise(message), counter
        try:
            return host.run(work)
        finally:
            self._budget.add_releases(self._ledger_name(header), counter)

    def _releases_metrics(self, header: Mapping[str, Any]) -> bool:
        """Return whether metrics with noise leave after the exchange of a message."""
        return self._allowed.discreet and self._allowed.releases_metrics(exchange_from_header(header))

    def _ledger_name(self, header: Mapping[str, Any]) -> str:
        """Return the name under which the ledger counts the releases of the exchange of a message.

        Each evaluation replaces the personal model of the site. Evaluations whose metrics stay at the site therefore
        share one name and count once.
        """
        if header["index"] >= 0:
            return str(header["sequence"])
        return metrics_of_round(header["round"]) if self._releases_metrics(header) else SITE_MODEL

    def _remove_private_metrics(self, header: Mapping[str, Any], result: ChunkResult) -> ChunkResult:
        """Return the result without losses and metrics if the study is private, and write the metrics to a file."""
        if not self._allowed.discreet:
            return result
        if metrics := result.metrics.get(self.client.id):
            fields = {name: header[name] for name in ("round", "index", "measure")}
            loss = float(result.losses[0])
            line = {**fields, "train_loss": loss if isfinite(loss) else None, "metrics": metrics}
            with (self._store.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return replace(result, losses=torch.full_like(result.losses, torch.nan), metrics={})

    def _add_noisy_metrics(self, round_: int, message: bytes, result: ChunkResult, outputs: Outputs) -> ChunkResult:
        """Return the result with noisy metrics, which are part of the reply itself if the reply is summed."""
        assert self._budget is not None
        metrics = self._budget.release_metrics(round_, message, outputs, self._info, self._scale)
        if self._masking is None:
            return replace(result, metrics={self.client.id: metrics})
        stacked = {name: torch.tensor([value], dtype=torch.float64) for name, value in metrics.items()}
        return replace(result, content={**result.content, MEASURED: stacked}, shapes=({},))

    def _list_needed_states(self, base: int, sequence: int) -> set[int]:
        """Return the numbers of the stored states that the server may still refer to.

        The server has not accepted the replies between ``base`` and ``sequence``, so their states are not needed.
        """
        stored = self._store.list_sequences()
        return {base, *[n for n in stored if n >= sequence], *[n for n in stored if n < base][-_MAX_OLDER_STATES:]}

    def _get_host(self, header: Mapping[str, Any]) -> LocalExecutor:
        """Return the executor of tasks, which is created again if a message changes the facts about the federation."""
        background = make_background(self.client, header, self._info)
        if self._host is None or self._host.background != background:
            self._host = LocalExecutor([self.client], background, self.initialiser, self.plan)
            if self._allowed.discreet:
                self._host.on_metric_error = self._note_metric_error
        return self._host

    def _note_metric_error(self, error: Exception) -> None:
        """Note that exact metrics failed; an error in the reply could reveal something of the test rows."""
        kind = type(error.__cause__ or error).__name__  # the text of the error may quote rows
        self._store.notes.append(f"exact metrics cannot be computed and are left out ({kind})")


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
    """Return the program, the split and a hash of a request, which do not depend on the states that must be kept."""
    fields = {name: value for name, value in header.items() if name not in ("keep", "secure")}
    body = unframe(data)[1]
    return f"{header['program']} {header['measure']} {hashlib.sha256(frame(fields, body)).hexdigest()}"


def make_background(client: Client, header: Mapping[str, Any], info: FederationInfo) -> Background:
    """Return the facts about the federation: those in ``info``, with the updates in the header of a message."""
    ids = (client.id, *["another"] * (header["clients"] - 1))  # only the number of clients matters
    info = replace(info, ids=ids, num_domains=header["domains"])
    return Background(info, (client.input_shape,), tuple(header["trained"]), None)


def load_model_message(path: Path) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the message from which a site last derived its personal model.

    Args:
        path: The folder of the run at the site.

    Returns:
        The header and the tree of the message, and the description of the request (:func:`describe_request`).

    Raises:
        PerfedError: There is no such message yet, or its file is damaged.
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
        runs = [file.parent.name for file in sorted(path.parent.glob(f"*/{MODEL}"))]
        hint = f"; for the model of an earlier run: --run {' or '.join(runs)}" if runs else ""
        raise PerfedError(f"{path}: there is no model yet; the first evaluation of the run creates it{hint}") from None
