"""Experts that vLLM's routers choose, on a CPU. On CUDA, ``enable_return_routed_experts`` returns them."""

from typing import Any

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
from vllm.model_executor.layers.fused_moe import routed_experts_capturer as routers
from vllm.v1.core.sched.scheduler import Scheduler


class RoutesScheduler(Scheduler):
    """Scheduler that passes on the routes that ``record`` adds to the outputs of steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aux_output_connector = AuxOutputSchedulerConnector()


def record(worker: Any) -> None:
    """Add the routes of new tokens to the output of every step of the ``worker``.

    A step reads a request's whole context, or the token after it. When a preempted request is read again, only routes
    of its last token are new.
    """
    runner = worker.model_runner
    capturer = routers.RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
    capturer.device_buffer.fill_(-1)
    routers.bind_routed_experts_capturer(runner.model, capturer)
    execute, sample = runner.execute_model, runner.sample_tokens
    outputs: dict[str, AuxRequestOutput] = {}

    def executing(scheduled: Any, *arguments: Any, **options: Any) -> Any:
        outputs.clear()
        result, first = execute(scheduled, *arguments, **options), 0
        for index, request in enumerate(runner.input_batch.req_ids if scheduled.total_num_scheduled_tokens else ()):
            count = scheduled.num_scheduled_tokens[request]
            emitted = scheduled.aux_output_connector_metadata.requests[request]
            read = int(runner.input_batch.num_computed_tokens_cpu[index])
            rows = capturer.device_buffer[first + emitted - read : first + count].numpy().copy()
            outputs[request] = AuxRequestOutput(emitted, rows)
            first += count
        return result

    def sampling(*arguments: Any, **options: Any) -> Any:
        result = sample(*arguments, **options)
        result.aux_output_connector_output = dict(outputs)
        return result

    runner.execute_model, runner.sample_tokens = executing, sampling
