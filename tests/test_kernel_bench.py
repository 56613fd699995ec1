"""The kernel benchmark: its table, its models of cost, and what it does where something is missing."""

import dataclasses
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from reslab import cli, kernel_bench, kernel_bench_figure, kernel_bench_reads, paths, plotting, timing, traffic
from reslab.kernel_bench import COLUMNS, SIZES, Moved
from reslab.kernel_bench_reads import Implementation, Problem
from reslab.residuals import ConnectionConfig
from reslab.residuals.depth_attention import AttnResOptions
from reslab.schema import UserError

PEERS = ("flash-attn-res", "fast-attnres", "flash-linear-attention", "Liger")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where a quick run has written, and what it has said. On a machine without CUDA; nothing is compiled, for time."""
    folder = tmp_path_factory.mktemp("quick")
    with pytest.MonkeyPatch.context() as patch, (folder / "said").open("w") as said:
        patch.setattr(paths, "BUILD", folder)
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(sys, "stdout", said)
        torch.set_num_threads(1)
        assert cli.main(["bench", "kernel", "--quick"]) == 0
    return folder, (folder / "said").read_text()


@pytest.fixture(scope="module")
def table(quick: tuple[Path, str]) -> pd.DataFrame:
    return pd.read_csv(quick[0] / "bench_kernel.csv", dtype=str, keep_default_na=False)


# --- a quick run ----------------------------------------------------------------------------------


def test_the_table_has_its_columns_and_rows(table: pd.DataFrame) -> None:
    assert tuple(table.columns) == COLUMNS
    assert " ".join(COLUMNS[:13]) == (
        "what device dtype sublayers tokens width kind implementation forward_ms backward_ms ratio_to_prenorm "
        "modelled_bytes share_of_bandwidth"
    )
    here = table[table["device"] == "cpu"]
    assert list(here["what"] + " " + here["kind"] + " " + here["implementation"]) == [
        "op full naive",
        "op full compiled",
        "op full numba",
        "step add torch",
        "step full plain",
        "step full numba",
        "step block plain",
        "step block numba",
    ]
    assert set(here["n"]) == {"3"}


def test_what_is_measured_is_positive(table: pd.DataFrame) -> None:
    here = table[table["device"] == "cpu"]
    for what, names in (
        ("op", ["share_of_bandwidth", "forward_share"]),
        ("step", ["ratio_to_prenorm", "peak_mb"]),
    ):
        both = ["forward_ms", "backward_ms", "modelled_bytes", "ratio_low", "ratio_high", "bandwidth_gbs"]
        assert (here[here["what"] == what][names + both].astype(float) > 0).all(axis=None)
    steps = here[here["what"] == "step"]
    assert (steps[steps["kind"] == "add"]["ratio_to_prenorm"].astype(float) == 1).all()
    assert (steps["ratio_low"].astype(float) <= steps["ratio_high"].astype(float)).all()
    assert (steps[steps["kind"] == "add"][["share_of_bandwidth", "forward_share"]] == "").all(axis=None)
    slow = steps[(steps["kind"] == "full") & (steps["implementation"] == "plain")]
    assert (slow["share_of_bandwidth"].astype(float) > 0).all()


def test_all_that_reads_sources_needs_more_memory_than_prenorm(table: pd.DataFrame) -> None:
    peaks = table[(table["device"] == "cpu") & (table["what"] == "step")].set_index("kind")["peak_mb"].astype(float)
    assert (peaks.drop("add") > peaks["add"]).all()


def test_a_device_that_is_not_there_is_not_measured(table: pd.DataFrame) -> None:
    cuda = table[table["device"] == "cuda"]
    assert set(cuda["what"]) == {"op", "step"}
    assert (cuda[["forward_ms", "backward_ms"]] == "not measured").all(axis=None)
    assert (cuda[["share_of_bandwidth", "forward_share", "bandwidth_gbs"]] == "not measured").all(axis=None)
    assert (cuda[cuda["what"] == "step"][["ratio_to_prenorm", "peak_mb"]] == "not measured").all(axis=None)
    assert set(cuda["n"]) == {"0"}


@pytest.mark.parametrize("peer", PEERS)
def test_peers_are_named_with_why_they_are_skipped(quick: tuple[Path, str], peer: str) -> None:
    [line] = [line for line in quick[1].splitlines() if f": {peer}: " in line]
    assert line.startswith("skipped on cpu: ")
    assert "not installed" in line or "runs on CUDA only" in line


def test_the_figure_is_wide_enough_to_read(quick: tuple[Path, str]) -> None:
    height, width = imread(quick[0] / "bench_kernel.png").shape[:2]
    assert width >= 1600
    assert height >= 500


# --- models of cost -------------------------------------------------------------------------------


def test_bytes_of_one_read() -> None:
    activation = 2048 * 128 * 4
    assert kernel_bench.bytes_of_read(8, 2048, 128, 4) == (9 * activation, 17 * activation)
    assert kernel_bench.bytes_of_read(48, 2048, 128, 4) == (49 * activation, 97 * activation)


def attnres(**options: Any) -> ConnectionConfig:
    return ConnectionConfig("attnres", **options)


def test_bytes_of_a_step_without_a_kernel() -> None:
    reads = [1, 2, 3, 4, 5]  # of four sublayers and the output
    blocks = [1, 2, 2, 3, 3]  # two joins
    found = kernel_bench.bytes_of_step(attnres(kernel="naive"), 4, 10, 16, 2)
    assert found == (sum(n + 1 for n in reads) * 320, sum(5 * n + 1 for n in reads) * 320)
    found = kernel_bench.bytes_of_step(attnres(kernel="naive", block=2), 4, 10, 16, 2)
    assert found == ((sum(n + 1 for n in blocks) + 2 * 2) * 320, (sum(5 * n + 1 for n in blocks) + 3 * 2) * 320)
    assert kernel_bench.bytes_of_step(ConnectionConfig("add"), 4, 10, 16, 2) == (12 * 320, 12 * 320)


@pytest.mark.parametrize("block", [1, 6])
def test_bytes_of_a_step_by_a_bank(block: int) -> None:
    """All that the plan moves, scores, and joins; partial sums in float32."""
    connection = attnres(block=block)
    assert isinstance(connection.options, AttnResOptions)
    plan, joins = connection.options.plan(48, keep=True), 0 if block == 1 else 40
    assert sum(plan.joins) == joins
    forward, backward = kernel_bench.bytes_of_step(connection, 48, 1024, 64, 4)
    rows = plan.rows_mixed + 49 + 2 * joins
    assert rows == traffic.of_connection(connection, 48)
    assert (forward, backward) == (rows * 2**18, (plan.rows_pulled + 2 * 49 + joins) * 2**18)
    without = kernel_bench.bytes_of_step(attnres(block=block, kernel="naive"), 48, 1024, 64, 4)
    assert forward + backward < sum(without) / 2
    partial = [sum(len(group.members) for group in groups if group.common) for groups in (plan.mixing, plan.pulling)]
    assert kernel_bench.bytes_of_step(connection, 48, 1024, 64, 2) == (
        forward / 2 + 2 * partial[0] * 2**17,
        backward / 2 + 2 * partial[1] * 2**17,
    )


def test_no_model_no_bytes() -> None:
    with pytest.raises(UserError, match="no bytes are modelled for connection 'hyper'; give add or attnres"):
        kernel_bench.bytes_of_step(ConnectionConfig("hyper"), 4, 10, 16, 2)


# --- what is made of measurements -----------------------------------------------------------------


def test_shares_of_a_read() -> None:
    laps = np.array([[1.0, 3.0], [2.0, 4.0], [3.0, 11.0]])  # ms, forward and backward
    row = kernel_bench._read_measures(laps, Moved(4_000_000, 8_000_000), 10e9)
    assert (row["forward_share"], row["share_of_bandwidth"], row["bandwidth_gbs"]) == ("0.2", "0.2", "10")


def test_shares_of_a_step_are_of_what_it_takes_beyond_prenorm() -> None:
    prenorm = np.array([[10.0, 20.0, 5.0]] * 3)
    laps = prenorm + np.array([[1.0, 3.0, 50.0], [2.0, 4.0, 50.0], [3.0, 11.0, 50.0]])
    row = kernel_bench._step_measures(laps, prenorm, Moved(4_000_000, 8_000_000), 10e9)
    assert (row["forward_share"], row["share_of_bandwidth"]) == ("0.2", "0.2")
    row = kernel_bench._step_measures(laps - [2.0, 0.0, 0.0], prenorm, Moved(4_000_000, 8_000_000), 10e9)
    assert (row["forward_share"], row["share_of_bandwidth"]) == ("", "0.3")


@pytest.mark.parametrize(("measure", "times"), [(timing.read_bandwidth, 1), (timing.copy_bandwidth, 2)])
def test_bandwidth_counts_what_is_moved(
    measure: Callable[[Tensor], float], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that shows 4, 3 and 2 ms and then 2 ms for ever."""
    shown = iter([4.0, 3.0])
    monkeypatch.setattr(timing.Clock, "laps", lambda clock: [next(shown, 2.0)])
    assert measure(torch.ones(1000)) == pytest.approx(times * 4000 / 2e-3)


def test_a_copy_is_the_bandwidth_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "read_bandwidth", lambda buffer: 1.0)
    monkeypatch.setattr(kernel_bench, "copy_bandwidth", lambda buffer: 2.0)
    assert kernel_bench._bandwidth(torch.ones(4), 1) == 1
    on_cuda: Any = SimpleNamespace(device=torch.device("cuda"), nbytes=4)
    assert kernel_bench._bandwidth(on_cuda, 1) == 2


def test_full_takes_at_most_35_percent_more_memory_than_prenorm() -> None:
    """Peak of a training step at 48 sublayers; bytes are the same at every run."""
    peaks = {}
    for arm in kernel_bench._arms(48, "numba"):
        if (arm.kind, arm.implementation) in {("add", "torch"), ("full", "numba")}:
            training = kernel_bench._training(SIZES["cpu"], arm, 48, 64)
            training.step()
            peaks[arm.kind] = training.peak_bytes()
    assert peaks["add"] < peaks["full"] <= 1.35 * peaks["add"]


def test_block_has_eight_blocks() -> None:
    for sublayers in {sublayers for sizes in SIZES.values() for sublayers, _ in sizes.steps}:
        options = kernel_bench._arms(sublayers, "numba")[-1].connection.options
        assert isinstance(options, AttnResOptions)
        assert options.sources_before(sublayers) == 9


def test_low_precision_as_on_a_gpu() -> None:
    """The stream, whose bytes are modelled, is in the low precision too, while weights are not."""
    sizes = dataclasses.replace(SIZES["cuda"], device="cpu", batch=2, context=8)
    [arm] = [arm for arm in kernel_bench._arms(4, kernel_bench.PLAIN) if arm.kind == "full"]
    training = kernel_bench._training(sizes, arm, 4, 32)
    seen: list[torch.dtype] = []
    training.model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0][0][0].dtype))
    assert len(training.step()) == 3
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in training.model.parameters()} == {torch.float32}


# --- what goes wrong ------------------------------------------------------------------------------


def test_another_formula_is_found_out() -> None:
    problem = Problem(3, 5, 8, "cpu", torch.float32)
    expected = kernel_bench_reads._outcome(problem, kernel_bench_reads._NAIVE)

    def mean(query: Tensor, sources: list[Tensor]) -> Tensor:
        return torch.stack(sources).mean(0) + 0 * query

    wrong = Implementation("mean", lambda query: lambda sources: mean(query, sources))
    assert "h is " in str(kernel_bench_reads._fault(problem, wrong, expected))
    assert kernel_bench_reads._fault(problem, kernel_bench_reads._NAIVE, expected) is None


def test_a_peer_that_fails_is_skipped_with_its_words() -> None:
    problem = Problem(3, 5, 8, "cpu", torch.float32)
    expected = kernel_bench_reads._outcome(problem, kernel_bench_reads._NAIVE)

    def fail(sources: list[Tensor]) -> Tensor:
        raise RuntimeError("no such luck\nat line 3")

    broken = Implementation("broken", lambda query: fail)
    assert kernel_bench_reads._fault(problem, broken, expected) == "RuntimeError: no such luck"


def test_sources_given_as_one_tensor() -> None:
    problem = Problem(3, 5, 8, "cpu", torch.float32)
    expected = kernel_bench_reads._outcome(problem, kernel_bench_reads._NAIVE)

    def unstack(query: Tensor) -> kernel_bench_reads.Read:
        return lambda sources: kernel_bench_reads.algebra(query, list(sources))

    assert kernel_bench_reads._fault(problem, Implementation("stacked", unstack, stacked=True), expected) is None


def test_what_does_not_fit_into_memory_is_left_out() -> None:
    def too_large() -> list[float]:
        raise torch.OutOfMemoryError("too large")

    laps = timing.interleaved({"small": lambda: [1.0, 2.0], "large": too_large}, 4)
    assert list(laps) == ["small"]
    assert laps["small"].shape == (4, 2)
    measures = kernel_bench._step_measures(None, laps["small"], Moved(1, 1), 1e9)
    assert {measures[name] for name in ("ratio_to_prenorm", "share_of_bandwidth")} == {"out of memory"}


def test_rows_of_the_other_device_are_kept(tmp_path: Path) -> None:
    path, sizes = tmp_path / "bench_kernel.csv", list(SIZES.values())
    unmeasured = kernel_bench._others(path, "cpu", sizes)
    assert {row["forward_ms"] for row in unmeasured} == {"not measured"}
    earlier = pd.DataFrame([row | {"forward_ms": 1.5} for row in unmeasured], columns=list(COLUMNS))
    earlier.to_csv(path, index=False)
    assert {row["forward_ms"] for row in kernel_bench._others(path, "cpu", sizes)} == {"1.5"}
    earlier.drop(columns="n").to_csv(path, index=False)
    assert {row["forward_ms"] for row in kernel_bench._others(path, "cpu", sizes)} == {"not measured"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda"], "device cuda asked for, but PyTorch finds no CUDA device; leave --device out"),
        (["--repeats", "0"], "repeats is 0; give 1 or more"),
    ],
)
def test_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "kernel", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "kernels"], ["bench", "kernel", "--device", "tpu"]])
def test_wrong_names(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    assert "invalid choice" in capsys.readouterr().err


def test_bench_alone_runs_both(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr("reslab.bench.main", lambda: called.append("training"))
    monkeypatch.setattr("reslab.kernel_bench.main", lambda *arguments: called.append("kernel"))
    for arguments in ([], ["training"], ["kernel"]):
        assert cli.main(["bench", *arguments]) == 0
    assert called == ["training", "kernel", "training", "kernel"]


def test_the_first_kernel_leaves_pytorchs_threads_alone() -> None:
    """Numba's OpenMP layer sets the number of threads when it starts, in a process once."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from reslab.kernels.depth_attention import depth_attention\n"
        "depth_attention(torch.zeros(8), [torch.ones(4, 8)])\n"
        "assert torch.get_num_threads() == 1, torch.get_num_threads()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(paths.ROOT / "lib")})


# --- the figure -----------------------------------------------------------------------------------


def test_an_op_is_drawn_at_the_median_of_its_whole_time() -> None:
    """Not at the sum of two medians, which noise of two modes puts elsewhere; quartiles are of the whole."""
    row = {"what": "op", "device": "cpu", "sublayers": 8, "tokens": 4, "width": 16, "threads": 1, "modelled_bytes": 1e6}
    row |= {"ratio_low": 0.9, "ratio_high": 1.1, "bandwidth_gbs": float("nan")}
    quiet = {"forward_ms": 4.0, "backward_ms": 6.0, "share_of_bandwidth": 0.5}  # 2e8 bytes a second at full bandwidth
    torn = {"forward_ms": 4.0, "backward_ms": 6.0, "share_of_bandwidth": 0.25}
    rows = [row | quiet | {"implementation": name} for name in ("naive", "numba")]
    ops = pd.DataFrame([*rows, row | torn | {"implementation": "compiled"}])
    for known in (ops, ops.assign(bandwidth_gbs=0.2)):
        assert kernel_bench_figure._bandwidth(known) == pytest.approx(2e8)
        with plotting.figure(1, 1) as (_, axes):
            kernel_bench_figure._draw_reads(axes[0], known, "cpu")
            drawn = {each.get_label(): float(each.lines[0].get_ydata()[0]) for each in axes[0].containers}
        assert drawn == pytest.approx({"naive": 10, "numba": 10, "compiled": 20})


def steps(*ratios: float) -> pd.DataFrame:
    """Of Full at one width and one number of threads, by sublayers."""
    rows = [
        {"kind": "full", "implementation": "numba", "width": 64.0, "sublayers": 24.0 * number, "threads": 1.0}
        | {"ratio_to_prenorm": ratio, "ratio_low": ratio - 0.1, "ratio_high": 10 * ratio}
        for number, ratio in enumerate(ratios, 1)
    ]
    return pd.DataFrame(rows)


def test_one_disturbed_size_does_not_stretch_the_axis_of_steps() -> None:
    with plotting.figure(1, 1) as (_, axes):
        kernel_bench_figure._draw_steps(axes[0], steps(1.3, 3.7), "cpu")
        low, high = axes[0].get_ylim()
        [arm] = axes[0].containers
        assert list(arm.lines[0].get_ydata()) == [1.3]
        assert [text.get_text() for text in axes[0].texts] == ["3.7"]
    assert low <= 0.95
    assert 1.6 <= high <= 2


def test_targets_are_drawn_over_their_width() -> None:
    with plotting.figure(1, 1) as (_, axes):
        kernel_bench_figure._draw_steps(axes[0], steps(1.3, 1.4), "cpu")
        lines = {lines.get_label(): lines.get_segments()[0][:, 1].tolist() for lines in axes[0].collections}
    assert {label: height for label, height in lines.items() if "target" in str(label)} == {
        "target, full": [1.25, 1.25],
        "target, block": [1.10, 1.10],
    }


def test_an_older_table_is_drawn_too(table: pd.DataFrame, tmp_path: Path) -> None:
    older = table.drop(columns=["bandwidth_gbs", "forward_share"]).replace({"implementation": {"plain": "naive"}})
    kernel_bench_figure.write(older, tmp_path / "older.png")
    assert imread(tmp_path / "older.png").shape[1] >= 1600


_FAULTS = """
import resource, torch
from reslab.timing import keep_freed_memory
keep_freed_memory()
def allocate():
    tensors = [torch.empty(2**21).fill_(1) for _ in range(8)]
for _ in range(3):
    allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_used_again() -> None:
    """8 tensors of 8 MiB are 16 384 pages where the system hands them out anew."""
    found = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 1000
