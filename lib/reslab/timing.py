"""Time and memory of what is compared, measured so that noise of the machine meets all of it.

Everything that is compared runs in one process, in rounds that have each once in a new order. Measured times differ
from run to run; allocated bytes do not.
"""

import ctypes
import os
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from reslab.models.decoder import Decoder, DecoderConfig
from reslab.training import loss_of, parameter_groups

__all__ = [
    "Clock",
    "TrainingStep",
    "allocated_peak",
    "copy_bandwidth",
    "interleaved",
    "keep_freed_memory",
    "large_buffer",
    "read_bandwidth",
]

WARMUP = 2
"""Rounds that are not counted: compilation, memory of the allocator, the optimiser's state."""

Key = TypeVar("Key", bound=Hashable)


class Clock:
    """Milliseconds between marks: by events on CUDA, so that the host need not wait in between."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self.device == "cpu":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def laps(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device == "cpu":
            return [1e3 * (after - before) for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What glibc's mallopt calls them."""


def keep_freed_memory() -> None:
    """Have this process keep what is freed, also large tensors, where its allocator is glibc's; elsewhere nothing.

    Else each round gets its memory from the system page by page, which can take longer than what is measured.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**25)  # the most that it takes
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def large_buffer(device: str) -> Tensor:
    """Float32, several times larger than the last cache: 256 MB, on CUDA 1 GB."""
    return torch.ones((1 if device == "cpu" else 4) * 64 * 10**6, device=device)


def read_bandwidth(buffer: Tensor, repeats: int = 10) -> float:
    """Bytes a second of `torch.sum` over `buffer`, which only reads, on as many threads as PyTorch has: the best."""
    return buffer.nbytes / _shortest(buffer.sum, buffer.device.type, repeats)


def copy_bandwidth(buffer: Tensor, repeats: int = 10) -> float:
    """Bytes a second of a copy of `buffer`, which reads as many as it writes, both counted: the best."""
    target = torch.empty_like(buffer)
    return 2 * buffer.nbytes / _shortest(lambda: target.copy_(buffer), buffer.device.type, repeats)


def _shortest(run: Callable[[], Any], device: str, repeats: int) -> float:
    """Seconds."""
    best = float("inf")
    for _ in range(repeats):
        clock = Clock(device)
        run()
        clock.mark()
        best = min(best, *clock.laps())
    return best / 1e3


def interleaved(arms: Mapping[Key, Callable[[], list[float]]], repeats: int) -> dict[Key, np.ndarray]:
    """Of each arm the laps in ms, [repeats, laps]; without those that run out of the device's memory."""
    running = dict(arms)
    for name, arm in arms.items():
        try:
            for _ in range(WARMUP):
                arm()
        except torch.OutOfMemoryError:
            del running[name]
            torch.cuda.empty_cache()
    order, shuffled = random.Random(0), list(running)
    laps: dict[Key, list[list[float]]] = {name: [] for name in running}
    for _ in range(repeats):
        order.shuffle(shuffled)
        for name in shuffled:
            laps[name].append(running[name]())
    return {name: np.array(rows) for name, rows in laps.items()}


class TrainingStep:
    """A decoder in training, on random tokens: what they are does not matter for time."""

    def __init__(self, config: DecoderConfig, batch: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = Decoder(self.config)
            self.inputs, self.targets = (torch.randint(config.vocabulary, (batch, config.context)) for _ in range(2))
        self.optimiser = torch.optim.AdamW(parameter_groups(self.model, 1e-3, 0.1), betas=(0.9, 0.95), fused=True)

    def step(self) -> list[float]:
        """Laps: forward with the loss; backward; clipping and the optimiser."""
        clock = Clock(self.device)
        with self._autocast():
            loss = loss_of(self.model(self.inputs), self.targets)
        clock.mark()
        loss.backward()
        clock.mark()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimiser.step()
        self.optimiser.zero_grad()
        clock.mark()
        return clock.laps()

    @torch.no_grad()
    def infer(self) -> None:
        """A forward pass without gradients."""
        with self._autocast():
            self.model(self.inputs)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32)

    def kept_bytes(self) -> int:
        """Of what lasts from step to step: weights and the optimiser's state."""
        states = [value for state in self.optimiser.state.values() for value in state.values()]
        return sum(part.nbytes for part in (*self.model.parameters(), *states) if isinstance(part, Tensor))

    def peak_bytes(self) -> int:
        """Most bytes that a step has allocated at a time: weights, optimiser's state, gradients, activations, scratch.

        Not before the first step, which makes the optimiser's state.
        """
        return self.kept_bytes() + allocated_peak(self.step, self.device)


def allocated_peak(run: Callable[[], Any], device: str) -> int:
    """Most bytes that `run` has allocated at a time through PyTorch's allocator, beyond what there was before.

    On CUDA as the allocator counts, on the CPU by adding up the profiler's record of each allocation: the same at
    every run, without compilers and libraries. Resident memory may be several times as much where many small tensors
    leave the C library's heap in pieces, as the naive form's do.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max())


@contextmanager
def _silent() -> Iterator[None]:
    """Without the lines that the profiler's library writes to the standard error stream when it starts and stops."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
