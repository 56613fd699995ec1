"""What attention over depth costs: one read of n sources, whole training steps, and peak memory.

Written to figures/bench_kernel.csv and .png. All that is compared runs in one process, in rounds that have each once
in a new order, so that noise of the machine meets all; medians are given, and quartiles. A ratio is taken within a
round. Before each read a buffer larger than the caches is gone through, as rows of a deep pass are not in cache either.

Letters: X = T d b bytes, one activation: T tokens of width d, b bytes an element; n sources of a read.

Columns: `sublayers` is n for an op. `forward_ms` and `backward_ms` are medians; the optimiser's time is in
neither, but in the ratio. `modelled_bytes` is what must be moved, forward and backward; of a step, by its reads only.
`share_of_bandwidth`, of an op: modelled bytes / time / bandwidth of reading, as `read_bandwidth` finds it here.
`ratio_low` and `ratio_high`, quartiles: of the ratio to pre-norm for a step, of time over its median for an op.
`peak_mb`, in 10^6 bytes: what a training step has allocated at most, see `TrainingStep.peak_bytes`. `n`: repeats.
Empty: does not apply. Rows of the device that a run does not measure stay as the file has them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from reslab import data, paths
from reslab.files import write_atomic
from reslab.kernel_bench_reads import Implementation, Problem, implementations
from reslab.kernels.depth_attention import bank
from reslab.models.decoder import DecoderConfig
from reslab.residuals import ConnectionConfig
from reslab.residuals.depth_attention import AttnResOptions
from reslab.residuals.stack import StreamDtype
from reslab.schema import UserError
from reslab.timing import Clock, TrainingStep, interleaved, large_buffer, read_bandwidth

__all__ = ["COLUMNS", "SIZES", "Sizes", "bytes_of_read", "bytes_of_step", "main"]

COLUMNS = (
    "what", "device", "dtype", "sublayers", "tokens", "width", "kind", "implementation", "forward_ms", "backward_ms",
    "ratio_to_prenorm", "modelled_bytes", "share_of_bandwidth", "threads", "ratio_low", "ratio_high", "peak_mb", "n",
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


def bytes_of_read(sources: int, tokens: int, width: int, element: int) -> int:
    """Least bytes of one read: (n + 1) X forward and (2n + 1) X backward, a token's rows being kept on the chip."""
    return (3 * sources + 2) * tokens * width * element


def bytes_of_step(options: AttnResOptions, sublayers: int, tokens: int, width: int, element: int) -> int:
    """Bytes moved by all reads of a step: as planned with a bank; naively (n + 1) X forward and (5n + 1) X backward."""
    plan = options.plan(sublayers, keep=True)
    rows = plan.rows_mixed + plan.rows_pulled
    if options.kernel == "naive":
        rows = sum(6 * len(read) + 2 for read in plan.reads)
    return rows * tokens * width * element


# --- one read -------------------------------------------------------------------------------------


def _read_rows(sizes: Sizes, threads: int, repeats: int, skipped: dict[str, str]) -> Iterator[Row]:
    """All reads on so many threads; names of what did not run, and why, are added to `skipped`."""
    buffer = large_buffer(sizes.device)
    bandwidth = read_bandwidth(buffer)
    print(
        f"{sizes.device}, threads {threads}: torch.sum reads {buffer.nbytes / 1e6:.0f} MB at {bandwidth / 1e9:.1f} GB/s"
    )
    for shape in sizes.reads:
        torch.compiler.reset()  # what was compiled for other shapes and threads
        problem = Problem(*shape, sizes.device, sizes.dtype)
        usable, left_out = implementations(problem)
        skipped |= left_out
        laps = interleaved({each.name: _timed_read(problem, each, buffer) for each in usable}, repeats)
        for each in usable:
            row = _row("op", sizes, shape[0], shape[1], shape[2], "full", each.name, threads)
            row["modelled_bytes"] = bytes_of_read(*shape, sizes.dtype.itemsize)
            yield row | _read_measures(laps.get(each.name), row["modelled_bytes"], bandwidth)


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


def _read_measures(laps: np.ndarray | None, modelled: int, bandwidth: float) -> Row:
    if laps is None:
        return _nothing_for("op", "out of memory")
    forward, backward = np.median(laps, 0)
    whole = laps.sum(1)
    low, high = np.quantile(whole / np.median(whole), [0.25, 0.75])
    share = modelled / (np.median(whole) / 1e3) / bandwidth
    return {
        "forward_ms": _rounded(forward),
        "backward_ms": _rounded(backward),
        "share_of_bandwidth": _rounded(share),
        "ratio_low": _rounded(low),
        "ratio_high": _rounded(high),
        "n": len(laps),
    }


# --- a training step ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Arm:
    """A connection by the names it has in the table."""

    kind: str
    implementation: str
    connection: ConnectionConfig

    def modelled(self, sizes: Sizes, sublayers: int, width: int) -> int | str:
        options = self.connection.options
        if not isinstance(options, AttnResOptions):
            return ""
        return bytes_of_step(options, sublayers, sizes.batch * sizes.context, width, sizes.dtype.itemsize)


PRENORM = _Arm("add", "torch", ConnectionConfig("add"))
"""The twin that all are compared with."""


def _arms(sublayers: int, auto: str) -> list[_Arm]:
    """Full and Block, naive and by the kernel `auto`; that one is left out where it is naive too."""
    kinds = {"full": 1, "block": -(-sublayers // BLOCKS)}
    return [PRENORM] + [
        _Arm(kind, name, ConnectionConfig("attnres", block=block, kernel="naive" if name == "naive" else "auto"))
        for kind, block in kinds.items()
        for name in dict.fromkeys(("naive", auto))
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
    auto = bank.implementation(torch.empty(0, device=sizes.device, dtype=sizes.dtype)) or "naive"
    if auto == "naive":
        skipped["auto"] = f"reslab has no kernel of whole passes for {sizes.device}: the same as naive"
    for sublayers, width in sizes.steps:
        weighed = (sublayers, width) in sizes.memory and threads == sizes.threads[0]
        for number, arms in enumerate(_together(sizes, _arms(sublayers, auto))):
            measures = _measure_steps(sizes, arms, sublayers, width, repeats, weighed)
            for arm in arms[min(number, 1) :]:  # pre-norm's row once
                yield _step_row(sizes, arm, sublayers, width, threads) | measures[arm]


def _together(sizes: Sizes, arms: list[_Arm]) -> list[list[_Arm]]:
    """What takes turns: all; on CUDA each with pre-norm, so that large models fit."""
    return [arms] if sizes.device == "cpu" else [[PRENORM, arm] for arm in arms if arm != PRENORM]


def _measure_steps(
    sizes: Sizes, arms: list[_Arm], sublayers: int, width: int, repeats: int, weighed: bool
) -> dict[_Arm, Row]:
    trainings = {arm: _training(sizes, arm, sublayers, width) for arm in arms}
    laps = interleaved({arm: training.step for arm, training in trainings.items()}, repeats)
    measures = {arm: _step_measures(laps.get(arm), laps.get(PRENORM)) for arm in arms}
    for arm in laps if weighed else ():
        measures[arm]["peak_mb"] = f"{trainings[arm].peak_bytes() / 1e6:.1f}"
    return measures


def _step_row(sizes: Sizes, arm: _Arm, sublayers: int, width: int, threads: int) -> Row:
    """Without measurements."""
    tokens = sizes.batch * sizes.context
    row = _row("step", sizes, sublayers, tokens, width, arm.kind, arm.implementation, threads)
    return row | {"modelled_bytes": arm.modelled(sizes, sublayers, width)}


def _step_measures(laps: np.ndarray | None, prenorm: np.ndarray | None) -> Row:
    if laps is None or prenorm is None:
        return _nothing_for("step", "out of memory")
    forward, backward, _ = np.median(laps, 0)
    low, ratio, high = np.quantile(laps.sum(1) / prenorm.sum(1), [0.25, 0.5, 0.75])
    return {
        "forward_ms": _rounded(forward),
        "backward_ms": _rounded(backward),
        "ratio_to_prenorm": _rounded(ratio),
        "ratio_low": _rounded(low),
        "ratio_high": _rounded(high),
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
    own = {"op": "share_of_bandwidth", "step": "ratio_to_prenorm"}[what]
    return dict.fromkeys(("forward_ms", "backward_ms", own, "ratio_low", "ratio_high"), why) | {"n": 0}


def _unmeasured(sizes: Sizes) -> Iterator[Row]:
    """The rows of a device that is not there. `auto` is whatever kernel this package has for it."""
    for shape, name, threads in product(sizes.reads, ("naive", "compiled", "auto"), sizes.threads):
        row = _row("op", sizes, *shape, "full", name, threads) | _nothing_for("op", "not measured")
        yield row | {"modelled_bytes": bytes_of_read(*shape, sizes.dtype.itemsize)}
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
