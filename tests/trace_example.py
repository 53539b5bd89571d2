"""A step of PPO as it could have run on two ranks a role, for the tests of the trace, and to be looked at:

PYTHONPATH=. python -m tests.trace_example DIRECTORY
"""

import sys
from pathlib import Path

from engine.control.trace import ControllerSpan, Edge, Operation, Span, Trace
from engine.control.trace_page import to_html

BEGAN = 1_760_000_000.25
POOLS = {"actor": "train", "critic": "value", "reference": "value", "reward": "cpu"}

# name: (start, end) in seconds after the beginning when each role has devices of its own; and when all share theirs
RAN = {
    "actor.generate": ((0.02, 5.31), (0.02, 5.31)),
    "actor.lengths": ((5.36, 5.38), (5.36, 5.38)),
    "reward.score": ((5.37, 6.35), (5.37, 6.35)),
    "actor.log_prob": ((5.42, 7.66), (5.42, 7.66)),
    "reference.log_prob": ((5.41, 7.42), (7.70, 9.71)),
    "critic.values": ((7.45, 8.62), (9.73, 10.90)),
    "actor.agreement": ((7.68, 7.73), (7.70, 7.74)),
    "actor.advantage": ((8.66, 8.72), (10.94, 11.01)),
    "actor.update": ((8.75, 13.05), (11.04, 15.34)),
    "critic.update": ((8.75, 11.83), (15.36, 18.44)),
    "actor.synchronise": ((13.07, 13.74), (15.38, 16.05)),
}
RESULT = {  # bytes
    "actor.generate": 9_437_184,
    "actor.lengths": 4_096,
    "reward.score": 8_192,
    "actor.log_prob": 2_097_152,
    "reference.log_prob": 2_097_152,
    "critic.values": 2_097_152,
    "actor.agreement": 640,
    "actor.advantage": 4_194_304,
}
FLOWS = [
    ("actor.generate", "actor.lengths", "response_mask"),
    ("actor.generate", "reward.score", "responses"),
    ("actor.generate", "actor.log_prob", "rollout"),
    ("actor.generate", "reference.log_prob", "rollout"),
    ("actor.generate", "critic.values", "rollout"),
    ("actor.generate", "actor.agreement", "rollout_log_probs"),
    ("actor.log_prob", "actor.agreement", "log_probs"),
    ("actor.generate", "actor.advantage", "rollout"),
    ("reward.score", "actor.advantage", "rewards"),
    ("actor.log_prob", "actor.advantage", "log_probs"),
    ("reference.log_prob", "actor.advantage", "reference_log_probs"),
    ("critic.values", "actor.advantage", "values"),
    ("actor.generate", "actor.update", "rollout"),
    ("actor.lengths", "actor.update", "lengths"),
    ("actor.advantage", "actor.update", "advantages"),
    ("actor.generate", "critic.update", "rollout"),
    ("actor.advantage", "critic.update", "returns"),
]


def example(split: bool, streamed: int = 36) -> Trace:
    """`split`: each role on devices of its own; else all ranks of all roles are processes of one pool, two processes for everything but rewards."""
    operations: list[Operation] = []

    def called(name: str, spans: list[Span], result: int) -> Operation:
        role, operator = name.split(".")
        pool, device = (POOLS[role] if split else "all"), ("cpu" if role == "reward" else "cuda")
        operations.append(Operation(len(operations), role, operator, pool, device, spans, result))
        return operations[-1]

    def span(role: str, rank: int, start: float, end: float, bytes_in: int, bytes_out: int) -> Span:
        own = {"actor": 4100, "critic": 4200, "reference": 4300, "reward": 4400}[role]
        process = (own if split or role == "reward" else 4100) + rank
        return Span(
            rank, BEGAN + start, BEGAN + end, bytes_in, bytes_out, process, "node-1" if split and role in ("critic", "reference") else "node-0"
        )

    ids: dict[str, int] = {}
    for name, (apart, together) in RAN.items():
        start, end = apart if split else together
        role = name.partition(".")[0]
        arriving = sum(RESULT[source] for source, target, _ in FLOWS if target == name)
        spans = [span(role, rank, start, end - 0.11 * rank * (end - start), arriving // 2, RESULT.get(name, 320) // 2) for rank in range(2)]
        ids[name] = called(name, spans, RESULT.get(name, 320)).id
        if name == "actor.generate":
            for number in range(streamed):  # while the rest is still being generated; some at the same time on one process
                begins = 1.1 + 4.1 * number / streamed
                called("reward.prefetch", [span("reward", number % 2, begins, begins + 0.09 + 0.21 * (number % 3 == 0), 65_536, 256)], 256)
    edges = [Edge(ids[source], ids[target], RESULT[source], label) for source, target, label in FLOWS]
    waits = [
        ControllerSpan("wait actor.generate", BEGAN + 0.01, BEGAN + 5.35),
        ControllerSpan("wait actor.agreement", BEGAN + 5.45, BEGAN + (7.75 if split else 7.76)),
        ControllerSpan("wait actor.update", BEGAN + (8.74 if split else 11.03), BEGAN + (13.06 if split else 15.35)),
        ControllerSpan("wait actor.synchronise", BEGAN + (13.07 if split else 15.38), BEGAN + (13.76 if split else 16.07)),
    ]
    return Trace("rl", 7, operations, edges, waits, 41_216, sum(operation.result_bytes for operation in operations))


if __name__ == "__main__":
    for kind in ("split", "colocated"):
        Path(sys.argv[1], f"{kind}.html").write_text(to_html(example(kind == "split")), encoding="utf-8")
