"""What attention over depth costs: one read of n sources, whole training steps, and peak memory.

Written to figures/bench_kernel.csv and .png. All that is compared runs in one process, in rounds that have each once
in a new order, so that noise of the machine meets all; medians are given, and quartiles. A ratio is taken within a
round. Before each read a buffer larger than the caches is gone through, as rows of a deep pass are not in cache either.

Letters: X = T d b bytes, one activation: T tokens of width d, b bytes an element; n sources of a read.

Columns: `sublayers` is n for an op. `forward_ms` and `backward_ms` are medians; the optimiser's time is in
neither, but in the ratio. `modelled_bytes` is what must be moved, forward and backward; of a step, by its stream only.
`share_of_bandwidth`, of an op: modelled bytes / time / bandwidth, forward and backward; `forward_share` forward only.
Of a step: both numbers beyond pre-norm's, the time within a round; empty where noise hides the extra time.
`ratio_low` and `ratio_high`, quartiles: of the ratio to pre-norm for a step, of time over its median for an op.
`peak_mb`, in 10^6 bytes: what a training step has allocated at most, see `TrainingStep.peak_bytes`. `n`: repeats.
`bandwidth_gbs`, in 10^9 bytes a second, measured beside: of reading on the CPU, of a copy on CUDA. Steps: `plain` is
the connection without a kernel, which stacks nothing; `naive`, of an op, the definition, which stacks its sources.
Empty: does not apply. Rows of the device that a run does not measure stay as the file has them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from reslab import data, paths, traffic
from reslab.files import write_atomic
from reslab.kernel_bench_reads import Implementation, Problem, implementations
from reslab.kernels.depth_attention import bank
from reslab.kernels.depth_attention.plan import Group
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.residuals.depth_attention import AttnResOptions
from reslab.residuals.stack import StreamDtype
from reslab.schema import UserError
from reslab.timing import (
    Clock,
    TrainingStep,
    copy_bandwidth,
    interleaved,
    keep_freed_memory,
    large_buffer,
    read_bandwidth,
)

__all__ = ["COLUMNS", "SIZES", "Moved", "Sizes", "bytes_of_read", "bytes_of_step", "main"]

COLUMNS = (
    "what", "device", "dtype", "sublayers", "tokens", "width", "kind", "implementation", "forward_ms", "backward_ms",
    "ratio_to_prenorm", "modelled_bytes", "share_of_bandwidth", "threads", "ratio_low", "ratio_high", "peak_mb", "n",
    "forward_share", "bandwidth_gbs",
)  # fmt: skip

BLOCKS = 8
"""Blocks of the Block form."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device."""

    device: str
    dtype: torch.dtype
    """Of an op's sources and a step's stream; the rest of a step is by autocast, with float32 weights."""
    reads: tuple[tuple[int, int, int], ...]
    """Sources, tokens, width."""
    steps: tuple[tuple[int, int], ...]
    """Sublayers, width."""
    memory: tuple[tuple[int, int], ...]
    """Those of `steps` whose memory is measured."""
    batch: int
    context: int
    heads: int
    threads: tuple[int, ...]

    @property
    def stream_dtype(self) -> StreamDtype | None:
        return None if self.dtype == torch.float32 else "bfloat16"

    def smallest(self) -> "Sizes":
        """The first of each sort, on one thread."""
        return replace(self, reads=self.reads[:1], steps=self.steps[:1], memory=self.steps[:1], threads=(1,))


_CUDA_STEPS = ((24, 1024), (48, 1024), (24, 2048), (48, 2048))

SIZES = {
    "cpu": Sizes(
        device="cpu",
        dtype=torch.float32,
        reads=((8, 2048, 128), (24, 2048, 128), (48, 2048, 128), (24, 4096, 512)),
        steps=((24, 64), (48, 64), (24, 256), (48, 256)),
        memory=((48, 64),),
        batch=16,
        context=64,
        heads=4,
        threads=(1, 2),
    ),
    "cuda": Sizes(
        device="cuda",
        dtype=torch.bfloat16,
        reads=tuple((sublayers, 4096, width) for sublayers, width in _CUDA_STEPS),
        steps=_CUDA_STEPS,
        memory=_CUDA_STEPS,
        batch=4,
        context=1024,
        heads=16,
        threads=(1,),
    ),
}


# --- models of cost -------------------------------------------------------------------------------


class Moved(NamedTuple):
    """Bytes."""

    forward: int
    backward: int


PARTIAL = 4
"""Bytes of a number of a partial sum, which is float32 whatever the rows are."""


def bytes_of_read(sources: int, tokens: int, width: int, element: int) -> Moved:
    """Least bytes of one read: (n + 1) X forward and (2n + 1) X backward, a token's rows being kept on the chip."""
    row = tokens * width * element
    return Moved((sources + 1) * row, (2 * sources + 1) * row)


def bytes_of_step(connection: ConnectionConfig, sublayers: int, tokens: int, width: int, element: int) -> Moved:
    """Bytes moved by the stream of a step: forward as `traffic.of_connection` counts, backward in the same way.

    Backward, pre-norm adds a sublayer's gradient to the stream's, 3 X. The plain form moves (5n + 1) X a read, of
    which 3n to add up gradients, and 3 X where a sublayer joins a sum. A bank moves what is planned, 2 X a read for
    <g, h>, and X where a sublayer joins.
    """
    rows, options = traffic.of_connection(connection, sublayers), connection.options
    if rows is None:
        raise UserError(f"bench kernel: no bytes are modelled for connection {connection.kind!r}; give add or attnres")
    back, partial, partial_back = 3 * sublayers, 0, 0
    if isinstance(options, AttnResOptions):
        plan = options.plan(sublayers, keep=True)
        back = sum(5 * len(read) + 1 for read in plan.reads) + 3 * sum(plan.joins)
        if options.fused:
            back = plan.rows_pulled + 2 * len(plan.reads) + sum(plan.joins)
            partial, partial_back = _partial_sums(plan.mixing), _partial_sums(plan.pulling)
    numbers, more = tokens * width, PARTIAL - element
    return Moved(
        (int(rows) * element + partial * more) * numbers,
        (back * element + partial_back * more) * numbers,
    )


def _partial_sums(groups: Sequence[Group]) -> int:
    """Rows of partial sums: one is written and read for each member of a group that has anything in common."""
    return sum(2 * len(group.members) for group in groups if group.common)


# --- bandwidth ------------------------------------------------------------------------------------


def _bandwidth(buffer: Tensor, threads: int) -> float:
    """Bytes a second of reading; on CUDA, where a sum is not bound by memory alone, of a copy."""
    device = buffer.device.type
    measure, said = (read_bandwidth, "torch.sum reads") if device == "cpu" else (copy_bandwidth, "a copy moves")
    found = measure(buffer)
    print(f"{device}, threads {threads}: {said} {found / 1e9:.1f} GB/s, over a buffer of {buffer.nbytes / 1e6:.0f} MB")
    return found


def _share(moved: int, milliseconds: np.ndarray, bandwidth: float) -> str:
    """Of the bandwidth, in the median time; empty where a quarter of the times are not positive, as differences may."""
    if np.quantile(milliseconds, 0.25) <= 0:
        return ""
    return _rounded(moved / (float(np.median(milliseconds)) / 1e3) / bandwidth)


# --- one read -------------------------------------------------------------------------------------


def _read_rows(sizes: Sizes, threads: int, repeats: int, skipped: dict[str, str]) -> Iterator[Row]:
    """All reads on so many threads; names of what did not run, and why, are added to `skipped`."""
    buffer = large_buffer(sizes.device)
    bandwidth = _bandwidth(buffer, threads)
    for shape in sizes.reads:
        torch.compiler.reset()  # what was compiled for other shapes and threads
        problem = Problem(*shape, sizes.device, sizes.dtype)
        usable, left_out = implementations(problem)
        skipped |= left_out
        laps = interleaved({each.name: _timed_read(problem, each, buffer) for each in usable}, repeats)
        for each in usable:
            row = _row("op", sizes, shape[0], shape[1], shape[2], "full", each.name, threads)
            moved = bytes_of_read(*shape, sizes.dtype.itemsize)
            yield row | {"modelled_bytes": sum(moved)} | _read_measures(laps.get(each.name), moved, bandwidth)


def _timed_read(problem: Problem, chosen: Implementation, buffer: Tensor) -> Callable[[], list[float]]:
    """Laps: forward, backward."""
    read, sources = problem.given_to(chosen)

    def timed() -> list[float]:
        buffer.sum()  # empties the caches; on CUDA it also lets the host run ahead
        clock = Clock(buffer.device.type)
        h = read(sources)
        clock.mark()
        problem.differentiate(h, sources)
        clock.mark()
        return clock.laps()

    return timed


def _read_measures(laps: np.ndarray | None, moved: Moved, bandwidth: float) -> Row:
    if laps is None:
        return _nothing_for("op", "out of memory")
    forward, backward = np.median(laps, 0)
    whole = laps.sum(1)
    low, high = np.quantile(whole / np.median(whole), [0.25, 0.75])
    return {
        "forward_ms": _rounded(forward),
        "backward_ms": _rounded(backward),
        "share_of_bandwidth": _share(sum(moved), whole, bandwidth),
        "forward_share": _share(moved.forward, laps[:, 0], bandwidth),
        "ratio_low": _rounded(low),
        "ratio_high": _rounded(high),
        "bandwidth_gbs": _rounded(bandwidth / 1e9),
        "n": len(laps),
    }


# --- a training step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Arm:
    """A connection by the names it has in the table."""

    kind: str
    implementation: str
    connection: ConnectionConfig

    def moved(self, sizes: Sizes, sublayers: int, width: int) -> Moved:
        return bytes_of_step(self.connection, sublayers, sizes.batch * sizes.context, width, sizes.dtype.itemsize)


PLAIN = "plain"
"""The connection without a kernel."""

PRENORM = _Arm("add", "torch", ConnectionConfig("add"))
"""The twin that all are compared with."""


def _arms(sublayers: int, auto: str) -> list[_Arm]:
    """Full and Block, plain and by the kernel `auto`; that one is left out where it is plain too."""
    kinds = {"full": 1, "block": -(-sublayers // BLOCKS)}
    return [PRENORM] + [
        _Arm(kind, name, ConnectionConfig("attnres", block=block, kernel="naive" if name == PLAIN else "auto"))
        for kind, block in kinds.items()
        for name in dict.fromkeys((PLAIN, auto))
    ]


def _training(sizes: Sizes, arm: _Arm, sublayers: int, width: int) -> TrainingStep:
    config = DecoderConfig(
        vocabulary=data.VOCABULARY,
        width=width,
        heads=sizes.heads,
        context=sizes.context,
        depth=sublayers // 2,
        init_std=0.55 / width**0.5,
        connection=arm.connection,
        stream_dtype=sizes.stream_dtype,
    )
    return TrainingStep(config, sizes.batch, sizes.device, sizes.dtype)


def _step_rows(sizes: Sizes, threads: int, repeats: int, skipped: dict[str, str]) -> Iterator[Row]:
    """All steps on so many threads; their memory on the first number of threads, on which it does not depend."""
    auto = bank.implementation(torch.empty(0, device=sizes.device, dtype=sizes.dtype)) or PLAIN
    if auto == PLAIN:
        skipped["auto"] = f"reslab has no kernel of whole passes for {sizes.device}: the same as {PLAIN}"
    bandwidth = _bandwidth(large_buffer(sizes.device), threads)
    for size in sizes.steps:
        sublayers, width = size
        weighed = size in sizes.memory and threads == sizes.threads[0]
        for number, arms in enumerate(_together(sizes, _arms(sublayers, auto))):
            measures = _measure_steps(sizes, arms, size, repeats, weighed, bandwidth)
            for arm in arms[min(number, 1) :]:  # pre-norm's row once
                yield _step_row(sizes, arm, sublayers, width, threads) | measures[arm]


def _together(sizes: Sizes, arms: list[_Arm]) -> list[list[_Arm]]:
    """What takes turns: all; on CUDA each with pre-norm, so that large models fit."""
    return [arms] if sizes.device == "cpu" else [[PRENORM, arm] for arm in arms if arm != PRENORM]


def _measure_steps(
    sizes: Sizes, arms: list[_Arm], size: tuple[int, int], repeats: int, weighed: bool, bandwidth: float
) -> dict[_Arm, Row]:
    trainings = {arm: _training(sizes, arm, *size) for arm in arms}
    laps = interleaved({arm: training.step for arm, training in trainings.items()}, repeats)
    measures = {
        arm: _step_measures(laps.get(arm), laps.get(PRENORM), _beyond_prenorm(arm, sizes, size), bandwidth)
        for arm in arms
    }
    for arm in laps if weighed else ():
        measures[arm]["peak_mb"] = f"{trainings[arm].peak_bytes() / 1e6:.1f}"
    return measures


def _beyond_prenorm(arm: _Arm, sizes: Sizes, size: tuple[int, int]) -> Moved:
    own, prenorm = arm.moved(sizes, *size), PRENORM.moved(sizes, *size)
    return Moved(own.forward - prenorm.forward, own.backward - prenorm.backward)


def _step_row(sizes: Sizes, arm: _Arm, sublayers: int, width: int, threads: int) -> Row:
    """Without measurements."""
    tokens = sizes.batch * sizes.context
    row = _row("step", sizes, sublayers, tokens, width, arm.kind, arm.implementation, threads)
    return row | {"modelled_bytes": sum(arm.moved(sizes, sublayers, width))}


def _step_measures(laps: np.ndarray | None, prenorm: np.ndarray | None, more: Moved, bandwidth: float) -> Row:
    """`more` bytes than pre-norm."""
    if laps is None or prenorm is None:
        return _nothing_for("step", "out of memory")
    forward, backward, _ = np.median(laps, 0)
    low, ratio, high = np.quantile(laps.sum(1) / prenorm.sum(1), [0.25, 0.5, 0.75])
    longer = (laps - prenorm)[:, :2]
    return {
        "forward_ms": _rounded(forward),
        "backward_ms": _rounded(backward),
        "ratio_to_prenorm": _rounded(ratio),
        "share_of_bandwidth": _share(sum(more), longer.sum(1), bandwidth),
        "forward_share": _share(more.forward, longer[:, 0], bandwidth),
        "ratio_low": _rounded(low),
        "ratio_high": _rounded(high),
        "bandwidth_gbs": _rounded(bandwidth / 1e9),
        "n": len(laps),
    }


# --- the table ------------------------------------------------------------------------------------


def _row(
    what: str, sizes: Sizes, sublayers: int, tokens: int, width: int, kind: str, implementation: str, threads: int
) -> Row:
    named = (
        what,
        sizes.device,
        str(sizes.dtype).removeprefix("torch."),
        sublayers,
        tokens,
        width,
        kind,
        implementation,
    )
    return dict.fromkeys(COLUMNS, "") | dict(zip(COLUMNS, named, strict=False)) | {"threads": threads}


def _rounded(value: float) -> str:
    """Four digits, never in powers of ten."""
    return np.format_float_positional(value, precision=4, unique=False, fractional=False, trim="-")


def _nothing_for(what: str, why: str) -> Row:
    """`why` in the columns that a measurement of an op or a step fills."""
    own = ("ratio_to_prenorm",) if what == "step" else ()
    both = ("forward_ms", "backward_ms", "share_of_bandwidth", "forward_share", "ratio_low", "ratio_high")
    return dict.fromkeys((*both, *own, "bandwidth_gbs"), why) | {"n": 0}


def _unmeasured(sizes: Sizes) -> Iterator[Row]:
    """The rows of a device that is not there. `auto` is whatever kernel this package has for it."""
    for shape, name, threads in product(sizes.reads, ("naive", "compiled", "auto"), sizes.threads):
        row = _row("op", sizes, *shape, "full", name, threads) | _nothing_for("op", "not measured")
        yield row | {"modelled_bytes": sum(bytes_of_read(*shape, sizes.dtype.itemsize))}
    for (sublayers, width), threads in product(sizes.steps, sizes.threads):
        for arm in _arms(sublayers, "auto"):
            row = _step_row(sizes, arm, sublayers, width, threads) | _nothing_for("step", "not measured")
            weighed = (sublayers, width) in sizes.memory and threads == sizes.threads[0]
            yield row | {"peak_mb": "not measured" if weighed else ""}


def _measured(sizes: Sizes, repeats: int) -> list[Row]:
    """All rows of a device that is there."""
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    before = torch.get_num_threads()
    try:
        for measured, threads in product((_read_rows, _step_rows), sizes.threads):
            torch.set_num_threads(threads)
            rows += measured(sizes, threads, repeats, skipped)
    finally:
        torch.set_num_threads(before)
    for name, reason in skipped.items():
        print(f"skipped on {sizes.device}: {name}: {reason}")
    return rows


def _others(path: Path, device: str, sizes: Sequence[Sizes]) -> list[Row]:
    """Rows of other devices than `device`: those that the file has, else that they are not measured."""
    known = pd.DataFrame(columns=list(COLUMNS))
    if path.exists():
        found = pd.read_csv(path, dtype=str, keep_default_na=False)
        known = found if tuple(found.columns) == COLUMNS else known
    rows: list[Row] = []
    for other in sizes:
        if other.device != device:
            kept = known[known["device"] == other.device].to_numpy()
            rows += [dict(zip(COLUMNS, row, strict=True)) for row in kept] or list(_unmeasured(other))
    return rows


def main(device: str = "cpu", repeats: int | None = None, quick: bool = False) -> None:
    """Measure one device, print the table, and write it and its figure; `quick` to build/, for it means little."""
    repeats = (3 if quick else 9) if repeats is None else repeats
    if repeats < 1:
        raise UserError(f"bench kernel: repeats is {repeats}; give 1 or more")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "bench kernel: device cuda asked for, but PyTorch finds no CUDA device; leave --device out to measure the "
            "CPU, or install a CUDA build of torch on a machine with a GPU"
        )
    keep_freed_memory()
    sizes = {name: each.smallest() if quick else each for name, each in SIZES.items()}
    path = (paths.BUILD if quick else paths.FIGURES) / "bench_kernel.csv"
    rows = _measured(sizes[device], repeats)
    rows = sorted(rows + _others(path, device, list(sizes.values())), key=lambda row: list(SIZES).index(row["device"]))
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(str)
    print("Attention over depth: one read, and whole steps over pre-norm's (1: as fast); measured, so it varies.")
    print(table.to_string(index=False))
    write_atomic(path, table.to_csv(index=False, lineterminator="\n").encode())
    from reslab import kernel_bench_figure  # seaborn takes a second to import

    kernel_bench_figure.write(table, path.with_suffix(".png"))
    print(f"written: {path} and {path.with_suffix('.png').name}")
