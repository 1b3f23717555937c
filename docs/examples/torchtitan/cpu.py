"""torchtitan's command on a machine without an accelerator: ``torchrun … cpu.py --module … --config …``.

torchtitan asks for the kind of device when it is imported and takes CUDA where there is none; so it is told before.
"""

from types import SimpleNamespace

import torch
from torchtitan.tools import utils


class Processor:
    """What torchtitan asks of a device, of a CPU."""

    set_device = reset_peak_memory_stats = empty_cache = synchronize = staticmethod(lambda *device: None)
    current_device = staticmethod(lambda: "cpu")
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda device: "CPU")
    get_device_properties = staticmethod(lambda device: SimpleNamespace(name="CPU", total_memory=1))
    memory_stats = staticmethod(lambda device: {})


utils.device_type, utils.device_module = "cpu", Processor
torch.distributed.barrier = lambda **options: torch.distributed.all_reduce(torch.zeros(1))  # gloo's takes no device

from torchtitan.train import main  # noqa: E402

if __name__ == "__main__":
    main()
