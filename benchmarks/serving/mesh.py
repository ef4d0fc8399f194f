"""Model a decode step over several devices: what it reads, what it sends, how long both take.

    python -m benchmarks.serving.mesh

Nothing is measured here. Bytes follow from a model's shape, and `tests/engine/test_mesh.py`
compares them with the compiled programs of `examples/engine`; rates come from data sheets. Over p
devices, with B sequences of n tokens each,

    weights      W / p / memory              every weight once; only the chosen experts'
    caches       B keys(n) / shares / memory shares = min(p, KV heads), 1 for a latent cache
    collectives  sum of (latency + bytes on the wire / link)
                 all-reduce of m bytes: 2 m (p - 1) / p,  all-gather of m bytes: m (p - 1) / p
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Collective(NamedTuple):
    """The collectives of one kind and size in a step."""

    name: str  # "all-reduce" or "all-gather"
    count: int
    num_bytes: int  # of its result

    def wire_bytes(self, num_devices: int) -> float:
        """Return the bytes that one device sends for one of them, in a ring."""
        trips = 2 if self.name == "all-reduce" else 1
        return trips * self.num_bytes * (num_devices - 1) / num_devices


class Keys(NamedTuple):
    """The keys that some layers keep for a sequence."""

    num_layers: int
    num_kv_heads: int
    bytes_per_head: int  # of one token in one layer
    window: int | None = None

    def num_bytes(self, num_tokens: int, num_devices: int) -> int:
        """Return the bytes that one device reads for a sequence."""
        seen = min(num_tokens, self.window or num_tokens)
        heads = -(-self.num_kv_heads // num_devices)
        return self.num_layers * heads * self.bytes_per_head * seen


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model sizes that determine a decode step's time."""

    name: str
    num_layers: int  # of attention or a recurrence, each with a feed-forward part
    hidden_size: int
    vocab_size: int
    weight_bytes: float  # outside of experts
    keys: tuple[Keys, ...] = ()
    value_bytes: int = 2  # of an activation
    expert_bytes: float = 0.0  # of all experts
    num_experts: int = 0  # in a layer
    experts_per_token: int = 0

    def read_bytes(self, num_seqs: int) -> float:
        """Return the weight bytes that B tokens read: (1 - k / E) ** B of experts are unused."""
        if not self.num_experts:
            return self.weight_bytes
        left_out = (1 - self.experts_per_token / self.num_experts) ** num_seqs
        return self.weight_bytes + self.expert_bytes * (1 - left_out)

    def collectives(self, num_seqs: int) -> tuple[Collective, ...]:
        """Return the collectives of a step on several devices, with only `tensor` parallelism."""
        hidden = num_seqs * self.hidden_size * self.value_bytes
        return (
            Collective("all-reduce", 2 * self.num_layers + 1, hidden),  # plus one for embeddings
            Collective("all-gather", 1, num_seqs * self.vocab_size * 4),  # logits in float32
        )


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates in bytes per second, and seconds before a collective moves anything."""

    name: str
    memory: float
    link: float  # of one device, one way
    latency: float


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    weights: float
    caches: float
    collectives: float

    @property
    def total(self) -> float:
        """The total if nothing overlaps."""
        return self.weights + self.caches + self.collectives


def step_times(
    shape: Shape, machine: Machine, num_devices: int, num_seqs: int, num_tokens: int
) -> Times:
    """Return the times of a decode step by the formulas at the top of this file."""
    read = sum(keys.num_bytes(num_tokens, num_devices) for keys in shape.keys)
    sent = 0.0
    if num_devices > 1:
        for kind in shape.collectives(num_seqs):
            wire = kind.wire_bytes(num_devices) / machine.link
            sent += kind.count * (machine.latency + wire)
    return Times(
        shape.read_bytes(num_seqs) / num_devices / machine.memory,
        num_seqs * read / machine.memory,
        sent,
    )


GEMMA4_31B = Shape(
    name="Gemma 4 31B, bfloat16",
    num_layers=60,
    hidden_size=5376,
    vocab_size=262_144,
    weight_bytes=31e9 * 2,
    keys=(Keys(50, 16, 2 * 256 * 2, window=1024), Keys(10, 4, 2 * 512 * 2)),
)
DEEPSEEK_V3 = Shape(
    name="DeepSeek-V3, weights in fp8",
    num_layers=61,
    hidden_size=7168,
    vocab_size=129_280,
    weight_bytes=671e9 - 58 * 256 * 3 * 7168 * 2048,
    keys=(Keys(61, 1, 576 * 2),),  # latents, replicated on every device
    expert_bytes=58 * 256 * 3 * 7168 * 2048,
    num_experts=256,
    experts_per_token=8,
)
# NVIDIA's data sheets of H100 SXM (NVLink 4: 900 GB/s both ways) and of ConnectX-7 (400 Gbit/s, one
# for each GPU). The latencies are assumptions, for a collective of a few devices in one host and
# for one that crosses a switch.
IN_A_HOST = Machine("NVLink", memory=3.35e12, link=450e9, latency=10e-6)
BETWEEN_HOSTS = Machine("400 Gbit/s", memory=3.35e12, link=50e9, latency=30e-6)
CASES = (
    (GEMMA4_31B, ((1, IN_A_HOST), (2, IN_A_HOST), (4, IN_A_HOST), (8, IN_A_HOST))),
    (GEMMA4_31B, ((16, BETWEEN_HOSTS),)),
    (DEEPSEEK_V3, ((8, IN_A_HOST), (16, BETWEEN_HOSTS), (32, BETWEEN_HOSTS))),
)
NUM_SEQS, NUM_TOKENS = 32, 8192
COLUMNS = "{:>7}  {:<10} {:>8} {:>8} {:>12} {:>8} {:>9}"


def table() -> str:
    """Write the step times of every case as text."""
    lines = [f"{NUM_SEQS} sequences of {NUM_TOKENS} tokens, milliseconds of a decode step"]
    header = ("devices", "link", "weights", "caches", "collectives", "sum", "tokens/s")
    seen = None
    for shape, machines in CASES:
        if shape is not seen:
            lines += ["", shape.name, COLUMNS.format(*header)]
            seen = shape
        for count, machine in machines:
            times = step_times(shape, machine, count, NUM_SEQS, NUM_TOKENS)
            lines.append(
                f"{count:>7}  {machine.name if count > 1 else '-':<10} {times.weights * 1e3:>8.2f} "
                f"{times.caches * 1e3:>8.2f} {times.collectives * 1e3:>12.2f} "
                f"{times.total * 1e3:>8.2f} {NUM_SEQS / times.total:>9.0f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
