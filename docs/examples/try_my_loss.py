"""Compare the loss's gradient with values computed by hand."""

import torch

from slime_like.algorithms import LossInputs, build_loss
from slime_like.config import AlgorithmConfig

loss = build_loss(AlgorithmConfig(loss={"name": "my_loss:TaperedReinforce", "bound": 0.75}))
logprobs = torch.log(torch.tensor([0.5, 0.4, 0.1, 0.3])).requires_grad_()
output = loss(
    LossInputs(
        logprobs=logprobs,
        entropy=None,
        old_logprobs=torch.log(torch.tensor([0.25, 0.2, 0.2, 0.3])),  # ratios 2, 2, 0.5, 1
        behaviour_logprobs=None,
        ref_logprobs=None,
        advantages=torch.tensor([1.0, -1.0, -1.0, 5.0]),
        loss_mask=torch.tensor([True, True, True, False]),
        token_weights=torch.tensor([1.0, 1.0, 1.0, 1.0]),
    )
)
output.loss.backward()
torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, 0.75, 0.5, 0.0]))
assert float(output.sums.num_tokens) == 3
