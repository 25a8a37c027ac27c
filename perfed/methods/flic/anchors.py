"""FLIC's term: Gaussian anchors of classes, or of values on a line, in the latent space."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.data.labels import no_labels
from perfed.errors import PerfedError
from perfed.maths.aggregate import Average, masked_mean
from perfed.method.exchange import Clients, FederationInfo, ParameterSet, Replies, Reply, ServerState
from perfed.method.term import Term, register_term
from perfed.methods.flic.classes import ClassAnchors
from perfed.methods.flic.line import LineAnchors
from perfed.model.chain import EMBEDDING, stage_of
from perfed.model.placement import SENT
from perfed.settings import LISTED
from perfed.training.batches import IntArray
from perfed.training.cohort import Cohort
from perfed.training.early_stopping import best_epochs, hold_out
from perfed.training.step import Penalty, Step


@register_term
class Anchors(Term):
    """FLIC's term: each class has a Gaussian anchor in the latent space (Rakotomamonjy et al. 2024, eq. 2-5).

    Adds ``lambda1 sum_c W2^2(anchor_c, embedded samples of class c) + lambda2 sum_c mean_j l(c, g[Z_cj])`` with
    ``Z_cj ~ anchor_c`` to the local loss, c running over the classes of the mini-batch. Means are learnt by one Adam
    step per round; the covariance is ``anchor_scale`` times the identity and stays.
    For values (regression) the anchors are two points, and that of a response lies on the line between them
    (:class:`~perfed.methods.flic.line.LineAnchors`); clients then send the range of their responses before the first
    round. ``meta_classes`` gives groups of classes one anchor each, so that fewer travel.
    Departures from Algorithm S2: a client sends the anchors of its own classes only (which reveals which classes it
    holds; with ``send_all`` only to who compares them with those sent), and the server averages each anchor over the
    clients that hold the class.

    Example:
        >>> from perfed import build_method
        >>> build_method("hetfedrep", {"terms": ["anchors"], "lambda1": 0.01}).terms[0].lambda1
        0.01
    """

    name: ClassVar[str] = "anchors"

    lambda1: float = Field(1e-3, ge=0, description="weight of the alignment W2^2")
    lambda2: float = Field(1e-3, ge=0, description="weight of the classifier's loss on samples of the anchors")
    anchor_std: float = Field(10.0, gt=0, description="standard deviation of the anchors' initial means")
    anchor_scale: float = Field(1.0, gt=0, description="covariance of an anchor: this times the identity")
    anchor_samples: int = Field(4, ge=1, description="samples J per anchor and step in the lambda2 term")
    anchor_lr: float = Field(1e-3, ge=0, description="learning rate (Adam) of the anchors' means")
    anchor_steps: Literal["once", "per-batch"] = Field(
        "once",
        description="steps on the means per round: one (paper), or as many as mini-batches (authors' program)",
    )
    pretrain_epochs: Annotated[int, Field(ge=0)] | Literal["validated"] = Field(
        "validated",
        description="epochs of alignment before round 1; 'validated': each client stops on held-out data",
    )
    pretrain_max_epochs: int = Field(100, ge=1, description="most epochs that 'validated' tries")
    pretrain_batch_size: int = Field(10, ge=1, description="mini-batch of the pre-training")
    realign_epochs: int = Field(
        0, ge=0, description="alignment epochs of all clients after each round (authors' program)"
    )
    anchor_average: Average = "uniform"
    w2: Literal["closed-form", "two-sample"] = Field(
        "closed-form",
        description="W2 against the anchor itself (paper), or against samples of it (authors' program)",
    )
    meta_classes: Annotated[tuple[Annotated[tuple[int, ...], LISTED], ...], LISTED] = Field(
        (), description="groups of classes, by number, that have one anchor each; none: every class has its own"
    )
    send_all: bool = Field(False, description="send the anchors of all classes, unchanged where a client holds none")

    def sets(self) -> dict[str, ParameterSet]:
        """``anchors``: means ``(C, k)`` on the server; of a line two, and the range of the responses."""
        return {"anchors": ParameterSet("server", init=self._initial)}

    def _initial(self, info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
        if info.task == "survival":
            raise no_labels("the anchors term needs values or", info.task)
        if len(info.latent_shape) != 1:
            raise PerfedError(f"the anchors term needs an embedding into vectors, not shape {info.latent_shape}")
        entries = 2 if info.num_classes is None else len(self._groups(info.num_classes)) or info.num_classes
        means = self.anchor_std * rng.normal(key, entries * info.latent_shape[0], info.dtype).view(entries, -1)
        if info.num_classes is not None:
            return {"mean": means}
        for name in ("meta_classes", "w2"):
            if name in self.model_fields_set and getattr(self, name) not in ((), "closed-form"):
                raise PerfedError(f"{name} is for class labels; these targets are values (regression)")
        return {"mean": means, "range": torch.tensor([0.0, 1.0], dtype=info.dtype)}

    def _groups(self, num_classes: int) -> tuple[tuple[int, ...], ...]:
        """The meta-classes.

        Raises:
            PerfedError: a class is in none of them, or in two.
        """
        if self.meta_classes and sorted(sum(self.meta_classes, ())) != list(range(num_classes)):
            raise PerfedError(f"meta_classes: each of the classes 0 to {num_classes - 1} must be in one group")
        return self.meta_classes

    def anchors(self, cohort: Cohort, received: Mapping[str, Tensor]) -> ClassAnchors | LineAnchors:
        """What the anchors are of, for clients that ``received`` them."""
        if cohort.num_classes is None:
            return LineAnchors(received["range"], self.anchor_scale, self.anchor_samples)
        groups = self._groups(cohort.num_classes)
        entry = torch.zeros(cohort.num_classes, dtype=torch.int64, device=cohort.device)
        for number, members in enumerate(groups):
            entry[list(members)] = number
        entries = len(groups) or cohort.num_classes
        return ClassAnchors(entry if groups else None, entries, self.anchor_scale, self.anchor_samples, self.w2)

    # Server ------------------------------------------------------------------------------------------------

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Pre-train every client's embedding on the alignment alone (Algorithm 1, line 2)."""
        if clients.info.num_classes is None:
            found = clients.run(self.extent)
            low, high = found.low.min(), found.high.max()
            if low == high:
                raise PerfedError("the anchors of values need responses that differ; all clients have the same one")
            server.anchors = {**server.anchors, "range": torch.stack([low, high])}
        if self.pretrain_epochs != 0:
            clients.run(self.pretrain, anchors=server.anchors)

    def payload(self, server: ServerState) -> dict[str, Any]:
        """The anchors' means, the same for all clients, and of a line the range of the responses."""
        return dict(server.anchors)

    def absorb(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Mean of each anchor over the clients of the round that hold the class; others keep their place."""
        moved = masked_mean(content["mean"], content["weight"], server.anchors["mean"])
        server.anchors = {**server.anchors, "mean": moved}

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Re-alignment of all embeddings to the new anchors, as in the authors' program."""
        if self.realign_epochs:
            clients.run(self.realign, anchors=server.anchors)

    # Clients -----------------------------------------------------------------------------------------------

    def extent(self, cohort: Cohort) -> Reply:
        """The least and the largest response of each client, ``(n,)``.

        Raises:
            PerfedError: several values per sample.
        """
        samples = cohort.samples()
        if samples.y.numel() != len(samples.y):
            raise PerfedError(f"the anchors of values need one per sample, not shape {tuple(samples.y.shape[1:])}")
        parts = torch.split(samples.y.flatten(), samples.counts.tolist())
        return Reply(low=torch.stack([y.min() for y in parts]), high=torch.stack([y.max() for y in parts]))

    def pretrain(self, cohort: Cohort, anchors: Mapping[str, Tensor]) -> Reply:
        """Alignment alone, for a fixed number of epochs or for the number that held-out samples ask for."""
        _check_embedding(cohort)
        loss = self.alignment(cohort, anchors)
        epochs: Any = self.pretrain_epochs
        if epochs == "validated":
            epochs = self.validated_epochs(cohort, anchors, loss)
        cohort.fit(EMBEDDING, epochs=epochs, loss=loss, samples=cohort.samples().in_batches(self.pretrain_batch_size))
        return Reply()

    def validated_epochs(self, cohort: Cohort, received: Mapping[str, Tensor], loss: Penalty) -> IntArray:
        """Epochs after which held-out samples of each client lie closest to their anchors."""
        kept, held = hold_out(cohort)
        anchors = self.anchors(cohort, received)
        trial = {name: tensor.clone() for name, tensor in cohort.model.items() if stage_of(name) == EMBEDDING}

        def train(epochs: int) -> None:
            samples = kept.in_batches(self.pretrain_batch_size)
            cohort.fit(EMBEDDING, epochs=epochs, params=trial, samples=samples, loss=loss)

        def score() -> Tensor:
            total = held.x.new_zeros(cohort.n)
            for x, index, valid in cohort.windows(held):
                z = cohort.forward(x, stages=(EMBEDDING,), params=trial)
                total += (anchors.distances(received["mean"], z, held.y[index]) * valid).sum(1)
            return total / torch.from_numpy(held.counts).to(total)

        with cohort.rehearsal():
            return best_epochs(train, score, self.pretrain_max_epochs)

    def realign(self, cohort: Cohort, anchors: Mapping[str, Tensor]) -> Reply:
        """A few epochs of alignment alone."""
        _check_embedding(cohort)
        loss = self.alignment(cohort, anchors)
        samples = cohort.samples().in_batches(self.pretrain_batch_size)
        cohort.fit(EMBEDDING, epochs=self.realign_epochs, loss=loss, samples=samples)
        return Reply()

    def alignment(self, cohort: Cohort, received: Mapping[str, Tensor]) -> Penalty:
        """``sum_c W2^2(anchor_c, N(m_c, S_c))`` of each client's mini-batch, or its form for a line."""
        return self.anchors(cohort, received).alignment(received["mean"])

    def penalty(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """``lambda1`` and ``lambda2`` terms, each where it has a gradient."""
        means, anchors = payload["mean"], self.anchors(cohort, payload)
        align = anchors.alignment(means)

        def value(step: Step) -> Tensor:
            parts = []
            if self.lambda1 and EMBEDDING in step.trained:
                parts.append(self.lambda1 * align(step))
            if self.lambda2 and step.trained - {EMBEDDING}:
                parts.append(self.lambda2 * anchors.calibration(step, means))
            return sum(parts[1:], parts[0]) if parts else step.weight.new_zeros(step.weight.shape[0])

        return value

    def after(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Step on the anchors' means through the moments of the updated embedding (Algorithm S2, step 3).

        Uses the *received* shared parameters, as the body's step does.
        """
        mean, gradient_at = payload["mean"], self.anchor_gradient(cohort, payload)
        moved = mean.clone()
        first, second = torch.zeros_like(moved), torch.zeros_like(moved)
        steps = torch.ones(cohort.n) if self.anchor_steps == "once" else cohort.steps_done
        for count in range(1, int(steps.max()) + 1):
            gradient = gradient_at(moved, count)
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            update = (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)
            moved -= self.anchor_lr * update * (steps >= count).to(update)[:, None, None]
        held = self.anchors(cohort, payload).held(cohort)
        moved = torch.where(held[:, :, None], moved, mean)
        weight = (torch.ones_like(held) if self.send_all else held).to(moved)
        if self.anchor_average == "samples":
            weight = weight * cohort.num_samples[:, None]
        return {"mean": moved, "weight": weight}

    def anchor_gradient(self, cohort: Cohort, received: Mapping[str, Tensor]) -> Callable[[Tensor, int], Tensor]:
        """Gradient in the means ``(n, entries, k)`` with the samples of a step; 0 where a client holds none."""
        anchors = self.anchors(cohort, received)
        held, centres = anchors.held(cohort), anchors.centres(cohort)

        def at(means: Tensor, count: int) -> Tensor:
            gradient = self.lambda1 * anchors.pull(means, centres)
            if self.lambda2:
                gradient = gradient + self.lambda2 * anchors.push(cohort, means, count)
            return torch.where(held[:, :, None], gradient, 0.0)

        return at


def _check_embedding(cohort: Cohort) -> None:
    way = 'give the model an embedding and set placement = {"embedding": "personal"}'
    if not any(stage_of(name) == EMBEDDING for name in cohort.personal_parameters):
        raise PerfedError(f"the anchors term aligns personal embeddings, and this run has none; {way}")
    sent = [name for name, place in cohort.places.items() if stage_of(name) == EMBEDDING and place in SENT]
    if sent:
        raise PerfedError(f"the anchors term aligns personal embeddings, but '{sent[0]}' is shared; {way}")
