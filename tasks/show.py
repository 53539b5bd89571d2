"""What a person sees of a run: the summary as JSON, the closing table, the note on MLflow's page, and MLflow's own pages."""

import os
import signal
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from engine.reshard.ledger import PARTS, Ledger
from tasks import workspace
from tasks.answering import answers
from tasks.record import RunRecord, StageRecord
from tasks.stage_config import KINDS
from tasks.tracker_location import tracking_uri

PHASE_ORDER = ("generate", "reward", "log_prob", "update", "synchronise", "other")
START_SECONDS = 120.0
"""How long MLflow's server may take to answer for the first time."""


def summary(record: RunRecord) -> dict[str, Any]:
    """The run as JSON values: `almanac show RUN --json`. Accuracies are fractions; what is not known yet is null."""
    return record.model_dump(mode="json", exclude={"process"})


def table(record: RunRecord) -> RenderableType:
    """The end of a run on the terminal, 100 columns or fewer: accuracies, seconds, what synchronisations moved, and how to look further."""
    parts: list[RenderableType] = [_headline(record), "", _accuracies(record)]
    parts += [Text(f"{stage.name} converged after step {stage.steps}: {stage.ended_because}", "dim") for stage in record.stages if _converged(stage)]
    if reused := [f"{stage.name} (as in {stage.reused_from})" for stage in record.stages if stage.reused_from]:
        parts += ["", Text(f"Lay ready and were not run again: {', '.join(reused)}; --fresh makes them anew", "dim")]
    if any(stage.results for stage in record.stages):
        parts += ["", _results(record)]
    if any(stage.seconds for stage in record.stages):
        parts += ["", _seconds(record)]
    if any(stage.synchronisations for stage in record.stages):
        parts += ["", _synchronisations(record)]
    return Group(*parts, "", _commands(record))


def note(record: RunRecord, description: str) -> str:
    """Markdown for MLflow's page of the run: the recipe's description and the table of its results."""
    name = average(record)
    lines = [
        description,
        "",
        f"| stage | steps | {name} before | {name} after | gain | greedy after | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in trained(record):
        cells = [
            stage.name,
            f"{stage.steps} of {stage.steps_planned or '?'}" + (", converged" if _converged(stage) else ""),
            percent(stage.accuracy_before, stage.interval_before),
            percent(stage.accuracy_after, stage.interval),
            gain(stage),
            percent(stage.greedy_after, None),
            _number(stage.seconds),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"{stage.name}: {results_text(stage.results)}" for stage in record.stages if stage.results)]
    if record.final_model:
        lines += ["", f"Final model: `{record.final_model}`"]
    return "\n".join(lines)


def _headline(record: RunRecord) -> Text:
    colour = {"finished": "green", "running": "cyan"}.get(record.status, "red")
    line = Text.assemble((record.run, "bold"), "  ", (record.status, f"bold {colour}"), f"  seed {record.seed}")
    if record.error:
        line.append(f"\n{record.error}", style="red")
    return line


def trained(record: RunRecord) -> list[StageRecord]:
    """Stages that train, in order."""
    return [stage for stage in record.stages if KINDS[stage.kind].trains]


def _converged(stage: StageRecord) -> bool:
    return stage.ended_by == "convergence"


def average(record: RunRecord) -> str:
    """`avg@8`, with the run's own k."""
    return f"avg@{next((stage.samples_per_prompt for stage in record.stages if stage.samples_per_prompt), 'k')}"


def _accuracies(record: RunRecord) -> Table:
    name, confidence = average(record), next((stage.confidence for stage in record.stages if stage.confidence), None)
    title = "Accuracy on the test set, %" + (f" [{100 * confidence:g} % interval]" if confidence else "")
    grid = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    grid.add_column("stage")
    for heading in ("steps", f"{name} before", f"{name} after", "gain", "greedy"):
        grid.add_column(heading, justify="right")
    for stage in trained(record):
        greedy = f"{percent(stage.greedy_before, None)} → {percent(stage.greedy_after, None)}"
        style = "green" if stage.gain_interval and stage.gain_interval[0] > 0 else None
        grid.add_row(
            stage.name,
            f"{stage.steps}/{stage.steps_planned or '?'}",
            percent(stage.accuracy_before, stage.interval_before),
            percent(stage.accuracy_after, stage.interval),
            Text(gain(stage), style=style or ""),
            greedy,
        )
    return grid


def _results(record: RunRecord) -> Table:
    """Of stages that do not train: counts as they are, rates and shares in %."""
    grid = Table(box=None, padding=(0, 2, 0, 0), title="Found", title_justify="left", title_style="bold")
    grid.add_column("stage")
    grid.add_column("result", overflow="fold")
    for stage in record.stages:
        if stage.results:
            grid.add_row(stage.name, results_text(stage.results))
    return grid


def results_text(results: Mapping[str, float]) -> str:
    """`prompts 4000, kept 3120, pass rate 41.2 %`."""

    def one(name: str, value: float) -> str:
        shown = f"{100 * value:.1f} %" if name.endswith(("rate", "share")) else f"{value:,.6g}"
        return f"{name.replace('_', ' ')} {shown}"

    return ", ".join(one(name, value) for name, value in results.items())


def _seconds(record: RunRecord) -> Table:
    found = {phase for stage in record.stages for phase in stage.seconds_by_phase}
    phases = [phase for phase in PHASE_ORDER if phase in found] + sorted(found.difference(PHASE_ORDER))
    grid = Table(box=None, padding=(0, 2, 0, 0), title="Seconds", title_justify="left", title_style="bold")
    grid.add_column("stage")
    for heading in (*(phase.replace("_", " ") for phase in phases), "all", "tokens/s"):
        grid.add_column(heading, justify="right")
    for stage in record.stages:
        by_phase = [_number(stage.seconds_by_phase.get(phase)) for phase in phases]
        grid.add_row(stage.name, *by_phase, _number(stage.seconds), _number(stage.tokens_per_second))
    return grid


def _synchronisations(record: RunRecord) -> Table:
    """Bytes of the rank that receives most, seconds of the mean rank."""
    title = "Weights, per synchronisation and rank; parts in % of the seconds"
    grid = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    grid.add_column("stage")
    for heading in ("times", "received", "minimum", "extra memory", "seconds", *PARTS):
        grid.add_column(heading, justify="right")
    for stage in record.stages:
        if stage.synchronisations:
            count, ranks = stage.synchronisations.count, stage.synchronisations.ranks
            most, whole = max(ranks, key=lambda rank: rank.bytes_received), sum(ranks, Ledger())
            moved = [size(round(total / count)) for total in (most.bytes_received, most.bytes_minimum)]
            shares = [f"{100 * seconds / (whole.seconds or 1.0):.0f}" for seconds in whole.by_part().values()]
            grid.add_row(stage.name, str(count), *moved, size(whole.peak_extra_bytes), f"{whole.seconds / len(ranks) / count:.3f}", *shares)
    return grid


def size(count: int) -> str:
    """Bytes for people, in units of 1000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3f} {unit}"
    return f"{count} B"


def _commands(record: RunRecord) -> Table:
    rows = [
        ("Curves, samples, plots", "almanac ui"),
        ("All numbers, as JSON", f"almanac show {record.run} --json"),
        ("Accuracy of a model", f"almanac evaluate {_path(record.final_model) if record.final_model else 'MODEL'} recipe={record.recipe}"),
    ]
    rows += [(label, _path(path)) for label, path in (("Final model", record.final_model), ("Log", record.log_file)) if path]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    # Folded, not cut: people copy these.
    grid.add_column(style="bold", overflow="fold")
    for label, command in rows:
        grid.add_row(label, Text(command))
    return grid


def _path(path: str) -> str:
    """Relative to the current directory where that leads down to it: shorter, and it can be pasted."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def final(record: RunRecord) -> str:
    """avg@k after the last stage that has one, in percent of the test set."""
    measured = [stage for stage in record.stages if stage.accuracy_after is not None]
    return percent(measured[-1].accuracy_after, measured[-1].interval) if measured else "–"


def percent(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """`61.3 [58.0, 64.1]`, of fractions of 1."""
    if value is None:
        return "–"
    return f"{100 * value:.1f}" + (f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else "")


def gain(stage: StageRecord) -> str:
    """`+12.5 [+9.1, +15.8]`, in percent of the test set."""
    if stage.gain is None:
        return "–"
    interval = f" [{100 * stage.gain_interval[0]:+.1f}, {100 * stage.gain_interval[1]:+.1f}]" if stage.gain_interval else ""
    return f"{100 * stage.gain:+.1f}{interval}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def run_url(base: str, record: RunRecord | None) -> str:
    """The page of a run, or of all runs, on an MLflow server."""
    if record is None or record.mlflow is None:
        return base
    # Or MLflow's pages are those for language-model applications, with traces first and runs last.
    return f"{base.rstrip('/')}/#/experiments/{record.mlflow.experiment_id}/runs/{record.mlflow.run_id}?workflowType=machine_learning"


def ui(record: RunRecord | None, port: int = 5000) -> None:
    """Serves MLflow's pages on this machine until Ctrl-C, and prints the run's address; a tracking server is only pointed at.

    Raises:
        ValueError: the port is taken.
        RuntimeError: the server ended, or does not answer.
    """
    uri = record.mlflow.tracking_uri if record is not None and record.mlflow is not None else tracking_uri()
    if uri.startswith(("http://", "https://")):
        _open(run_url(uri, record))
        return
    check_port(port, "--port")
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    log = workspace.work_directory() / "mlflow-ui.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    for sign in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C: else the server would outlive a closed terminal.
        signal.signal(sign, signal.default_int_handler)
    with log.open("w") as output:
        # A session of its own: Ctrl-C reaches us alone, and the server ends with all its workers when we say so.
        server = subprocess.Popen(mlflow_server(uri, port), env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            print(f"MLflow is starting; its log is {_path(str(log))}", flush=True)
            base = f"http://127.0.0.1:{port}"
            _wait_until_healthy(server, base, str(log))
            _open(run_url(base, record))
            print("Ctrl-C stops it.", flush=True)
            server.wait()
            raise RuntimeError(f"MLflow's server ended by itself with exit code {server.returncode}; its log is {log}")
        except KeyboardInterrupt:
            print("stopped")
        finally:
            _stop(server)


def check_port(port: int, option: str) -> None:
    """Whether a server can be started there.

    Raises:
        ValueError: another process has the port; names the option that chooses another one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(f"port {port} cannot be used ({error.strerror}); choose another one with {option}") from error


def mlflow_server(uri: str, port: int) -> list[str]:
    """The command that serves MLflow's pages over a database, to this machine alone."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    return [*command, "--default-artifact-root", workspace.artifacts_directory().as_uri(), "--host", "127.0.0.1", "--port", str(port)]


def _wait_until_healthy(server: subprocess.Popen[bytes], base: str, log: str) -> None:
    def check() -> None:
        if server.poll() is not None:
            raise RuntimeError(f"MLflow's server ended with exit code {server.returncode}; its log is {log}")

    if not answers(f"{base}/health", START_SECONDS, check):
        raise RuntimeError(f"MLflow's server did not answer within {START_SECONDS:.0f} s; its log is {log}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and its workers, which are one process group."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, None)):
        try:
            os.killpg(server.pid, sign)
            server.wait(patience)
            return
        except ProcessLookupError:
            server.wait()
            return
        except subprocess.TimeoutExpired:
            continue


def _open(url: str) -> None:
    print(url, flush=True)
    if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
