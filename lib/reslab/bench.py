"""Training throughput of the decoder against a minimal nanoGPT-style model of the same size.

Both train on the same corpus in one process, step about, so that noise of the machine meets both; the
result is the median ratio of neighbouring steps. Absolute times say little and are given for scale only.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reslab import data, params, paths
from reslab.files import write_atomic
from reslab.models.decoder import DecoderConfig
from reslab.training import Device, RunConfig, build, optimisation_steps

__all__ = ["MinimalGpt", "main", "measure"]

SIZES = ((64, 12), (256, 6))
"""Width and blocks."""

BATCH, CONTEXT = 16, 64


class _MinimalBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.packed, self.project = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.packed(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        grown: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return grown


class MinimalGpt(nn.Module):
    """The yardstick: a GPT written as plainly as in nanoGPT, with nothing of this package in it."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_MinimalBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def _minimal_steps(config: RunConfig, text: Tensor) -> Iterator[float]:
    """nanoGPT's loop: random slices, AdamW as PyTorch has it, clipping, the loss read at every step."""
    shape = config.model
    assert isinstance(shape, DecoderConfig)
    model = MinimalGpt(shape.vocabulary, shape.width, shape.heads, shape.depth, shape.context)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))
        inputs = torch.stack([text[i : i + CONTEXT].long() for i in starts])
        targets = torch.stack([text[i + 1 : i + 1 + CONTEXT].long() for i in starts])
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield loss.item()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def _config(width: int, depth: int, threads: int, steps: int) -> RunConfig:
    settings = params.preset("cpu")
    shape = settings.decoder.model_dump() | {"width": width, "context": CONTEXT}
    return RunConfig(
        task=data.TextConfig(corpus=settings.corpus, context=CONTEXT, evaluation_windows=16),
        model=DecoderConfig(**shape, vocabulary=data.VOCABULARY, depth=depth),
        optimisation=settings.optimisation.model_copy(update={"batch": BATCH, "steps": steps}),
        learning_rate=1e-3,
        seed=0,
        device=Device(threads=threads),
    )


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def measure(width: int, depth: int, threads: int, repeats: int) -> dict[str, float | int]:
    """One row of the table: median milliseconds of both, and median and quartiles of their ratio."""
    torch.set_num_threads(threads)
    warmup = 3
    config = _config(width, depth, threads, warmup + repeats + 1)
    task = data.load(config.task)
    assert isinstance(task, data.Text)
    text = torch.from_numpy(task.corpus.splits["train"].copy())
    ours = optimisation_steps(config, task, build(config.model, config.seed))
    theirs = _minimal_steps(config, text)
    times = [(_seconds(lambda: next(theirs)), _seconds(lambda: next(ours))) for _ in range(warmup + repeats)][warmup:]
    minimal, reslab = np.array(times).T
    low, ratio, high = np.quantile(minimal / reslab, [0.25, 0.5, 0.75])
    return {
        "width": width,
        "depth": depth,
        "threads": threads,
        "batch": BATCH,
        "context": CONTEXT,
        "minimal_ms": round(float(np.median(minimal)) * 1e3, 1),
        "reslab_ms": round(float(np.median(reslab)) * 1e3, 1),
        "speed_ratio": round(float(ratio), 3),
        "ratio_quartile_low": round(float(low), 3),
        "ratio_quartile_high": round(float(high), 3),
        "n": repeats,
    }


def main(repeats: int = 41) -> None:
    """Print the table and write it to figures/bench_training.csv."""
    threads = (1, 2)
    rows = [measure(width, depth, count, repeats) for width, depth in SIZES for count in threads]
    table = pd.DataFrame(rows)
    print("Training step, minimal nanoGPT-style model over ours (above 1: ours is faster); measured, so it varies.")
    print(table.to_string(index=False))
    write_atomic(paths.FIGURES / "bench_training.csv", table.to_csv(index=False, lineterminator="\n").encode())
