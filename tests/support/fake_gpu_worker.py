"""A fake worker of the GPU benchmark, without torch or a GPU: peers work, fail, print or die."""

import os
from typing import Any

import numpy as np

from benchmarks.gpu import data as gpu_data
from benchmarks.worker import serve
from benchmarks.workloads import from_json, to_float32


def fill(stream: int, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Return the array of `gpu_data.make_data`, in NumPy."""
    rows = np.arange(shape[0], dtype=np.uint32)[:, None]
    columns = np.arange(np.prod(shape[1:]), dtype=np.uint32)[None]
    words = gpu_data.normal_words(scale)[gpu_data.choices(stream, rows, columns)]
    return to_float32(words).reshape(shape)


class FakeWorker:
    broken = False

    def open(self, device: str, gigabytes: float, vllm_kernels: str | None) -> dict[str, str]:
        if device == "none":
            raise RuntimeError("no such device")
        return {"pid": str(os.getpid())}

    def prepare(self, peer: str, workload: dict[str, Any], copies: int) -> None:
        print("a library that prints")
        if peer == "vllm-triton":
            raise RuntimeError("it does not like this")
        if peer == "flashinfer-nhd":
            os._exit(3)
        if peer == "flashinfer-hnd":
            self.broken = True  # and so is every kernel after it
        if self.broken:
            raise RuntimeError("misaligned address")
        w = from_json(workload)
        data = gpu_data.arrays_of(w, copies, fill)
        self.found = gpu_data.expected_rows(w, data, data.tables[0])
        if peer == "torch-flex":
            self.found *= 1.05

    def lost(self) -> bool:
        return self.broken

    def rows(self, tokens: list[int], path: str) -> None:
        assert len(tokens) == len(self.found)
        np.savez(path, rows=self.found.astype(np.float32), finite=True)

    def time(self, turns: int, repeats: int) -> dict[str, Any]:
        return {"seconds": [1e-3] * turns, "how": "it knows"}


if __name__ == "__main__":
    serve(FakeWorker())
