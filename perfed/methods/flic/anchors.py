"""FLIC's extension: Gaussian anchors in the latent space, of classes or of responses on a line."""

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
from perfed.methods.flic.distances import Estimate, Measure, select_distance
from perfed.methods.flic.line import LineAnchors
from perfed.model.chain import EMBEDDING, stage_of
from perfed.model.placement import suggest_personal_embedding
from perfed.settings import LISTED, exclude_default
from perfed.training.batches import IntArray
from perfed.training.cohort import Cohort
from perfed.training.early_stopping import choose_epochs, hold_out
from perfed.training.step import Penalty, Step


def choose_pretraining_epochs(
    cohort: Cohort, anchors: ClassAnchors | LineAnchors, batch_size: int, limit: int
) -> IntArray:
    """Return, for each client, the epochs of alignment with the smallest distance of held-out samples, ``(n,)``.

    Args:
        cohort: the clients; their models do not change.
        anchors: the anchors to align with.
        batch_size: size of the mini-batches.
        limit: largest number of epochs.
    """
    training_samples, held_out = hold_out(cohort)
    training_samples, loss = anchors.mark_samples(cohort, training_samples).in_batches(batch_size), anchors.alignment()
    trial = {name: tensor.clone() for name, tensor in cohort.model.items() if stage_of(name) == EMBEDDING}

    def train(epochs: int) -> None:
        cohort.fit(EMBEDDING, epochs=epochs, params=trial, samples=training_samples, loss=loss)

    def score() -> Tensor:
        total = held_out.x.new_zeros(cohort.n)
        for x, index, valid in cohort.iterate_windows(held_out):
            z = cohort.forward(x, stages=(EMBEDDING,), params=trial)
            total += (anchors.distances(z, held_out.y[index]) * valid).sum(1)
        return total / torch.from_numpy(held_out.counts).to(total)

    with cohort.trial_fits():
        return choose_epochs(train, score, limit)


def check_embedding(info: FederationInfo) -> None:
    """Check that there is a personal embedding.

    Raises:
        PerfedError: the embedding is missing or shared; the message names the settings to add.
    """
    shared_names = [name for name in info.shared if stage_of(name) == EMBEDDING]
    has_personal = any(stage_of(name) == EMBEDDING for name in info.personal)
    remedy = f"add {suggest_personal_embedding(has_personal or bool(shared_names))}"
    if shared_names:
        raise PerfedError(
            f"the anchors extension aligns personal embeddings, but '{shared_names[0]}' is shared; {remedy}"
        )
    if not has_personal:
        raise PerfedError(f"the anchors extension aligns personal embeddings, but this run has none; {remedy}")


def run_adam(
    values: Mapping[str, Tensor],
    gradient_at: Callable[[Mapping[str, Tensor], int], Mapping[str, Tensor]],
    steps: Tensor,
    lr: float,
) -> dict[str, Tensor]:
    """Return the anchors' learnt values after steps of Adam, which starts with fresh moments.

    Args:
        values: the initial values, ``(n, entries, ...)`` each.
        gradient_at: function that returns the gradients at some values in step ``count``, which starts at 1.
        steps: number of steps of each client, ``(n,)``.
        lr: learning rate.
    """
    new_values = {name: tensor.clone() for name, tensor in values.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in new_values.items()} for _ in range(2))
    for count in range(1, int(steps.max()) + 1):
        for name, gradient in gradient_at(new_values, count).items():
            first_moment = first[name].mul_(0.9).add_(gradient, alpha=0.1)
            second_moment = second[name].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            update = (first_moment / (1 - 0.9**count)) / ((second_moment / (1 - 0.999**count)).sqrt() + 1e-8)
            new_values[name] -= lr * update * (steps >= count).to(update)[:, None, None]
    return new_values


@register_extension
class Anchors(Extension):
    """FLIC's extension: each class has a Gaussian anchor in the latent space (Rakotomamonjy et al. 2024, eq. 2-5).

    The extension adds ``lambda1 sum_c W2^2(anchor_c, embedded samples of class c) + lambda2 sum_c mean_j l(c,
    g[Z_cj])`` with ``Z_cj ~ anchor_c`` to the local loss, where c are the classes of the mini-batch. Means are learnt
    by one Adam step per round. The covariance is fixed, ``anchor_scale`` times the identity, or learnt in the same way
    through a factor L (``covariance``): clients send their factors, and the server averages them, as the paper does, or
    computes the barycentre of the clients' Gaussians (``covariance_average``). ``distance`` selects alternatives to
    W2^2. In regression the anchors are two points, and the anchor of a response lies on the line between them
    (:class:`~perfed.methods.flic.line.LineAnchors`); clients then send the range of their responses before the first
    round. With ``meta_classes`` each group of classes has one anchor, so that fewer are sent.

    Departures from Algorithm S2: a client sends only the anchors of its own classes, which reveals which classes it has
    (with ``send_all`` only by comparison with the anchors that it received), and the server averages each anchor over
    the clients with samples of the class.

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
    anchor_scale: float = Field(
        1.0, gt=0, description="the (initial) covariance of an anchor is this times the identity"
    )
    anchor_samples: int = Field(4, ge=1, description="samples J per anchor and step in the lambda2 term")
    anchor_lr: float = Field(1e-3, ge=0, description="learning rate (Adam) of the anchors")
    anchor_steps: Literal["once", "per-batch"] = Field(
        "once",
        description="steps on the anchors per round: one (paper), or one per mini-batch (authors' program)",
    )
    pretrain_epochs: Annotated[int, Field(ge=0)] | Literal["validated"] = Field(
        "validated",
        description="epochs of alignment before round 1; 'validated': each client stops on held-out data",
    )
    pretrain_max_epochs: int = Field(100, ge=1, description="largest number of epochs that 'validated' tries")
    pretrain_batch_size: int = Field(10, ge=1, description="mini-batch size of the pre-training")
    realign_epochs: int = Field(
        0, ge=0, description="alignment epochs of all clients after each round (authors' program)"
    )
    anchor_average: Average = "uniform"
    w2: Estimate = Field(
        "closed-form",
        description="W2 to the anchor itself (paper), or to samples of it (authors' program); anchors follow the "
        "expected gradient in both cases",
    )
    distance: Measure = Field(
        "w2",
        description="distance of samples and anchor: W2 between Gaussians, maximum mean discrepancy, exact optimal "
        "transport (extra perfed[ot]), or W2 of mixtures: several Gaussians per class",
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
        description="covariance of an anchor: fixed (the paper's experiments), or learnt, diagonal or full",
        exclude_if=exclude_default("fixed"),
    )
    covariance_average: Literal["factors", "barycentre"] = Field(
        "factors",
        description="learnt covariances at the server: mean of the factors (paper), or exact barycentre",
        exclude_if=exclude_default("factors"),
    )
    meta_classes: Annotated[tuple[Annotated[tuple[int, ...], LISTED], ...], LISTED] = Field(
        (), description="groups of classes, by number, that have one anchor each; none: one anchor per class"
    )
    send_all: bool = Field(
        False, description="send the anchors of all classes, unchanged ones for classes without samples"
    )

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        needs = {
            "w2": (self.distance == "w2" and self.covariance == "fixed") or "distance = 'w2' and covariance = 'fixed'",
            "modes": self.distance == "mixture" or "distance = 'mixture'",
            "ot_entropy": self.distance == "ot" or "distance = 'ot'",
            "covariance_average": self.covariance != "fixed" or "a covariance that is learnt",
        }
        for name, condition in needs.items():
            if condition is not True and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {getattr(self, name)!r} needs {condition}")
        return self

    def sets(self) -> dict[str, ParameterSet]:
        """Return ``anchors`` on the server: means ``(C, k)``, ``(C K, k)`` for mixtures, and factors of learnt
        covariances.

        In regression they are two means, and the range of the responses.
        """
        return {"anchors": ParameterSet("server", init=self._init_anchors)}

    def check(self, info: FederationInfo, moves_shared: bool) -> None:
        """Refuse survival data, and embeddings that are not personal or whose outputs are not vectors."""
        if info.task == "survival":
            raise no_labels("the anchors extension needs values or", info.task)
        check_embedding(info)
        if len(info.latent_shape) != 1:
            raise PerfedError(f"the anchors extension needs an embedding into vectors, not shape {info.latent_shape}")

    def _init_anchors(self, info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
        entries = 2
        if info.num_classes is not None:
            entries = (len(self._check_groups(info.num_classes)) or info.num_classes) * self._modes
        means = self.anchor_std * rng.normal(key, entries * info.latent_shape[0], info.dtype).view(entries, -1)
        if info.num_classes is not None:
            select_distance(self.distance, self.w2, self.ot_entropy)  # fails before the run if its package is missing
            return {"mean": means, **self._covariance.initial(means)}
        for name in ("meta_classes", "w2", "distance", "covariance"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise PerfedError(f"{name} is for class labels, but these targets are values (regression)")
        return {"mean": means, "range": torch.tensor([0.0, 1.0], dtype=info.dtype)}

    def _check_groups(self, num_classes: int) -> tuple[tuple[int, ...], ...]:
        """Return the meta-classes after checking them.

        Raises:
            PerfedError: a class is in no group, or in two.
        """
        if self.meta_classes and sorted(sum(self.meta_classes, ())) != list(range(num_classes)):
            raise PerfedError(f"meta_classes: each of the classes 0 to {num_classes - 1} must be in one group")
        return self.meta_classes

    def classes(self, num_classes: int) -> list[int]:
        """Return the class of each anchor; the first class of a group."""
        groups = self._check_groups(num_classes) or [(label,) for label in range(num_classes)]
        return [members[0] for members in groups for _ in range(self._modes)]

    @property
    def _modes(self) -> int:
        return self.modes if self.distance == "mixture" else 1

    @property
    def _covariance(self) -> Covariance:
        return Covariance(self.covariance, self.anchor_scale**0.5)

    def anchors(self, cohort: Cohort, received: Mapping[str, Tensor]) -> ClassAnchors | LineAnchors:
        """Return the received anchors in a form that clients can align with."""
        if cohort.num_classes is None:
            return LineAnchors(received, self.anchor_scale, self.anchor_samples)
        groups = self._check_groups(cohort.num_classes)
        entry = torch.zeros(cohort.num_classes, dtype=torch.int64, device=cohort.device)
        for number, members in enumerate(groups):
            entry[list(members)] = number
        return ClassAnchors(
            received,
            entry if groups else None,
            self._modes,
            self._covariance,
            self.anchor_samples,
            select_distance(self.distance, self.w2, self.ot_entropy),
        )

    # Server ------------------------------------------------------------------------------------------------

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Pre-train every client's embedding on the alignment only (Algorithm 1, line 2)."""
        if clients.info.num_classes is None:
            extents = clients.run(self.extent)
            low, high = extents.low.min(), extents.high.max()
            if low == high:
                raise PerfedError("the anchors of values need responses that differ; all clients have the same one")
            server.anchors = {**server.anchors, "range": torch.stack([low, high])}
        if self.pretrain_epochs != 0:
            clients.run(self.pretrain, anchors=server.anchors)

    def payload(self, server: ServerState) -> dict[str, Any]:
        """Return the anchors, which are the same for all clients, and in regression the range of the responses."""
        return dict(server.anchors)

    def on_replies(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Update each anchor to the mean, or barycentre, over the round's clients with samples of its class."""
        weight, current = content["weight"], server.anchors
        updated = {"mean": masked_mean(content["mean"], weight, current["mean"])}
        if "factor" in content:
            exact = self.covariance_average == "barycentre"
            updated["factor"] = self._covariance.mean(content["factor"], weight, current["factor"], exact=exact)
        server.anchors = {**current, **updated}

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Align all embeddings to the new anchors, as in the authors' program."""
        if self.realign_epochs:
            clients.run(self.realign, anchors=server.anchors)

    # Clients -----------------------------------------------------------------------------------------------

    def extent(self, cohort: Cohort) -> Reply:
        """Return the smallest and the largest response of each client, ``(n,)``.

        Raises:
            PerfedError: the targets have several values per sample.
        """
        samples = cohort.samples()
        if samples.y.numel() != len(samples.y):
            raise PerfedError(f"the anchors of values need one per sample, not shape {tuple(samples.y.shape[1:])}")
        parts = torch.split(samples.y.flatten(), samples.counts.tolist())
        return Reply(low=torch.stack([y.min() for y in parts]), high=torch.stack([y.max() for y in parts]))

    def pretrain(self, cohort: Cohort, anchors: Mapping[str, Tensor]) -> Reply:
        """Train the embedding on the alignment only, for a fixed number of epochs or one chosen on held-out samples."""
        received_anchors, epochs = self.anchors(cohort, anchors), self.pretrain_epochs
        if epochs == "validated":
            epochs_of_clients = choose_pretraining_epochs(
                cohort, received_anchors, self.pretrain_batch_size, self.pretrain_max_epochs
            )
        else:
            epochs_of_clients = np.full(cohort.n, epochs)
        samples = received_anchors.mark_samples(cohort, cohort.samples()).in_batches(self.pretrain_batch_size)
        cohort.fit(EMBEDDING, epochs=epochs_of_clients, loss=received_anchors.alignment(), samples=samples)
        return Reply()

    def realign(self, cohort: Cohort, anchors: Mapping[str, Tensor]) -> Reply:
        """Train the embedding on the alignment only, for ``realign_epochs``."""
        loss = self.alignment(cohort, anchors)
        samples = cohort.samples().in_batches(self.pretrain_batch_size)
        cohort.fit(EMBEDDING, epochs=self.realign_epochs, loss=loss, samples=samples)
        return Reply()

    def alignment(self, cohort: Cohort, received: Mapping[str, Tensor]) -> Penalty:
        """Return a penalty: the distance of each client's mini-batch from its anchors.

        By default it is ``sum_c W2^2(anchor_c, N(m_c, S_c))``.
        """
        return self.anchors(cohort, received).alignment()

    def loss(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """Return the ``lambda1`` and ``lambda2`` terms, each only in training that it has a gradient for."""
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
        """Return the anchors' means and factors after a step with the updated embedding (Algorithm S2, step 3).

        The step uses the *received* shared parameters, as the body's step does.
        """
        received = {name: payload[name] for name in ("mean", "factor") if name in payload}
        steps = torch.ones(cohort.n) if self.anchor_steps == "once" else cohort.steps_done
        updated = run_adam(received, self.anchor_gradient(cohort, payload), steps, self.anchor_lr)
        has_samples = self.anchors(cohort, payload).find_present_entries(cohort)
        weight = (torch.ones_like(has_samples) if self.send_all else has_samples).to(updated["mean"])
        if self.anchor_average == "samples":
            weight = weight * cohort.num_samples[:, None]
        return {name: torch.where(has_samples[:, :, None], updated[name], t) for name, t in received.items()} | {
            "weight": weight
        }

    def anchor_gradient(
        self, cohort: Cohort, received: Mapping[str, Tensor]
    ) -> Callable[[Mapping[str, Tensor], int], dict[str, Tensor]]:
        """Return a function that computes the gradient in the anchors' learnt values ``(n, entries, ...)`` in a step.

        The gradient is 0 for entries without samples at the client.
        """
        anchors = self.anchors(cohort, received)
        has_samples, pull = anchors.find_present_entries(cohort), anchors.pull(cohort)

        def compute_gradient(values: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
            gradients = {name: self.lambda1 * gradient for name, gradient in pull(values, count).items()}
            if self.lambda2:
                for name, gradient in anchors.push(cohort, values, count).items():
                    gradients[name] = gradients[name] + self.lambda2 * gradient
            return {name: torch.where(has_samples[:, :, None], gradient, 0.0) for name, gradient in gradients.items()}

        return compute_gradient
