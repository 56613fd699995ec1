"""The Triton kernels of depth attention where there is no GPU: interpreted, and compiled ahead of time."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from reslab.kernels.depth_attention import implementation, op
from reslab.schema import UserError

triton = pytest.importorskip("triton")
INTERPRETED = Path(__file__).with_name("depth_attention_interpreted.py")
TENSORS = {
    "sources": "*i64", "gradients": "*i64", "query": "*fp32", "logs": "*fp32", "scale": "*fp32", "scores": "*fp32",
    "products": "*fp32", "parts": "*fp32", "rows": "*i64", "largest": "*fp32", "sums": "*fp32", "means": "*fp32",
    "by_score": "*fp32", "norms": "*fp32", "h": "*fp32",
}  # fmt: skip
NUMBERS = {"eps": "fp32"} | dict.fromkeys(
    ("tokens", "count", "members", "across", "number", "read", "reads", "events", "height"), "i32"
)
ACROSS_LAYERS = {
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
    types = TENSORS | NUMBERS | {"out": rows, "grad": rows} | dict.fromkeys(settings, "constexpr")
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
    assert "ld.global.v4" in ptx, "rows are read in pieces of 16 bytes"
    assert "atom." not in ptx
    assert "red.global" not in ptx


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

    of_rows = {"WIDTH": 8192, "DTYPE": triton.language.bfloat16, "ALIGNED": True, "enable_fp_fusion": True}
    kernel = getattr(triton_bank, name)
    assert_lean(*resources(kernel, ACROSS_LAYERS[name] | of_rows, "*fp32", 90, tmp_path))
    numbers = {parameter.name for parameter in kernel.params if not parameter.is_constexpr} - set(TENSORS) - {"out"}
    assert numbers == {parameter.name for parameter in kernel.params if parameter.do_not_specialize}


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="nothing is compiled where it is interpreted")
def test_compiled_once_for_any_number_of_tokens_and_sources() -> None:
    from reslab.kernels.depth_attention import triton_op

    for kernel in (triton_op._forward, triton_op._backward):
        varying = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        assert varying == {"tokens", "count"} & set(kernel.arg_names)


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
