"""Compare the time of a training step with TRL's GRPOTrainer: ``python -m benchmarks.step``.

Both systems train the same checkpoint on the prompts of one file, in the same order: 32 prompts with 8 samples each,
one optimizer update per step, float32, no KL term, the same reward function. Ours is ``slime-like train`` with Ray, an
engine and Megatron-core. TRL's is its trainer in one process with transformers' generation. They run in turns.
"""
