"""The worker of `benchmarks.cpu.sdpa`: torch's `scaled_dot_product_attention`.

Keys and values are contiguous, [1, H, L, D], so the timed call follows no block table. If query
heads share KV heads, the keys are repeated before the clock starts, because torch's fused CPU
kernel needs as many KV heads as query heads.
"""

import importlib.metadata
import itertools

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cpu.peer_worker import Commands, tensor
from benchmarks.timing import num_cores, seconds_of
from benchmarks.worker import serve
from benchmarks.workloads import Workload, from_json, make_queries, make_tokens


class Attention:
    """A prefill of one sequence, ready to run."""

    def __init__(self, w: Workload, copies: int):
        group = w.num_heads // w.num_kv_heads
        key, value = (
            tensor(stored).transpose(0, 1).repeat_interleave(group, 0)[None]
            for stored in make_tokens(w, 0, 0)
        )
        # Repeated keys have the same bytes in fewer copies.
        pairs = [(key.clone(), value.clone()) for _ in range(-(-copies // group))]
        self._copies = itertools.cycle(pairs)
        self._query = tensor(make_queries(w)).transpose(0, 1).contiguous()[None]
        self._scale = w.scale

    def attend(self) -> torch.Tensor:
        """Run one call, on the next copy of the keys, and return [1, H, T, V]."""
        key, value = next(self._copies)
        return scaled_dot_product_attention(
            self._query, key, value, is_causal=True, scale=self._scale
        )

    def run(self, count: int) -> list[float]:
        """Return the seconds of each of `count` calls."""
        return seconds_of(self.attend, count)

    def result(self) -> np.ndarray:
        """Return the result [T, H, V] as stored: float32, or uint16 words."""
        out = self.attend()[0].transpose(0, 1).contiguous()
        if out.dtype == torch.bfloat16:
            return out.view(torch.int16).numpy().view(np.uint16)
        return out.numpy()


class SdpaCommands(Commands):
    """The worker's commands."""

    def open(self) -> dict:
        """Return versions."""
        return {"torch": importlib.metadata.version("torch"), "threads": torch.get_num_threads()}

    def prepare(self, workload: dict, copies: int) -> dict:
        """Make a workload's data."""
        self.attention = None  # there may be no room for two
        w = from_json(workload)
        self.attention = Attention(w, copies)
        return {"block_size": w.block_size, "isa": "sdpa"}


if __name__ == "__main__":
    torch.set_num_threads(num_cores())
    with torch.inference_mode():
        serve(SdpaCommands())
