"""Serve a checkpoint over HTTP.

    python -m examples.engine.serve
    curl localhost:8000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 20}'

`--help` lists all options; `examples/engine/http/app.py` lists the routes.
"""

# ruff: noqa: E402 (missing packages are reported before they are imported)

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_packages = ("jax", "flax", "safetensors", "tqdm", "starlette", "uvicorn", "httpx")
if _missing := [name for name in _packages if not importlib.util.find_spec(name)]:
    sys.exit(f"this server needs {', '.join(_missing)}: pip install -e '.[serve]'")

import jax

import jattn
from examples import native
from examples.engine import hosts
from examples.engine.alike import shared_options
from examples.engine.caches import aligned_block_size, group_layers
from examples.engine.drafts.speculation import read_speculation
from examples.engine.engine import Engine
from examples.engine.http.access import Access
from examples.engine.http.app import make_app
from examples.engine.http.chat import ChatTemplate, load_chat_template
from examples.engine.http.front import Front
from examples.engine.http.listening import DrainingServer, listen, listen_at
from examples.engine.mesh import DeviceMesh, make_mesh, make_meshes
from examples.engine.model import Model, StateCache, load_model
from examples.engine.scheduler import PAGES, Limits
from examples.engine.starting import (
    end_process,
    end_with_parent,
    ends_when_told,
    on_signals,
    tells_of_memory,
    watch_cache,
)
from examples.engine.structure import Grammars, load_grammars
from examples.engine.supervise import supervise
from examples.engine.transfer.offers import Offers
from examples.engine.transfer.remote import Remote
from examples.engine.transfer.roles import (
    add_role_options,
    check_engines,
    check_role,
    offers_of,
    remote_of,
)
from examples.models.lora import Lora, Room, read_lora
from examples.options import KV_FORMATS, SPEAKING, add_engine_options, checkpoint_directory, integer
from examples.text import load_tokenizer

DEFAULT_MAX_LEN = 1024  # or the model's positions, if fewer
DEFAULT_RANK = 16  # of adapters, if none is loaded at startup
RESTART_WAIT = 120  # seconds
COMMAND = (sys.executable, "-m", "examples.engine.serve")


def build(
    options: argparse.Namespace, mesh: DeviceMesh | None = None
) -> tuple[Engine, ChatTemplate | None, Grammars | None]:
    """Load the model, make its caches and compile its steps, behind a progress bar.

    Args:
      options: of the command line.
      mesh: the devices to use; None: those of `options.mesh`, or the default device.

    Returns: the engine, the model's chat template if it has one, and the compiler of grammars.

    Raises:
      ValueError: options do not fit each other, the checkpoint or the devices.
      jattn.UnsupportedError: `--implementation` cannot run this model.
    """
    directory = checkpoint_directory(options.model)
    if mesh is None and options.mesh is not None:
        mesh = make_mesh(options.mesh)
    speculation = draft = None
    if options.draft is not None:
        draft = load_model(checkpoint_directory(options.draft), options.dtype, mesh)
    if options.speculate is not None or draft:
        how = "draft" if options.speculate is None else options.speculate
        speculation = read_speculation(how, draft)
    has_mtp = speculation is not None and speculation.mtp
    model = load_model(directory, options.dtype, mesh, mtp=has_mtp, join=True)
    kv_format = KV_FORMATS[options.kv_format or model.dtype]
    block_size = options.block_size
    if options.unified:
        if not any(isinstance(cache, StateCache) for cache in model.layers.values()):
            raise ValueError(f"--unified is for models with recurrent layers, not {model.name}")
        item = jattn.init_kv_cache(1, 1, 1, 1, format=kv_format)[0].data.dtype.itemsize
        block_size = aligned_block_size(model.layers, item, block_size)
    loras = read_loras(options, model)
    groups = group_layers(model.layers, unified=options.unified)
    names = [PAGES] if options.unified else [group.name for group in groups]
    limits = Limits(
        groups=groups,
        max_seqs=options.max_seqs,
        token_budget=options.token_budget,
        block_size=block_size,
        max_len=longest(options.max_len, model),
        num_blocks=dict.fromkeys(names, options.blocks) if options.blocks else None,
        prefix_caching=not options.no_prefix_cache,
        unified=options.unified,
        adapters=room_for(options, loras),
    )
    template = load_chat_template(directory, options.chat_template)
    tokenizer = load_tokenizer(directory, model.vocab_size)
    grammars = load_grammars(directory, tokenizer, model.vocab_size, model.stop_tokens)
    if wants_native(options.products, mesh) and (reason := native.load()):
        print(f"XLA computes all products: {reason}", file=sys.stderr, flush=True)
    engine = Engine(
        model,
        limits,
        kv_format=kv_format,
        tokenizer=tokenizer,
        implementation=options.implementation,
        speculation=None if options.role == "prefill" else speculation,
        loras=loras,
        host_cache_bytes=int(options.host_cache * 2**30),
        quiet=False,
        behind=True,
    )
    return engine, template, grammars


def longest(max_len: int | None, model: Model) -> int:
    """Return the length of the longest sequence: `--max-len`, or at most 1,024 by default.

    Raises:
      ValueError: the model has fewer positions than `--max-len`.
    """
    if max_len is not None and max_len > model.max_positions:
        raise ValueError(
            f"--max-len is {max_len}, but must be at most {model.max_positions}, the positions of "
            f"{model.name}"
        )
    return min(DEFAULT_MAX_LEN, model.max_positions) if max_len is None else max_len


def wants_native(products: str, mesh: DeviceMesh | None) -> bool:
    """Whether C++ products are wanted and possible: on a single device that is a CPU."""
    return products == "native" and mesh is None and jax.default_backend() == "cpu"


def options_parser() -> argparse.ArgumentParser:
    """Make the parser, with every option, its default and its help."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.engine.serve",
        description="Serve a model over HTTP with OpenAI's API.",
    )
    _add_model_and_limits(parser)
    _add_programs(parser)
    _add_access(parser)
    _add_speculation_and_cache(parser)
    _add_adapters(parser)
    add_role_options(parser)
    _add_processes(parser)
    _add_restarts(parser)
    parser.add_argument(
        "--unified", action="store_true", help="keep recurrent states in pages of the KV pools"
    )
    return parser


def _add_model_and_limits(parser: argparse.ArgumentParser) -> None:
    """Add options for the model, its address and its limits."""
    add = parser.add_argument
    number = functools.partial(add, metavar="N", type=integer(1))
    add("--model", default=SPEAKING, help="a directory or bundled checkpoint (%(default)s)")
    add("--chat-template", metavar="FILE", help="a Jinja template (default: the checkpoint's)")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=integer(0, 65_535), default=8000, help="0 for any free one (%(default)s)")
    number("--max-requests", default=256, help="most waiting and running requests (%(default)s)")
    add("--seed", metavar="N", type=integer(0), help="for requests without a seed (default: any)")
    add_engine_options(parser, max_seqs=16, token_budget=128)
    number(
        "--max-len",
        help=f"most tokens of a sequence (default: {DEFAULT_MAX_LEN}, or what the model allows)",
    )
    number("--blocks", help="blocks in each pool (default: never too few)")
    number(
        "--step-timeout",
        default=300,
        help="seconds a step may take before the server exits (%(default)s)",
    )
    number(
        "--drain-timeout",
        default=30,
        help="seconds to finish requests in when the server stops (%(default)s)",
    )


def _add_programs(parser: argparse.ArgumentParser) -> None:
    """Add options for compilation."""
    add = parser.add_argument
    add(
        "--compilation-cache",
        metavar="DIR",
        help=f"where to keep compiled programs for the next start ({default_cache()})",
    )
    add("--no-compilation-cache", action="store_true", help="compile everything again")
    add(
        "--products",
        choices=("native", "xla"),
        default="native",
        help="how to multiply with weights on a single CPU with AVX2: in C++, compiled at the "
        "first start, or in XLA (%(default)s); a mesh always uses XLA",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    """Add options that say who may send requests."""
    add = parser.add_argument
    add(
        "--api-key",
        default=os.environ.get("JATTN_API_KEY"),
        help="key that requests must send (default: $JATTN_API_KEY)",
    )
    add(
        "--cors",
        metavar="ORIGIN",
        type=origin,
        action="append",
        default=[],
        help="allow requests from pages of a site, such as https://example.com, or of all (*)",
    )


def _add_speculation_and_cache(parser: argparse.ArgumentParser) -> None:
    """Add options for speculative decoding, and for the prefix cache in host memory."""
    add = parser.add_argument
    add(
        "--speculate",
        metavar="HOW=N",
        help="speculative decoding: draft up to N tokens and verify them in one step; lookup: from "
        "earlier text, draft: with the model of --draft, mtp: with the model's own MTP layer; NxB: "
        "a tree of N tokens in B branches",
    )
    add("--draft", metavar="DIRECTORY", help="a smaller draft model with the same vocabulary")
    add(
        "--host-cache",
        metavar="GIB",
        type=gibibytes,
        default=0.0,
        help="host memory for prefix cache blocks that the pools evict: for all groups of devices "
        "together, in each process that shares a mesh (%(default)s)",
    )


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    """Add options for LoRA adapters."""
    add = parser.add_argument
    number = functools.partial(add, metavar="N", type=integer(1))
    add(
        "--lora",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="a LoRA adapter saved by PEFT, which requests select as their model; may be repeated",
    )
    number("--max-loras", help="the most adapters to make room for (default: those of --lora)")
    add("--lora-folder", metavar="DIR", help="load and unload adapters of this folder over HTTP")
    number(
        "--max-lora-rank",
        help=f"largest rank to make room for (default: the largest of --lora, or {DEFAULT_RANK})",
    )


def _add_processes(parser: argparse.ArgumentParser) -> None:
    """Add options for several processes that share a mesh."""
    add = parser.add_argument
    number = functools.partial(add, metavar="N", type=integer(1))
    add("--coordinator", metavar="HOST:PORT", help="address of the first of several processes")
    number("--num-processes", help="processes that share the mesh, each with its own --process-id")
    add("--process-id", metavar="I", type=integer(0), help="index of this process, from 0")
    add("--cluster", action="store_true", help="ask the cluster (Slurm, TPU pod) for these three")
    number(
        "--heartbeat",
        default=hosts.HEARTBEAT_SECONDS,
        help="seconds a process may be silent before the others exit (%(default)s)",
    )


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    """Add options for a server that restarts after a crash, behind a front."""
    add = parser.add_argument
    number = functools.partial(add, metavar="N", type=integer(1))
    add(
        "--restarts",
        metavar="N",
        type=integer(0),
        help="restart up to N times after a crash; requests in flight wait and are computed again",
    )
    number(
        "--restart-wait",
        help=f"seconds that a request waits for a restarting server ({RESTART_WAIT})",
    )
    add("--uds", metavar="PATH", help=argparse.SUPPRESS)  # of the server behind a front,
    add("--supervisor", type=int, metavar="PID", help=argparse.SUPPRESS)  # in this process


def origin(text: str) -> str:
    """Parse a web page's origin, as browsers send it ("null" for a file), or "*"."""
    if text not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s,*]+", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an origin, such as https://example.com, without a path, or *"
        )
    return text


def gibibytes(text: str) -> float:
    """Parse a number of GiB."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value * 2**30 < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB of at least 0")
    return value


def read_loras(options: argparse.Namespace, model: Model) -> dict[str, Lora]:
    """Read the adapters of `--lora`, by name.

    Raises:
      ValueError: one is not NAME=DIR, or does not fit the model.
    """
    found = {}
    for text in options.lora:
        name, _, directory = text.partition("=")
        if not name or not directory or name in found:
            raise ValueError(f"--lora is {text!r}, but must be NAME=DIR, with distinct names")
        found[name] = read_lora(directory, model.linears, model.unused)
    return found


def room_for(options: argparse.Namespace, loras: Mapping[str, Lora]) -> Room | None:
    """Return the room for adapters; by default, exactly what `--lora` needs.

    Raises:
      ValueError: `--lora-folder` is not a directory, is given without `--max-loras`, or is given
        with several processes.
    """
    if options.lora_folder and not Path(options.lora_folder).is_dir():
        raise ValueError(f"--lora-folder is {options.lora_folder!r}, but must be a directory")
    if options.lora_folder and not options.max_loras:
        raise ValueError("--lora-folder needs --max-loras N, room for adapters loaded later")
    if options.lora_folder and (options.num_processes or options.cluster):
        raise ValueError("--lora-folder needs a single process: several load adapters at startup")
    if not loras and not options.max_loras:
        return None
    largest = max((lora.rank for lora in loras.values()), default=DEFAULT_RANK)
    return Room(options.max_loras or len(loras), options.max_lora_rank or largest)


def default_cache() -> str | None:
    """Return the folder of compiled programs in the user's cache directory, if there is one."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # HOME is not set, and the user database has no home either
        return None
    return str(Path(home) / "jattn" / "compiled")


def keep_compiled(options: argparse.Namespace) -> None:
    """Make JAX keep compiled programs, in its own environment variable's folder if that is set."""
    given = options.compilation_cache
    folder = default_cache() if given is None else given
    if options.no_compilation_cache or not folder:
        jax.config.update("jax_enable_compilation_cache", False)
    elif not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        watch_cache(folder)


def check_options(options: argparse.Namespace) -> None:
    """Check before the model is loaded that options are valid, and that each given one has a use.

    Raises:
      ValueError: an option is wrong, or would be ignored.
    """
    if not (options.num_processes or options.cluster):
        alone = {"coordinator": None, "process_id": None, "heartbeat": hosts.HEARTBEAT_SECONDS}
        for name, default in alone.items():
            if getattr(options, name) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')} is for several processes: add --num-processes N"
                )
    if options.coordinator is not None:
        host, _, port = options.coordinator.rpartition(":")
        if not (host and port.isdecimal()):
            raise ValueError(f"--coordinator is {options.coordinator!r}, but must be HOST:PORT")
    if not options.host:
        raise ValueError("--host is empty, but must be an address; 0.0.0.0 means all of them")
    key = options.api_key
    if key is not None and (not key or key != key.strip() or not key.isprintable()):
        raise ValueError(
            "--api-key or JATTN_API_KEY is empty, or has a line break or surrounding spaces, which "
            "no request can send"
        )
    if options.compilation_cache is not None and options.no_compilation_cache:
        raise ValueError("--compilation-cache cannot be combined with --no-compilation-cache")
    if options.restart_wait is not None and not (options.restarts or options.supervisor):
        raise ValueError("--restart-wait is for a server that restarts: add --restarts N")
    if options.host_cache and options.no_prefix_cache:
        raise ValueError("--host-cache extends the prefix cache: leave out --no-prefix-cache")
    if options.max_lora_rank and not (options.lora or options.max_loras):
        raise ValueError("--max-lora-rank is for adapters: add --lora NAME=DIR or --max-loras N")


def use_wide_vectors() -> None:
    """Make XLA use AVX-512's full width, unless XLA_FLAGS set a width.

    A step of Qwen3-0.6B's layers with 64 or 256 tokens takes 6 % less time on a Xeon with AMX.
    Nothing changes on processors without AVX-512. XLA reads its flags when JAX first needs a
    device.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_prefer_vector_width" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_prefer_vector_width=512".strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until it is interrupted.

    Wrong arguments exit with status 2, and a failure of the engine with status 1.
    """
    parser = options_parser()
    options = parser.parse_args(arguments)
    if options.restarts:
        given = sys.argv[1:] if arguments is None else arguments
        sys.exit(restarted(options, given, parser.prog))
    if options.supervisor:
        end_with_parent(options.supervisor)
    keep_compiled(options)
    use_wide_vectors()
    try:
        check_options(options)
        check_role(options)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if options.num_processes or options.cluster:
        try:
            hosts.join(
                *(options.coordinator, options.num_processes, options.process_id), options.heartbeat
            )
        except (RuntimeError, ValueError) as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        try:
            hosts.check_alike(shared_options(options))
        except ValueError as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
        except Exception as failure:  # the network or another process failed: worth a restart
            hosts.exit_with(failure)
        if jax.process_index():
            follow(options, parser.prog)
            end_process(0)
    try:
        # Before compiling the model, which takes long.
        listener = listen_at(options.uds) if options.uds else listen(options.host, options.port)
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    told = threading.Event()  # set by a signal before the server has started
    with listener:
        with on_signals(told.set):
            try:
                with ends_when_told(parser.prog), tells_of_memory(parser.prog):
                    engines, *shared = start(options)
            except (ValueError, jattn.UnsupportedError) as error:
                parser.exit(2, f"{parser.prog}: error: {error}\n")
            access, folder = access_of(options), options.lora_folder
            reason = run(engines, access, listener, *shared, folder, options.seed, told=told)
        if reason:
            print(f"{parser.prog}: error: {reason}", file=sys.stderr, flush=True)
            end_process(1)
        if engines[0] is not None and engines[0].followers:
            try:
                engines[0].followers.tell(hosts.END)
                hosts.leave(engines[0])
            except Exception as error:
                hosts.exit_with(error)
    end_process(0)


def restarted(options: argparse.Namespace, given: Sequence[str], name: str) -> int:
    """Run a server behind a front, restart it when it dies, and return the exit status.

    Args:
      options: the parsed command line.
      given: the command line.
      name: the command's name.
    """
    with tempfile.TemporaryDirectory(prefix="jattn-") as folder:  # other users cannot enter it
        path = str(Path(folder, "server"))
        behind = ("--restarts", "0", "--uds", path, "--supervisor", str(os.getpid()))
        # A repeated signal must not cut off the front's last responses.
        with (
            on_signals(lambda: None),
            Front(path, access_of(options), options.restart_wait or RESTART_WAIT) as front,
        ):
            front.listen(options.host, options.port)
            status = supervise([*COMMAND, *given, *behind], options.restarts, front=front)
    if front.refused:
        print(f"{name}: error: {front.refused}", file=sys.stderr, flush=True)
        return 2
    return status


def start(
    options: argparse.Namespace,
) -> tuple[list[Engine], ChatTemplate | None, Grammars | None, Remote | None, Offers | None]:
    """Make all that serves requests, including one engine for each group of devices.

    Raises:
      ValueError: options do not fit each other, the checkpoint, the devices or other servers.
      jattn.UnsupportedError: `--implementation` cannot run this model.
    """
    meshes = [] if options.mesh is None else make_meshes(options.mesh)
    options = argparse.Namespace(**vars(options))
    options.host_cache /= max(len(meshes), 1)  # all groups share it
    engines: list[Engine] = []
    try:
        engine, template, grammars = build(options, *meshes[:1])
        engines.append(engine)
        engines += (build(options, mesh)[0] for mesh in meshes[1:])
        check_engines(options, engines)
        remote = remote_of(options, engine)
    except (ValueError, jattn.UnsupportedError):
        for one in engines:
            one.close()  # rather than compile what will never run
            if one.followers:
                one.followers.tell(hosts.END)
        raise
    return engines, template, grammars, remote, offers_of(options)


def follow(options: argparse.Namespace, name: str) -> None:
    """Run a process that follows the first one of its group; `name` is the command's."""
    try:
        with ends_when_told(name), tells_of_memory(name):
            engine = build(options)[0]
            check_engines(options, [engine])

        def wait() -> None:  # the first process has requests to finish
            print("waiting for the first process to end the group", file=sys.stderr, flush=True)

        with on_signals(wait):
            hosts.follow(engine)
        hosts.leave(engine)
    except Exception as error:
        hosts.exit_with(error)


def access_of(options: argparse.Namespace) -> Access:
    """Return the HTTP server's limits from the options.

    Behind a front, bodies may be larger: the front has checked their sizes, and adds seeds.
    """
    return Access(
        max_requests=options.max_requests,
        max_body=Access.max_body * (2 if options.uds else 1),
        step_seconds=options.step_timeout,
        drain_seconds=options.drain_timeout,
        api_key=options.api_key,
        origins=() if options.uds else tuple(options.cors),  # the front handles CORS
    )


def run(
    engines: Sequence[Engine],
    access: Access,
    listener: socket.socket,
    chat_template: ChatTemplate | None = None,
    grammars: Grammars | None = None,
    remote: Remote | None = None,
    offers: Offers | None = None,
    lora_folder: str | None = None,
    seed: int | None = None,
    *,
    told: threading.Event | None = None,
) -> str | None:
    """Serve until interrupted or terminated; return why an engine failed, if one did.

    On SIGTERM or SIGINT the server accepts no more connections and finishes the requests it has.
    Requests that take longer than `access.drain_seconds` get an error. Then this returns, whereas
    uvicorn would raise the signal again. It returns at once if `told` was set before it began to
    listen to signals.
    """
    reasons: list[str] = []

    def stop(reason: str) -> None:
        reasons.append(reason)
        server.should_exit = True

    application = make_app(
        engines, access, stop, chat_template, grammars, remote, offers, lora_folder, seed
    )
    is_public = listener.family != socket.AF_UNIX  # if not, the front logs requests
    server = DrainingServer(application, access, log_level="info", access_log=is_public)

    def end() -> None:  # on a signal, before or after uvicorn listens to them
        server.should_exit = True

    with on_signals(end):
        if told is not None and told.is_set():
            end()
        server.run(sockets=[listener])
    return reasons[0] if reasons else None


if __name__ == "__main__":
    main()
