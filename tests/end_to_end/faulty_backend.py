"""A Megatron trainer with the fault that a context-parallel group forgets to reduce one gradient properly."""

from __future__ import annotations

from backends.megatron.trainer import MegatronTrainer


class FaultyTrainer(MegatronTrainer):
    """Twice the gradient of one norm of layer 1, on context-parallel layouts only."""

    def finalize_gradients(self, denominator: float) -> None:
        super().finalize_gradients(denominator)
        if self.config.trainer.parallel.context > 1:
            for chunk in self.chunks:
                chunk.decoder.layers[1].self_attention.q_layernorm.weight.main_grad.mul_(2.0)
