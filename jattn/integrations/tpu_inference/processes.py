"""jattn in vLLM's other processes: spawned ones, and Ray workers on several machines."""

from __future__ import annotations

import copyreg
import functools
import socket
from typing import Any

import jax

ADDRESS = "jattn/jax_coordinator"  # a key in the store of the host's first worker


def enable(name: str) -> None:
    """Make vLLM pass a configuration with `--attention-backend name` to any process.

    tpu-inference accepts registered backends only in forked processes: a backend's enum member is
    pickled by its value, which another process does not know before it has loaded vLLM's plugins.
    The hooks pickle the member together with a function that registers it, and skip the host's
    check for `name`.

    Args:
      name: of the registered backend.
    """
    from tpu_inference.layers.common import attention_backend
    from tpu_inference.platforms import tpu_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    copyreg.pickle(AttentionBackendEnum, _reduce)
    check = tpu_platform.check_attention_backend_config
    if hasattr(check, "__wrapped__"):
        return  # done before

    @functools.wraps(check)
    def check_others(config: Any) -> None:
        if attention_backend.attention_backend_name(config) != name:
            check(config)

    tpu_platform.check_attention_backend_config = check_others


def _reduce(member: Any) -> tuple[Any, ...]:
    return _member, (type(member), member.name, member.value)


def _member(kind: Any, name: str, path: str) -> Any:
    return kind.__members__.get(name) or kind.register(name, path)


@functools.cache
def worker_class() -> type[Any]:
    """Return a worker class that connects processes without TPUs, as libtpu does on TPUs."""
    from tpu_inference.worker import tpu_worker

    class Worker(tpu_worker.TPUWorker):
        def init_device(self, *args: Any, **options: Any) -> None:
            count = len(self.parallel_config.placement_group.bundle_specs)
            join(self.distributed_init_method, self.rank, count)
            use_local_cpus()
            super().init_device(*args, **options)

    return Worker


def use_local_cpus() -> None:
    """Make the host load the weights of torch models on a CPU device of this process.

    The host uses the first of `jax.devices("cpu")`. With TPUs these are this process's devices,
    without TPUs those of all processes. So two of its modules get a `jax` whose `devices("cpu")`
    returns only this process's.
    """
    from tpu_inference.layers.vllm.process_weights import cleanup_sharding
    from tpu_inference.models.vllm import vllm_model_wrapper

    for module in (cleanup_sharding, vllm_model_wrapper):
        module.jax = _LocalCpus()


class _LocalCpus:
    """The module `jax`, except for `devices("cpu")`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self, backend: str | None = None) -> list[jax.Device]:
        return jax.local_devices(backend="cpu") if backend == "cpu" else jax.devices(backend)


def join(store_address: str, rank: int, count: int) -> None:
    """Start JAX's distributed runtime in each of `count` processes.

    Args:
      store_address: "tcp://host:port" of a running store of torch.distributed. Process 0 starts
        JAX's coordinator and leaves its address in the store.
      rank: of this process.
      count: the number of processes.
    """
    from torch.distributed import TCPStore

    host, _, port = store_address.removeprefix("tcp://").rpartition(":")
    store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False)
    if rank == 0:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host.strip("[]"), 0))
            store.set(ADDRESS, f"{host}:{free.getsockname()[1]}")
    address = store.get(ADDRESS).decode()
    jax.distributed.initialize(address, num_processes=count, process_id=rank)
