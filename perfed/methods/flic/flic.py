"""FLIC: clients with different feature spaces, aligned with shared Gaussian anchors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perfed import rng
from perfed.errors import PerfedError
from perfed.maths.aggregate import Average, masked_mean
from perfed.maths.divergence import sample_w2
from perfed.method.exchange import Clients, FederationInfo, ParameterSet, Replies, Reply, ServerState
from perfed.method.registry import register
from perfed.method.term import Term, register_term
from perfed.methods.flic.class_batches import ClassMembers, class_members, class_slots
from perfed.methods.flic.fast_w2 import gaussian_w2_sets
from perfed.methods.flic.hetfedrep import HetFedRep
from perfed.model.chain import Model, stage_of
from perfed.model.placement import PERSONAL, SENT, Placement
from perfed.training.cohort import Cohort
from perfed.training.early_stopping import best_epochs, hold_out
from perfed.training.step import Penalty, Step

EMBEDDING = "embedding"
_DRAW_BYTES = 16 << 20


@register_term
class Anchors(Term):
    """FLIC's term: each class has a Gaussian anchor in the latent space (Rakotomamonjy et al. 2024, eq. 2-5).

    Adds ``lambda1 sum_c W2^2(anchor_c, embedded samples of class c) + lambda2 sum_c mean_j l(c, g[Z_cj])`` with
    ``Z_cj ~ anchor_c`` to the local loss, c running over the classes of the mini-batch. Means are learnt by one Adam
    step per round; the covariance is ``anchor_scale`` times the identity and stays.
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
    send_all: bool = Field(False, description="send the anchors of all classes, unchanged where a client holds none")

    def sets(self) -> dict[str, ParameterSet]:
        """``anchors``: means ``(C, k)`` on the server."""
        return {"anchors": ParameterSet("server", init=self._initial)}

    def _initial(self, info: FederationInfo, key: Tensor) -> dict[str, Tensor]:
        if info.num_classes is None:
            raise PerfedError("the anchors term needs class labels; these targets are values (regression)")
        if len(info.latent_shape) != 1:
            raise PerfedError(f"the anchors term needs an embedding into vectors, not shape {info.latent_shape}")
        means = rng.normal(key, info.num_classes * info.latent_shape[0], info.dtype)
        return {"mean": self.anchor_std * means.view(info.num_classes, -1)}

    # Server ------------------------------------------------------------------------------------------------

    def prepare(self, server: ServerState, clients: Clients) -> None:
        """Pre-train every client's embedding on the alignment alone (Algorithm 1, line 2)."""
        if self.pretrain_epochs != 0:
            clients.run(self.pretrain, anchors=server.anchors)

    def payload(self, server: ServerState) -> dict[str, Any]:
        """The anchors' means, the same for all clients."""
        return {"mean": server.anchors["mean"]}

    def absorb(self, server: ServerState, replies: Replies, content: Mapping[str, Any]) -> None:
        """Mean of each anchor over the clients of the round that hold the class; others keep their place."""
        server.anchors = {"mean": masked_mean(content["mean"], content["weight"], server.anchors["mean"])}

    def finish(self, server: ServerState, clients: Clients) -> None:
        """Re-alignment of all embeddings to the new anchors, as in the authors' program."""
        if self.realign_epochs:
            clients.run(self.realign, anchors=server.anchors)

    # Clients -----------------------------------------------------------------------------------------------

    def pretrain(self, cohort: Cohort, anchors: Mapping[str, Tensor]) -> Reply:
        """Alignment alone, for a fixed number of epochs or for the number that held-out samples ask for."""
        _check_embedding(cohort)
        loss = self.alignment(cohort, anchors["mean"])
        if self.pretrain_epochs == "validated":
            epochs: Any = self.validated_epochs(cohort, anchors["mean"], loss)
        else:
            epochs = self.pretrain_epochs
        cohort.fit(EMBEDDING, epochs=epochs, loss=loss, samples=cohort.samples().in_batches(self.pretrain_batch_size))
        return Reply()

    def validated_epochs(self, cohort: Cohort, means: Tensor, loss: Penalty) -> Any:
        """Epochs after which held-out samples of each client lie closest to the anchors of their classes."""
        kept, held = hold_out(cohort)
        trial = {name: tensor.clone() for name, tensor in cohort.model.items() if stage_of(name) == EMBEDDING}

        def train(epochs: int) -> None:
            cohort.fit(
                EMBEDDING,
                epochs=epochs,
                params=trial,
                samples=kept.in_batches(self.pretrain_batch_size),
                loss=loss,
            )

        def score() -> Tensor:
            total = held.x.new_zeros(cohort.n)
            for x, index, valid in cohort.windows(held):
                z = cohort.forward(x, stages=(EMBEDDING,), params=trial)
                target = means.gather(1, held.y[index][:, :, None].expand(-1, -1, z.shape[2]))
                total += ((z - target).square().sum(2) * valid).sum(1)
            return total / torch.from_numpy(held.counts).to(total)

        with cohort.rehearsal():
            return best_epochs(train, score, self.pretrain_max_epochs)

    def realign(self, cohort: Cohort, anchors: Mapping[str, Tensor]) -> Reply:
        """A few epochs of alignment alone."""
        _check_embedding(cohort)
        loss = self.alignment(cohort, anchors["mean"])
        samples = cohort.samples().in_batches(self.pretrain_batch_size)
        cohort.fit(EMBEDDING, epochs=self.realign_epochs, loss=loss, samples=samples)
        return Reply()

    def penalty(self, cohort: Cohort, payload: Mapping[str, Any]) -> Penalty:
        """``lambda1`` and ``lambda2`` terms, each where it has a gradient."""
        means = payload["mean"]
        align = self.alignment(cohort, means)

        def value(step: Step) -> Tensor:
            parts = []
            if self.lambda1 and EMBEDDING in step.trained:
                parts.append(self.lambda1 * align(step))
            if self.lambda2 and step.trained - {EMBEDDING}:
                parts.append(self.lambda2 * self._calibration(step, means, cohort.num_classes or 0))
            return sum(parts[1:], parts[0]) if parts else step.weight.new_zeros(step.weight.shape[0])

        return value

    def alignment(self, cohort: Cohort, means: Tensor) -> Penalty:
        """``sum_c W2^2(anchor_c, N(m_c, S_c))`` of each client's mini-batch; ``means`` is ``(n, C, k)``."""
        std = self.anchor_scale**0.5

        def value(step: Step) -> Tensor:
            members = _members(step, cohort.num_classes or 0)
            z = step.output(EMBEDDING).flatten(0, 1)
            target = step.of(means).flatten(0, 1).index_select(0, members.entry)
            if self.w2 == "closed-form":
                distance = gaussian_w2_sets(z, members.sets, target, std)
            else:
                rows = z[members.rows[:, : members.counts[0]]]
                noise = _noise(step, members, "two-sample", rows.shape[1], z)
                distance = sample_w2(rows, target[:, None] + std * noise, members.counts.tolist())
            return z.new_zeros(len(step.rows)).index_add(0, members.client, distance)

        return value

    def _calibration(self, step: Step, means: Tensor, num_classes: int) -> Tensor:
        """``sum_c mean_j l(c, g[Z_cj])`` over the classes of the mini-batch."""
        draws: _Draws = step.block.cached("draws", lambda: _Draws(step, step.of(means), num_classes, self))
        z, labels, weight = draws.at(step)
        logits = step.after(EMBEDDING, z)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        return (losses.view(weight.shape) * weight).sum(1)

    def after(self, cohort: Cohort, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Step on the anchors' means through the moments of the updated embedding (Algorithm S2, step 3).

        Uses the *received* shared parameters, as the body's step does.
        """
        mean = payload["mean"]
        held = cohort.class_counts > 0
        centres = cohort.class_means(EMBEDDING)
        moved = mean.clone()
        first, second = torch.zeros_like(moved), torch.zeros_like(moved)
        steps = torch.ones(cohort.n) if self.anchor_steps == "once" else cohort.steps_done
        for count in range(1, int(steps.max()) + 1):
            gradient = self.anchor_gradient(cohort, moved, centres, held, count)
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            update = (first / (1 - 0.9**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)
            moved -= self.anchor_lr * update * (steps >= count).to(update)[:, None, None]
        moved = torch.where(held[:, :, None], moved, mean)
        weight = (torch.ones_like(held) if self.send_all else held).to(moved)
        if self.anchor_average == "samples":
            weight = weight * cohort.num_samples[:, None]
        return {"mean": moved, "weight": weight}

    def anchor_gradient(self, cohort: Cohort, mean: Tensor, centres: Tensor, held: Tensor, count: int) -> Tensor:
        """Gradient in the means ``(n, C, k)`` with the samples of step ``count``; 0 where a client holds none."""
        gradient = 2 * self.lambda1 * (mean - centres)
        if self.lambda2:
            n, classes, k = mean.shape
            keys = cohort.key("anchor step", count)
            noise = rng.normal(keys, classes * self.anchor_samples * k, mean.dtype).view(n, classes, -1, k)
            v = mean.detach().clone().requires_grad_(True)
            z = (v[:, :, None] + self.anchor_scale**0.5 * noise).flatten(1, 2)
            logits = cohort.after(EMBEDDING, z, params=cohort.received, turn=count)
            labels = torch.arange(classes, device=z.device).repeat_interleave(self.anchor_samples).repeat(n)
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            (found,) = torch.autograd.grad(losses / self.anchor_samples, v)
            gradient = gradient + self.lambda2 * found
        return torch.where(held[:, :, None], gradient, 0.0)


def _check_embedding(cohort: Cohort) -> None:
    way = 'give the model an embedding and set placement = {"embedding": "personal"}'
    if not any(stage_of(name) == EMBEDDING for name in cohort.personal_parameters):
        raise PerfedError(f"the anchors term aligns personal embeddings, and this run has none; {way}")
    sent = [name for name, place in cohort.places.items() if stage_of(name) == EMBEDDING and place in SENT]
    if sent:
        raise PerfedError(f"the anchors term aligns personal embeddings, but '{sent[0]}' is shared; {way}")


def _members(step: Step, num_classes: int) -> ClassMembers:
    found: list[ClassMembers] = step.block.cached("classes", lambda: class_members(step.block, num_classes))
    return found[step.at]


def _noise(step: Step, members: ClassMembers, purpose: str, samples: int, like: Tensor) -> Tensor:
    """Standard normal samples per (client, class) pair of the mini-batch, ``(pairs, samples, k)``."""
    k = like.shape[-1]
    keys = rng.key(step.keys[members.client], purpose, members.label)
    return rng.normal(keys, samples * k, like.dtype).view(len(members.counts), samples, k)


class _Draws:
    """Samples of the anchors of each mini-batch's classes, made for as many steps at once as fit in memory."""

    def __init__(self, step: Step, means: Tensor, num_classes: int, term: Anchors) -> None:
        self.slots = class_slots(step.block, num_classes)
        self.means, self.term = means, term
        per_step = means.element_size() * means.shape[-1] * term.anchor_samples * self.slots.label[0].numel()
        self.room = max(1, _DRAW_BYTES // per_step)
        self.first = self.stop = 0

    def at(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Samples ``(clients, slots * J, k)``, their classes, flattened, and their weights ``(clients, slots * J)``."""
        if not self.first <= step.at < self.stop:
            self._make(step, step.at, min(step.at + self.room, len(self.slots.label)))
        at = step.at - self.first
        return self.z[at], self.labels[at], self.weight[at]

    def _make(self, step: Step, first: int, stop: int) -> None:
        label, samples, k = self.slots.label[first:stop], self.term.anchor_samples, self.means.shape[-1]
        keys = rng.key(step.block.keys[first:stop, :, None], "calibration", label)
        noise = rng.normal(keys, samples * k, self.means.dtype).view(*label.shape, samples, k)
        client = torch.arange(label.shape[1], device=label.device)[:, None]
        centre = self.means.flatten(0, 1)[client * self.means.shape[1] + label]
        self.z = noise.mul_(self.term.anchor_scale**0.5).add_(centre[:, :, :, None]).flatten(2, 3)
        self.labels = label.repeat_interleave(samples, dim=2).flatten(1)
        held = self.slots.held[first:stop].to(self.means.dtype)
        self.weight = held.repeat_interleave(samples, dim=2) / samples
        self.first, self.stop = first, stop


@register("flic-hl", terms=(Anchors,))
class FLICHL(HetFedRep):
    """FLIC with a shared hidden layer: personal embedding and head, anchors (Rakotomamonjy et al. 2024)."""


@register("flic-class", terms=(Anchors,))
class FLICClass(HetFedRep):
    """FLIC with only a personal linear head on top of the aligned embeddings (Rakotomamonjy et al. 2024)."""

    default_placement: ClassVar[dict[str, Placement]] = {"embedding": PERSONAL, "head": PERSONAL}

    def adapt(self, model: Model) -> Model:
        """The experiment's model without its body."""
        return Model(**{stage: factory for stage, factory in model.factories.items() if stage != "body"})
