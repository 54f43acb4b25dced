"""A Megatron trainer with a fault: sequence-parallel ranks do not sum the gradient of a query norm."""

import importlib
from typing import Any

from backends.megatron.trainer import MegatronTrainer

# By name: the package has a function of the same name.
_finalization = importlib.import_module("megatron.core.distributed.finalize_model_grads")


class FaultyTrainer(MegatronTrainer):
    """Trainer whose tensor ranks keep their parts of the gradient of layer 1's query norm."""

    def finalize_gradients(self, denominator: float) -> None:
        correct = _finalization._allreduce_non_tensor_model_parallel_grads

        def reduce(model: Any, *arguments: Any) -> None:
            norm = self.chunks[0].decoder.layers[1].self_attention.q_layernorm.weight
            gradient = norm.main_grad.clone()
            correct(model, *arguments)
            norm.main_grad.copy_(gradient)

        _finalization._allreduce_non_tensor_model_parallel_grads = reduce
        try:
            super().finalize_gradients(denominator)
        finally:
            _finalization._allreduce_non_tensor_model_parallel_grads = correct
