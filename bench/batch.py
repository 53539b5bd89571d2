"""How fast is Batch, beside TensorDict and verl's DataProto? The same rows, the same operations, in one process, in turns.

    python bench/batch.py [--rows 1000 10000 100000 1000000] [--seconds 2]

The other two live in an environment of their own (requirements/reference.sh). Before anything is measured, results are compared.
Writes docs/results/batch.{json,md}.
"""

import argparse
import json
import os
import pickle
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from reference import inside, rerun
from report import RESULTS, ROOT, commit
from turns import in_turns, ratio

WIDTHS = {1_000: 2_048, 10_000: 512, 100_000: 64, 1_000_000: 8}
"""Rows -> tokens: as in training where that fits, narrow where only the number of rows matters. At most 180 MB a batch."""
MOST_ROWS_AS_STACK = 1_000
"""TensorDict keeps every object of a column in a TensorDict of its own; with more rows than this that takes minutes and gigabytes."""
MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "8000000000"}
"""glibc keeps the memory that was freed: else most of what is measured is the kernel, which clears the same pages again and again."""
PARTS, TIMES = 8, 4
OURS, TENSORDICT, DATAPROTO = "Batch", "TensorDict", "DataProto"


def main() -> int:
    """Measures in the environment of its own. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--seconds", type=float, default=2.0, help="for each operation, size and kind of batch")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not inside():
        return rerun(MEMORY)

    code = commit()  # before anybody goes on editing
    measured = [cell for rows in arguments.rows for objects in (False, True) for cell in measure(rows, objects, arguments.seconds)]
    about = {
        "commit": code,
        "packages": [f"{name}=={version(name)}" for name in ("tensordict", "verl", "torch")],
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 1),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "batch.json").write_text(json.dumps({"about": about, "measured": measured}, indent=2) + "\n")
    (arguments.out / "batch.md").write_text(page(about, measured))
    print(page(about, measured))
    return 0


if inside():
    import numpy as np
    import torch
    from tensordict import NonTensorStack, TensorDict
    from torch import Tensor
    from verl import DataProto

    sys.path.insert(0, str(ROOT))
    from engine.batch import Batch, concat, join

    torch.set_num_threads(1)  # so that a busy neighbour costs all three the same


# -- the same batch three times, over the same memory


def columns(rows: int) -> "tuple[dict[str, Tensor], list[str]]":
    """What a rollout consists of."""
    tokens = WIDTHS[rows]
    generator = torch.Generator().manual_seed(rows)
    tensors = {
        "input_ids": torch.randint(1, 50_000, (rows, tokens), generator=generator),
        "response_mask": torch.rand(rows, tokens, generator=generator) < 0.7,
        "log_probs": torch.randn(rows, tokens, generator=generator),
        "advantages": torch.randn(rows, tokens, generator=generator),
        "rewards": torch.rand(rows, generator=generator),
        "lengths": torch.randint(1, tokens + 1, (rows,), generator=generator),
    }
    return tensors, [f"sample-{row}" for row in range(rows)]


def as_batch(tensors: "dict[str, Tensor]", ids: list[str] | None) -> "Batch":
    """`ids` of None: without a column of objects."""
    return Batch(tensors=tensors, objects={} if ids is None else {"sample_id": ids}, meta={"step": 7})


def as_tensordict(tensors: "dict[str, Tensor]", ids: list[str] | None) -> "TensorDict":
    """Its way to hold one object for each row is a stack."""
    rows = len(next(iter(tensors.values())))
    return TensorDict(tensors if ids is None else {**tensors, "sample_id": NonTensorStack(*ids)}, batch_size=[rows])


def as_dataproto(tensors: "dict[str, Tensor]", ids: list[str] | None) -> "DataProto":
    """Objects are an array."""
    return DataProto.from_dict(tensors, {} if ids is None else {"sample_id": np.array(ids, dtype=object)}, {"step": 7})


def plain(result: Any) -> "tuple[dict[str, Tensor], list[str] | None]":
    """Tensors and objects of whichever of the three, to be compared."""
    if isinstance(result, Batch):
        return dict(result.tensors), result.objects.get("sample_id")
    if isinstance(result, DataProto):
        objects = result.non_tensor_batch.get("sample_id")
        return dict(result.batch.items()), None if objects is None else objects.tolist()
    found = {key: result.get(key) for key in result.keys()}  # noqa: SIM118  # iterating over it gives its rows
    objects = found.pop("sample_id", None)
    return found, None if objects is None else objects.tolist()


# -- the operations


def round_trip(value: Any) -> Any:
    """Through one stream of bytes, as through a socket or a file."""
    return pickle.loads(pickle.dumps(value, 5))


def through_store(value: Any) -> Any:
    """As through Ray: buffers that the pickler is shown are copied once, into memory that the reader may not write to."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return pickle.loads(stream, buffers=[bytes(buffer) for buffer in buffers])


def wider(tensor: "Tensor", tokens: int) -> "Tensor":
    """What users of the other two write, who have no such operation on a whole batch."""
    return torch.nn.functional.pad(tensor, (0, tokens - tensor.shape[1])) if tensor.dim() > 1 else tensor


def calls(tensors: "dict[str, Tensor]", ids: list[str] | None, stack: bool) -> dict[str, dict[str, Callable[[], Any]]]:
    """Operation -> who -> the call."""
    rows, tokens = tensors["input_ids"].shape
    made: dict[str, Any] = {
        OURS: as_batch(tensors, ids),
        TENSORDICT: as_tensordict(tensors, ids) if stack else None,
        DATAPROTO: as_dataproto(tensors, ids),
    }
    batch, stacked, proto = made.values()
    keys, objects, more = ["input_ids", "response_mask", "rewards"], [] if ids is None else ["sample_id"], tokens + max(1, tokens // 4)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    parts: dict[str, Any] = {who: None if one is None else list(one.chunk(PARTS)) for who, one in made.items()}
    # Of the second batch one column is the first's, in other memory, as it comes from another process; the other column is new.
    other = {"input_ids": tensors["input_ids"].clone(), "values": tensors["log_probs"] * 2}
    others = [as_batch(other, None), as_tensordict(other, None), as_dataproto(other, None)]

    def reordered() -> DataProto:
        copied = DataProto(batch=proto.batch, non_tensor_batch=proto.non_tensor_batch, meta_info=proto.meta_info)
        copied.reorder(order)  # in place
        return copied

    def united() -> DataProto:
        return DataProto(batch=proto.batch.copy(), non_tensor_batch=dict(proto.non_tensor_batch), meta_info=dict(proto.meta_info)).union(others[2])

    def pad_proto() -> DataProto:
        return DataProto.from_dict({key: wider(tensor, more) for key, tensor in proto.batch.items()}, proto.non_tensor_batch, proto.meta_info)

    def pad_stacked() -> TensorDict:
        padded = stacked.apply(lambda tensor: wider(tensor, more), batch_size=[rows])
        return padded if ids is None else padded.set("sample_id", stacked.get("sample_id"))  # which `apply` leaves out

    def one_by_one() -> TensorDict:
        # A part of a TensorDict is pickled with the memory of all parts, unless it is copied first.
        return torch.cat([through_store(part.clone()) for part in stacked.chunk(PARTS)])

    found: list[tuple[str, Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = [
        ("select", lambda: batch.select(keys + objects), lambda: stacked.select(*keys, *objects), lambda: proto.select(keys, objects)),
        ("chunk", lambda: batch.chunk(PARTS), lambda: stacked.chunk(PARTS), lambda: proto.chunk(PARTS)),
        ("concat", lambda: concat(parts[OURS]), lambda: torch.cat(parts[TENSORDICT]), lambda: DataProto.concat(parts[DATAPROTO])),
        ("join", lambda: join(batch, others[0]), lambda: stacked.copy().update(others[1]), united),
        ("repeat", lambda: batch.repeat(TIMES), lambda: stacked.repeat_interleave(TIMES, dim=0), lambda: proto.repeat(TIMES)),
        ("reorder", lambda: batch.reorder(order), lambda: stacked[order], reordered),
        ("pad", lambda: batch.padded_to(more), pad_stacked, pad_proto),
        ("serialise", lambda: round_trip(batch), lambda: round_trip(stacked), lambda: round_trip(proto)),
        ("serialise, as in Ray", lambda: through_store(batch), lambda: through_store(stacked), lambda: through_store(proto)),
        (
            "chunk, serialise, concat",
            lambda: concat([through_store(part) for part in batch.chunk(PARTS)]),
            one_by_one,
            lambda: DataProto.concat([through_store(part) for part in proto.chunk(PARTS)]),
        ),
    ]
    return {operation: {OURS: ours, **({TENSORDICT: second} if stack else {}), DATAPROTO: third} for operation, ours, second, third in found}


# -- the clock


def measure(rows: int, objects: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """Every operation on one batch: medians, and ratios of runs that stood next to each other."""
    tensors, ids = columns(rows)
    for operation, who in calls(tensors, ids if objects else None, stack=not objects or rows <= MOST_ROWS_AS_STACK).items():
        compare(operation, {name: call() for name, call in who.items()})
        runs = in_turns(who, seconds)
        cell: dict[str, Any] = {
            "rows": rows,
            "tokens": WIDTHS[rows],
            "objects": objects,
            "operation": operation,
            "rounds": len(runs[OURS]),
            "milliseconds": {name: 1e3 * statistics.median(spent) for name, spent in runs.items()},
            "ratio": {name: ratio(runs, name, OURS) for name in who if name != OURS},
        }
        print(
            rows, "objects" if objects else "tensors", operation, {name: round(spent, 3) for name, spent in cell["milliseconds"].items()}, flush=True
        )
        yield cell


def compare(operation: str, results: dict[str, Any]) -> None:
    """ValueError where two of them do not give the same."""
    for name, result in results.items():
        pairs = [(results[OURS], result)] if not isinstance(result, list | tuple) else list(zip(results[OURS], result, strict=True))
        for ours, other in pairs:
            (tensors, ids), (other_tensors, other_ids) = plain(ours), plain(other)
            same = tensors.keys() == other_tensors.keys() and ids == other_ids
            if not same or not all(torch.equal(tensors[key], other_tensors[key]) for key in tensors):
                raise ValueError(f"{operation}: {name} gives something else")


# -- the page


def page(about: dict[str, Any], measured: list[dict[str, Any]]) -> str:
    """One table for each kind of batch."""
    ratios = [ratio for cell in measured for ratio in cell["ratio"].values()]
    won, lost = sum(low > 1 for low, _, _ in ratios), sum(high < 1 for _, _, high in ratios)
    text = f"""# Batch beside TensorDict and DataProto

`python bench/batch.py`, commit {about["commit"]}; {", ".join(about["packages"])}; Python {about["python"]}, {about["threads"]} thread,
peak {about["peak_gigabytes"]} GB. Six tensors, four of them token tensors; {PARTS} chunks, {TIMES} repeats. Every cell: milliseconds of processor
time of Batch, and how many times as long the other takes for the same result: the median of the ratios of neighbouring runs, which take turns
(quartiles in `batch.json`). Memory that was freed is used again, not given back.

Of {len(ratios)} comparisons Batch is faster in {won} and slower in **{lost}** (bold); in the others three of four runs do not agree.

What the three do is not quite the same. Batch checks that columns fit and that `reorder` loses no row. `join` compares what both sides have, as
DataProto does; TensorDict takes the later one unseen. `select` and `chunk` copy no tensor in all three, but Batch keeps objects in lists, and
cutting a list copies its references, where DataProto cuts an array. "As in Ray": what the pickler hands out as buffers is copied once into memory
that is read-only for the reader; Batch copies once more on the way out, so that a worker may write.
"""
    for objects in (False, True):
        cells = [cell for cell in measured if cell["objects"] is objects]
        if cells:
            text += f"\n## {'With a column of objects' if objects else 'Tensors only'}\n\n" + table(cells)
    if any(cell["objects"] for cell in measured):
        text += f"\nTensorDict keeps each object as a TensorDict of its own: measured with up to {MOST_ROWS_AS_STACK} rows.\n"
    return text


def table(cells: list[dict[str, Any]]) -> str:
    """Operations down, sizes across."""
    sizes = list(dict.fromkeys((cell["rows"], cell["tokens"]) for cell in cells))
    text = "| operation | " + " | ".join(f"{rows:,} × {tokens}: ms | TensorDict | DataProto" for rows, tokens in sizes) + " |\n"
    text += "| --- |" + " ---: | ---: | ---: |" * len(sizes) + "\n"
    for operation in dict.fromkeys(cell["operation"] for cell in cells):
        text += f"| {operation} |"
        for cell in (cell for cell in cells if cell["operation"] == operation):
            text += f" {cell['milliseconds'][OURS]:.3g} |"
            for name in (TENSORDICT, DATAPROTO):
                ratio = cell["ratio"].get(name)
                mark = "**" if ratio is not None and ratio[2] < 1 else ""
                text += " – |" if ratio is None else f" {mark}{ratio[1]:.3g}{mark} |"
        text += "\n"
    return text


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.exit(main())
