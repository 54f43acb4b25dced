"""A process group of one sender and its receivers, over gloo or NCCL, and the store through which they meet."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.system.network import listen

GLOO, NCCL = "gloo", "nccl"
_LOOK_EVERY_S = 0.0005
_WATCHDOG_AFTER = timedelta(days=1)
_ASK_EVERY_S = 0.25
"""Time between a waiting receiver's checks for a broken group. Gloo doesn't report it to every member."""


@dataclass(slots=True)
class BroadcastGroup:
    """A process group. The first use forms it, which waits for all members.

    Attributes:
        own: address of the interface that this member listens on.
        host, port: the sender's store.
        key: prefix of its keys' names.
    """

    backend: str
    own: str
    host: str
    port: int
    key: str
    generation: int
    rank: int
    size: int
    timeout_s: float
    _group: Any = None

    def broadcast(self, data: Tensor, is_broken: Callable[[], bool] = lambda: False) -> None:
        """Copy rank 0's ``data`` into every other member's ``data``; return when it has arrived.

        Raises:
            RuntimeError, TimeoutError: a member was lost, ``is_broken`` returned true, or time ran out.
        """
        timeout = timedelta(seconds=self.timeout_s)
        try:
            if data.is_cuda:
                torch.cuda.set_device(data.device)  # for this thread
            if self._group is None:
                self._group = self._form(timeout)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
            work = self._group.broadcast([data], options)
            _wait_completed(work, self.timeout_s, is_broken)
            work.wait(timeout)  # raises the error, if any
            if self.backend == NCCL:
                torch.cuda.current_stream().synchronize()  # ``wait`` blocks only a stream, not this thread
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End running operations and close connections. Otherwise NCCL's kernel would wait on the device forever."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _form(self, timeout: timedelta) -> Any:
        # A separate connection, because waiting for the others must not block other users of the store.
        store = join_store(self.host, self.port, self.key, self.timeout_s)
        own_part = dist.PrefixStore(f"group/{self.generation}", store)
        if self.backend == NCCL:
            options = dist.ProcessGroupNCCL.Options()
            # The bound is ours: torch's watchdog would end the process (TORCH_NCCL_ASYNC_ERROR_HANDLING).
            options._timeout = timeout + _WATCHDOG_AFTER
            return dist.ProcessGroupNCCL(own_part, self.rank, self.size, options)
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack the options
        gloo_options = gloo._Options()
        gloo_options._devices = [gloo.create_device(hostname=self.own)]  # listen on this interface only
        gloo_options._timeout = timeout
        return gloo(own_part, self.rank, self.size, gloo_options)


def _wait_completed(work: Any, timeout_s: float, is_broken: Callable[[], bool]) -> None:
    started = asked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - asked > _ASK_EVERY_S:
            asked = now
            if is_broken():
                raise RuntimeError("the sender has given up this group")
        if now - started > timeout_s:
            raise TimeoutError("the broadcast did not end")
        time.sleep(_LOOK_EVERY_S)


def serve_store(address: str, key: str, timeout_s: float) -> tuple[dist.Store, int]:
    """Return a store and its port. A stranger can list its keys, but can't take a place by guessing names."""
    with listen(address, 0) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # By default, the store would listen on every interface of the machine.
            master_listen_fd=listener.detach(),
        )
    return dist.PrefixStore(key, store), port


def join_store(host: str, port: int, key: str, timeout_s: float) -> dist.Store:
    try:
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(key, store)
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"no sender listens on {host}:{port} ({one_line(error)}): the sender has ended, or the network between "
            "engine and trainer is closed",
            code="no-sender",
            who="weight sync",
        ) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
