"""The `almanac` command. Hydra overrides follow the verb: `almanac run recipe=grpo_tiny stages.rl.steps=40`."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from flows.terminal import silence_exit
from tasks import workspace
from tasks.failure import reason

ABOUT = "Reinforcement-learning recipes, run stage by stage."
HELP = "ALMANAC_ROOT: where data, runs and records go. ALMANAC_DEBUG=1: errors come with their traceback."
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 when it did what was asked, 2 for bad input, 1 for a failure, 130 after Ctrl-C."""
    workspace.quiet_environment()
    # A module beside the person who calls is found, as `python -m` does it; last, so that no file there hides a library.
    sys.path.append(os.getcwd())
    code = _run(parse(sys.argv[1:] if argv is None else argv))
    if argv is None:
        # We are the program, and have said everything.
        silence_exit()
    return code


def _run(arguments: argparse.Namespace) -> int:
    try:
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except KeyboardInterrupt as error:
        return _report(error, INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has enough of it, as `almanac list | head` does. Nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except Exception as error:  # noqa: BLE001 - the last place where anything can be said in a way that a person understands
        return _report(error, BAD_INPUT if _is_bad_input(error) else FAILED)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments of one command, with the function that runs it as `command`. Exits with 2 when they make no sense."""
    parser = argparse.ArgumentParser(prog="almanac", description=ABOUT, epilog=HELP)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def verb(name: str, command: Callable[[argparse.Namespace], int], text: str, *, overrides: bool = False) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(command=command, overrides=None)
        if overrides:
            added.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and settings in Hydra's grammar")
        return added

    from flows import commands, lineage_commands, nightly_commands, service_commands

    ran = verb("run", commands.run, "run a recipe from data to a measured gain; stages that lie ready are not run again", overrides=True)
    ran.add_argument("--fresh", action="store_true", help="make everything anew")
    ran.add_argument("--until", metavar="STAGE", help="end with this stage and its evaluation")
    checked = verb("preflight", commands.preflight, "check everything that can be known before a run", overrides=True)
    checked.add_argument("--here", action="store_true", help="fail, too, when this machine lacks something that the recipe needs")
    reckoned = _reckoning_verbs(verb)
    verb("validate", commands.validate, "make a recipe's data and check them: duplicates, contamination, answers, lengths, drift", overrides=True)
    tracked = verb("dvc", commands.dvc, "write params.yaml and dvc.yaml for a recipe; without one, dvc.yaml for params.yaml", overrides=True)
    tracked.add_argument("--check", action="store_true", help="write nothing; fail where they are not what the recipe says")
    shown = verb("show", commands.show, "what a run did and measured")
    shown.add_argument("run", nargs="?", default="latest", metavar="RUN", help="run id, or latest (the default)")
    ui = verb("ui", commands.ui, "open MLflow on a run")
    ui.add_argument("run", nargs="?", metavar="RUN", help="run id; the newest run without it")
    ui.add_argument("--port", type=int, default=5000, help="default 5000")
    traced = verb("trace", commands.trace, "the dataflow of a recorded step, as a page, as a Chrome trace and as JSON")
    traced.add_argument("--output", metavar="DIRECTORY", help="where the files go; beside the run's other traces without it")
    replayed = verb("replay", commands.replay, "run one operator of a kept step again, alone, and compare")
    replayed.add_argument("--operator", required=True, metavar="ROLE.OPERATOR", help="such as actor.log_prob")
    replayed.add_argument("--tolerance", type=float, default=0.0, help="largest absolute difference that is no failure (default 0)")
    for added, needed in ((traced, False), (replayed, True)):
        added.add_argument("run", nargs="?", default="latest", metavar="RUN", help="run id, or latest (the default)")
        added.add_argument("--step", type=int, required=needed, help="counts from 1" + ("" if needed else "; the last one without it"))
        added.add_argument("--stage", help="the last stage that has any, without it")
    doctor = verb("doctor", commands.doctor, "versions, devices, services, and what is missing")
    evaluate = verb("evaluate", commands.evaluate, f"accuracy of a model on a recipe's test set (default: {commands.DEFAULT_RECIPE})")
    evaluate.add_argument("model", metavar="MODEL", help="Hugging Face directory or hub name")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and settings in Hydra's grammar")
    asked = _asked(verb)
    dropped = _drop_easy(verb)
    nightly_commands.add(verb)
    lineage_commands.add(verb)
    service_commands.add(verb)
    verb("list", commands.list_names, "recipes, models, data, algorithms, rewards and resources, with what they are")
    for added in (shown, doctor, evaluate, *reckoned, *asked, dropped):
        added.add_argument("--json", action="store_true", help="for programs")

    arguments, rest = parser.parse_known_args(argv)
    # argparse gives up on overrides that follow an option.
    if rest and (arguments.overrides is None or any(word.startswith("-") for word in rest)):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


Verb = Callable[..., argparse.ArgumentParser]


def _reckoning_verbs(verb: Verb) -> list[argparse.ArgumentParser]:
    """What is told of models and recipes by arithmetic alone."""
    from flows import commands

    estimated = verb("estimate", commands.estimate, "memory of a rank and cost of each stage, by phase", overrides=True)
    estimated.add_argument("--device", help="h100, h200, h800, a100_80 or cpu; without it h800 for GPUs, else cpu")
    estimated.add_argument("--mean-share", type=float, help="mean length of responses as a share of their cap (default 0.4)")
    planned = verb(
        "reshard-plan", commands.reshard_plan, "which bytes of the weights go where between training and generation, and the least that would do"
    )
    planned.add_argument(
        "model", metavar="MODEL", help="a model of `almanac list`, a published one such as Qwen/Qwen3-32B, or a Hugging Face directory"
    )
    planned.add_argument("--fsdp", type=int, required=True, metavar="N", help="training ranks; the engines sit on the same ones")
    planned.add_argument("--tp", type=int, required=True, metavar="T", help="tensor-parallel ranks of one engine")
    planned.add_argument(
        "--bucket-megabytes", type=float, default=256, metavar="MB", help="most that a rank sends and receives at once (default 256)"
    )
    planned.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="what travels (default bfloat16)")
    return [estimated, planned]


def _asked(verb: Verb) -> list[argparse.ArgumentParser]:
    """What asks a model and changes nothing."""
    from flows import commands

    default = f"(default: {commands.DEFAULT_RECIPE})"
    rated = verb("difficulty", commands.difficulty, f"how often a model answers each training prompt of a recipe right {default}")
    text = f"accuracy, diversity and entropy of a model over temperatures, and which one to train at {default}"
    searched = verb("temperature-search", commands.temperature_search, text)
    for added, kind in ((rated, "difficulty"), (searched, "temperature_search")):
        added.add_argument("model", metavar="MODEL", help="Hugging Face directory or hub name")
        added.add_argument("overrides", nargs="*", metavar="key=value", help="recipe=NAME, and settings in Hydra's grammar")
        added.add_argument("--stage", help=f"stage of kind {kind} whose settings are taken; without it the first, or else as the first RL stage asks")
    return [rated, searched]


def _drop_easy(verb: Verb) -> argparse.ArgumentParser:
    from flows import commands

    dropped = verb("drop-easy", commands.drop_easy, "the prompts that a run's RL stage was trained on, without those that it answers too well")
    dropped.add_argument("run", nargs="?", default="latest", metavar="RUN", help="run id, or latest (the default)")
    dropped.add_argument("--stage", action="append", required=True, help="RL stage whose logged outcomes are looked at; may be said again")
    dropped.add_argument("--threshold", type=float, default=0.9, help="a prompt is dropped when its estimate is above this (default 0.9)")
    dropped.add_argument("--estimator", choices=("mean", "latest"), default="mean", help="over all visits, or the last one's (default mean)")
    dropped.add_argument("--min-visits", type=int, default=1, help="prompts visited less often are kept (default 1)")
    dropped.add_argument("--output", metavar="FILE", help="parquet file for the prompts that are kept; under .work/drop_easy without it")
    return dropped


def _is_bad_input(error: Exception) -> bool:
    """Configuration, data and resource errors are all ValueErrors: they say what to change."""
    from tasks.run_lock import RunInProgressError

    return isinstance(error, ValueError | RunInProgressError)


def _report(error: BaseException, code: int) -> int:
    first, *more = reason(error).splitlines()
    print(f"almanac: {first}", *more, sep="\n         ", file=sys.stderr)
    for note in getattr(error, "__notes__", []):
        print(note, file=sys.stderr)
    if os.environ.get("ALMANAC_DEBUG") == "1":
        traceback.print_exception(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
