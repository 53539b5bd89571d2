"""Devices by name: what their makers publish, and what share of it training and generation get."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a rank computes on. The makers' numbers, and how far real work stays behind them."""

    operations_per_second: float
    """Dense, in the type that a recipe computes in on it."""
    bytes_per_second: float
    """Of its memory."""
    memory_bytes: float
    node_link_bytes_per_second: float
    """From one rank to another of the same node, one direction."""
    network_bytes_per_second: float
    """From a rank to one of another node."""
    element_bytes: int = 2
    ranks_per_node: int = 8
    training_share: float = 0.30
    """Of `operations_per_second`, that forward and backward passes over packed rows reach."""
    memory_share: float = 0.6
    """Of `bytes_per_second`, that decoding reaches."""
    decode_layer_seconds: float = 0.55e-3
    """For each layer and decoding step, below which no batch is small enough to get: launching kernels one by one, as eager mode does."""
    decode_step_seconds: float = 0.0
    """The same for each decoding step: scheduling and sampling."""
    decode_sample_seconds: float = 0.0
    """For each sample of a decoding step."""
    pass_layer_seconds: float = 1e-3
    """For each layer and pass of training, whatever its size."""


# Dense bfloat16 rates, HBM bandwidth and capacity, NVLink (half of the bidirectional rate), and a network port of 400 Gbit/s a device (A100: 200).
DEVICES = {
    "h100": Device(989e12, 3.35e12, 80e9, 450e9, 50e9),
    "h200": Device(989e12, 4.8e12, 141e9, 450e9, 50e9),
    "h800": Device(989e12, 3.35e12, 80e9, 200e9, 50e9),
    "a100_80": Device(312e12, 2.04e12, 80e9, 300e9, 25e9, training_share=0.4),
    # One core of the machine that docs/results was made on, in float32: its matrix product was measured, the rest is chosen so that a step of
    # grpo_tiny takes as long as docs/results/algorithms.json says. bench/cost.py compares phase by phase.
    "cpu": Device(
        operations_per_second=43e9,
        bytes_per_second=8e9,
        memory_bytes=8e9,
        node_link_bytes_per_second=1e9,
        network_bytes_per_second=1e9,
        element_bytes=4,
        training_share=1.0,
        decode_layer_seconds=1e-3,
        decode_step_seconds=4e-3,
        decode_sample_seconds=0.1e-3,
        pass_layer_seconds=3e-3,
    ),
}
"""GPUs at their published rates; `cpu` as measured."""
