"""The kernel benchmark: its table, its models of cost, and what it does where something is missing."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from reslab import cli, kernel_bench, kernel_bench_figure, kernel_bench_reads, paths, plotting, timing
from reslab.kernel_bench import COLUMNS, SIZES
from reslab.kernel_bench_reads import Implementation, Problem
from reslab.residuals.depth_attention import AttnResOptions

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
    here = table[table["device"] == "cpu"]
    assert list(here["what"] + " " + here["kind"] + " " + here["implementation"]) == [
        "op full naive",
        "op full compiled",
        "op full numba",
        "step add torch",
        "step full naive",
        "step full numba",
        "step block naive",
        "step block numba",
    ]
    assert set(here["n"]) == {"3"}


def test_what_is_measured_is_positive(table: pd.DataFrame) -> None:
    here = table[table["device"] == "cpu"]
    for what, names in (
        ("op", ["forward_ms", "backward_ms", "share_of_bandwidth", "ratio_low", "ratio_high"]),
        ("step", ["forward_ms", "backward_ms", "ratio_to_prenorm", "ratio_low", "ratio_high", "peak_mb"]),
    ):
        assert (here[here["what"] == what][names].astype(float) > 0).all(axis=None)
    steps = here[here["what"] == "step"]
    assert (steps[steps["kind"] == "add"]["ratio_to_prenorm"].astype(float) == 1).all()
    assert (steps["ratio_low"].astype(float) <= steps["ratio_high"].astype(float)).all()


def test_all_that_reads_sources_needs_more_memory_than_prenorm(table: pd.DataFrame) -> None:
    peaks = table[(table["device"] == "cpu") & (table["what"] == "step")].set_index("kind")["peak_mb"].astype(float)
    assert (peaks.drop("add") > peaks["add"]).all()


def test_a_device_that_is_not_there_is_not_measured(table: pd.DataFrame) -> None:
    cuda = table[table["device"] == "cuda"]
    assert set(cuda["what"]) == {"op", "step"}
    assert (cuda[["forward_ms", "backward_ms"]] == "not measured").all(axis=None)
    assert (cuda[cuda["what"] == "op"]["share_of_bandwidth"] == "not measured").all()
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
    assert kernel_bench.bytes_of_read(8, 2048, 128, 4) == (9 + 17) * activation
    assert kernel_bench.bytes_of_read(48, 2048, 128, 4) == (49 + 97) * activation


def test_bytes_of_a_step() -> None:
    naive = AttnResOptions(kernel="naive")
    reads = [1, 2, 3]  # of two sublayers and the output
    assert kernel_bench.bytes_of_step(naive, 2, 10, 16, 2) == sum((n + 1) + (5 * n + 1) for n in reads) * 10 * 16 * 2
    for block in (1, 6):
        auto = AttnResOptions(block=block)
        plan = auto.plan(48, keep=True)
        found = kernel_bench.bytes_of_step(auto, 48, 1024, 64, 4)
        assert found == (plan.rows_mixed + plan.rows_pulled) * 1024 * 64 * 4
        assert found < kernel_bench.bytes_of_step(AttnResOptions(block=block, kernel="naive"), 48, 1024, 64, 4) / 2


def test_block_has_eight_blocks() -> None:
    for sublayers in {sublayers for sizes in SIZES.values() for sublayers, _ in sizes.steps}:
        options = kernel_bench._arms(sublayers, "numba")[-1].connection.options
        assert isinstance(options, AttnResOptions)
        assert options.sources_before(sublayers) == 9


def test_low_precision_as_on_a_gpu() -> None:
    """The stream, whose bytes are modelled, is in the low precision too, while weights are not."""
    sizes = dataclasses.replace(SIZES["cuda"], device="cpu", batch=2, context=8)
    [arm] = [arm for arm in kernel_bench._arms(4, "naive") if arm.kind == "full"]
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
    assert kernel_bench._step_measures(None, laps["small"])["ratio_to_prenorm"] == "out of memory"


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


def test_an_op_is_drawn_at_the_median_of_its_whole_time() -> None:
    """Not at the sum of two medians, which noise of two modes puts elsewhere; quartiles are of the whole."""
    row = {"what": "op", "device": "cpu", "sublayers": 8, "tokens": 4, "width": 16, "threads": 1, "modelled_bytes": 1e6}
    row |= {"ratio_low": 0.9, "ratio_high": 1.1}
    quiet = {"forward_ms": 4.0, "backward_ms": 6.0, "share_of_bandwidth": 0.5}  # 2e8 bytes a second at full bandwidth
    torn = {"forward_ms": 4.0, "backward_ms": 6.0, "share_of_bandwidth": 0.25}
    rows = [row | quiet | {"implementation": name} for name in ("naive", "numba")]
    ops = pd.DataFrame([*rows, row | torn | {"implementation": "compiled"}])
    assert kernel_bench_figure._bandwidth(ops) == pytest.approx(2e8)
    with plotting.figure(1, 1) as (_, axes):
        kernel_bench_figure._draw_reads(axes[0], ops, "cpu")
        drawn = {each.get_label(): float(each.lines[0].get_ydata()[0]) for each in axes[0].containers}
    assert drawn == pytest.approx({"naive": 10, "numba": 10, "compiled": 20})
