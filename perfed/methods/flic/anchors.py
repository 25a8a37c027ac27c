"""FLIC's extension: Gaussian anchors of classes, or of values on a line, in the latent space."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from perfed import rng
from perfed.data.labels import no_labels
from perfed.errors import PerfedError
from perfed.maths.aggregate import Average, masked_mean
from perfed.method.declared import FederationInfo, ParameterSet
from perfed.method.disclosure import ANCHORS, CLASS_COUNTS, NONE, PRESENT_CLASSES, Disclosure
from perfed.method.exchange import Clients, Replies, Reply, ServerState
from perfed.method.extension import Extension, register_extension
from perfed.methods.flic.classes import ClassAnchors
from perfed.methods.flic.covariance import Covariance, Kind
from perfed.methods.flic.distances import Estimate, Measure, distance_for
from perfed.methods.flic.line import LineAnchors
from perfed.model.chain import EMBEDDING, stage_of
from perfed.model.placement import suggest_personal_embedding
from perfed.settings import LISTED, exclude_default
from perfed.training.batches import IntArray
from perfed.training.cohort import Cohort
from perfed.training.early_stopping import choose_epochs, hold_out
from perfed.training.step import Penalty, Step


def validated_epochs(cohort: Cohort, anchors: ClassAnchors | LineAnchors, batch_size: int, limit: int) -> IntArray:
    """Epochs of alignment after which held-out samples of each client lie closest to their anchors, ``(n,)``.

    Args:
        cohort: its model stays as it is.
        anchors: to align with.
        batch_size: of the mini-batches.
        limit: most epochs.
    """
    kept, held = hold_out(cohort)
    kept, loss = anchors.divided(cohort, kept).in_batches(batch_size), anchors.alignment()
    trial = {name: tensor.clone() for name, tensor in cohort.model.items() if stage_of(name) == EMBEDDING}

    def train(epochs: int) -> None:
        cohort.fit(EMBEDDING, epochs=epochs, params=trial, samples=kept, loss=loss)

    def score() -> Tensor:
        total = held.x.new_zeros(cohort.n)
        for x, index, valid in cohort.iterate_windows(held):
            z = cohort.forward(x, stages=(EMBEDDING,), params=trial)
            total += (anchors.distances(z, held.y[index]) * valid).sum(1)
        return total / torch.from_numpy(held.counts).to(total)

    with cohort.trial_fits():
        return choose_epochs(train, score, limit)


def check_embedding(info: FederationInfo) -> None:
    """What is aligned must be there, and personal.

    Raises:
        PerfedError: it is not; names the settings to add.
    """
    sent = [name for name in info.shared if stage_of(name) == EMBEDDING]
    own = any(stage_of(name) == EMBEDDING for name in info.personal)
    way = f"add {suggest_personal_embedding(own or bool(sent))}"
    if sent:
        raise PerfedError(f"the anchors extension aligns personal embeddings, but '{sent[0]}' is shared; {way}")
    if not own:
        raise PerfedError(f"the anchors extension aligns personal embeddings, and this run has none; {way}")


def descended(
    values: Mapping[str, Tensor],
    gradient_at: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]],
    steps: Tensor,
    lr: float,
) -> dict[str, Tensor]:
    """Adam, from fresh moments, on what is learnt of the anchors.

    Args:
        values: where it starts, ``(n, entries, ...)`` each.
        gradient_at: gradients at some values in step number ``count``, from 1.
        steps: of each client, ``(n,)``.
        lr: learning rate.
    """
    moved = {name: tensor.clone() for name, tensor in values.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in moved.items()} for _ in range(2))
    for count in range(1, int(steps.max()) + 1):
        for name, gradient in gradient_at(moved, count).items():
            one = first[name].mul_(0.9).add_(gradient, alpha=0.1)
            two = second[name].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            update = (one / (1 - 0.9**count)) / ((two / (1 - 0.999**count)).sqrt() + 1e-8)
            moved[name] -= lr * update * (steps >= count).to(update)[:, None, None]
    return moved


@register_extension
class Anchors(Extension):
    """FLIC's extension: each class has a Gaussian anchor in the latent space (Rakotomamonjy et al. 2024, eq. 2-5).

    Adds ``lambda1 sum_c W2^2(anchor_c, embedded samples of class c) + lambda2 sum_c mean_j l(c, g[Z_cj])`` with
    ``Z_cj ~ anchor_c`` to the local loss, c running over the classes of the mini-batch. Means are learnt by one Adam
    step per round; the covariance is ``anchor_scale`` times the identity and stays, or is learnt likewise through a
    factor L (``covariance``): clients send theirs, and the server averages factors, as the paper does, or takes the
    barycentre of the clients' Gaussians (``covariance_average``). ``distance`` has alternatives to W2^2.
    For values (regression) the anchors are two points, and that of a response lies on the line between them
    (:class:`~perfed.methods.flic.line.LineAnchors`); clients then send the range of their responses before the first
    round. ``meta_classes`` gives groups of classes one anchor each, so that fewer travel.
    Departures from Algorithm S2: a client sends the anchors of its own classes only (which reveals which classes it
    holds; with ``send_all`` only to who compares them with those sent), and the server averages each anchor over the
    clients that hold the class.

    Example:
        >>> from perfed import build_method
        >>> build_method("hetfedrep", {"extensions": ["anchors"], "lambda1": 0.01}).extensions[0].lambda1
        0.01
    """

    needs_mean: ClassVar[str] = "anchors are means and covariances over the clients' classes"
    disclosure: ClassVar[Disclosure | None] = Disclosure(
        {"mean": ANCHORS, "weight": PRESENT_CLASSES, "factor": NONE["second moments"]},
        counts=(CLASS_COUNTS,),
        per_round=lambda anchors: 1 + int(anchors.realign_epochs),
        before_rounds=lambda anchors: int(anchors.pretrain_epochs),
        absent=lambda anchors: {"factor"} if anchors.covariance == "fixed" else (),
    )
    name: ClassVar[str] = "anchors"

    lambda1: float = Field(1e-3, ge=0, description="weight of the alignment W2^2")
    lambda2: float = Field(1e-3, ge=0, description="weight of the classifier's loss on samples of the anchors")
    anchor_std: float = Field(10.0, gt=0, description="standard deviation of the anchors' initial means")
    anchor_scale: float = Field(1.0, gt=0, description="covariance of an anchor (at first): this times the identity")
    anchor_samples: int = Field(4, ge=1, description="samples J per anchor and step in the lambda2 term")
    anchor_lr: float = Field(1e-3, ge=0, description="learning rate (Adam) of the anchors")
    anchor_steps: Literal["once", "per-batch"] = Field(
        "once",
        description="steps on the anchors per round: one (paper), or as many as mini-batches (authors' program)",
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
    w2: Estimate = Field(
        "closed-form",
        description="W2 against the anchor itself (paper), or against samples of it (authors' program); anchors step "
        "along the expected gradient in both",
    )
    distance: Measure = Field(
        "w2",
        description="of samples and anchor: W2 between Gaussians, maximum mean discrepancy, exact optimal transport "
        "(extra perfed[ot]), or W2 of mixtures: several Gaussians per class",
        exclude_if=exclude_default("w2"),
    )
    modes: int = Field(2, ge=2, description="Gaussians per class of 'mixture'", exclude_if=exclude_default(2))
    ot_entropy: float = Field(
        0.0,
        ge=0,
        description="entropic regularisation of 'ot', in units of a squared distance; 0: none",
        exclude_if=exclude_default(0.0),
    )
    covariance: Kind = Field(
        "fixed",
        description="of an anchor: fixed (the paper's experiments), or learnt: its diagonal, or in full",
        exclude_if=exclude_default("fixed"),
    )
    covariance_average: Literal["factors", "barycentre"] = Field(
        "factors",
        description="learnt covariances at the server: mean of the factors (paper), or exact barycentre",
        exclude_if=exclude_default("factors"),
    )
    meta_classes: Annotated[tuple[Annotated[tuple[int, ...], LISTED], ...], LISTED] = Field(
        (), description="groups of classes, by number, that have one anchor each; none: every class has its own"
    )
    send_all: bool = Field(False, description="send the anchors of all classes, unchanged where a client holds none")

    @model_validator(mode="after")
    def _together(self) -> Self:
        needs = {
            "w2": (self.distance == "w2" and self.covariance == "fixed") or "distance = 'w2' and covariance = 'fixed'",
            "modes": self.distance == "mixture" or "distance = 'mixture'",
            "ot_entropy": self.distance == "ot" or "distance = 'ot'",
            "covariance_average": self.covariance != "fixed" or "a covariance that is learnt",
        }
        for name, met in needs.items():
            if met is not True and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {getattr(self, name)!r} needs {met}")
        return self

    def sets(self) -> dict[str, ParameterSet]:
        """``anchors`` on the server: means ``(C, k)``, of mixtures ``(C K, k)``, and the factors of learnt covariances.

        Of a line two means, and the range of the responses.
        """
        return {"anchors": ParameterSet("server", init=self._initial)}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse targets without labels or values, and embeddings that are not personal, or not into vectors."""
        if info.task == "survival":
            raise no_labels("the anchors extension needs values or", info.task)
        check_embedding(info)
        if len(info.latent_shape) != 1:
            raise PerfedError(f"the anchors extension needs an embedding into vectors, not shape {info.latent_shape}")

    def _initial(self, info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
        entries = 2
        if info.num_classes is not None:
            entries = (len(self._groups(info.num_classes)) or info.num_classes) * self._modes
        means = self.anchor_std * rng.normal(key, entries * info.latent_shape[0], info.dtype).view(entries, -1)
        if info.num_classes is not None:
            distance_for(self.distance, self.w2, self.ot_entropy)  # where its package is absent, nothing runs
            return {"mean": means, **self._covariance.initial(means)}
        for name in ("meta_classes", "w2", "distance", "covariance"):
            if getattr(self, name) != type(self).model_fields[name].default:
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

    def classes(self, num_classes: int) -> list[int]:
        """The class of each anchor; of a group's the first one."""
        groups = self._groups(num_classes) or [(label,) for label in range(num_classes)]
        return [members[0] for members in groups for _ in range(self._modes)]

    @property
    def _modes(self) -> int:
        return self.modes if self.distance == "mixture" else 1

    @property
    def _covariance(self) -> Covariance:
        return Covariance(self.covariance, self.anchor_scale**0.5)

    def anchors(self, cohort: Cohort, received: Mapping[str, Tensor]) -> ClassAnchors | LineAnchors:
        """What the anchors are of, for clients that ``received`` them."""
        if cohort.num_classes is None:
            return LineAnchors(received, self.anchor_scale, self.anchor_samples)
        groups = self._groups(cohort.num_classes)
        entry = torch.zeros(cohort.num_classes, dtype=torch.int64, device=cohort.device)
        for number, members in enumerate(groups):
            entry[list(members)] = number
        return ClassAnchors(
            received,
            entry if groups else None,
            self._modes,
            self._covariance,
            self.anchor_samples,
            distance_for(self.distance, self.w2, self.ot_entropy),
        )

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
        """The anchors, the same for all clients, and of a line the range of the responses."""
        return dict(server.anchors)

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Mean, or barycentre, of each anchor over the round's clients that hold the class; others stay as they are."""
        weight, kept = content["weight"], server.anchors
        moved = {"mean": masked_mean(content["mean"], weight, kept["mean"])}
        if "factor" in content:
            exact = self.covariance_average == "barycentre"
            moved["factor"] = self._covariance.mean(content["factor"], weight, kept["factor"], exact=exact)
        server.anchors = {**kept, **moved}

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
        found, epochs = self.anchors(cohort, anchors), self.pretrain_epochs
        if epochs == "validated":
            length = validated_epochs(cohort, found, self.pretrain_batch_size, self.pretrain_max_epochs)
        else:
            length = np.full(cohort.n, epochs)
        samples = found.divided(cohort, cohort.samples()).in_batches(self.pretrain_batch_size)
        cohort.fit(EMBEDDING, epochs=length, loss=found.alignment(), samples=samples)
        return Reply()

    def realign(self, cohort: Cohort, anchors: Mapping[str, Tensor]) -> Reply:
        """A few epochs of alignment alone."""
        loss = self.alignment(cohort, anchors)
        samples = cohort.samples().in_batches(self.pretrain_batch_size)
        cohort.fit(EMBEDDING, epochs=self.realign_epochs, loss=loss, samples=samples)
        return Reply()

    def alignment(self, cohort: Cohort, received: Mapping[str, Tensor]) -> Penalty:
        """Distance of each client's mini-batch from its anchors: by default ``sum_c W2^2(anchor_c, N(m_c, S_c))``."""
        return self.anchors(cohort, received).alignment()

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """``lambda1`` and ``lambda2`` terms, each where it has a gradient."""
        anchors = self.anchors(cohort, payload)
        align = anchors.alignment()

        def value(step: Step) -> Tensor:
            parts = []
            if self.lambda1 and EMBEDDING in step.trained:
                parts.append(self.lambda1 * align(step))
            if self.lambda2 and step.trained - {EMBEDDING}:
                parts.append(self.lambda2 * anchors.calibration(step))
            return sum(parts[1:], parts[0]) if parts else step.weight.new_zeros(step.weight.shape[0])

        return value

    def client_update(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Step on the anchors' means and learnt factors, by the updated embedding's samples (Algorithm S2, step 3).

        Uses the *received* shared parameters, as the body's step does.
        """
        sent = {name: payload[name] for name in ("mean", "factor") if name in payload}
        steps = torch.ones(cohort.n) if self.anchor_steps == "once" else cohort.steps_done
        moved = descended(sent, self.anchor_gradient(cohort, payload), steps, self.anchor_lr)
        held = self.anchors(cohort, payload).held(cohort)
        weight = (torch.ones_like(held) if self.send_all else held).to(moved["mean"])
        if self.anchor_average == "samples":
            weight = weight * cohort.num_samples[:, None]
        return {name: torch.where(held[:, :, None], moved[name], t) for name, t in sent.items()} | {"weight": weight}

    def anchor_gradient(
        self, cohort: Cohort, received: Mapping[str, Tensor]
    ) -> Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]:
        """Gradient in what is learnt of the anchors ``(n, entries, ...)`` with the samples of a step.

        0 where a client holds none.
        """
        anchors = self.anchors(cohort, received)
        held, pull = anchors.held(cohort), anchors.pull(cohort)

        def at(values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
            found = {name: self.lambda1 * gradient for name, gradient in pull(values, count).items()}
            if self.lambda2:
                for name, gradient in anchors.push(cohort, values, count).items():
                    found[name] = found[name] + self.lambda2 * gradient
            return {name: torch.where(held[:, :, None], gradient, 0.0) for name, gradient in found.items()}

        return at
