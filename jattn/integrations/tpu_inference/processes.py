"""jattn in the other processes of vLLM: spawned ones, and Ray's workers on several machines."""

from __future__ import annotations

import copyreg
import functools
import socket
from typing import Any

import jax

ADDRESS = "jattn/jax_coordinator"  # in the store of the host's first worker


def enable(name: str) -> None:
    """Let vLLM hand a configuration with `--attention-backend name` to any process.

    tpu-inference takes registered backends in forked processes only, because a backend's enum
    member is pickled by its value, which another process does not know before it has loaded
    vLLM's plugins. Here it is pickled with what registers it, and the host's check is left out
    for `name`.

    Args:
      name: of the backend, which is registered.
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
    """The host's worker for several processes without TPUs, which libtpu would bring together."""
    from tpu_inference.worker import tpu_worker

    class Worker(tpu_worker.TPUWorker):
        def init_device(self, *args: Any, **options: Any) -> None:
            count = len(self.parallel_config.placement_group.bundle_specs)
            join(self.distributed_init_method, self.rank, count)
            use_local_cpus()
            super().init_device(*args, **options)

    return Worker


def use_local_cpus() -> None:
    """Load the weights of torch models on a CPU of this process.

    The host puts them on the first of `jax.devices("cpu")`, which next to TPUs are this process's
    and here are those of all. Two of its modules are given a `jax` where they are this process's.
    """
    from tpu_inference.layers.vllm.process_weights import cleanup_sharding
    from tpu_inference.models.vllm import vllm_model_wrapper

    for module in (cleanup_sharding, vllm_model_wrapper):
        module.jax = _LocalCpus()


class _LocalCpus:
    """The module `jax`, but for `devices("cpu")`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self, backend: str | None = None) -> list[jax.Device]:
        return jax.local_devices(backend="cpu") if backend == "cpu" else jax.devices(backend)


def join(store_address: str, rank: int, count: int) -> None:
    """Start JAX's distributed runtime in each of `count` processes.

    Args:
      store_address: "tcp://host:port" of a store of torch.distributed that runs there; process 0
        leaves the address of JAX's coordinator, which it starts, in it.
      rank: of this process.
      count: of processes.
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
