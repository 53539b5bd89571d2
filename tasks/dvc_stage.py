"""`python -m tasks.dvc_stage UNIT`: one stage of dvc.yaml, with the settings of params.yaml. It is what `dvc repro` calls.

It does what a run of the same recipe does, by the same functions: what lies ready, made from the same, is taken as it is.
"""

import sys
from collections.abc import Sequence

from tasks import dvc_graph, record, stage, workspace
from tasks.config import RecipeConfig
from tasks.dvc_graph import EVALUATE, PREPARE, REPORT, VALIDATE
from tasks.progress import Listener
from tasks.run_lock import RunInProgressError, only_run


def main(arguments: Sequence[str]) -> None:
    """The command; bad input ends with its error on stderr and exit code 1."""
    workspace.quiet_environment()
    try:
        if len(arguments) != 1:
            raise ValueError("say the name of one stage of dvc.yaml")
        if workspace.root() != workspace.checkout():
            raise ValueError(f"DVC is for what lies in the checkout, {workspace.checkout()}; unset ALMANAC_ROOT ({workspace.root()})")
        config, unit = dvc_graph.read_params(), arguments[0]
        known = dvc_graph.units(config)
        if unit not in known:
            raise ValueError(f"{unit} is no stage of the recipe in {dvc_graph.PARAMS}; there are: {', '.join(known)}")
        if unit in dvc_graph.behind(config):
            raise ValueError(f"stage {unit} of {dvc_graph.GRAPH} is not what {dvc_graph.PARAMS} makes it; run `almanac dvc`")
        with only_run(f"dvc-{unit}"):
            run(config, unit, stage.notices)
    except (ValueError, RunInProgressError) as error:
        sys.exit(str(error))


def run(config: RecipeConfig, unit: str, listener: Listener) -> None:
    """One DVC stage, published.

    Raises:
        ValueError: what it depends on does not lie ready, or it could not be published.
    """
    from tasks import stages, validate  # torch
    from tasks.publishing import Publication

    if unit in (PREPARE, VALIDATE, REPORT):
        publication = Publication(config, listener)
        if unit == REPORT:
            publication.report()
        else:
            ready = stages.prepared(config, stages.first_weights(config))
            publication.data()
            if unit == VALIDATE:
                found = validate.validate(config, ready)
                if config.data.quality == "error":
                    validate.refuse(found, ready.directory)
                publication.validation(found)
        publication.close()
        if not publication.done(unit):
            raise ValueError(f"stage {unit} was not published")
    elif unit.startswith(EVALUATE):
        stage.evaluated_after(config, unit.removeprefix(EVALUATE), record.new_run_id(config.name), listener)
    else:
        stage.after_others(config, unit, record.new_run_id(config.name), listener)


if __name__ == "__main__":
    main(sys.argv[1:])
