"""Names that tie the engine to its worker; importing them imports no vLLM."""

BACKEND = "slime_like"
"""Our weight-transfer backend in vLLM's registry."""

WORKER_EXTENSION = "rollout.vllm.worker.WorkerExtension"
"""Import path of the class vLLM mixes into its worker."""
