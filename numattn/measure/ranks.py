"""The processes that share a sweep: this one alone, or those that ``torchrun`` started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = timedelta(days=7)  # for another rank, whose unit of work may take long


@dataclass(frozen=True)
class Team:
    """Who shares the work.

    What is exchanged are rows, which are on the processor, so it needs no more than gloo; under
    nccl torch moves them through the current GPU.

    Attributes:
        rank: The number of this process; 0 leads.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    @staticmethod
    def of_all() -> Team:
        """All processes of the default group of `torch.distributed`; alone without one."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return Team()
        return Team(dist.get_rank(), dist.get_world_size())

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def from_leader(self, compute: Callable[[], T]) -> T:
        """What `compute` returns in the leader; what it raises there is raised by all."""
        if self.size == 1:
            return compute()
        import torch.distributed as dist

        box: list[Any] = [None, None]
        if self.leads:
            try:
                box = [compute(), None]
            except Exception as error:  # the others must not wait for what never comes
                box = [None, error]
        dist.broadcast_object_list(box, 0)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def gather(self, mine: T) -> list[T]:
        """What every process has, in order of rank, in every process."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, mine)
        return every

    def share(self, work: Sequence[T], load: Callable[[T], float]) -> list[T]:
        """What falls to this process: the heaviest piece first to whoever has least to do."""
        loads = [0.0] * self.size
        mine = []
        for piece in sorted(work, key=load, reverse=True):
            to = loads.index(min(loads))
            loads[to] += load(piece)
            mine.extend([piece] if to == self.rank else [])
        return mine


@contextlib.contextmanager
def launched() -> Iterator[Team]:
    """The team that ``torchrun`` started, while this lasts; alone where it did not."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield Team()
        return
    dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield Team.of_all()
    finally:
        dist.destroy_process_group()
