"""Composing: every shipped file is good, every key of the classes can be overridden, and all mistakes are told at once."""

import threading
import time

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import AlgorithmConfig, GSPOLossConfig, OPOAdvantageConfig, OwnAdvantageConfig
from tasks import schema, workspace
from tasks.compose import choices, compose, load_resolved, write_resolved
from tasks.config import RecipeConfig
from tasks.problems import ConfigurationError

TINY = "recipe=grpo_tiny"
RECIPES = sorted(choices("recipe"))
FILES = sorted(workspace.conf_directory().rglob("*.yaml"))


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        compose(list(overrides))
    return str(caught.value).splitlines()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_shipped_recipe_composes_under_its_own_name(recipe: str) -> None:
    assert compose([f"recipe={recipe}"]).name == recipe


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_shipped_file_parses_says_what_it_is_and_composes(file) -> None:
    """Mutation: a misspelled key in any file of any group turns this red."""
    assert isinstance(yaml.safe_load(file.read_text()) or {}, dict)
    group = file.parent.name
    if group == "conf":
        return
    assert len(choices(group)[file.stem]) > 10
    if group == "recipe":
        overrides = [f"recipe={file.stem}"]
    elif group in RecipeConfig.model_fields:
        overrides = [TINY, f"{group}={file.stem}"]
    else:
        overrides = [TINY, f"{group}@stages.rl.{group}={file.stem}"]
    if group == "data" and "train_file" in file.read_text():
        overrides += ["data.train_file=train.parquet", "data.sft_file=sft.parquet"]
    if group == "resources":
        # Multiples of every number of ranks that is shipped.
        overrides += ["stages.rl.prompts_per_step=384", "stages.sft.rows_per_step=384"]
    compose(overrides)


def test_a_group_is_swapped_and_its_interpolation_follows_the_stage() -> None:
    config = compose([TINY, "algorithm@stages.rl.algorithm=dr_grpo", "resources=one_cpu", "stages.rl.max_response_tokens=50"])
    stage = config.stages["rl"]
    assert stage.kind == "rl"
    assert stage.algorithm.advantage.scale == "none"
    assert stage.algorithm.loss.aggregation_constant_tokens == 50
    assert config.resources.ranks == 1


def test_a_key_that_no_file_mentions_can_be_overridden() -> None:
    """Mutation: hand overrides to Hydra as they are, and its struct check refuses these."""
    overrides = ["model.architecture.layers=2", "stages.rl.sampling.temperature=0.5", "rollout.max_log_prob_difference=null", "+seed=4"]
    config = compose([TINY, *overrides])
    assert config.model.architecture is not None
    stage = config.stages["rl"]
    assert stage.kind == "rl"
    assert (config.model.architecture.layers, stage.sampling.temperature, config.rollout.max_log_prob_difference, config.seed) == (2, 0.5, None, 4)


@pytest.mark.parametrize("text", ["1e-4", "1E-4"])
def test_numbers_in_any_notation_are_numbers(text: str) -> None:
    assert compose([TINY, f"stages.rl.training.optimizer.learning_rate={text}"]).stages["rl"].training.optimizer.learning_rate == 1e-4


def test_interpolations_are_resolved_before_the_check() -> None:
    assert compose([TINY, "seed=${stages.rl.steps}"]).seed == compose([TINY]).stages["rl"].steps
    rate = compose([TINY]).stages["sft"].training.optimizer.learning_rate
    assert problems(TINY, "seed=${stages.sft.training.optimizer.learning_rate}") == [f"seed: should be a valid integer, is {rate}"]


def test_stages_run_in_the_order_of_the_recipes_file() -> None:
    """Hydra alone begins with the stage that the defaults list mentions first.

    Mutation: without `_in_written_order`, a stage named first in the defaults and last in the file comes first.
    """
    for recipe in RECIPES:
        written = yaml.safe_load((workspace.conf_directory() / "recipe" / f"{recipe}.yaml").read_text())["stages"]
        assert [name for name in compose([f"recipe={recipe}"]).stages if name in written] == list(written)


def test_a_recipe_that_begins_with_another_puts_its_own_stages_where_it_writes_them(tmp_path, monkeypatch) -> None:
    """Mutations: own stages first; inherited ones first; those that it does not write last."""
    conf = tmp_path / "conf"
    (conf / "recipe").mkdir(parents=True)
    (conf / "config.yaml").write_text("defaults:\n  - recipe: ???\n  - _self_\n")
    sft = "{kind: sft, steps: 1, training: {optimizer: {learning_rate: 1e-5}}}"
    body = "name: base\ndescription: Three stages\ndata: {chain_sum: {}}\nmodel: {architecture: {}}\nstages:\n"
    stages = "".join(f"  {name}: {sft}\n" for name in ("one", "two", "three"))
    (conf / "recipe" / "base.yaml").write_text(f"# @package _global_\n{body}{stages}")
    own = f"  zero: {sft}\n  one: {{steps: 2}}\n  between: {sft}\n  again: {sft}\n  three: {{steps: 3}}\n  last: {sft}\n"
    (conf / "recipe" / "mine.yaml").write_text(f"# @package _global_\ndefaults: [base, _self_]\nname: mine\nstages:\n{own}")
    monkeypatch.setattr("tasks.compose.conf_directory", lambda: conf)
    config = compose(["recipe=mine"])
    assert list(config.stages) == ["zero", "one", "two", "between", "again", "three", "last"]
    assert [stage.steps for stage in config.stages.values()] == [1, 2, 1, 1, 1, 3, 1]


def test_written_order_wins_over_the_defaults_list(tmp_path, monkeypatch) -> None:
    conf = tmp_path / "conf"
    (conf / "training").mkdir(parents=True)
    (conf / "recipe").mkdir()
    (conf / "config.yaml").write_text("defaults:\n  - recipe: ???\n  - _self_\n")
    (conf / "training" / "slow.yaml").write_text("optimizer: {learning_rate: 1e-5}\n")
    header = "# @package _global_\ndefaults:\n  - /training@stages.last.training: slow\n  - /training@stages.first.training: slow\n  - _self_\n"
    body = "name: two\ndescription: Two stages\ndata: {chain_sum: {}}\nmodel: {architecture: {}}\n"
    stages = "stages:\n  first: {kind: sft, steps: 1}\n  last: {kind: sft, steps: 1}\n"
    (conf / "recipe" / "two.yaml").write_text(header + body + stages)
    monkeypatch.setattr("tasks.compose.conf_directory", lambda: conf)
    assert list(compose(["recipe=two"]).stages) == ["first", "last"]
    assert list(compose(["recipe=two", "~stages.first"]).stages) == ["last"]


# Each list holds mistakes that do not touch each other; all of a list are made in one go.
MISTAKES = {
    "unknown keys": [
        ("stages.rl.stepz=3", "stages.rl.stepz: unknown key; did you mean stages.rl.steps?"),
        ("+sead=3", "sead: unknown key; did you mean seed?"),
        ("++resource.ranks=1", "resource: unknown key; did you mean resources?"),
        ("stages.rl.learning_rate=1", "stages.rl.learning_rate: unknown key; did you mean stages.rl.training.optimizer.learning_rate or "),
        ("learning_rate=1", "learning_rate: unknown key; did you mean stages.NAME.training.optimizer.learning_rate or "),
        ("stages.sfd.steps=3", "stages.sfd: the recipe has no such stage (did you mean sft?); it has: sft, rl; a new one needs a kind"),
        ("tracking.xyz=3", "tracking.xyz: unknown key; known here: experiment, samples_per_table, system_metrics"),
        ("algorithm@stages.rl.algoritm=grpo", "stages.rl.algoritm: unknown key; did you mean stages.rl.algorithm?"),
        ("~stages.rm", "stages.rm: cannot be taken out: the recipe does not set it"),
        ("hydra.run.dir=/tmp", "hydra.run.dir: Hydra only composes here; its own settings have no effect. Take it out"),
    ],
    "groups and grammar": [
        ("resources=colocatd", "resources: there is no conf/resources/colocatd.yaml (did you mean colocated?); there are: colocated, "),
        ("data=[chain_sum]", "data: there is no conf/data/["),
        ("model=null", "model: there is no conf/model/null.yaml; there are: "),
        ("algoritm@stages.rl.algorithm=grpo", "algoritm: unknown group (did you mean algorithm?); there are: algorithm, data, "),
        ("algorithm=grpo", "algorithm: belongs to a stage; say algorithm@stages.rl.algorithm=grpo"),
        ("~algorithm", "algorithm: cannot be taken out: the recipe uses algorithm@stages."),
        ("seed=1,2", "seed: seed=1,2 is a sweep over several values; give one"),
        ("seed 1", "seed 1: not of the form key=value"),
    ],
    "unknown kind": [
        ("stages.rl.groups.kind=fliter", "stages.rl.groups.kind: is 'fliter'; it can be 'keep', 'filter', 'substitute', 'drop'"),
        ("stages.rl.truncated={kind: penalty}", "stages.rl.truncated.buffer_tokens: has to be set: integer"),
    ],
    "settings of another kind": [
        ("stages.rl.groups.max_generations=3", "stages.rl.groups.max_generations: unknown key of kind=keep, which takes: ; kind=filter has max_gen"),
    ],
    "no length": [("stages.sft.steps=null", "stages.sft: set exactly one of steps and epochs; steps is None, epochs is None")],
    "two lengths": [("stages.sft.epochs=2", "stages.sft: set exactly one of steps and epochs; steps is 750, epochs is 2")],
    "types and ranges": [
        ("stages.rl.steps=abc", "stages.rl.steps: should be a valid integer, is 'abc'"),
        ("stages.rl.samples_per_prompt=1e3", "stages.rl.samples_per_prompt: should be a valid integer, is 1000.0"),
        ("stages.rl.max_prompt_tokens=true", "stages.rl.max_prompt_tokens: should be a valid integer, is True"),
        ("stages.rl.prompts_per_step=0", "stages.rl.prompts_per_step: should be greater than 0, is 0"),
        ("~stages.rl.max_response_tokens", "stages.rl.max_response_tokens: has to be set: integer"),
        ("stages.rl.algorithm=grpo", "stages.rl.algorithm: is 'grpo', but holds settings of its own: advantage, loss"),
        ("stages.rl.training.optimizer.learning_rate=inf", "stages.rl.training.optimizer.learning_rate: should be a finite number, is inf"),
        ("tracking.experiment=12", "tracking.experiment: should be a string, is 12; put it into quotes twice: tracking.experiment='\"12\"'"),
        (
            "evaluation_reward.by_data_source.mine=exact",
            "evaluation_reward.by_data_source.mine: no reward is called 'exact'",
        ),
        ("data.chain_sum.max_terms=1", "data.chain_sum.max_terms: should be greater than or equal to 2, is 1"),
        ("model.architecture.head_dim=16", "model.architecture.head_dim: should be "),
    ],
    "rules within a part": [
        ("stages.sft.kind=ppo", "stages.sft.kind: is 'ppo'; a stage is of kind sft or rl or difficulty or drop_easy"),
        ("stages.RL-2={kind: rl}", "stages.RL-2: should match pattern"),
        ("model.path=some/where", "model: set exactly one of architecture, path, gguf; set are: architecture, path"),
        ("data.train_file=x.parquet", "data: chain_sum and train_file are both set; data=files takes chain_sum out"),
        ("stages.rl.algorithm.loss.aggregation=sequence_sum_constant", "stages.rl.algorithm.loss: aggregation_constant_tokens goes with"),
    ],
    "settings of another estimator, loss or kind of stage": [
        (
            "stages.rl.algorithm.advantage.gamma=0.5",
            "stages.rl.algorithm.advantage.gamma: unknown key of estimator=grpo, which takes: scale; estimator=gae or reinforce_plus_plus has gamma",
        ),
        (
            "stages.rl.algorithm.advantage.scal=none",
            "stages.rl.algorithm.advantage.scal: unknown key; did you mean stages.rl.algorithm.advantage.scale?",
        ),
        ("stages.rl.algorithm.loss.tau_negative=1.0", "stages.rl.algorithm.loss.tau_negative: unknown key of name=ppo, which takes: aggregation, "),
        ("stages.sft.prompts_per_step=4", "stages.sft.prompts_per_step: unknown key of kind=sft, which takes: steps, "),
        ("stages.rl.prompts_per_step=33", "stages.rl.prompts_per_step: 33 prompts cannot be divided among"),
    ],
    "unknown estimator and loss": [
        (
            "stages.rl.algorithm.advantage.estimator=rlo",
            "stages.rl.algorithm.advantage: estimator: no advantage estimator is called 'rlo': did you mean rloo? There are: gae, gpg, grpo, ",
        ),
        ("stages.rl.algorithm.loss.name=gspoo", "stages.rl.algorithm.loss: name: no policy loss is called 'gspoo': did you mean gspo? There are: "),
    ],
    "a key of the loss before": [
        ("stages.rl.algorithm.loss.name=gspo", ""),
        ("stages.rl.algorithm.loss.dual_clip=2.0", "stages.rl.algorithm.loss.dual_clip: unknown key of name=gspo, which takes: aggregation, "),
        ("stages.rl.prompts_per_step=33", "stages.rl.prompts_per_step: 33 prompts cannot be divided among"),
    ],
    "an aggregation that a loss does not accept": [
        (
            "stages.rl.algorithm.loss={name: gspo, aggregation: token_mean}",
            "stages.rl.algorithm.loss.aggregation: should be 'sequence_mean_token_mean'",
        ),
    ],
    "rules between parts": [
        ("evaluation_reward.shuffle=true", "evaluation_reward.shuffle: shuffled scores measure nothing; set false"),
        (
            "stages.rl.prompts_per_step=33",
            "stages.rl.prompts_per_step: 33 prompts cannot be divided among resources.ranks=2; use 32 or 34, or change the ranks",
        ),
        ("stages.sft.rows_per_step=1", "stages.sft.rows_per_step: 1 rows cannot be divided among resources.ranks=2; use 2, or change the ranks"),
        ("evaluation.max_response_tokens=250", "evaluation.max_response_tokens: prompts of up to 40 tokens plus 250 tokens do not fit into"),
    ],
    "two recipes": [("recipe=smollm2_sums", "recipe: given more than once; say recipe=NAME once")],
    "no data": [("data=files", "data: no data; set train_file, or swap the group: data=chain_sum")],
    "files beside generated data": [("data.sft_file=x.parquet", "data: sft_file would be ignored beside chain_sum; set train_file too")],
    "terms": [("data.chain_sum={min_terms: 5, max_terms: 4}", "data.chain_sum: max_terms (4) is below min_terms (5)")],
    "interpolation": [("seed=${sed}", "seed: Interpolation key 'sed' not found")],
}


@pytest.mark.parametrize("mistakes", MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_is_named_with_what_to_do_and_all_at_once(mistakes: list[tuple[str, str]]) -> None:
    lines = problems(TINY, *(override for override, _ in mistakes))
    for override, expected in mistakes:
        assert any(line.startswith(expected) for line in lines), (override, lines)


def test_an_unknown_recipe_is_told_together_with_what_the_overrides_get_wrong_by_themselves() -> None:
    lines = problems("recipe=grpo_tny", "seed=-1", "sed=3", "resources=colocateds", "stages.rl.steps=4", "algorithm@stages.rl.algorithm=dr_grpo")
    assert lines[0].startswith("recipe: unknown recipe 'grpo_tny' (did you mean grpo_tiny?); there are: ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["resources", "seed", "sed"]
    assert problems("seed=3")[0].startswith("recipe: not given; say recipe=NAME once; there are:")


def test_all_problems_are_reported_at_once_rules_between_settings_included() -> None:
    """Mutation: stop after the first validation, and the batch that cannot be divided is missing from the list."""
    lines = problems(
        TINY, "stages.rl.stepz=3", "stages.rl.steps=abc", "seed=-1", "resources=thre_cpu", "stages.rl.prompts_per_step=33", "evaluation.confidence=2"
    )
    keys = [line.partition(":")[0] for line in lines]
    assert sorted(keys) == sorted(["resources", "stages.rl.stepz", "stages.rl.steps", "seed", "evaluation.confidence", "stages.rl.prompts_per_step"])


def test_rules_that_rest_on_a_wrong_value_are_left_out() -> None:
    """33 prompts do not fit on the default two ranks; but how many ranks there are to be is what is wrong."""
    assert problems(TINY, "resources.ranks=many", "stages.rl.prompts_per_step=33") == ["resources.ranks: should be a valid integer, is 'many'"]


def test_resolved_configuration_is_read_back_equal(tmp_path) -> None:
    """The digest, unlike ==, sees the order of the stages too."""
    path = tmp_path / "resolved.yaml"
    for recipe in RECIPES:
        config = compose([f"recipe={recipe}", "seed=7"])
        write_resolved(config, path)
        again = load_resolved(path)
        assert again == config
        assert again.digest() == config.digest()
    assert [file.name for file in tmp_path.iterdir()] == ["resolved.yaml"]


@settings(max_examples=30, deadline=None)
@given(suffix=st.text(st.characters(codec="utf-8", exclude_categories=("Cs",))), rate=st.floats(0, 1e300))
def test_resolved_configuration_keeps_any_text_and_number(tmp_path_factory, suffix: str, rate: float) -> None:
    dumped = BASE.model_dump()
    dumped["data"]["prompt_template"] = "{prompt}" + suffix.replace("{prompt}", "")
    dumped["stages"]["rl"]["training"]["optimizer"]["learning_rate"] = rate
    config = RecipeConfig.model_validate(dumped)
    path = tmp_path_factory.getbasetemp() / "resolved.yaml"
    write_resolved(config, path)
    assert load_resolved(path) == config


BASE = compose([TINY])


def test_a_resolved_file_that_was_spoiled_is_refused(tmp_path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_text("seed: [")
    with pytest.raises(ConfigurationError, match="is not YAML"):
        load_resolved(path)
    path.write_text("seed: 3\n")
    with pytest.raises(ConfigurationError, match="stages: has to be set"):
        load_resolved(path)


def test_composing_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose([TINY])
    assert list(tmp_path.iterdir()) == []
    assert not GlobalHydra.instance().is_initialized()


def test_composing_in_threads(monkeypatch) -> None:
    """Hydra has one global state. Mutation: without the lock, a thread composes while another one does."""
    inside, overlaps, found = [], [], []

    def watched(*arguments, **options):
        overlaps.append(len(inside))
        inside.append(1)
        # Gives the other threads every chance to come in.
        time.sleep(0.05)
        try:
            return hydra.compose(*arguments, **options)
        finally:
            inside.pop()

    monkeypatch.setattr("tasks.compose.hydra_compose", watched)
    threads = [threading.Thread(target=lambda seed=seed: found.append(compose([TINY, f"seed={seed}"]).seed)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [0, 0, 0]
    assert sorted(found) == [0, 1, 2]


def rl_algorithm(*overrides: str) -> AlgorithmConfig:
    stage = compose([TINY, *overrides]).stages["rl"]
    assert stage.kind == "rl"
    return stage.algorithm


@pytest.mark.parametrize("override", ["stages.rl.algorithm.loss.name=gspo", "stages.rl.algorithm.loss={name: gspo}"])
def test_another_loss_begins_with_its_own_defaults(override: str) -> None:
    """Mutation: leave `_begin_anew` out: the preset's dual_clip is refused, or its clip_high, a thousand times too large, is taken over."""
    assert rl_algorithm(override).loss == GSPOLossConfig(name="gspo")
    before = rl_algorithm("stages.rl.algorithm.loss.clip_high=5e-4", override)
    after = rl_algorithm(override, "stages.rl.algorithm.loss.clip_high=5e-4")
    assert before == after == AlgorithmConfig(loss=GSPOLossConfig(name="gspo", clip_high=5e-4))


def test_the_same_loss_named_once_more_keeps_what_the_file_says() -> None:
    """Mutation: compare with what the file writes alone; grpo.yaml does not name its loss, and would lose its clip."""
    assert rl_algorithm("stages.rl.algorithm.loss.name=ppo") == rl_algorithm()
    assert rl_algorithm() != AlgorithmConfig()


def test_another_estimator_leaves_the_scale_of_the_file_behind() -> None:
    swap = "algorithm@stages.rl.algorithm=dr_grpo"
    assert rl_algorithm(swap, "stages.rl.algorithm.advantage.estimator=opo").advantage == OPOAdvantageConfig(estimator="opo")
    own = rl_algorithm(swap, "stages.rl.algorithm.advantage.estimator=my.module:mine", "stages.rl.algorithm.advantage.parameters.width=3").advantage
    assert own == OwnAdvantageConfig(estimator="my.module:mine", parameters={"width": 3})


def chosen(key: str) -> bool:
    """Whether the tiny recipe can have this key without another kind of stage, estimator or loss."""
    above, _, name = key.rpartition(".")
    variants = schema.at(above.split("."))
    if (selects := schema.tag_field(variants)) is None:
        return not above or chosen(above)
    if selects == "function":  # parts of rewards, of which there is none that is called so
        return False
    tag = schema.default_tag(variants) or above.rpartition(".")[2]
    (model,) = (model for model in schema.models(variants) if schema.tag(model) == tag)
    return name in model.model_fields and name != selects and chosen(above)


def test_every_key_of_the_classes_can_be_named_in_an_override() -> None:
    """All keys are given a list, which no setting takes: the answers must be about the values, none may say that a key is unknown.

    Mutation: let `schema.child` overlook union members, or drop the `++`, and keys of stages turn up as unknown.
    """
    keys = [path.replace("NAME", "rl") for path in schema.paths(RecipeConfig)]
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    lines = problems(TINY, *(f"{key}=[no]" for key in leaves if chosen(key)))
    assert len(lines) > 70
    assert not [line for line in lines if "unknown" in line or "no such" in line]


@pytest.mark.parametrize(
    ("part", "model"),
    [
        (part, model)
        for part in ("algorithm.advantage", "algorithm.loss", "groups", "truncated")
        for model in schema.models(schema.at(["stages", "rl", *part.split(".")]))
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_key_of_every_variant_can_be_named_once_it_is_chosen(part: str, model: type) -> None:
    place = f"stages.rl.{part}"
    selects = schema.tag_field(schema.at(place.split(".")))
    name = "my.module:function" if schema.tag(model) == "own" else schema.tag(model)
    keys = [key for key in model.model_fields if key != selects]
    lines = problems(TINY, f"{place}.{selects}={name}", *(f"{place}.{key}=[no]" for key in keys), "seed=-1")
    assert {"seed", *(f"{place}.{key}" for key in keys)} <= {line.partition(":")[0] for line in lines}
    assert not [line for line in lines if "unknown" in line]
