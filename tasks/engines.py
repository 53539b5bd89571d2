"""The engine of a run: started when something first needs it, and started again where it does not hold the weights that are asked for."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.digest import directory_digest
from engine.trainer.session import Session
from tasks.config import RecipeConfig
from tasks.lineage import hold_file
from tasks.progress import START_ENGINE, Listener, devices, told


@dataclass(frozen=True, slots=True)
class Weights:
    """A model on the disk."""

    directory: Path
    digest: str
    """`engine.digest.directory_digest` of it."""

    @classmethod
    def of(cls, directory: Path) -> Self:
        """Reads all of it, for its digest."""
        return cls(directory, directory_digest(directory))

    def unchanged(self) -> Path:
        """The directory of weights that are about to be loaded, hashed. Raises `ChangedInputError` where they are others by now."""
        hold_file("model", self.directory, self.digest)
        return self.directory


class Engine:
    """Ray and the hybrid actors.

    No dataclass, and with slots: see `RunContext`.

    Args:
        config: resolved.
        directory: for logs and whatever else the workers write.
        listener: is told when the engine starts.
    """

    __slots__ = ("_config", "_directory", "_holds", "_listener", "_session", "_stack")

    def __init__(self, config: RecipeConfig, directory: Path, listener: Listener) -> None:
        self._config, self._directory, self._listener = config, directory, listener
        self._stack = ExitStack()
        self._session: Session | None = None
        self._holds: str | None = None

    def session(self, weights: Weights) -> Session:
        """The session, whose policy is exactly these weights.

        Raises:
            ChangedInputError: the weights are not those that they were.
            ResourceError: Ray lacks devices; names the resource.
            WorkerError: a worker failed; names it.
        """
        if self._session is None or self._holds != weights.digest:
            self.close()
            with told(self._listener, START_ENGINE) as result:
                opening = Session.open(self._config.engine(), weights.unchanged(), self._directory)
                self._session, self._holds = self._stack.enter_context(opening), weights.digest
                result.append(devices(self._config))
        return self._session

    def trains(self) -> None:
        """From now on the policy is nothing that lies on the disk."""
        self._holds = None

    def export(self, directory: Path) -> Weights:
        """Writes the policy as an ordinary Hugging Face directory.

        It is kept and written in float32, so that the engine holds what is written to the last bit. Not so with LoRA, whose adapter is merged
        into what is written: whatever comes next starts the engine from there, as it would if the run had been broken off in between.
        """
        assert self._session is not None, "nothing has been trained"
        self._session.export(directory)
        weights = Weights.of(directory)
        self._holds = weights.digest if self._config.training.lora is None else None
        return weights

    def close(self) -> None:
        """Takes everything down; nothing where the engine has not been started."""
        self._session = None
        self._stack.close()
