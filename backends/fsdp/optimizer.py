"""AdamW on the ranks' shards, the run's schedule, and clipping by the norm of the whole gradient."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends.fsdp.model import FsdpModel
from backends.fsdp.parallel import shard_of
from slime_like.config import OptimizerConfig


class FsdpOptimizer:
    """AdamW with decoupled weight decay (none on norms and biases), global clipping and the run's schedule.

    Everything is elementwise and needs only this rank's rows, except the norm, which needs the other ranks.
    """

    def __init__(self, settings: OptimizerConfig, total: int, model: FsdpModel, device: torch.device) -> None:
        self._settings, self._total = settings, total
        self._device = device
        self._parameters = {name: p for name, p in model.parameters_by_name().items() if p.requires_grad}
        # The shards' memory without their distributed type, because each operation on that type is slow.
        self._shards = {name: nn.Parameter(shard_of(p).detach()) for name, p in self._parameters.items()}
        groups: list[dict[str, Any]] = []
        for decays, decay in ((True, settings.weight_decay), (False, 0.0)):
            named = ((name, p.ndim > 1 and not name.endswith("bias")) for name, p in self._parameters.items())
            shards = [self._shards[name] for name, may_decay in named if may_decay == decays]
            groups.append({"params": shards, "weight_decay": decay, "decays": decays})
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self.updates = 0
        # Create AdamW's state before its first step, to save it or load into it.
        for shard in self._shards.values():
            self.adamw.state[shard] = {
                "step": torch.tensor(0.0, device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    @property
    def learning_rate(self) -> float:
        """Rate of the last step taken; 0 before the first."""
        return learning_rate(self._settings, self._total, self.updates) if self.updates else 0.0

    @property
    def moments(self) -> dict[str, dict[str, Tensor]]:
        """``exp_avg`` and ``exp_avg_sq`` of every parameter's shard."""
        state = self.adamw.state
        return {
            name: {kind: state[shard][kind] for kind in ("exp_avg", "exp_avg_sq")}
            for name, shard in self._shards.items()
        }

    def set_updates(self, updates: int) -> None:
        """Move to the position of a checkpoint."""
        self.updates = updates
        for state in self.adamw.state.values():
            state["step"].fill_(float(updates))

    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's rows of every gradient, in float32; zeros if no micro-batch reached a parameter."""
        found = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            found[name] = torch.zeros_like(self._shards[name]) if gradient is None else shard_of(gradient)
        return found

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply every gradient."""
        torch._foreach_mul_([g for g in self.gradients().values() if g.numel()], factor)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient. Every element is on exactly one rank. Collective over the world."""
        gradients = [gradient for gradient in self.gradients().values() if gradient.numel()]
        total = torch.zeros((), dtype=torch.float32, device=self._device)
        if gradients:
            total += torch.stack(torch._foreach_norm(gradients)).square().sum().to(self._device)
        dist.all_reduce(total)
        return float(total.sqrt())

    @torch.no_grad()
    def update(self, gradient_norm: float) -> None:
        """Clip by the measured norm and take one AdamW step at the schedule's next rate."""
        clip = self._settings.clip_grad
        if gradient_norm > clip:
            self.scale(clip / (gradient_norm + 1e-6))
        self.updates += 1
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate
            if group["decays"]:
                group["weight_decay"] = weight_decay(self._settings, self._total, self.updates)
        for name, gradient in self.gradients().items():
            self._shards[name].grad = gradient
        self.adamw.step()
        self.adamw.zero_grad()

    def zero_gradients(self) -> None:
        """Clear all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None


def learning_rate(settings: OptimizerConfig, total: int, update: int) -> float:
    """Return the rate of step ``update`` (from 1): linear warm-up from 0, then decay to ``min_lr`` at step ``total``.

    Step n of the warm-up runs at n / warmup_steps of the peak rate; the cosine is half a period.
    """
    warmup = settings.warmup_steps
    if warmup and update <= warmup:
        return settings.lr * update / warmup
    if settings.decay == "constant":
        return settings.lr
    end = max(total, warmup + 1)
    if update > end:
        return settings.min_lr
    passed = (update - warmup) / (end - warmup)
    remaining = 1.0 - passed if settings.decay == "linear" else 0.5 * (math.cos(math.pi * passed) + 1.0)
    return settings.min_lr + remaining * (settings.lr - settings.min_lr)


def weight_decay(settings: OptimizerConfig, total: int, update: int) -> float:
    """Return the weight decay of step ``update`` (from 1): constant, or linear towards ``final_weight_decay``."""
    if settings.final_weight_decay is None:
        return settings.weight_decay
    passed = min(1.0, update / total)
    return settings.weight_decay + passed * (settings.final_weight_decay - settings.weight_decay)
