"""params.yaml: what is refused, with which words, and that the presets and the shipped file agree."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reslab import params, paths
from reslab.schema import UserError


def claim(**changed: Any) -> dict[str, Any]:
    return {"claims": {"no_residual_collapse": changed}}


def refusal(changed: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        params.load("smoke", changed)
    return str(caught.value)


def edited(tmp_path: Path, old: str, new: str) -> Path:
    """params.yaml with one piece of text replaced."""
    text = paths.PARAMS.read_text()
    assert text.count(old) == 1
    path = tmp_path / "params.yaml"
    path.write_text(text.replace(old, new))
    return path


# --- the shipped file and the presets --------------------------------------------------------------


def test_shipped_file_is_preset_cpu() -> None:
    shipped = params.read()
    assert params.changes(shipped) == {}
    assert shipped == params.preset("cpu")


@pytest.mark.parametrize("scale", ["smoke", "cpu", "gpu"])
def test_preset_is_named_like_its_file(scale: str) -> None:
    assert params.preset(scale).scale == scale


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"seeds": [5, 3]},
        {"decoder": {"width": 24, "heads": 3}},
        {"corpus": {"source": "my.txt", "sha256": None}},
        claim(criteria={"loss_gap": {"above": None, "below": -1.5}}),
        claim(learning_rates=[1e-4], resnet={"channels": 3}),
    ],
)
def test_changes_lead_back_to_the_same_parameters(changed: dict[str, Any]) -> None:
    wanted = params.load("gpu", changed)
    found = params.changes(wanted)
    assert params.load("gpu", found) == wanted
    assert (found == {}) == (changed == {})


def test_changes_name_only_what_differs() -> None:
    changed = params.load("smoke", {"decoder": {"width": 24}})
    assert params.changes(changed) == {"decoder": {"width": 24}}


def test_unknown_scale_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown scale 'smok'; did you mean 'smoke'"):
        params.preset("smok")
    with pytest.raises(UserError, match="valid are: cpu, gpu, smoke"):
        params.load("huge")


# --- reading the file -----------------------------------------------------------------------------


def test_exponents_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 would read 1e-3 as a string."""
    path = edited(tmp_path, "weight_decay: 0.1", "weight_decay: 1e-3")
    assert params.read(path).optimisation.weight_decay == 0.001


def test_quoted_number_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path, "weight_decay: 0.1", 'weight_decay: "1e-3"')
    with pytest.raises(UserError, match=r"params\.yaml: optimisation\.weight_decay: .*valid number, got '1e-3'"):
        params.read(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml: cannot read it \(No such file"):
        params.read(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("scale: cpu\n\nscale: gpu\n", "'scale' is given twice, in line 1 and in line 3; keep one of them"),
        ("sweep:\n  beyond: 1\n  seed: 9\n  beyond: 1\n", "'beyond' is given twice, in line 2 and in line 4"),
        ("sweep: {seed: 1, seed: 2}\n", "'seed' is given twice, in line 1 and in line 1"),
        ("0x10: 1\n16: 2\n", "'16' is given twice, in line 1 and in line 2"),
    ],
)
def test_key_given_twice_is_named_with_its_lines(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"params\.yaml: not valid YAML: {words}"):
        params.read(path)


def test_key_given_twice_in_a_preset_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(paths.CONF, tmp_path / "conf")
    with (tmp_path / "conf" / "scale" / "smoke.yaml").open("a") as file:
        file.write("\nseeds: [1]\n")
    monkeypatch.setattr(paths, "CONF", tmp_path / "conf")
    with pytest.raises(UserError, match=r"^conf: .* found duplicate key seeds in .*smoke\.yaml.*$"):
        params.preset("smoke")


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    """It is how YAML overrides one; the file is refused for its names alone."""
    path = tmp_path / "params.yaml"
    path.write_text("sweep: &sweep {beyond: 1}\nother: {<<: *sweep, beyond: 2}\n")
    with pytest.raises(UserError, match="other: unknown parameter"):
        params.read(path)


@pytest.mark.parametrize("content", [b"scale: [cpu", b"\x80\xff\x00"])
def test_malformed_yaml_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"params\.yaml: not valid YAML") as caught:
        params.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "- cpu\n", "cpu\n"])
def test_file_without_parameters_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"params\.yaml: top level"):
        params.read(path)


def test_missing_parameter_is_named(tmp_path: Path) -> None:
    path = edited(tmp_path, "  clip: 1.0\n", "")
    with pytest.raises(UserError, match=r"params\.yaml: optimisation\.clip: missing"):
        params.read(path)


def test_missing_criterion_is_named(tmp_path: Path) -> None:
    line = next(line for line in paths.PARAMS.read_text().splitlines(keepends=True) if "loss_gap:" in line)
    with pytest.raises(UserError, match=r"criteria\.loss_gap: missing"):
        params.read(edited(tmp_path, line, ""))


def test_each_fault_has_its_line() -> None:
    lines = refusal({"seeds": [0, 0], "optimisation": {"clip": -1.0}, "decodr": {}}).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("scale smoke with changes: ") for line in lines)


# --- refused values -------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"decodr": {"width": 64}}, "decodr: unknown parameter; did you mean 'decoder'?"),
    ({"decoder": {"widht": 64}}, "decoder.widht: unknown parameter; did you mean 'width'?"),
    (claim(resnet={"chanels": 8}), "resnet.chanels: unknown parameter; did you mean 'channels'?"),
    ({"evaluation_window": 1}, "evaluation_window: unknown parameter; did you mean 'evaluation_windows'?"),
    ({"sweep": {"steps_at_most": 1}}, "sweep.steps_at_most: unknown parameter; did you mean 'steps'?"),
    ({"zzz": 1}, "zzz: unknown parameter; valid are: claims, corpus"),
    ({"decoder": {"width": "64"}}, "decoder.width: input should be a valid integer, got '64'"),
    ({"decoder": {"width": 64.0}}, "decoder.width: input should be a valid integer, got 64.0"),
    ({"evaluation_windows": True}, "evaluation_windows: input should be a valid integer, got True"),
    ({"decoder": {"tied_head": 1}}, "decoder.tied_head: input should be a valid boolean, got 1"),
    ({"decoder": 7}, "decoder: input should be a valid dictionary"),
    ({"seeds": 3}, "seeds: input should be a valid tuple, got 3"),
    ({"optimisation": {"clip": "1e-3"}}, "optimisation.clip: input should be a valid number, got '1e-3'"),
    ({"optimisation": {"clip": float("nan")}}, "optimisation.clip: input should be a finite number, got nan"),
    ({"optimisation": {"weight_decay": float("inf")}}, "input should be a finite number, got inf"),
    ({"optimisation": {"warmup": 1.0}}, "optimisation.warmup: input should be less than 1"),
    (claim(depth=-1), "no_residual_collapse.depth: input should be greater than or equal to 2, got -1"),
    ({"decoder": {"width": 30, "heads": 4}}, "width 30 is not divisible by heads 4; change one of them"),
    ({"decoder": {"tied_head": True}}, "use embedding: gpt2"),
    ({"decoder": {"norm": "layer"}}, "decoder.norm: input should be 'layernorm' or 'rmsnorm', got 'layer'"),
    ({"seeds": []}, "seeds: "),
    ({"seeds": [1, 2, 1]}, "seeds: seeds must be different and not negative, got [1, 2, 1]"),
    ({"seeds": [-1]}, "seeds: seeds must be different and not negative, got [-1]"),
    ({"seeds": ["0"]}, "seeds.0: input should be a valid integer, got '0'"),
    ({"seeds": [0, "1"]}, "seeds.1: input should be a valid integer, got '1'"),
    ({"corpus": {"sha256": "abc"}}, "corpus.sha256: 'abc' is no SHA-256; give its 64 digits, 0-9 and a-f, or null"),
    ({"corpus": {"sha256": 1}}, "corpus.sha256: input should be a valid string, got 1"),
    ({"device": {"precision": "float16"}}, "precision float16 needs kind: cuda; on the CPU use float32"),
    ({"device": {"kind": "gpu"}}, "device.kind: input should be 'cpu' or 'cuda', got 'gpu'"),
    ({"device": {"kind": "cudda"}}, "got 'cudda'; did you mean 'cuda'?"),
    ({"execution": {"scheduler": "host:8786"}}, "execution.scheduler: 'host:8786' is no address of a Dask scheduler"),
    ({"execution": {"scheduler": "tcp://host"}}, "give local, or one such as tcp://host:8786 (tcp, tls or ucx)"),
    ({"execution": {"scheduler": 3}}, "execution.scheduler: input should be a valid string, got 3"),
    ({"execution": {"workers": 0}}, "execution.workers: input should be greater than or equal to 1, got 0"),
    (claim(skips=[0.0, 1.0]), "skips must increase from 0 to 1"),
    (claim(learning_rates=[]), "learning_rates: tuple should have at least 1 item"),
    (claim(learning_rates=["a"]), "learning_rates.0: input should be a valid number, got 'a'"),
    (claim(learning_rates=[1e-3, 1.0e-2, 0.001]), "learning_rates: 0.001 is given more than once in [0.001, 0.01, 0"),
    ({"sweep": {"steps": 13}}, "sweep.steps 13 is more than optimisation.steps 12; lower it"),
    (
        {"claims": {"layer_roles": {"hops": {"sweep_steps": 41}}}},
        "claims.layer_roles.hops.sweep_steps 41 is more than claims.layer_roles.hops.steps 40; lower it",
    ),
    (claim(exact={"depths": [4, 2]}), "depths must increase"),
    (claim(criteria={"loss_gap": {"above": None, "below": None}}), "criteria.loss_gap: a criterion needs a threshold"),
    (claim(criteria={"loss_gap": {"above": 1.0, "below": 1.0}}), "above 1.0 is not less than below 1.0"),
    (claim(criteria={"loss_gap": {"abov": 1.0}}), "loss_gap.abov: unknown parameter; did you mean 'above'?"),
    (claim(criteria={"los_gap": {"above": 1.0}}), "criteria.los_gap: unknown parameter; did you mean 'loss_gap'?"),
    (claim(criteria={"loss_gap": None}), "criteria.loss_gap: input should be a valid dictionary"),
    ({1: 2}, "1: keys should be strings"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=[words[:50] for _, words in REFUSED])
def test_refused(changed: dict[str, Any], words: str) -> None:
    said = refusal(changed)
    assert words in said
    assert "\n" not in said


@pytest.mark.parametrize("address", ["local", "tcp://host:8786", "tls://10.0.0.1:80", "ucx://a.b:1"])
def test_addresses_of_schedulers(address: str) -> None:
    assert params.load("smoke", {"execution": {"scheduler": address}}).execution.scheduler == address


def test_a_sweep_may_be_as_long_as_its_runs() -> None:
    assert params.load("smoke", {"sweep": {"steps": 12}}).sweep.steps == 12


def test_one_seed_is_enough_to_run() -> None:
    assert params.load("smoke", {"seeds": [0]}).seeds == (0,)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (claim(skips=[]), "skips"),
        (claim(learning_rates=[1e-3, 0.0]), "learning_rates"),
        (claim(learning_rates=[-1e-3, 1e-3]), "learning_rates"),
        (claim(resnet={"learning_rates": [1e-3, -1.0]}), "learning_rates"),
        (claim(exact={"width": 10}), "width"),
    ],
    ids=["no skips", "rate of zero", "negative rate", "negative rate of the ResNet", "width no multiple of 4 heads"],
)
def test_refused_before_training_rather_than_in_it(changed: dict[str, Any], named: str) -> None:
    """Each of these would stop a run in the middle, far from its cause."""
    assert named in refusal(changed)


def test_sweep_seed_is_used_for_nothing_else() -> None:
    """conf says so of sweep.seed: a rate chosen and judged at one seed would favour itself."""
    assert "sweep.seed 99 is among seeds" in refusal({"seeds": [0, 99]})


def test_misspelt_name_is_one_line_and_not_also_missing(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(paths.PARAMS.read_text().replace("  steps: ", "  stepz: ", 1))
    with pytest.raises(UserError) as refused:
        params.read(path)
    assert str(refused.value) == "params.yaml: optimisation.stepz: unknown parameter; did you mean 'steps'?"


def test_reading_parameters_imports_nothing_that_takes_seconds() -> None:
    """Every stage of the pipeline and every worker imports this much before it does anything."""
    slow = ["matplotlib", "rfc3987_syntax", "scipy.stats", "sklearn", "sympy", "torch._dynamo", "triton"]
    code = f"import sys; from reslab import notebook, params; print(*sorted(set(sys.modules) & set({slow})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
