"""params.yaml: read as YAML 1.2, validated strictly; the presets of conf/scale through DVC's Hydra composition."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from pydantic import Field, field_validator, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError
from yaml import YAMLError as ConfError  # type: ignore[import-untyped]

from reslab import paths
from reslab.comparison import RateSweep
from reslab.data import CorpusConfig
from reslab.experiments.attention_residual_cost import Parameters as AttentionResidualCost
from reslab.experiments.attention_residual_gains import Parameters as AttentionResidualGains
from reslab.experiments.depth_scaled_init import Parameters as DepthScaledInit
from reslab.experiments.diffusion_residuals import Parameters as DiffusionResiduals
from reslab.experiments.fp16_swamping import Parameters as Fp16Swamping
from reslab.experiments.layer_drop_redundancy import Parameters as LayerDropRedundancy
from reslab.experiments.layer_roles import Parameters as LayerRoles
from reslab.experiments.layerscale_depth import Parameters as LayerscaleDepth
from reslab.experiments.no_residual_collapse import Parameters as NoResidualCollapse
from reslab.experiments.pre_vs_post_ln import Parameters as PreVsPostLn
from reslab.experiments.prenorm_dilution import Parameters as PrenormDilution
from reslab.experiments.residual_health import Parameters as ResidualHealth
from reslab.experiments.residual_scale import Parameters as ResidualScale
from reslab.experiments.sandwich_ln import Parameters as SandwichLn
from reslab.experiments.state_space_residuals import Parameters as StateSpaceResiduals
from reslab.models.decoder import DecoderShape
from reslab.schema import Settings, UserError, did_you_mean, validate
from reslab.sweep import Execution
from reslab.training import Device, Optimisation

__all__ = ["Params", "changes", "load", "preset", "read"]


class Claims(Settings):
    """One section a claim, named like its notebook without the number."""

    no_residual_collapse: NoResidualCollapse
    pre_vs_post_ln: PreVsPostLn
    layerscale_depth: LayerscaleDepth
    fp16_swamping: Fp16Swamping
    layer_drop_redundancy: LayerDropRedundancy
    attention_residual_gains: AttentionResidualGains
    residual_scale: ResidualScale
    sandwich_ln: SandwichLn
    depth_scaled_init: DepthScaledInit
    residual_health: ResidualHealth
    prenorm_dilution: PrenormDilution
    layer_roles: LayerRoles
    diffusion_residuals: DiffusionResiduals
    state_space_residuals: StateSpaceResiduals
    attention_residual_cost: AttentionResidualCost


class Params(Settings):
    """All of params.yaml."""

    scale: Literal["smoke", "cpu", "gpu"]
    """The preset these values come from; verdicts at `smoke` mean nothing and are marked so."""
    execution: Execution
    device: Device
    seeds: tuple[int, ...] = Field(min_length=1)
    evaluation_windows: int = Field(ge=1)
    corpus: CorpusConfig
    decoder: DecoderShape
    optimisation: Optimisation
    sweep: RateSweep
    claims: Claims

    @model_validator(mode="after")
    def _sweep_has_its_own_seed(self) -> "Params":
        if self.sweep.seed in self.seeds:
            raise ValueError(f"sweep.seed {self.sweep.seed} is among seeds; choose one that is used for nothing else")
        return self

    @model_validator(mode="after")
    def _sweeps_are_no_longer_than_runs(self) -> "Params":
        """A rate is chosen by runs as long as those that are compared at it, or shorter ones."""
        lengths = [("sweep.steps", self.sweep.steps, "optimisation.steps", self.optimisation.steps)]
        for name, part in _parts("claims", self.claims):
            if hasattr(part, "sweep_steps") and hasattr(part, "steps"):
                lengths.append((f"{name}.sweep_steps", part.sweep_steps, f"{name}.steps", part.steps))
        for short, number, long, most in lengths:
            if number > most:
                raise ValueError(f"{short} {number} is more than {long} {most}; lower it, for instance to half of them")
        return self

    @model_validator(mode="after")
    def _claims_fit(self) -> "Params":
        for name, section in self.claims:
            try:
                section.require(self)
            except ValueError as error:
                raise ValueError(f"claims.{name}: {error}") from None
        return self

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise ValueError(f"seeds must be different and not negative, got {list(seeds)}")
        return seeds


def _parts(name: str, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """The settings and all inside them, with their paths."""
    yield name, settings
    for field, value in settings:
        if isinstance(value, Settings):
            yield from _parts(f"{name}.{field}", value)


class _Constructor(SafeConstructor):
    """As ruamel's, but of a key that is given twice both lines are told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lines: dict[tuple[int, Any], int] = {}
        """Of each key of a mapping, which is known by its node."""

    def check_mapping_key(self, node: Any, key_node: Any, mapping: Any, key: Any, value: Any) -> bool:
        line = key_node.start_mark.line + 1
        first = self.lines.setdefault((id(node), key), line)
        if key in mapping:
            raise YAMLError(f"'{key}' is given twice, in line {first} and in line {line}; keep one of them")
        return True


def _plain(settings: Any) -> Any:
    """Settings as the dictionaries and lists that YAML and notebooks hold."""
    return settings.model_dump(mode="json")


def read(path: Path | None = None) -> Params:
    """params.yaml, checked; a UserError with one line for each fault."""
    path = path or paths.PARAMS
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        content = yaml.load(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror})") from None
    except YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return validate(Params, content, path.name)


def _compose(scale: str) -> dict[str, Any]:
    scales = sorted(path.stem for path in (paths.CONF / "scale").glob("*.yaml"))
    if scale not in scales:
        raise UserError(f"unknown scale '{scale}'; {did_you_mean(scale, scales)}")
    try:
        with initialize_config_dir(str(paths.CONF), version_base=None):
            composed = OmegaConf.to_container(compose("config", overrides=[f"scale={scale}"]), resolve=True)
    except (HydraException, ConfError) as error:
        raise UserError(f"conf: {' '.join(str(error).split())}") from None
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}


def preset(scale: str) -> Params:
    """The parameters of conf/config.yaml with those of conf/scale/<scale>.yaml over them."""
    return validate(Params, _compose(scale), f"conf, scale {scale}")


def load(scale: str, changed: dict[str, Any] | None = None) -> Params:
    """The preset `scale` with `changed` over it: nested, for instance {"decoder": {"width": 128}}."""
    content = _merged(_plain(preset(scale)), changed or {})
    return validate(Params, content, f"scale {scale} with changes")


def changes(params: Params) -> dict[str, Any]:
    """What `load(params.scale, ...)` needs to give `params`: where they differ from their preset."""
    return _difference(_plain(preset(params.scale)), _plain(params))


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if nested else value
    return merged


def _difference(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    difference = {}
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            if inner := _difference(base[key], value):
                difference[key] = inner
        elif key not in base or base[key] != value:
            difference[key] = value
    return difference
