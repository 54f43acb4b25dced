"""Names that tie the engine to what runs in the engine core's process; importing them imports no vLLM."""

BACKEND = "slime_like"
"""Our weight-transfer backend in vLLM's registry."""

WORKER_EXTENSION = "rollout.vllm.worker.WorkerExtension"
"""Import path of the class vLLM mixes into its worker."""

BURST_SCHEDULER = "rollout.vllm.scheduler.BurstScheduler"
"""Import path of the class with which vLLM schedules on a CPU."""
