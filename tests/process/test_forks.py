"""What the server of forks imports leaves CUDA alone: else no fork of it could use a device."""

from tests.process.conftest import python

_PROGRAM = """
import importlib, torch
counted, asked = [], []
torch._C._cuda_getDeviceCount = lambda: counted.append(1) or 1  # which initialises the driver
torch._C._cuda_getCurrentRawStream = None  # imported where torch has CUDA
torch.cuda._device_count_nvml = lambda: 1
is_available = torch.cuda.is_available
torch.cuda.is_available = lambda: asked.append(1) or is_available()
from tests.support.forks import PRELOADED
for name in PRELOADED:
    importlib.import_module(name)
print(len(asked) > 0, len(counted), torch.cuda.is_initialized())
"""


def test_modules_of_the_server_do_not_initialise_cuda() -> None:
    """As on a machine with one device; some of them ask whether there is one."""
    assert python(_PROGRAM).splitlines()[-1] == "True 0 False"
