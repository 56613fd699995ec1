"""Residual traffic: how much memory the stream of a deep model moves, counted and measured.

Counts are in units of d numbers a token and sublayer, or in rows (one row: d numbers for every token). Published
schedules: Kimi Team 2026, arXiv 2603.15031, section 4 (their table of memory access); mHC: Xie et al. 2025,
arXiv 2512.24880. Letters: S sublayers, n streams, N blocks.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from reslab.residuals import ConnectionConfig, ResidualSettings, Stack
from reslab.residuals.depth_attention import AttnResOptions
from reslab.timing import Clock, large_buffer, read_bandwidth

__all__ = [
    "bandwidth",
    "hyper_connections",
    "of_connection",
    "standard",
    "stream_passes",
    "two_phase_block",
    "two_phase_full",
]


class Step(NamedTuple):
    """One step of a schedule: what it does, and how many rows it reads and writes."""

    what: str
    read: float
    write: float


def _rows(steps: list[Step]) -> float:
    return sum(step.read + step.write for step in steps)


def standard() -> float:
    """Of x <- x + v: 3."""
    return _rows([Step("add", read=2, write=1)])


def hyper_connections(streams: int) -> float:
    """Of n parallel streams, each step by itself: 8n + 2."""
    n = streams
    return _rows(
        [
            Step("norm and mappings", read=n, write=0),
            Step("read: r H", read=n, write=1),
            Step("mix: M H", read=n, write=n),
            Step("spread the update: b v", read=1, write=n),
            Step("add both", read=2 * n, write=n),
        ]
    )


def two_phase_full(sublayers: int, group: int) -> float:
    """Of Full by the paper's schedule, keys and values being read apart, averaged over the sublayers.

    A group of sublayers reads what was finished before it at once; each reads its own group's rows by itself.
    """
    moved = 0.0
    for first in range(0, sublayers, group):
        members = min(group, sublayers - first)
        moved += 2 * first + members  # phase 1: all finished rows once, a partial sum for each member
        moved += sum(2 * inside + 1 for inside in range(members))  # phase 2: rows of the group, the result
    return moved / sublayers


def two_phase_block(sublayers: int, blocks: int) -> float:
    """Of Block by the paper's schedule, averaged over the sublayers: N/S + 5 with S sublayers in each of N blocks."""
    size = sublayers / blocks
    finished = [2 * number for number in range(blocks)]  # rows before each block, keys and values
    phase_one = sum(finished) / blocks / size + 1 / size  # read by all of a block at once; the new block written
    return phase_one + _rows([Step("partial sums", read=0, write=1), Step("merge and add", read=3, write=1)])


def of_connection(connection: ConnectionConfig, sublayers: int) -> float | None:
    """Rows that a forward pass of this package reads and writes; None for connections without such a plan.

    A row that a sublayer puts out is read once more where it is scored and joins a running sum.
    """
    if connection.kind == "add":
        return 3.0 * sublayers
    options = connection.options
    if not isinstance(options, AttnResOptions) or options.value_rank is not None:
        return None
    plan = options.plan(sublayers, keep=True)
    joined = sum(2 if joins else 0 for joins in plan.joins)
    if not options.fused:
        return float(sum(len(read) + 1 for read in plan.reads) + joined)
    return float(plan.rows_mixed + len(plan.joins) + joined)


# --- measured -------------------------------------------------------------------------------------


class _Given(nn.Module):
    """A sublayer that puts out what it was given."""

    def __init__(self, update: Tensor) -> None:
        super().__init__()
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        return self.update


def stream_passes(
    compared: Mapping[str, ConnectionConfig], sublayers: int, tokens: int, width: int, device: str
) -> dict[str, Callable[[], list[float]]]:
    """Forward passes of the stream alone, by name: each call runs one and gives its time in ms.

    Sublayers put out random tensors [1, tokens, width] that all passes share; there are no norms and no gradients.
    """
    generator = torch.Generator().manual_seed(0)
    updates = [torch.randn(1, tokens, width, generator=generator).to(device) for _ in range(sublayers + 1)]

    def timed(connection: ConnectionConfig) -> Callable[[], list[float]]:
        settings = ResidualSettings(connection=connection, placement="none")
        branches = [{"given": _Given(update)} for update in updates[1:]]
        stack = Stack(branches, width, settings, nn.Identity).to(device)

        @torch.no_grad()
        def run() -> list[float]:
            clock = Clock(device)
            stack(updates[0])
            clock.mark()
            return clock.laps()

        return run

    return {name: timed(connection) for name, connection in compared.items()}


def bandwidth(device: str) -> float:
    """Bytes a second that this machine reads on as many threads as PyTorch has."""
    return read_bandwidth(large_buffer(device))
