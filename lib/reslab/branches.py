"""Where the residual branches of a model are: of known blocks by themselves, of others by name.

A branch is a place where an update f is added to a stream x, both [..., d].
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from reslab.residuals import Residual
from reslab.schema import UserError, did_you_mean

__all__ = ["RECIPES", "Branch", "Recipe", "known_branches", "named_branches", "unknown_blocks", "what_to_pass"]


@dataclass(frozen=True)
class Recipe:
    """Where one branch of a known block is seen. Names are of the block's children; "" is the block itself."""

    label: str
    """Follows the block's name in the branch's name."""
    stream: str
    """Its input is x."""
    update: str
    """Its output is f."""
    after: str | None = None
    """Its output is the next stream; None where that is x + f."""


_GPT2 = (
    Recipe("attn", "ln_1", "attn"),
    Recipe("crossattention", "ln_cross_attn", "crossattention"),
    Recipe("mlp", "ln_2", "mlp"),
)
_LLAMA = (Recipe("self_attn", "input_layernorm", "self_attn"), Recipe("mlp", "post_attention_layernorm", "mlp"))
_BERT = (
    Recipe("attention", "attention", "attention.output.dropout", "attention.output"),
    Recipe("mlp", "intermediate", "output.dropout", "output"),
)
_VIT = (Recipe("attention", "layernorm_before", "dropout"), Recipe("mlp", "layernorm_after", "dropout"))
_MAMBA = (Recipe("mixer", "", "mixer"),)

RECIPES: dict[str, tuple[Recipe, ...]] = {
    # Hugging Face transformers 5, by the block's class; each class has the forward of the one it shares a recipe with
    "GPT2Block": _GPT2,
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "BertLayer": _BERT,
    "RobertaLayer": _BERT,
    "ViTLayer": _VIT,
    "MambaBlock": _MAMBA,
    "Mamba2Block": _MAMBA,
    # torch.nn.TransformerEncoderLayer
    "norm_first": (Recipe("self_attn", "norm1", "dropout1"), Recipe("mlp", "norm2", "dropout2")),
    "norm_last": (Recipe("self_attn", "self_attn", "dropout1", "norm1"), Recipe("mlp", "linear1", "dropout2", "norm2")),
    # reslab.residuals.Residual
    "Residual": (Recipe("", "norm_input", "norm_update", ""),),
}
"""The known blocks. A branch whose children a block lacks, such as cross-attention, is not there."""


def _recipes(block: nn.Module) -> tuple[Recipe, ...]:
    """The branches of `block`, none where it is not known."""
    if isinstance(block, Residual):
        known = RECIPES["Residual"]
    elif isinstance(block, nn.TransformerEncoderLayer):
        known = RECIPES["norm_first" if block.norm_first else "norm_last"]
    else:
        known = next((RECIPES[kind.__name__] for kind in type(block).__mro__ if kind.__name__ in RECIPES), ())
    names = {name for name, _ in block.named_modules(remove_duplicate=False)}
    return tuple(recipe for recipe in known if {recipe.stream, recipe.update, recipe.after or ""} <= names)


@dataclass(frozen=True, eq=False)
class Branch:
    """One place to watch."""

    name: str
    stream: nn.Module
    update: nn.Module
    after: nn.Module | None = None
    whole: bool = False
    """`update` returns the next stream x + f rather than f."""
    tokens_first: bool = False
    """The stream is [T, B, d]."""
    weigh: Callable[[Tensor], Tensor] | None = None
    """What of the update joins the stream, where a connection weighs it; None is all of it."""


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def known_branches(model: nn.Module) -> list[Branch]:
    """The branches of all known blocks, in the order of the model's modules."""
    found = []
    for name, block in model.named_modules():
        tokens_first = isinstance(block, nn.TransformerEncoderLayer) and not block.self_attn.batch_first
        for recipe in _recipes(block):
            after = None if recipe.after is None else block.get_submodule(recipe.after)
            places = block.get_submodule(recipe.stream), block.get_submodule(recipe.update), after
            label = _joined(name, recipe.label) or type(block).__name__
            weigh = block.connection.weigh if isinstance(block, Residual) else None
            found.append(Branch(label, *places, tokens_first=tokens_first, weigh=weigh))
    return found


def unknown_blocks(model: nn.Module) -> list[str]:
    """Lists of blocks in which no branch is known, though the model has others that are: "decoder.layers (2 x ...)"."""
    known = [name for name, module in model.named_modules() if _recipes(module)]
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or not _is_block(module[0]):
            continue
        inside = any(name.startswith(f"{block}.") for block in known)
        if not inside and not any(block.startswith(f"{name}.") for block in known):
            found.append(f"{name} ({len(module)} x {type(module[0]).__name__})")
    return found


def _is_block(module: nn.Module) -> bool:
    """By the usual names, of a module that holds others."""
    return type(module).__name__.endswith(("Layer", "Block")) and next(module.children(), None) is not None


def _matches(name: str, pattern: str) -> bool:
    """Part by part, so that "layers.*" are the layers and not what is inside them."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def named_branches(model: nn.Module, patterns: Sequence[str]) -> list[Branch]:
    """The modules that `patterns` name, each once; a UserError for a pattern that names none."""
    if not patterns:
        raise UserError(f"branches is empty; {what_to_pass(model)}")
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[int, Branch] = {}
    for pattern in patterns:
        names = [name for name in modules if _matches(name, pattern)]
        if not names:
            where = type(model).__name__
            raise UserError(f"branches: no module of {where} is named '{pattern}'; {_nearest(pattern, modules)}")
        for name in names:
            module = modules[name]
            chosen.setdefault(id(module), Branch(name, module, module, whole=True))
    return list(chosen.values())


def _nearest(pattern: str, names: Mapping[str, nn.Module]) -> str:
    """The hint at the nearest name of the same depth, with stars for numbers where a model has too many to list."""
    level = {name for name in names if name.count(".") == pattern.count(".")}
    starred = {re.sub(r"\b\d+\b", "*", name) for name in level}
    hint = did_you_mean(pattern, starred if "*" in pattern else level)
    return hint if hint.startswith("did") else did_you_mean(pattern, starred or {n for n in names if "." not in n})


def what_to_pass(model: nn.Module) -> str:
    """What the user is to write, with the lists of modules that may be meant."""
    lists = [
        f"'{_joined(name, '*')}' ({len(module)} x {type(module[0]).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)
    ]
    wanted = "pass branches=[...] with the names of modules that take the stream and return it"
    return f"{wanted}; candidates: {', '.join(lists)}" if lists else f"{wanted}, as model.named_modules() has them"
