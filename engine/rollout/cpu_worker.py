"""vLLM's worker for CPUs, with shared memory of its own."""

import uuid
from pathlib import Path

import torch.distributed as dist
from vllm.v1.worker.cpu_worker import CPUWorker

SHARED_MEMORY = Path("/dev/shm")


class OwnMemoryCPUWorker(CPUWorker):
    """Ranks that share an engine reduce through shared memory, which vLLM names after what follows the last colon of its rendezvous address. Of
    the process group's own, `env://`, nothing does: two runs on one machine would use the same memory, and what a killed run left behind would
    keep the next from starting ("create shm in SHMManager failed. errno: 17")."""

    def init_device(self) -> None:
        """Names it by a number drawn for this run, and takes the names away again once every rank has opened it: a killed run leaves nothing."""
        drawn = [uuid.uuid4().hex]
        dist.broadcast_object_list(drawn)
        # Only its end is read: the process group is there already.
        self.distributed_init_method = f"env://:{drawn[0]}"
        super().init_device()
        for file in SHARED_MEMORY.glob(f"{drawn[0]}-*"):
            file.unlink(missing_ok=True)
