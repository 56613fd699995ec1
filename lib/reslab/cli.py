"""The command `reslab`. Exit codes: 0 done, 1 failed, 2 the user's input is wrong."""

import argparse
import os
import sys
from importlib import import_module

from reslab.schema import UserError

__all__ = ["main"]


def _clean(options: argparse.Namespace) -> int:
    import_module("reslab.notebook").write_clean(options.notebook)
    return 0


def _run(options: argparse.Namespace) -> int:
    from reslab import lifeline, published

    def end() -> None:
        lifeline.end_descendants()
        published.restore(options.notebook)
        lifeline.end()

    if "DVC_STAGE" in os.environ:
        lifeline.die_with_parent(end)  # before the imports below, which take seconds
    from reslab import runner

    try:
        runner.run(options.notebook)
    except runner.RunFailed as error:
        print(f"reslab: {error}", file=sys.stderr)
        return 1
    return 0


def _report(options: argparse.Namespace) -> int:
    report = import_module("reslab.report")
    report.write()
    return 0


def _scoreboard(options: argparse.Namespace) -> int:
    print(import_module("reslab.report").scoreboard())
    return 0


def _setup(options: argparse.Namespace) -> int:
    from reslab import paths, workspace

    workspace.allow_without_git(paths.ROOT)
    return 0


def _repro(options: argparse.Namespace) -> int:
    """`dvc repro`, checked before it starts and followed by the scoreboard; ends with the process that started it."""
    from reslab import lifeline

    if "MAKELEVEL" in os.environ:
        lifeline.die_with_parent()
    from reslab import notebook, params, paths, published, runner, workspace

    print(f"reslab: checking {f'conf/scale/{options.scale}.yaml' if options.scale else 'params.yaml'}", flush=True)
    if options.scale:
        folder = paths.BUILD / f"scale-{options.scale}"
        environment = workspace.create(folder, options.scale)
        os.chdir(folder)
        os.execvpe(sys.executable, [sys.executable, "-m", "reslab", "repro", "--", *options.dvc], environment)
    runner.preflight(params.read(), notebook.names())
    workspace.allow_without_git(paths.ROOT)
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # noqa: PTH120
    dvc = import_module("dvc.cli")
    code = int(dvc.main(["--cd", str(paths.ROOT), "repro", *options.dvc]))
    if code == 0:
        print()
        return _scoreboard(options)
    lost = [path.name for name in notebook.names() for path in published.restore(name)]
    print(
        "reslab: the pipeline stopped; what is finished is kept, run the same again to continue. Not in figures/ now: "
        + (", ".join(lost) or "nothing is missing"),
        file=sys.stderr,
    )
    return 1


def _bench(options: argparse.Namespace) -> int:
    """Both benchmarks."""
    import_module("reslab.bench").main()
    import_module("reslab.kernel_bench").main()
    return 0


def _bench_training(options: argparse.Namespace) -> int:
    import_module("reslab.bench").main()
    return 0


def _bench_kernel(options: argparse.Namespace) -> int:
    import_module("reslab.kernel_bench").main(options.device, options.repeats, options.quick)
    return 0


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="measure training throughput and the kernels: both, or the one named")
    bench.set_defaults(call=_bench)
    parts = bench.add_subparsers(metavar="benchmark")
    training = parts.add_parser("training", help="a training step against a minimal model: figures/bench_training.csv")
    training.set_defaults(call=_bench_training)
    kernel = parts.add_parser("kernel", help="attention over depth: figures/bench_kernel.csv and .png")
    kernel.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what is measured; default cpu")
    kernel.add_argument("--repeats", type=int, metavar="N", help="rounds that count; default 9, with --quick 3")
    kernel.add_argument("--quick", action="store_true", help="the smallest sizes only, written to build/")
    kernel.set_defaults(call=_bench_kernel)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reslab", description="Replicate the claims about residual connections.")
    commands = parser.add_subparsers(required=True, metavar="command")
    repro = commands.add_parser("repro", help="dvc repro with a check before it and the scoreboard after it")
    repro.add_argument("--scale", help="run a preset of conf/scale in build/scale-<name>, params.yaml untouched")
    repro.add_argument("dvc", nargs="*", help="arguments for dvc repro, after --")
    repro.set_defaults(call=_repro)
    for name, call, help_text in (
        ("clean", _clean, "write a notebook without outputs to build/clean (a pipeline stage)"),
        ("run", _run, "run one claim's notebook with the values of params.yaml (a pipeline stage)"),
    ):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("notebook", help="name without .ipynb, such as 01_no_residual_collapse")
        command.set_defaults(call=call)
    for name, call, help_text in (
        ("report", _report, "write figures/README.md and figures/claims.csv (a pipeline stage)"),
        ("scoreboard", _scoreboard, "print the verdicts"),
        ("setup", _setup, "make DVC work in an unpacked tarball without git"),
    ):
        commands.add_parser(name, help=help_text).set_defaults(call=call)
    _add_bench(commands)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.call(options))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"reslab: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reslab: stopped; what is finished is kept, run the same again to continue", file=sys.stderr)
        return 130
