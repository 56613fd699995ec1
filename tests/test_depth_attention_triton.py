"""The Triton kernels of depth attention where there is no GPU: interpreted, and compiled ahead of time."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from reslab.kernels.depth_attention import implementation, op
from reslab.residuals.depth_attention import AttnResOptions
from reslab.schema import UserError

triton = pytest.importorskip("triton")
INTERPRETED = Path(__file__).with_name("depth_attention_interpreted.py")
TENSORS = {
    "sources": "*i64", "gradients": "*i64", "query": "*fp32", "logs": "*fp32", "scale": "*fp32", "scores": "*fp32",
    "products": "*fp32", "parts": "*fp32", "rows": "*i64", "largest": "*fp32", "sums": "*fp32", "means": "*fp32",
    "by_score": "*fp32", "norms": "*fp32", "h": "*fp32", "queries": "*fp32",
}  # fmt: skip
NUMBERS = {"eps": "fp32"} | dict.fromkeys(
    ("tokens", "count", "members", "across", "number", "read", "reads", "events", "height", "column", "slot"), "i32"
)
IN_ROWS = ("out", "grad", "update", "before", "kept")
ACROSS_LAYERS = {
    "_write": {"BLOCK": 32, "TOKENS": 32, "QUERIES": 64, "JOINS": True, "NORMED": True, "num_warps": 4},
    "_mix": {"BLOCK": 512, "QUERIES": 8, "BEGUN": False, "DONE": False, "num_warps": 2},
    "_differentiate": {"BLOCK": 128, "ROWS": 8, "READS": 8, "num_warps": 4},
    "_gather": {"BLOCK": 512, "ROWS": 8, "BEGUN": False, "DONE": False, "num_warps": 2},
}
"""Kernels of `triton_bank` at their largest."""


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="these are run by themselves")
def test_values_and_gradients_where_interpreted() -> None:
    without = [f"-pno:{plugin}" for plugin in ("nbval", "xdist", "cacheprovider")]  # they take long to import
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *without, "--noconftest", str(INTERPRETED)]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def resources(kernel: Any, settings: dict[str, Any], rows: str, architecture: int, folder: Path) -> tuple[str, str]:
    """What the assembler says of a kernel compiled for rows of this type, and the PTX that it was given."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: settings.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    types = (
        TENSORS
        | NUMBERS
        | dict.fromkeys(("out", "grad", "update", "before", "kept"), rows)
        | dict.fromkeys(settings, "constexpr")
    )
    signature = {name: types[name] for name in kernel.arg_names}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(signature) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, settings, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
    return said.stdout, compiled.asm["ptx"]


def assert_lean(said: str, ptx: str) -> None:
    assert re.findall(r"(STACK|LOCAL):(\d+)", said) == [("STACK", "0"), ("LOCAL", "0")], said
    assert re.search(r"ld\.global\.v4|cp\.async\S+ \[.*\], \[.*\], 0x10", ptx), "rows are read in pieces of 16 bytes"
    assert "atom." not in ptx
    assert not re.search(r"\bred\.", ptx)


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="nothing is compiled where it is interpreted")
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("width", [512, 1024, 4096, 8192])
def test_nothing_spills(width: int, architecture: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from reslab.kernels.depth_attention import triton_op

    for kernel in (triton_op._forward, triton_op._backward):
        settings = triton_op.settings(width, torch.bfloat16, in_pieces=True)
        assert_lean(*resources(kernel, settings, "*bf16", architecture, tmp_path))


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="nothing is compiled where it is interpreted")
@pytest.mark.parametrize("name", ACROSS_LAYERS)
def test_nothing_spills_across_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    from reslab.kernels.depth_attention import triton_bank

    constants = {"WIDTH": 8192, "DTYPE": triton.language.bfloat16, "ALIGNED": True, "enable_fp_fusion": True}
    kernel = getattr(triton_bank, name)
    known = {key: value for key, value in constants.items() if key in (*kernel.arg_names, "enable_fp_fusion")}
    rows = "*bf16" if name == "_write" else "*fp32"
    assert_lean(*resources(kernel, ACROSS_LAYERS[name] | known, rows, 90, tmp_path))


class NoGpu:
    """Stands in for the driver: kernels are compiled as on a GPU of sm_90, and not run."""

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    """Of each kernel, what its launches compile."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    plain, found = triton.runtime.jit.JITFunction.run, defaultdict[str, list[str]](list)

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        compiled = plain(kernel, *arguments, grid=grid, warmup=True, **settings)
        found[kernel.__name__].append(compiled.hash)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    monkeypatch.setattr(triton.runtime.driver, "_active", NoGpu())
    return found


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="nothing is compiled where it is interpreted")
def test_compiled_once_for_any_number_of_tokens_and_sources(compilations: dict[str, list[str]]) -> None:
    from reslab.kernels.depth_attention import triton_op

    for tokens, count in ((1, 1), (16, 16), (5, 3), (33, 2)):
        query, sources = torch.ones(64), [torch.ones(tokens, 64, dtype=torch.bfloat16) for _ in range(count)]
        out, *saved = triton_op.forward(query, sources, 1e-6)
        triton_op.backward(out, query, sources, *saved)
    assert {name: (len(each), len(set(each))) for name, each in compilations.items()} == {
        "_forward": (4, 1),
        "_backward": (4, 1),
    }


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="nothing is compiled where it is interpreted")
def test_a_pass_compiles_nothing_more_for_other_tokens(
    compilations: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from reslab.kernels.depth_attention import bank, triton_bank

    monkeypatch.setattr(bank, "_history", triton_bank.TritonHistory)
    counts = []
    for tokens in (16, 1, 5):
        x, queries = torch.ones(tokens, 64, requires_grad=True), torch.ones(7, 64, requires_grad=True)
        rows, token = bank.Bank.start(AttnResOptions().plan(6, True), x, queries, 1e-6, True)
        for index in range(6):
            token = rows.write(token, index + 1, 2 * rows.read(token, index))
        rows.read(token, 6).sum().backward()
        counts.append({name: len(set(each)) for name, each in compilations.items()})
    assert counts[0] == counts[1] == counts[2]
    assert set(counts[0]) == {"_write", "_mix", "_project", "_differentiate", "_gather"}


def test_what_runs_it() -> None:
    assert {device: implementation(torch.empty(2, 4, device=device)) for device in ("cpu", "meta")} == {
        "cpu": "numba",
        "meta": "naive",
    }
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        for dtype, name in ((torch.float32, "triton"), (torch.bfloat16, "triton"), (torch.float64, "naive")):
            assert implementation(torch.empty(2, 4, device="cuda", dtype=dtype)) == name


def test_a_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "implementation", lambda source: "triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "reslab.kernels.depth_attention.triton_op", raising=False)
    monkeypatch.delattr("reslab.kernels.depth_attention.triton_op", raising=False)
    with pytest.raises(UserError, match=r"pip install 'triton>=3\.6'"):
        op.depth_attention(torch.ones(4), [torch.ones(2, 4)])
