"""Stages of all kinds, a flow each, so that Prefect's pages keep them apart."""

from prefect import Flow, flow

from flows import artifacts
from flows.crash import HOOKS
from flows.parameters import Override, RecipeName, Seconds
from flows.units import create_model, prepare_data, run_stage
from flows.watch import run_of
from tasks.config import RecipeConfig
from tasks.stage import through


def _flow_of(kind: str) -> Flow[..., str]:
    """The flow of the stages of one kind."""

    @flow(name=kind, flow_run_name="{stage} of {recipe}", **HOOKS)
    def one_stage(recipe: RecipeName, stage: str, overrides: tuple[Override, ...] = (), timeout_seconds: Seconds | None = None) -> str:
        """A stage of a recipe, with what the stages before it have left, which must lie ready. Returns the run's id.

        Args:
            recipe: one of the files in conf/recipe.
            stage: name of the stage in the recipe; see `stages` in its file.
            overrides: settings of the recipe, one an item: `key=value` in Hydra's grammar, such as `seed=7` or `~stages.sft`.
            timeout_seconds: the run is stopped so many seconds after its turn has come; None: never.
        """

        def stages(config: RecipeConfig) -> list[str]:
            found = through(config, stage)
            if config.stages[stage].kind != kind:
                raise ValueError(f"stage {stage} of recipe {config.name} is of kind {config.stages[stage].kind}; start the flow of that kind")
            return found

        with run_of(recipe, overrides, about=stages, timeout_seconds=timeout_seconds) as context:
            create_model()
            prepare_data()
            for earlier in stages(context.config)[:-1]:
                run_stage(earlier, only_kept=True)
            run_stage(stage)
            artifacts.stage_table(context.record, stage)
            return context.run

    return one_stage


sft = _flow_of("sft")
rl = _flow_of("rl")
difficulty = _flow_of("difficulty")
drop_easy = _flow_of("drop_easy")
temperature_search = _flow_of("temperature_search")

FLOWS = {found.name: found for found in (sft, rl, difficulty, drop_easy, temperature_search)}
"""By kind of stage."""
