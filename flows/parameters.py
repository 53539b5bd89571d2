"""What flows take: values that a person types, and that Prefect's pages make a form of."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from tasks.check import did_you_mean
from tasks.compose import choices
from tasks.config import RecipeConfig

DevicePool = Literal["cpu", "gpu"]
"""Work pools, by the devices that their runs take."""


def _known(recipe: str) -> str:
    known = choices("recipe")
    if recipe not in known:
        raise ValueError(f"unknown recipe '{recipe}'{did_you_mean(recipe, known)}; there are: {', '.join(known)}")
    return recipe


RecipeName = Annotated[str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": list(choices("recipe"))})]
"""File in conf/recipe."""
Override = Annotated[str, Field(pattern=r"^(~\S+|[~+]{0,2}[^\s=]+=.*)$")]
"""`key=value` in Hydra's grammar."""
Seconds = Annotated[float, Field(gt=0)]
"""Above 0."""


def pool_of(config: RecipeConfig) -> DevicePool:
    """The work pool that a recipe's runs belong to: `gpu` where it asks for CUDA, else `cpu`."""
    pools = [config.resources, *config.resources.pools.values()]
    return "gpu" if any(pool.device == "cuda" for pool in pools) else "cpu"
