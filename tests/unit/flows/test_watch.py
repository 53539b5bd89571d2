"""What stands between a flow and who watches it."""

import socket
from pathlib import Path

import pytest

from flows import child_run, cli
from flows.units import is_offline
from flows.watch import OutOfTimeError, _limited, _Lines
from tasks.compose import compose, split_recipe
from tasks.problems import ConfigurationError
from tasks.stage import through


def test_lines_reach_the_log_whole_and_once() -> None:
    """Mutation: log every write; a table would come in pieces."""
    logged: list[str] = []
    lines = _Lines(logged.append)
    for piece in ("one", " line\ntwo", "\n", "\n", "three"):
        lines.write(piece)
    assert logged == ["one line", "two"]


def test_a_run_is_stopped_when_its_time_is_over() -> None:
    """Mutation: leave the limit out, or let Prefect's words through, which name no setting."""

    def endless() -> None:
        with _limited(0.2):
            while True:
                socket.gethostname()

    with pytest.raises(OutOfTimeError, match=r"stopped after 0\.2 s \(timeout_seconds\)"):
        endless()
    with _limited(None):
        pass


def test_a_cancelled_run_is_recorded_as_terminated() -> None:
    """Mutation: let Prefect's signal through to the record."""
    from prefect.exceptions import TerminationSignal

    from tasks.failure import reason

    with pytest.raises(SystemExit) as ended, _limited(None):
        raise TerminationSignal(15)
    assert (ended.value.code, reason(ended.value)) == (143, "terminated")


def test_stages_through_one() -> None:
    config = compose(["recipe=grpo_tiny"])
    assert through(config, "rl") == ["sft", "rl"]
    assert through(config, "sft") == ["sft"]
    assert through(config, None) == ["sft", "rl"]
    with pytest.raises(ValueError, match=r"recipe grpo_tiny has no stage rl2 \(did you mean rl\?\); it has: sft, rl"):
        through(config, "rl2")


def test_the_recipe_is_taken_out_of_overrides_wherever_it_stands() -> None:
    """Mutation: by position, or by text that a value may hold."""
    assert split_recipe(["seed=3", "recipe=grpo_tiny", "name=recipe"]) == ("grpo_tiny", ["seed=3", "name=recipe"])
    with pytest.raises(ConfigurationError, match="not given"):
        split_recipe(["seed=3"])


def test_only_the_network_is_worth_another_attempt() -> None:
    """Mutation: look at the error alone, and not at what it came from."""

    error = ValueError("model.path: cannot be loaded")
    error.__cause__ = type("ConnectTimeout", (OSError,), {})("timed out")
    assert is_offline(error)
    assert is_offline(ConnectionResetError())
    assert not is_offline(ValueError("model.path: no such model"))


def test_a_run_in_a_process_of_its_own_is_no_part_of_the_workers_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: hand the environment on as it is; the child would take itself for the night."""
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "1")
    monkeypatch.setenv("PREFECT_HOME", "/there")
    environment = child_run._environment()
    assert "PREFECT__FLOW_RUN_ID" not in environment
    assert environment["PREFECT_HOME"] == "/there"


@pytest.mark.parametrize("option", ["--prefect-port", "--mlflow-port"])
def test_a_taken_port_is_named_before_anything_starts(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: look at one port after the first service has started."""
    monkeypatch.setenv("ALMANAC_ROOT", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            free = other.getsockname()[1]
        ports = {"--prefect-port": free, "--mlflow-port": free} | {option: port}
        assert cli.main(["up", *(str(word) for pair in ports.items() for word in pair)]) == 2
    assert f"port {port} cannot be used (Address already in use); choose another one with {option}" in capsys.readouterr().err
    assert not (tmp_path / ".work" / "up").exists()
